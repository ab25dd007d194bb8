#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/data/safetensors.hpp"
#include "scratch.hpp"

using namespace sf;
using sf::test::error_of;
using sf::test::Scratch;

namespace {

std::string file_text(const std::string& header, size_t data_bytes) {
  const uint64_t count = header.size();
  std::string text(reinterpret_cast<const char*>(&count), sizeof(count));
  return text + header + std::string(data_bytes, '\1');
}

}  // namespace

TEST_CASE("safetensors: what is written in pieces and in any order is read back") {
  const Scratch scratch;
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> ids{7, 8};
  const auto path = scratch.path() / "a.safetensors";
  SafetensorsWriter writer(
      path, {{"ids", Dtype::kI64, {2}}, {"x", Dtype::kF32, {2, 3}}, {"empty", Dtype::kBF16, {0, 4}}},
      {{"format", "pt"}});
  writer.write("x", 12, std::as_bytes(std::span(floats).subspan(3)));
  writer.write("ids", 0, std::as_bytes(std::span(ids)));
  writer.write("x", 0, std::as_bytes(std::span(floats).first(3)));
  writer.finish();

  const SafetensorsFile file = SafetensorsFile::open(path);
  CHECK(file.file_bytes() == writer.file_bytes());
  CHECK(file.tensors().size() == 3);
  CHECK(file.metadata().at("format") == "pt");
  const TensorView& x = file.at("x");
  CHECK(x.dtype == Dtype::kF32);
  CHECK(x.shape == std::vector<int64_t>{2, 3});
  CHECK(std::memcmp(x.bytes.data(), floats.data(), 24) == 0);
  CHECK(std::memcmp(file.at("ids").bytes.data(), ids.data(), 16) == 0);
  CHECK(file.at("empty").bytes.empty());
  CHECK(reinterpret_cast<uintptr_t>(file.at("ids").bytes.data()) % 8 == 0);
}

TEST_CASE("safetensors: a view keeps the file alive") {
  const Scratch scratch;
  const int64_t number = 5;
  write_safetensors(scratch.path() / "a",
                    {{"n", Dtype::kI64, {1}, std::as_bytes(std::span(&number, 1)), nullptr}});
  TensorView view;
  {
    const SafetensorsFile file = SafetensorsFile::open(scratch.path() / "a");
    view = file.at("n");
  }
  CHECK(std::memcmp(view.bytes.data(), &number, 8) == 0);
  CHECK_FALSE(std::filesystem::exists(scratch.path() / "a.part"));
}

TEST_CASE("safetensors: a name that is taken by a folder is an error of the caller's kind, and nothing is left beside it") {
  const Scratch scratch;
  const int64_t number = 5;
  scratch.write("a/inside", "x");
  CHECK(error_of([&] { write_safetensors(scratch.path() / "a", {{"n", Dtype::kI64, {1}, std::as_bytes(std::span(&number, 1)), nullptr}}); })
            .find("/a: naming the finished file: ") != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(scratch.path() / "a.part"));
}

