// plugins/algorithm/dspark/dspark_options.hpp: the options of plugin.toml as a struct; what each means stands there.
#pragma once

#include <cstdint>

namespace sf {

enum class MarkovHead { kVanilla, kGated, kRnn };

struct DsparkOptions {
  int64_t num_anchors = 512;
  double loss_decay_gamma = 0;
  double ce_loss_alpha = 0.1, l1_loss_alpha = 0.9, confidence_head_alpha = 1;
  int64_t objective_chunk_blocks = 128;
  double schedule_threshold = 0.5;
  // For a configuration that is made here.
  int64_t markov_rank = 256;
  MarkovHead markov_head = MarkovHead::kVanilla;
  bool confidence_head = true, confidence_with_markov = true;
};

}  // namespace sf
