// core/kernels/float8_head.hpp: the frozen head in float8 (sf/float8_head.hpp), as head_objective asks for it.
//
// Shapes: r rows · h hidden · v vocabulary
#pragma once

#include <ATen/core/Tensor.h>

#include "sf/float8_head.hpp"
#include "sf/ops.hpp"

namespace sf {

[[nodiscard]] Float8Heads& float8_heads();
/// Bytes that a head [v, h] takes in training beside itself: two layouts and the scales of their rows; 0 when float8_heads() is not in use.
[[nodiscard]] int64_t float8_head_bytes(int64_t v, int64_t h);

struct Float8Head {
  Float8Matrix matrix;      // [v, h] and [h, v], e4m3, a scale for each row of each
  bool emulate = false;
};

/// The head in float8, encoded when it is first asked for; null unless float8_heads() is in use. Throws Error(kUsage) when its sizes don't go.
[[nodiscard]] const Float8Head* float8_head(const at::Tensor& head_vh);

/// hidden @ head^T, in the type of `hidden`.
[[nodiscard]] at::Tensor float8_logits(const Float8Head& head, const at::Tensor& hidden_rh);
/// grad_logits @ head, in the type of `grad_logits`.
[[nodiscard]] at::Tensor float8_head_gradient(const Float8Head& head, const at::Tensor& grad_logits_rv);

/// Counts for some rows: how many, how many have the same best token, and how far their negative log-likelihoods of the labels are apart in all.
void compare_float8_head(const Float8Head& head, const at::Tensor& hidden_rh, const at::Tensor& logits_rv, const at::Tensor& labels_r);
/// These three since it was last asked, float64 [3]; undefined when nothing was compared.
[[nodiscard]] at::Tensor take_float8_head_report();

}  // namespace sf
