// plugins/algorithm/dspark/dspark_config.hpp: a DSpark draft as its config.json and the recipe describe it. No LibTorch calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/algorithm/dspark/dspark_options.hpp"
#include "sdk/draft/block_config.hpp"
#include "sf/algorithm.hpp"

namespace sf {

inline constexpr const char* kDsparkArchitecture = "DSparkDraftModel";

struct DsparkConfig : draft::BlockConfig {
  int64_t markov_rank = 0;  // 0: no Markov head
  MarkovHead markov_head = MarkovHead::kVanilla;
  bool confidence_head = false;
  bool confidence_with_markov = false;  // the confidence head sees the previous token, too

  std::string json;  // resolved: what checkpoints and exports carry

  /// Whether a loss compares with the target's own distribution.
  [[nodiscard]] bool needs_teacher(const DsparkOptions& options) const { return options.l1_loss_alpha > 0 || trains_confidence(options); }
  [[nodiscard]] bool trains_confidence(const DsparkOptions& options) const { return confidence_head && options.confidence_head_alpha > 0; }
};

/// Reads model.draft_model_config or makes one in the target's shape, applies the recipe's overrides, fills in what the text leaves open
/// (target layers, mask token) and checks all of it. Throws sf::Error (usage).
[[nodiscard]] DsparkConfig resolve_dspark_config(const ModelFacts& facts, const DsparkOptions& options);

/// "vanilla", "gated", "rnn".
[[nodiscard]] const char* name_of(MarkovHead head);

/// Dotted keys that serving engines read: the head's keys at the top and inside dflash_config, since engines look in different places.
[[nodiscard]] std::vector<std::string> required_config_keys(const DsparkConfig& config);

}  // namespace sf
