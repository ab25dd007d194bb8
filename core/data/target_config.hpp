// core/data/target_config.hpp
//
// What a target's config.json says about its decoder, checked and in one spelling. No LibTorch: the plan
// reads it too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "sdk/draft/rope.hpp"
#include "sf/json.hpp"

namespace sf {

struct TargetConfig {
  std::string model_type;  // "llama", "qwen2", "qwen3" can run; others still give tables
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;    // need not be hidden_size / num_attention_heads
  int64_t vocab_size = 0;  // rows of embedding and head: padded_vocab_size where there is one
  double rms_norm_eps = 1e-6;
  bool qkv_bias = false;
  bool output_bias = false;  // of the attention's output projection
  bool mlp_bias = false;
  bool query_key_norm = false;  // Qwen3
  bool tied_embeddings = false;
  std::string dtype = "float32";  // "bfloat16", "float16", "float32": what the weights are meant to run in
  double logits_width_multiplier =
      0;  // logits_mup_width_multiplier; the head is divided by it. 0: there is none
  int64_t max_position_embeddings = 0;
  draft::Rope rope;
};

/// Reads `folder`/config.json. Throws sf::Error (data) with file, key, found and expected.
[[nodiscard]] Json read_model_config(const std::filesystem::path& folder);

/// The decoder's facts, from the top or from `text_config`. Throws sf::Error (data); `source` names the file.
[[nodiscard]] TargetConfig target_config(const Json& config, const std::string& source,
                                         draft::RopeRounding rounding = draft::RopeRounding::kExact);

/// Why this decoder can't be run by our forward pass; empty when it can.
[[nodiscard]] std::string why_not_runnable(const Json& config, const TargetConfig& facts);

}  // namespace sf
