// TensorBoard's event files, byte by byte. That TensorBoard itself reads them is tensorboard_files.py's to show.
#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "core/base/file.hpp"
#include "plugins/tracker/tensorboard/event_file.hpp"
#include "sf/error.hpp"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

struct Folder {
  fs::path path = fs::temp_directory_path() / ("sf-events-" + std::to_string(getpid()));
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
};

// The bytes of each record; a wrong length or checksum is an error of the test.
std::vector<std::string> records_of(const std::string& bytes) {
  std::vector<std::string> out;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t length = 0;
    uint32_t head_crc = 0, crc = 0;
    REQUIRE(bytes.size() - at >= 16);
    std::memcpy(&length, bytes.data() + at, 8);
    std::memcpy(&head_crc, bytes.data() + at + 8, 4);
    CHECK(head_crc == masked(crc32c(std::string_view(bytes).substr(at, 8))));
    REQUIRE(bytes.size() - at >= 16 + length);
    const std::string body = bytes.substr(at + 12, length);
    std::memcpy(&crc, bytes.data() + at + 12 + length, 4);
    CHECK(crc == masked(crc32c(body)));
    out.push_back(body);
    at += 16 + length;
  }
  return out;
}

}  // namespace

TEST_CASE("event file: CRC-32C gives the known answers") {
  CHECK(crc32c("") == 0);
  CHECK(crc32c("123456789") == 0xe3069283U);                 // the polynomial's check value
  CHECK(crc32c(std::string(32, '\0')) == 0x8a9136aaU);       // RFC 3720, B.4
  CHECK(crc32c(std::string(32, '\xff')) == 0x62a8ab43U);
  CHECK(masked(0) == 0xa282ead8U);
}

TEST_CASE("event file: version first, then scalars as protobuf writes them") {
  Folder folder;
  {
    EventFile file(folder.path / "e");
    file.scalars(1.5, 300, {{"loss", 2.5}});
    file.flush();
  }
  const auto records = records_of(read_file(folder.path / "e"));
  REQUIRE(records.size() == 2);
  CHECK(records[0] == std::string("\x09\0\0\0\0\0\0\0\0", 9) + "\x1a\x0d" "brain.Event:2");
  //                       wall_time 1.5                                step 300      summary of 13 bytes, value of 11: tag "loss", simple_value 2.5
  CHECK(records[1] == std::string("\x09\0\0\0\0\0\0\xf8\x3f", 9) + "\x10\xac\x02" + "\x2a\x0d\x0a\x0b\x0a\x04loss" + std::string("\x15\0\0\x20\x40", 5));
}

TEST_CASE("event file: a disk that is full costs the figures that were to be written, and no others") {
  Folder folder;
  const fs::path path = folder.path / "e";
  EventFile file(path);
  file.scalars(1, 1, {{"loss", 1}});
  file.flush();
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = fs::file_size(path) + 7;  // in the middle of the next record
  setrlimit(RLIMIT_FSIZE, &small);
  file.scalars(2, 2, {{"loss", 2}});
  std::string what, hint;
  try {
    file.flush();
  } catch (const Error& error) {
    what = error.what();
    hint = error.hint();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(what.find("can't write " + path.string()) == 0);
  CHECK(hint == "free some space on this disk");
  file.scalars(3, 3, {{"loss", 3}});
  file.flush();
  CHECK(records_of(read_file(path)).size() == 3);  // version, step 1, step 3
}

TEST_CASE("event file: a folder that is not there is an error with the file's name") {
  CHECK_THROWS_WITH_AS(EventFile("/nonexistent/e"), "can't make /nonexistent/e: No such file or directory", Error);
}
