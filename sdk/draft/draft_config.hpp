// sdk/draft/: what draft algorithms share: configuration, rope, blocks, context, anchors, objective pieces, acceptance. What comes in: a Hugging
// Face configuration and the operations of sf/ops.hpp. What goes out: units and plain functions; nothing here keeps state between steps.
//
// draft_config.hpp: the part of a draft's config.json that every block draft has. No LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sdk/draft/config_problems.hpp"
#include "sdk/draft/rope.hpp"
#include "sf/json.hpp"

namespace sf::draft {

/// Sizes and kinds of the draft's layers, checked. Where a key may stand in two places the finder says which one won.
struct DraftConfig {
  std::string architecture;            // the one entry of "architectures"
  int64_t hidden_size = 0, intermediate_size = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab_size = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool attention_bias = false;
  std::vector<bool> sliding;           // per layer
  int64_t sliding_window = 0;          // tokens; of the sliding layers
  std::optional<bool> is_causal;       // when present it decides for every layer, else sliding layers are causal inside a block
  Rope rope;

  [[nodiscard]] bool causal(int64_t layer) const { return is_causal.value_or(sliding[static_cast<size_t>(layer)]); }
};

/// Reads and checks; adds everything that is wrong to `problems`, and a value that can't be read is 1 or its default then.
[[nodiscard]] DraftConfig read_draft_config(const Json& config, RopeRounding rounding, ConfigProblems& problems);
/// The same; throws sf::Error (usage) with everything that is wrong.
[[nodiscard]] DraftConfig read_draft_config(const Json& config, RopeRounding rounding);

/// A draft configuration in the target's shape: its sizes, norm and rope, `layers` full-attention layers. `target` may nest them in text_config.
[[nodiscard]] Json config_like_target(const Json& target, const std::string& architecture, int64_t layers);

/// The configuration of the language model: `text_config` when there is one, else the whole.
[[nodiscard]] const Json& text_part(const Json& config);

/// "padded_vocab_size" when there is one, else "vocab_size"; -1 when neither is.
[[nodiscard]] int64_t vocabulary_size(const Json& config);

/// Which target layers a draft of `layers` layers reads unless told: one layer: the middle; else evenly from 1 to target_layers - 3, halves
/// rounded to even as the reference's language does. 36 target layers and 5 draft layers: 1, 9, 17, 25, 33.
[[nodiscard]] std::vector<int64_t> default_target_layers(int64_t target_layers, int64_t layers);

/// Candidates for the mask token in order of preference; -1 (or absent) means there is none.
struct MaskTokenFacts {
  int64_t explicit_id = -1;            // the recipe
  int64_t config_id = -1;              // the draft's configuration
  int64_t tokenizer_mask_id = -1;
  int64_t tokenizer_tokens = -1;       // the first id after the tokenizer's, when the embedding is larger
  int64_t pad_id = -1, eos_id = -1, unk_id = -1;
  int64_t vocab_size = 0;              // rows of the embedding
};

/// The first that there is; throws sf::Error (usage) when there is none or when it lies outside the embedding.
[[nodiscard]] int64_t resolve_mask_token(const MaskTokenFacts& facts);

/// The id of a target's token, of a list (eos_token_id) the first; -1 when absent, null, empty or -1. Throws sf::Error (data) with the value for anything else.
[[nodiscard]] int64_t token_id(const Json& config, const char* key);

}  // namespace sf::draft
