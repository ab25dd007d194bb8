#include "core/data/zip_archive.hpp"

#include "core/base/error.hpp"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace sf {

namespace {

constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kDirectoryHeader = 0x02014b50;
constexpr uint32_t kDirectoryEnd = 0x06054b50;
constexpr uint32_t kDirectoryEnd64 = 0x06064b50;
constexpr uint32_t kDirectoryEnd64Locator = 0x07064b50;
constexpr uint16_t kExtraZip64 = 1;
constexpr uint16_t kStored = 0;
constexpr uint16_t kDeflated = 8;
constexpr const char* kDamagedHint =
    "the file is damaged or was not written to its end: copy or make it again";

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Error(ExitCode::kData, name + ": " + what, kDamagedHint);
}

// Reads little-endian numbers at places that may lie outside the file.
class Bytes {
 public:
  Bytes(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  template <class Number>
  [[nodiscard]] Number number(uint64_t at) const {
    Number value;
    std::memcpy(&value, slice(at, sizeof(value)).data(), sizeof(value));
    return value;
  }
  [[nodiscard]] std::span<const std::byte> slice(uint64_t at, uint64_t count) const {
    if (at > bytes_.size() || count > bytes_.size() - at) refuse(name_, "truncated zip archive");
    return bytes_.subspan(at, count);
  }
  [[nodiscard]] std::string text(uint64_t at, uint64_t count) const {
    const auto part = slice(at, count);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& name_;
};

}  // namespace

ZipArchive::ZipArchive(std::span<const std::byte> archive, std::string name)
    : archive_(archive), name_(std::move(name)) {
  const Bytes bytes(archive_, name_);
  constexpr uint64_t kEndBytes = 22;
  if (archive_.size() < 4 || bytes.number<uint32_t>(0) != kLocalHeader) {
    refuse(name_, "not a file of torch.save: it does not start as a zip archive");
  }
  // The end record is the last thing but for a comment of at most 64 KiB.
  uint64_t end = archive_.size();
  const uint64_t search_to = archive_.size() > kEndBytes + 65535 ? archive_.size() - kEndBytes - 65535 : 0;
  bool found = false;
  for (uint64_t at = archive_.size() >= kEndBytes ? archive_.size() - kEndBytes + 1 : 0; at-- > search_to;) {
    if (bytes.number<uint32_t>(at) == kDirectoryEnd) {
      end = at;
      found = true;
      break;
    }
  }
  if (!found) refuse(name_, "truncated: the zip archive has no directory at its end");

  uint64_t count = bytes.number<uint16_t>(end + 10);
  uint64_t directory = bytes.number<uint32_t>(end + 16);
  if (end >= 20 && bytes.number<uint32_t>(end - 20) == kDirectoryEnd64Locator) {
    const uint64_t end64 = bytes.number<uint64_t>(end - 20 + 8);
    if (bytes.number<uint32_t>(end64) != kDirectoryEnd64) refuse(name_, "damaged zip64 directory");
    count = bytes.number<uint64_t>(end64 + 32);
    directory = bytes.number<uint64_t>(end64 + 48);
  }

  uint64_t at = directory;
  for (uint64_t i = 0; i < count; ++i) {
    if (bytes.number<uint32_t>(at) != kDirectoryHeader) refuse(name_, "damaged zip directory");
    Entry entry;
    entry.method = bytes.number<uint16_t>(at + 10);
    entry.packed_bytes = bytes.number<uint32_t>(at + 20);
    entry.bytes = bytes.number<uint32_t>(at + 24);
    const uint16_t name_bytes = bytes.number<uint16_t>(at + 28);
    const uint16_t extra_bytes = bytes.number<uint16_t>(at + 30);
    const uint16_t comment_bytes = bytes.number<uint16_t>(at + 32);
    entry.header_offset = bytes.number<uint32_t>(at + 42);
    std::string entry_name = bytes.text(at + 46, name_bytes);
    // A zip64 field replaces, in this order, exactly those numbers that are all ones.
    uint64_t extra = at + 46 + name_bytes;
    const uint64_t extra_end = extra + extra_bytes;
    while (extra + 4 <= extra_end) {
      const uint16_t id = bytes.number<uint16_t>(extra);
      const uint16_t field_bytes = bytes.number<uint16_t>(extra + 2);
      uint64_t field = extra + 4;
      if (id == kExtraZip64) {
        for (uint64_t* number : {&entry.bytes, &entry.packed_bytes, &entry.header_offset}) {
          if (*number != std::numeric_limits<uint32_t>::max()) continue;
          *number = bytes.number<uint64_t>(field);
          field += 8;
        }
      }
      extra += 4 + uint64_t{field_bytes};
    }
    entries_[std::move(entry_name)] = entry;
    at += 46 + uint64_t{name_bytes} + extra_bytes + comment_bytes;
  }
}

std::vector<std::string> ZipArchive::entries() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

ZipBytes ZipArchive::read(std::string_view entry_name) const {
  const auto found = entries_.find(entry_name);
  if (found == entries_.end())
    refuse(name_, "the zip archive has no entry '" + std::string(entry_name) + "'");
  const Entry& entry = found->second;
  const Bytes bytes(archive_, name_);
  if (bytes.number<uint32_t>(entry.header_offset) != kLocalHeader) {
    refuse(name_, "damaged zip entry '" + found->first + "'");
  }
  const uint64_t start = entry.header_offset + 30 + bytes.number<uint16_t>(entry.header_offset + 26) +
                         bytes.number<uint16_t>(entry.header_offset + 28);
  const std::span<const std::byte> packed = bytes.slice(start, entry.packed_bytes);
  if (entry.method == kStored) {
    if (entry.bytes != entry.packed_bytes) refuse(name_, "damaged zip entry '" + found->first + "'");
    return {packed, nullptr};
  }
  if (entry.method != kDeflated) {
    refuse(name_, "zip entry '" + found->first + "' is packed by method " + std::to_string(entry.method) +
                      "; stored (0) and deflated (8) are understood");
  }
  // Deflate reaches 1032:1 at most, so a size that packed bytes can't hold is a lie and not worth an
  // allocation.
  if (entry.bytes / 1032 > entry.packed_bytes + 64) refuse(name_, "damaged zip entry '" + found->first + "'");
  auto unpacked = std::make_shared<std::vector<std::byte>>(entry.bytes);
  z_stream stream{};
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK)
    throw Error(ExitCode::kData, name_ + ": zlib could not start");
  const std::byte* in = packed.data();
  uint64_t in_left = packed.size();
  std::byte* out = unpacked->data();
  uint64_t out_left = unpacked->size();
  int status = Z_OK;
  constexpr uint64_t kPiece = uint64_t{1} << 30;  // zlib counts in 32 bits
  while (status == Z_OK) {
    const uint64_t in_now = std::min(in_left, kPiece);
    const uint64_t out_now = std::min(out_left, kPiece);
    stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(in));
    stream.avail_in = static_cast<uInt>(in_now);
    stream.next_out = reinterpret_cast<Bytef*>(out);
    stream.avail_out = static_cast<uInt>(out_now);
    status = inflate(&stream, Z_NO_FLUSH);
    in += in_now - stream.avail_in;
    in_left -= in_now - stream.avail_in;
    out += out_now - stream.avail_out;
    out_left -= out_now - stream.avail_out;
  }
  inflateEnd(&stream);
  if (status != Z_STREAM_END || out_left != 0) refuse(name_, "damaged zip entry '" + found->first + "'");
  return {std::span<const std::byte>(*unpacked), unpacked};
}

