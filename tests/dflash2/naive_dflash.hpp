// tests/dflash2/naive_dflash.hpp: DFlash and DFlash2 written down once more, straight from their definition, over dense masks and all rows, with one
// autograd graph. Slow, and sharing nothing with the plugin but the resolved configuration and its inverse frequencies.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "plugins/algorithm/dflash2/dflash.hpp"
#include "tests/dflash2/draft_run.hpp"

namespace sf::testing {

struct NaiveOutcome {
  double loss = 0, denominator = 0, accuracy = 0, covered = 0, selector_loss = 0, acceptance_length = 0;
  std::map<std::string, at::Tensor> gradients;
  // Per slot, what metrics are made of. Shapes: b batch · w blocks · j slots, the known one included · v vocabulary · k candidates
  at::Tensor mask_bwj, weight_bwj, labels_bwj, position_bwj;  // float64, float64, int64, int64
  at::Tensor log_p_bwjv;                                      // float64, of the unary head
  at::Tensor strict_bwjk;                                     // int64, the largest logits' tokens
  at::Tensor selected_bwj, greedy_bwj;                        // 0/1: the selector's best candidate, and the greedy path's token, is the label; DFlash2 only
};

/// Everything in float64. `alpha` is the selector's factor. The acceptance length counts a greedy draft of every live block.
[[nodiscard]] NaiveOutcome naive_dflash(const DflashConfig& config, const DflashOptions& options, const TinyProblem& problem, double alpha);

}  // namespace sf::testing
