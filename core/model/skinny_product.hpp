// core/model/skinny_product.hpp
//
// x @ weight^T for a few rows of x, which is what decoding multiplies: bound by reading the weights once. On the CPU the usual library copies
// them into blocks of its own first, so they pass through memory twice; here they are read as they lie. float32, and processors with AVX-512;
// everything else goes to the library.
//
// Shapes: r rows · i input columns · o output columns
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// x [..., i], weight [o, i], bias [o] or undefined -> [..., o].
[[nodiscard]] at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o);

}  // namespace sf
