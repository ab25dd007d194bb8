// core/model/skinny_product.hpp
//
// What is done with few rows, as in decoding: bound by reading the weights once. On the CPU the usual library copies them into blocks of its own first, so they pass through
// memory twice; here they are read as they lie (core/kernels/row_tiles.hpp). float32, and processors with AVX-512 or AVX2; everything else goes to the library.
//
// Shapes: r rows · i input columns · o output columns · h hidden
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace sf {

/// Above it the library's blocks pay: a product of 32 rows does as much work for each weight as the processor can do while it reads one.
constexpr int64_t kSkinnyRows = 32;

/// Whether x [..., i] has few rows and the product with such a weight is made here.
[[nodiscard]] bool is_skinny(const at::Tensor& x, const at::Tensor& weight);

/// x [..., i], weight [o, i], bias [o] or undefined -> [..., o].
[[nodiscard]] at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o);

/// silu(x gate^T) * (x up^T) with both weights under each other, [..., i] -> [..., o]. Only what is_skinny().
[[nodiscard]] at::Tensor skinny_gate(const at::Tensor& x, const at::Tensor& gate_up_2oi, const at::Tensor& bias_2o);

/// {x + delta, its RMS norm times weight}, or {x, its norm} when delta is undefined. Only what is_skinny().
[[nodiscard]] std::pair<at::Tensor, at::Tensor> skinny_add_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight_h, double eps);

}  // namespace sf
