// sdk/draft/selector.hpp: re-ranks the head's candidates of a slot by the token before it, through two low-rank tables. DFlash2 only.
//
// Shapes: r rows · c blocks · p slots after the known token · k candidates · x rank · v vocabulary
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sf::draft {

/// value + <context, candidate row>, float32 [r, k]. context_rx = predecessor row * projected hidden row; the product is in the tables' type.
[[nodiscard]] at::Tensor selector_scores(const at::Tensor& values_rk, const at::Tensor& context_rx, const at::Tensor& candidate_rows_rkx);

struct SelectorLoss {
  at::Tensor cross_entropy_r;  // float32, over the candidates; of the first candidate where the label is none of them
  at::Tensor covered_r;        // bool, the label is a candidate
  at::Tensor hit_r;            // bool, the best candidate is the label
};

[[nodiscard]] SelectorLoss selector_loss(const at::Tensor& scores_rk, const at::Tensor& ids_rk, const at::Tensor& label_r);

/// The path that decoding takes: slot after slot the best candidate, which is the next slot's predecessor. int64 [c, p].
[[nodiscard]] at::Tensor selector_path(const at::Tensor& values_cpk, const at::Tensor& ids_cpk, const at::Tensor& projected_cpx,
                                       const at::Tensor& predecessor_table_vx, const at::Tensor& successor_table_vx,
                                       const at::Tensor& anchor_token_c);

/// Factor of the selector's loss in an update: 0 for the first int(total * warmup_ratio) updates, then a ramp over int(total * ramp_ratio).
[[nodiscard]] double selector_alpha(double alpha, double warmup_ratio, double ramp_ratio, int64_t update, int64_t updates_total);

}  // namespace sf::draft
