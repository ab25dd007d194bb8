// plugins/algorithm/dflash2/dflash_options.hpp: the options of plugin.toml as a struct; what each means stands there.
#pragma once

#include <cstdint>
#include <string>

#include "sdk/draft/objective.hpp"

namespace sf {

enum class LossType { kDflash, kDpace, kDpaceConfidence, kDpaceContinuation };

struct DflashOptions {
  int64_t num_anchors = 512;
  double loss_decay_gamma = 0;
  LossType loss_type = LossType::kDflash;
  double dpace_alpha = 0.5;
  bool dpace_per_sequence = true;     // false: the older normalisation by batch size
  draft::Lk lk = draft::Lk::none;
  double kl_scale = 1, kl_decay = 1;
  int64_t objective_chunk_blocks = 128;
  double selector_loss_alpha = 1;
  double selector_warmup_ratio = 0, selector_ramp_ratio = 0;
  bool selector_stop_gradient = false;
  bool insert_gold = false;
  // For a configuration that is made here.
  bool dflash2 = true;
  int64_t conv_kernel_size = 2, conv_group_size = 16, selector_rank = 256, selector_top_k = 16;

  [[nodiscard]] bool uses_dpace() const { return loss_type != LossType::kDflash; }
};

}  // namespace sf
