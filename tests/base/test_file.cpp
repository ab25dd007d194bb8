#include <doctest/doctest.h>

#include <filesystem>
#include <string>

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

struct TemporaryFolder {
  fs::path path = fs::temp_directory_path() / ("sf-test-file-" + std::to_string(getpid()));
  TemporaryFolder() { fs::create_directories(path); }
  ~TemporaryFolder() { fs::remove_all(path); }
};

}  // namespace

TEST_CASE("sha256: the examples of FIPS 180-4 and every length around a block") {
  CHECK(sha256(std::string_view("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256(std::string_view("abc")) ==
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256(std::string_view("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  std::string million(1000000, 'a');
  CHECK(sha256(million) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  for (std::size_t size = 0; size < 200; ++size) {
    std::string text = million.substr(0, size);
    Sha256 pieces;
    for (std::size_t at = 0; at < size; at += 7) {
      pieces.add(std::string_view(text).substr(at, 7));
      pieces.add(std::string_view());  // nothing, without an address
    }
    CHECK_MESSAGE(pieces.hex() == sha256(text), size);
  }
}

TEST_CASE("file: an atomic write replaces the whole file and leaves nothing beside it") {
  TemporaryFolder folder;
  fs::path path = folder.path / "index.json";
  atomic_write(path, "a long first version");
  atomic_write(path, "second");
  CHECK(read_file(path) == "second");
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);
}

TEST_CASE("file: a failed atomic write keeps the old file, removes its own and says what the system said") {
  TemporaryFolder folder;
  fs::create_directory(folder.path / "taken");
  fs::create_directory(folder.path / "taken" / "x");
  try {
    atomic_write(folder.path / "taken", "text",
                 ExitCode::kCheckpoint);  // a folder that is not empty can't be replaced
    FAIL("wrote over a folder");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kCheckpoint);
    CHECK(std::string(error.what()).find("taken") != std::string::npos);
  }
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);
  CHECK_THROWS_AS(atomic_write(folder.path / "missing" / "file", "text"), Error);
}

TEST_CASE("file: a mapped file has the file's bytes, also when it is empty or moved") {
  TemporaryFolder folder;
  atomic_write(folder.path / "a", "bytes");
  atomic_write(folder.path / "empty", "");
  MappedFile a(folder.path / "a");
  MappedFile moved = std::move(a);
  CHECK(moved.text() == "bytes");
  CHECK(MappedFile(folder.path / "empty").size() == 0);
  CHECK_THROWS_WITH_AS(MappedFile(folder.path / "absent"), doctest::Contains("No such file"), Error);
  CHECK_THROWS_AS(MappedFile{folder.path}, Error);
  CHECK_THROWS_WITH_AS(MappedFile("/dev/null"), doctest::Contains("a pipe or a device"), Error);  // and not an empty file
  CHECK(sha256_file(folder.path / "a") == sha256(std::string_view("bytes")));
}

TEST_CASE("file: free space is asked of the nearest folder that exists") {
  TemporaryFolder folder;
  CHECK(free_bytes(folder.path / "not" / "there" / "yet") > 0);
}
