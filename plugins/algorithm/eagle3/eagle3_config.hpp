// plugins/algorithm/eagle3/eagle3_config.hpp: an EAGLE3 draft as its config.json and the recipe describe it. No LibTorch calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/algorithm/eagle3/eagle3_options.hpp"
#include "sdk/draft/draft_config.hpp"
#include "sf/algorithm.hpp"

namespace sf {

inline constexpr const char* kEagle3Architecture = "LlamaForCausalLMEagle3";
inline constexpr int64_t kEagle3Layers = 3;             // of the target that a draft reads
inline constexpr int64_t kDraftVocabularyDefault = 32000;

struct Eagle3Config {
  draft::DraftConfig layers;
  int64_t target_hidden = 0;              // Ht; layers.hidden_size is H
  int64_t draft_vocabulary = 0;
  std::vector<int64_t> target_layer_ids;  // three, ascending; layer L is the state after decoder layer L
  bool fc_norm = false;                   // EAGLE3.1: each captured layer is normed on its own before they are fused
  bool norm_output = true;                // false (EAGLE3.1): the head reads the state as it is

  std::string json;  // resolved: what checkpoints and exports carry

  [[nodiscard]] bool has_whole_vocabulary() const { return draft_vocabulary == layers.vocab_size; }
};

/// Reads model.draft_model_config or makes one in the target's shape, applies the recipe's overrides and checks all of it. Throws sf::Error (usage).
[[nodiscard]] Eagle3Config resolve_eagle3_config(const ModelFacts& facts, const Eagle3Options& options);

/// Dotted keys that SGLang's and vLLM's loaders read.
[[nodiscard]] std::vector<std::string> required_eagle3_keys();

}  // namespace sf
