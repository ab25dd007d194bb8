#include "event_file.hpp"

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "sf/error.hpp"

#include <fcntl.h>
#include <unistd.h>

namespace sf {
namespace {

[[noreturn]] void fail(const std::string& doing, const std::filesystem::path& path, int number) {
  const bool is_full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  throw Error(ExitCode::kCheckpoint, doing + " " + path.string() + ": " + std::generic_category().message(number),
              is_full ? "free some space on this disk" : "look at who may write there");
}

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82f63b78U : crc >> 1;  // the polynomial, bits reversed
    }
    table[i] = crc;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kCrcTable = crc_table();

// ---- protobuf's wire format: a tag (field number and wire type), then the value

enum WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, std::uint64_t value) {
  while (value >= 0x80) {
    out += static_cast<char>(value | 0x80);
    value >>= 7;
  }
  out += static_cast<char>(value);
}

void put_tag(std::string& out, std::uint32_t field, WireType type) { put_varint(out, field << 3 | type); }

template <class T>
void put_little_endian(std::string& out, T value) {  // this machine's own order: only x86-64 is built for
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void put_number(std::string& out, std::uint32_t field, std::uint64_t value) {
  put_tag(out, field, kVarint);
  put_varint(out, value);
}

void put_double(std::string& out, std::uint32_t field, double value) {
  put_tag(out, field, kFixed64);
  put_little_endian(out, value);
}

void put_float(std::string& out, std::uint32_t field, float value) {
  put_tag(out, field, kFixed32);
  put_little_endian(out, value);
}

void put_bytes(std::string& out, std::uint32_t field, std::string_view bytes) {
  put_tag(out, field, kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

std::string message(std::uint32_t field, std::string_view bytes) {
  std::string out;
  put_bytes(out, field, bytes);
  return out;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = 0xffffffffU;
  for (const char byte : bytes) {
    crc = kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ (crc >> 8);
  }
  return crc ^ 0xffffffffU;
}

EventFile::EventFile(const std::filesystem::path& path) : path_(path), descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (descriptor_ < 0) {
    fail("can't make", path, errno);
  }
  event(0, 0, message(3, "brain.Event:2"));
}

EventFile::~EventFile() { close(descriptor_); }

void EventFile::event(double wall_seconds, std::int64_t step, const std::string& content) {
  std::string bytes;
  put_double(bytes, 1, wall_seconds);
  if (step != 0) {
    put_number(bytes, 2, static_cast<std::uint64_t>(step));
  }
  bytes += content;
  std::string head;
  put_little_endian(head, static_cast<std::uint64_t>(bytes.size()));
  std::string record = head;
  put_little_endian(record, masked(crc32c(head)));
  record += bytes;
  put_little_endian(record, masked(crc32c(bytes)));
  gathered_ += record;
}

void EventFile::restart(double wall_seconds, std::int64_t step) {
  std::string start;
  put_number(start, 1, 1);
  event(wall_seconds, step, message(7, start));
}

void EventFile::scalars(double wall_seconds, std::int64_t step, const std::vector<Scalar>& values) {
  std::string summary;
  for (const Scalar& scalar : values) {
    std::string value = message(1, scalar.tag);
    put_float(value, 2, static_cast<float>(scalar.value));
    put_bytes(summary, 1, value);
  }
  event(wall_seconds, step, message(5, summary));
}

void EventFile::text(double wall_seconds, std::int64_t step, std::string_view tag, std::string_view markdown) {
  std::string tensor;
  put_number(tensor, 1, 7);
  put_bytes(tensor, 2, "");
  put_bytes(tensor, 8, markdown);
  std::string value = message(1, tag);
  put_bytes(value, 8, tensor);
  put_bytes(value, 9, message(1, message(1, "text")));
  event(wall_seconds, step, message(5, message(1, value)));
}

void EventFile::flush() {
  const std::string bytes = std::exchange(gathered_, std::string());
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got = pwrite(descriptor_, bytes.data() + done, bytes.size() - done, written_ + static_cast<off_t>(done));
    if (got < 0 && errno != EINTR) {
      const int number = errno;
      (void)!ftruncate(descriptor_, written_);
      fail("can't write", path_, number);
    }
    done += got > 0 ? static_cast<std::size_t>(got) : 0;
  }
  written_ += static_cast<std::int64_t>(bytes.size());
}

}  // namespace sf
