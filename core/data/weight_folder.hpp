// core/data/weight_folder.hpp
//
// The tensors of a Hugging Face model folder by name, whichever of its files they lie in: one safetensors
// file, or shards with model.safetensors.index.json. Names are found with and without the prefixes that
// wrapped models put before them.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sf/json.hpp"

#include "core/data/safetensors.hpp"
#include "core/data/target_config.hpp"

namespace sf {

class WeightFolder {
 public:
  /// Opens every shard (headers only). Throws sf::Error (data): folder or shard missing, index and shards
  /// that disagree, damaged headers.
  [[nodiscard]] static WeightFolder open(const std::filesystem::path& folder);

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] std::vector<std::string> names() const;
  /// The tensor of exactly this name, or nullptr.
  [[nodiscard]] const TensorView* find(std::string_view name) const;
  /// The tensor that a decoder calls `name` ("model.embed_tokens.weight"): under that name, or with the
  /// prefix of this folder's wrapping ("model.language_model.embed_tokens.weight", "language_model.model.
  /// ...", "embed_tokens.weight").
  [[nodiscard]] const TensorView* find_in_decoder(std::string_view name) const;

  WeightFolder(WeightFolder&&) = default;
  WeightFolder& operator=(WeightFolder&&) = default;
  WeightFolder(const WeightFolder&) = delete;  // tensors_ points into files_
  WeightFolder& operator=(const WeightFolder&) = delete;

 private:
  WeightFolder() = default;

  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, const TensorView*, std::less<>> tensors_;
};

/// Where embedding and head of a target lie; what is not wanted stays null. With tied embeddings the head is
/// the embedding.
struct TargetTableViews {
  const TensorView* embedding = nullptr;
  const TensorView* head = nullptr;
};

struct TargetTableKeys {
  std::string embedding = "model.embed_tokens.weight";
  std::string head = "lm_head.weight";
  bool wants_embedding = true;
  bool wants_head = true;
};

/// Finds them and checks their shapes against the configuration. Throws sf::Error (data) with the option that
/// names another key.
[[nodiscard]] TargetTableViews find_target_tables(const WeightFolder& weights, const TargetConfig& config,
                                                  const TargetTableKeys& keys);

/// Compares the decoder layers among the weights with the configuration's num_hidden_layers. A folder without
/// any layer passes: tables are all that training reads. Throws sf::Error (data).
void check_layer_count(const WeightFolder& weights, const TargetConfig& config);

/// SHA-256 over the configuration (without the notes of the program that wrote it), every tensor's name, type
/// and shape, and bytes from its start, middle and end: two targets differ in it when any tensor was trained
/// further. Reads about 12 KiB a tensor.
[[nodiscard]] std::string target_fingerprint(const Json& config, const WeightFolder& weights);

}  // namespace sf
