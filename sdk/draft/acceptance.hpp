// sdk/draft/acceptance.hpp: how far drafted blocks agree with the stored tokens. A chain stops at the first slot that misses or is not supervised.
//
// Shapes: c blocks · p slots after the known token · b batch · w block slots
#pragma once

#include <ATen/core/Tensor.h>

namespace sf::draft {

struct Chain {
  at::Tensor reached_cp;   // float32 0/1: supervised, and every slot before it accepted
  at::Tensor accepted_cp;  // float32 0/1: reached and hit
  at::Tensor length_c;     // float32, accepted slots
};

/// hit_cp and mask_cp of any type; a slot is supervised when mask > 0.5.
[[nodiscard]] Chain follow_chain(const at::Tensor& hit_cp, const at::Tensor& mask_cp);

/// Sum over slots of the running product of probability * [supervised]: the expected number of accepted slots. [c]
[[nodiscard]] at::Tensor chain_length(const at::Tensor& probability_cp, const at::Tensor& mask_cp);

struct Walk {
  at::Tensor total, visits;  // float32 scalars
};

/// Walks each sequence in steps of accepted + 1: a block counts when it has a supervised slot and begins where the last step ended or later.
/// length_bw and supervised_bw in slot order, anchors_bw ascending over live slots.
[[nodiscard]] Walk walk_blocks(const at::Tensor& length_bw, const at::Tensor& supervised_bw, const at::Tensor& anchors_bw);

}  // namespace sf::draft
