// core/data/safetensors.hpp
//
// Files of named tensors: 8 bytes with the header's length, a JSON header, the tensors' bytes without gaps.
// Read by mmap, so opening a file of any size costs its header. Format:
// https://huggingface.co/docs/safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sf/error.hpp"

#include "core/data/dtype.hpp"

namespace sf {

class MappedFile;

/// A tensor in row-major order somewhere in memory. `owner` keeps that memory; a view may outlive what made
/// it.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

/// An opened file. Everything in the header is checked when it is opened: names, types, extents, that each
/// tensor's byte range fits its shape, that ranges neither overlap nor leave holes, and that the file is as
/// long as they say.
class SafetensorsFile {
 public:
  /// Throws sf::Error (data) naming the file, and the tensor where there is one.
  [[nodiscard]] static SafetensorsFile open(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  /// Views in the order of their bytes.
  [[nodiscard]] const std::vector<TensorView>& tensors() const { return tensors_; }
  /// The tensor of this name, or nullptr.
  [[nodiscard]] const TensorView* find(std::string_view name) const;
  /// The tensor of this name; throws sf::Error (data) with the file and the nearest name.
  [[nodiscard]] const TensorView& at(std::string_view name) const;
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  [[nodiscard]] int64_t file_bytes() const;

 private:
  std::filesystem::path path_;
  std::shared_ptr<const MappedFile> file_;
  std::vector<TensorView> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

/// What a tensor to be written looks like.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;

  [[nodiscard]] int64_t bytes() const { return element_count(shape).value_or(0) * bytes_of(dtype); }
};

/// Writes a file whose tensors are all known by shape beforehand; their bytes may come in any order and in
/// pieces. The file has its final size from the start (so a full disk is found out at once) and is only
/// complete after finish().
class SafetensorsWriter {
 public:
  /// Throws sf::Error with `failure` as its kind when the file can't be made: exit code 4 for features, 7 for
  /// checkpoints.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& tensors,
                    const std::map<std::string, std::string>& metadata, ExitCode failure = ExitCode::kData);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Puts bytes into a tensor, starting at a byte offset inside it.
  void write(std::string_view name, int64_t offset, std::span<const std::byte> bytes);
  /// Brings everything to the disk and closes the file.
  void finish();
  [[nodiscard]] int64_t file_bytes() const { return file_bytes_; }

 private:
  [[noreturn]] void fail(const std::string& doing, int error_number) const;

  std::filesystem::path path_;
  ExitCode failure_;
  int descriptor_ = -1;
  int64_t file_bytes_ = 0;
  std::map<std::string, std::pair<int64_t, int64_t>, std::less<>>
      ranges_;  // name -> offset in the file, bytes
};

/// A whole small file at once: specs with their bytes, written beside `path` and renamed into place.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorView>& tensors,
                       const std::map<std::string, std::string>& metadata = {},
                       ExitCode failure = ExitCode::kData);

}  // namespace sf
