// plugins/algorithm/dspark/engines.hpp: what serving engines read of a DSpark export, as data. Tensor names and shapes are describe()'s own; an engine
// takes embedding and head from the target and skips what it does not know, so a name that differs would be lost without a word.
#pragma once

#include <span>

namespace sf {

struct EngineContract {
  const char* engine;
  const char* start;                          // how it is told to use the draft; FOLDER stands for the export
  std::span<const char* const> config_keys;   // dotted, each there and not null
  std::span<const char* const> markov_heads;  // that it can serve
  bool needs_markov_head;                     // refuses a draft without one
};

/// SGLang: the class by "architectures"; head keys at the top (or prefixed, or in a block of their own), never inside dflash_config; layers, block size and
/// mask token inside dflash_config or at the top; the confidence head in float32.
inline constexpr const char* kSglangKeys[] = {"architectures",  "block_size",         "target_layer_ids",      "mask_token_id",
                                              "num_target_layers", "markov_rank",     "markov_head_type",      "enable_confidence_head",
                                              "confidence_head_with_markov", "rope_theta", "dflash_config.target_layer_ids", "dflash_config.mask_token_id",
                                              "hidden_size",    "num_hidden_layers",  "num_attention_heads",   "num_key_value_heads",
                                              "head_dim",       "intermediate_size",  "rms_norm_eps",          "layer_types"};
inline constexpr const char* kSglangHeads[] = {"vanilla", "gated", "rnn"};

/// vLLM: architecture DSparkDraftModel of model_type qwen3 becomes its own class; block size, layers and mask token are taken out of dflash_config when
/// they do not stand at the top; the Markov head has two tables and no projection.
inline constexpr const char* kVllmKeys[] = {"architectures", "model_type", "block_size", "target_layer_ids", "mask_token_id", "markov_rank", "vocab_size",
                                            "dflash_config.target_layer_ids", "dflash_config.mask_token_id", "hidden_size", "num_hidden_layers",
                                            "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta"};
inline constexpr const char* kVllmHeads[] = {"vanilla"};

inline constexpr EngineContract kDsparkEngines[] = {
    {"SGLang", "--speculative-algorithm DSPARK --speculative-draft-model-path FOLDER", kSglangKeys, kSglangHeads, true},
    {"vLLM", "--speculative-config '{\"method\": \"dspark\", \"model\": \"FOLDER\", \"num_speculative_tokens\": N}', N up to block_size", kVllmKeys, kVllmHeads, true}};

}  // namespace sf
