// core/data/inflate.hpp: unpacks deflate (RFC 1951) and gzip (RFC 1952). A few hundred lines of our own, so that a binary needs no library for it; input may be
// damaged or hostile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sf {

enum class Unpacked { whole, truncated, damaged };

struct Inflation {
  Unpacked state = Unpacked::damaged;
  size_t used = 0;   // bytes of the input that the stream took, when it is whole
};

/// Appends one deflate stream's content to `out`, `limit` bytes at most (more counts as damage). What has been appended is undefined unless it is whole.
[[nodiscard]] Inflation inflate(std::span<const std::byte> packed, std::vector<std::byte>& out, uint64_t limit);

/// The content of a gzip file, all its members, checksums compared.
[[nodiscard]] Unpacked gunzip(std::span<const std::byte> packed, std::vector<std::byte>& out);

/// CRC-32 as gzip and zip have it (polynomial 0x04C11DB7, reflected).
[[nodiscard]] uint32_t crc32(std::span<const std::byte> bytes);

}  // namespace sf