std::shared_ptr<const std::vector<std::byte>> unpack_gzip(std::span<const std::byte> packed,
                                                          const std::string& name) {
  constexpr size_t kPiece = size_t{1} << 20;
  auto unpacked = std::make_shared<std::vector<std::byte>>();
  z_stream stream{};
  if (inflateInit2(&stream, 16 + MAX_WBITS) != Z_OK)
    throw Error(ExitCode::kData, name + ": zlib could not start");
  int status = Z_OK;
  size_t in_done = 0;
  size_t out_done = 0;
  while (true) {
    if (unpacked->size() - out_done < kPiece)
      unpacked->resize(std::max(unpacked->size() * 2, out_done + 4 * kPiece));
    const size_t in_now = std::min(packed.size() - in_done, size_t{1} << 30);
    const size_t out_now = std::min(unpacked->size() - out_done, size_t{1} << 30);
    stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(packed.data() + in_done));
    stream.avail_in = static_cast<uInt>(in_now);
    stream.next_out = reinterpret_cast<Bytef*>(unpacked->data() + out_done);
    stream.avail_out = static_cast<uInt>(out_now);
    status = inflate(&stream, Z_NO_FLUSH);
    in_done += in_now - stream.avail_in;
    out_done += out_now - stream.avail_out;
    if (status == Z_STREAM_END) {
      if (in_done == packed.size()) break;
      if (inflateReset(&stream) != Z_OK) break;  // another member follows
    } else if (status != Z_OK) {
      break;
    }
  }
  inflateEnd(&stream);
  if (status != Z_STREAM_END || in_done != packed.size()) {
    refuse(name, status == Z_DATA_ERROR ? "not a gzip file, or damaged" : "truncated gzip file");
  }
  unpacked->resize(out_done);
  return unpacked;
}

}  // namespace sf
