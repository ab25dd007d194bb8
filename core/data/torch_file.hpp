// core/data/torch_file.hpp
//
// Files written by torch.save: a zip archive with a pickle of a dictionary and one entry for each storage.
// Only what a dictionary of plain tensors needs is understood; every other global that a pickle names is
// refused, so reading a file runs no code of it. `.gz` files are unpacked to memory first; uncompressed ones
// are mapped and not copied.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

#include "core/data/safetensors.hpp"

namespace sf {

class TorchFile {
 public:
  /// Throws sf::Error (data): what is broken, where, and what was expected.
  [[nodiscard]] static TorchFile open(const std::filesystem::path& path);

  /// The dictionary's tensors in its order; entries of other kinds (numbers, texts) are left out.
  [[nodiscard]] const std::vector<TensorView>& tensors() const { return tensors_; }
  /// The tensor of this name, or nullptr.
  [[nodiscard]] const TensorView* find(std::string_view name) const;

 private:
  std::vector<TensorView> tensors_;
};

}  // namespace sf
