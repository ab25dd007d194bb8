// core/model/target_tables.hpp: the target's embedding and head, which drafts share and never train.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

#include "sf/algorithm.hpp"

namespace sf {

struct TargetTableOptions {
  std::filesystem::path folder;
  std::string embedding_key = "model.embed_tokens.weight";
  std::string lm_head_key = "lm_head.weight";
  at::ScalarType dtype = at::ScalarType::BFloat16;
  at::Device device = at::Device(at::DeviceType::CPU);
  bool embedding = true;  // which are wanted
  bool head = true;
};

/// Both are [vocab, hidden], checked against config.json (padded_vocab_size counts where there is one). With
/// tied embeddings the head is the embedding itself; with logits_mup_width_multiplier it is divided by that
/// once. Only the shards that hold them need to be there. Every value has to be finite. Throws sf::Error (data) naming folder, key, found
/// and expected.
[[nodiscard]] TargetTables load_target_tables(const TargetTableOptions& options);

}  // namespace sf
