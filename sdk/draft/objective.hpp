// sdk/draft/objective.hpp: pieces of a block draft's token objective.
//
// Shapes: r rows · c blocks · p slots after the known token
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sf::draft {

/// Rows of a chunk of the head on a GPU: rounded up to whole tiles of its products. 1920 rows take as long as 2048 in the gradient, whose few tiles are as many.
[[nodiscard]] inline int64_t whole_head_tiles(int64_t rows) {
  constexpr int64_t kTileRows = 256;
  return (rows + kTileRows - 1) / kTileRows * kTileRows;
}

/// exp(-(slot - 1) / gamma) for slots 1, 2, ..; 1 when gamma is 0.
[[nodiscard]] at::Tensor position_decay(const at::Tensor& slot_r, double gamma);

/// How far down a block D-PACE lets a slot's weight reach: both factors, the confidence up to the slot alone, or the value after it alone.
enum class Dpace { both, confidence, continuation };

/// M * f of D-PACE: s = (1 - alpha) p + alpha (1 where nothing is supervised), pre = running product of s, suf = sum of pre * M from the slot to
/// the end; f = suf, pre, or suf / pre. probability_cp is taken without gradient.
[[nodiscard]] at::Tensor dpace_weights(const at::Tensor& probability_cp, const at::Tensor& mask_cp, double alpha, Dpace kind);

enum class Lk { none, alpha, lambda, total_variation };

/// Weight of the cross-entropy beside total variation under Lk::lambda; scalar float32 without gradient.
/// kl_scale * exp(-kl_decay * mean probability of the labels).
[[nodiscard]] at::Tensor lambda_weight(const at::Tensor& probability_sum, const at::Tensor& mask_sum, double kl_scale, double kl_decay);

/// Sum over rows. none, alpha: nll * w. total_variation: (1 - p) * w, p = exp(-nll). lambda: kw * the first + (1 - kw) * the second.
[[nodiscard]] at::Tensor token_objective(const at::Tensor& nll_r, const at::Tensor& weight_r, Lk kind, const at::Tensor& kl_weight);

}  // namespace sf::draft
