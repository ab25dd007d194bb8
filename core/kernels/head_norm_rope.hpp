// core/kernels/head_norm_rope.hpp: RMS norm of each head, then rotary positions, in one operation.
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// Norm over e (skipped when weight_e is undefined), then rotation of pairs (i, i + f) for i < f = cos.size(-1); the rest of a head
/// passes. x [b, q, n, e]; cos, sin float32 [b or 1, q, f].
at::Tensor head_norm_rope(const at::Tensor& x_bqne, const at::Tensor& weight_e, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf,
                          double eps);

}  // namespace sf
