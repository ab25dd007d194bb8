// core/data/zip_archive.hpp
//
// Entries of a zip archive in memory, stored or deflated, zip64 included. In: bytes; out: the bytes of an
// entry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sf {

/// An entry's bytes; `owner` is set when they had to be unpacked and then keeps them.
struct ZipBytes {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

class ZipArchive {
 public:
  /// Reads the directory. `name` is for messages. Throws sf::Error (data) when it is not a whole zip archive.
  ZipArchive(std::span<const std::byte> archive, std::string name);

  [[nodiscard]] std::vector<std::string> entries() const;
  [[nodiscard]] bool contains(std::string_view entry) const { return entries_.find(entry) != entries_.end(); }
  /// Throws sf::Error (data) when there is none or it is damaged.
  [[nodiscard]] ZipBytes read(std::string_view entry) const;

 private:
  struct Entry {
    uint16_t method = 0;
    uint64_t packed_bytes = 0;
    uint64_t bytes = 0;
    uint64_t header_offset = 0;
  };
  std::span<const std::byte> archive_;
  std::string name_;
  std::map<std::string, Entry, std::less<>> entries_;
};

/// The content of a gzip file (all its members). Throws sf::Error (data) when it is damaged or truncated.
[[nodiscard]] std::shared_ptr<const std::vector<std::byte>> unpack_gzip(std::span<const std::byte> packed,
                                                                        const std::string& name);

}  // namespace sf
