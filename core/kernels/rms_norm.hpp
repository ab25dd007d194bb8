// core/kernels/rms_norm.hpp: RMS norm over the last axis, alone or after a residual sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace sf {

/// weight_h * x / sqrt(mean(x^2) + eps). x [..., h].
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_h, double eps);

/// {sum, rms_norm(sum), the same again} with sum = x + residual, rounded once; x itself where the residual is undefined (sf/ops.hpp).
std::vector<at::Tensor> residual_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h, double eps);

/// 1 / sqrt(mean(x^2) + eps) over the last axis, which stays with size 1. x is wide.
at::Tensor inverse_rms(const at::Tensor& x, double eps);

struct RmsNormGradient {
  at::Tensor x;         // wide
  at::Tensor weight_h;  // wide; undefined when not asked for
};

/// Gradient of weight_h * x * inverse; all wide, summed over every axis but the last for the weight.
RmsNormGradient rms_norm_backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight_h,
                                  const at::Tensor& inverse, bool wants_weight);

}  // namespace sf