TEST_CASE("safetensors: a broken file is refused with the reason") {
  struct Row {
    const char* name;
    std::string text;
    const char* message;
  };
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const Row rows[] = {
      {"too short", "abc", "f: not a safetensors file: it has 3 bytes, at least 8 expected"},
      {"huge header", std::string("\xff\xff\xff\xff\xff\xff\xff\x7f") + good,
       "f: not a safetensors file: its header would have 9223372036854775807 bytes, at most 100000000 "
       "allowed"},
      {"header cut", file_text(good, 0).substr(0, 20),
       "f: truncated: the header has 54 bytes, the file only 20"},
      {"data cut", file_text(good, 7), "f: truncated: tensor 'a' ends at byte 8 of the data, the file has 7"},
      {"data too long", file_text(good, 9), "f: the tensors end at byte 8 of the data, the file has 9"},
      {"not JSON", file_text("{\"a\":", 0), "f: damaged header: header:1:6: not valid JSON"},
      {"not an object", file_text("[1]", 0), "f: not a safetensors file: the header does not start with {"},
      {"unknown type", file_text(R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", 8),
       "f: tensor 'a' has the unknown type F99"},
      {"size and shape disagree", file_text(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
       "f: damaged header: tensor 'a' has bytes 0 to 8, but shape [3] in F32 needs 12"},
      {"negative extent", file_text(R"({"a":{"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]}})", 8),
       "f: tensor 'a' has the impossible shape [-2, -1]"},
      {"overflowing shape",
       file_text(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}})", 0),
       "f: tensor 'a' has the impossible shape [4294967296, 4294967296, 4]"},
      {"overlap",
       file_text(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
           6),
       "f: damaged header: tensor 'b' starts at byte 2, but the tensor before it ends at 4"},
      {"hole",
       file_text(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
           9),
       "f: damaged header: tensor 'b' starts at byte 5, but the tensor before it ends at 4"},
      {"missing field", file_text(R"({"a":{"dtype":"U8","shape":[4]}})", 4),
       "f: damaged header: tensor 'a': there is no key \"data_offsets\""},
      {"one name twice",
       file_text(
           R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
           2),
       "f: damaged header: header: not valid JSON: key \"a\" appears twice in one object"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name);
    const Scratch scratch;
    const auto path = scratch.write("f", row.text);
    const std::string message = error_of([&] { (void)SafetensorsFile::open(path); }, &scratch);
    CHECK(message.substr(0, std::strlen(row.message)) == row.message);
  }
}

TEST_CASE("safetensors: a name that is not there brings the nearest one") {
  const Scratch scratch;
  const auto path = scratch.write(
      "f", file_text(R"({"lm_head.weight":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1));
  try {
    (void)SafetensorsFile::open(path).at("lm_heda.weight");
    FAIL("found");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kData);
    CHECK(error.hint() == "did you mean 'lm_head.weight'?");
  }
}

TEST_CASE("safetensors: a full disk is an error of its own kind and leaves nothing") {
  // A file larger than the disk, on file systems that can reserve space; a hole elsewhere would say nothing,
  // so both are seen.
  const Scratch scratch;
  const int probe = ::open((scratch.path() / "probe").c_str(), O_CREAT | O_RDWR, 0600);
  const bool can_reserve = ::fallocate(probe, 0, 0, 4096) == 0;
  ::close(probe);
  if (!can_reserve) {
    MESSAGE("skipped: this file system can't reserve space");
    return;
  }
  const auto path = scratch.path() / "huge.safetensors";
  const int64_t too_many = static_cast<int64_t>(free_bytes(scratch.path())) + (int64_t{1} << 40);
  try {
    SafetensorsWriter writer(path, {{"x", Dtype::kU8, {too_many}}}, {}, ExitCode::kCheckpoint);
    FAIL("reserved more than there is");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kCheckpoint);
    CHECK(std::string(error.what()).find("huge.safetensors: reserving") != std::string::npos);
  }
  CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("safetensors: every truncation is refused and no damaged byte of the header is a crash") {
  const Scratch scratch;
  const std::vector<float> values(12, 1);
  write_safetensors(scratch.path() / "whole",
                    {{"a", Dtype::kF32, {3, 4}, std::as_bytes(std::span(values)), nullptr},
                     {"b", Dtype::kBF16, {2}, std::as_bytes(std::span(values)).first(4), nullptr}},
                    {{"format", "pt"}});
  const std::string whole = read_file(scratch.path() / "whole");
  for (size_t length = 0; length < whole.size(); ++length) {
    const auto path = scratch.write(format("cut-{}", length), whole.substr(0, length));
    CHECK(error_of([&] { (void)SafetensorsFile::open(path); }) != "no error");
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const unsigned char bits : {0x01, 0x10, 0xff}) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ bits);
      const auto path = scratch.write(format("{}-{}", at, static_cast<int>(bits)), damaged);
      (void)error_of(
          [&] { (void)SafetensorsFile::open(path); });  // an sf::Error or none; anything else ends the test
    }
  }
}
