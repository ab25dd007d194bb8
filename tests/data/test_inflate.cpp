// tests/data/deflate/*.gz: one content packed by zlib with all kinds of blocks; whole.
#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "core/base/file.hpp"
#include "core/data/inflate.hpp"

using namespace sf;

namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text.data(), text.size())); }

// Numbers as text, bytes that a small generator draws, long runs: what the files were made of.
std::string content() {
  constexpr int kCount = 700;
  std::string text;
  for (int i = 0; i < kCount; ++i) {
    text += (i > 0 ? " " : "") + std::to_string(i * i % 997);
  }
  uint32_t x = 12345;
  for (int i = 0; i < kCount; ++i) {
    x = (x * 1103515245U + 12345U) & 0x7fffffffU;
    text += static_cast<char>(x >> 16 & 0xff);
  }
  text += std::string(kCount, 'a');
  for (int i = 0; i < kCount; ++i) {
    text += "ab";
  }
  return text;
}

std::string text_of(const std::vector<std::byte>& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

}  // namespace

TEST_CASE("inflate: blocks of every kind, as zlib writes them, give the content") {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SF_TEST_DATA "/data/deflate")) {
    std::vector<std::byte> out;
    CHECK_MESSAGE(gunzip(bytes_of(read_file(entry.path())), out) == Unpacked::whole, entry.path());
    CHECK_MESSAGE(text_of(out) == content(), entry.path());
    ++files;
  }
  CHECK(files == 8);
}

TEST_CASE("inflate: a file that ends early is truncated wherever it ends, and a changed byte is found") {
  const std::string whole = read_file(SF_TEST_DATA "/data/deflate/level9.gz");
  for (size_t size = 2; size < whole.size(); ++size) {
    std::vector<std::byte> out;
    CHECK_MESSAGE(gunzip(bytes_of(whole.substr(0, size)), out) == Unpacked::truncated, size);
  }
  int found = 0;
  for (size_t at = 10; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    std::vector<std::byte> out;
    const bool is_found = gunzip(bytes_of(changed), out) != Unpacked::whole;
    CHECK_MESSAGE((is_found || text_of(out) == content()), at);   // a run can be pointed to in two ways, and some bits mean nothing
    found += is_found ? 1 : 0;
  }
  CHECK(found > static_cast<int>(whole.size()) - 20);
  std::vector<std::byte> out;
  CHECK(gunzip(bytes_of("text"), out) == Unpacked::damaged);
  CHECK(gunzip({}, out) == Unpacked::damaged);
  CHECK(gunzip(bytes_of(whole + "x"), out) == Unpacked::damaged);   // no member begins so
}

TEST_CASE("inflate: more content than the limit is damage, and takes no more memory than the limit") {
  const std::string whole = read_file(SF_TEST_DATA "/data/deflate/runs.gz");
  const std::span<const std::byte> stream = bytes_of(whole).subspan(10);
  for (const size_t limit : {size_t{0}, size_t{1}, content().size() - 1}) {
    std::vector<std::byte> out;
    CHECK(inflate(stream, out, limit).state == Unpacked::damaged);
    CHECK(out.size() <= limit);
  }
  std::vector<std::byte> out;
  const Inflation inflation = inflate(stream, out, content().size());
  CHECK(inflation.state == Unpacked::whole);
  CHECK(inflation.used == stream.size() - 8);   // the member's checksum and length follow
}

TEST_CASE("inflate: CRC-32 gives the known answer") {
  CHECK(crc32(bytes_of("123456789")) == 0xcbf43926U);
  CHECK(crc32({}) == 0);
}
