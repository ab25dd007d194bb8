// core/checkpoint/reader.hpp: opens a committed checkpoint and reads its tensors, whole or any part of them,
// whatever the number of ranks that wrote it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/checkpoint/format.hpp"

namespace sf {

class CheckpointReader {
 public:
  enum class Verify {
    sizes,     // marker, index and the sizes of all files
    checksums  // and every byte
  };
  /// Throws Error(kCheckpoint) that says what is wrong with which file: no marker, a size, a checksum.
  static CheckpointReader open(const std::filesystem::path& folder, Verify verify = Verify::checksums);

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] const CheckpointIndex& index() const { return index_; }
  [[nodiscard]] const RunState& state() const { return state_; }
  /// A file of text that was saved with it, "recipe.toml"; empty when there is none.
  [[nodiscard]] std::string text(const std::string& name) const;

  /// Throws Error(kCheckpoint) when there is no such tensor.
  [[nodiscard]] const SavedTensor& tensor(const std::string& name) const;
  /// Copies the box `start`, `shape` of a tensor to `out`, row-major. Empty start and shape: the whole
  /// tensor. out.size() must be exact.
  void read(const std::string& name, std::span<std::byte> out, std::vector<int64_t> start = {},
            std::vector<int64_t> shape = {}) const;
  /// Copies elements [begin, end) of the row-major tensor to `out`, whatever the slices it was saved in.
  void read_range(const std::string& name, std::span<std::byte> out, int64_t begin, int64_t end) const;

 private:
  std::filesystem::path folder_;
  CheckpointIndex index_;
  RunState state_;
  std::map<std::string, MappedFile> files_;  // the ranks' files
};

}  // namespace sf
