// plugins/algorithm/dflash2/dflash_config.hpp: a DFlash or DFlash2 draft as its config.json and the recipe describe it. No LibTorch calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/algorithm/dflash2/dflash_options.hpp"
#include "sdk/draft/block_config.hpp"
#include "sf/algorithm.hpp"

namespace sf {

inline constexpr const char* kDflashArchitecture = "DFlashDraftModel";
inline constexpr const char* kDflash2Architecture = "DFlash2DraftModel";

struct DflashConfig : draft::BlockConfig {
  // DFlash2 only; 0 for DFlash.
  bool dflash2 = false;
  int64_t conv_taps = 0, conv_group_size = 0, selector_rank = 0, selector_top_k = 0;
  double output_multiplier = 1, final_logit_softcapping = 0;

  std::string json;  // resolved: what checkpoints and exports carry
};

/// Reads model.draft_model_config or makes one in the target's shape, applies the recipe's overrides, fills in what the text leaves open
/// (target layers, mask token) and checks all of it. Throws sf::Error (usage).
[[nodiscard]] DflashConfig resolve_dflash_config(const ModelFacts& facts, const DflashOptions& options);

/// Dotted keys that serving engines read.
[[nodiscard]] std::vector<std::string> required_config_keys(const DflashConfig& config);

}  // namespace sf
