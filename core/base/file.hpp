// core/base/file.hpp: files that are whole or not there, files mapped into memory, checksums, free space.
// Everything throws Error(code) with path, reason of the system and what to do; code is the caller's kind of
// failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "sf/error.hpp"

namespace sf {

/// The file's bytes as text.
[[nodiscard]] std::string read_file(const std::filesystem::path& path, ExitCode code = ExitCode::kData);

/// Writes a temporary file beside `path`, syncs it, renames it over `path` and syncs the folder: after a
/// crash the old or the new file is there, whole. The folder must exist.
void atomic_write(const std::filesystem::path& path, std::string_view bytes, ExitCode code = ExitCode::kData);

/// Waits until what was written to a file, or the names in a folder, are on the disk.
void sync_path(const std::filesystem::path& path, ExitCode code = ExitCode::kData);

/// Free bytes for this user on the disk of `path`, or of its nearest folder that exists.
[[nodiscard]] std::uint64_t free_bytes(const std::filesystem::path& path);

/// A whole file, read-only in memory. Movable.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path, ExitCode code = ExitCode::kData);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }
  [[nodiscard]] std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Holds an existing folder for this process until destroyed; the system lets go of it when the process dies, however that happens.
class FolderLock {
 public:
  /// Throws Error(code): another process holds the folder ("`what` is already ..."), or it can't be opened.
  FolderLock(const std::filesystem::path& folder, ExitCode code, const std::string& what, const std::string& hint);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  int descriptor_ = -1;
};

/// SHA-256 (FIPS 180-4), in pieces of any size.
class Sha256 {
 public:
  Sha256();
  void add(std::span<const std::byte> bytes);
  void add(std::string_view text);
  /// 64 hexadecimal digits; the object is used up.
  [[nodiscard]] std::string hex();

 private:
  std::uint32_t state_[8];
  std::uint64_t length_ = 0;
  std::uint8_t block_[64];
};

[[nodiscard]] std::string sha256(std::string_view text);
[[nodiscard]] std::string sha256(std::span<const std::byte> bytes);
[[nodiscard]] std::string sha256_file(const std::filesystem::path& path, ExitCode code = ExitCode::kData);

}  // namespace sf
