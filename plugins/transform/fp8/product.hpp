// plugins/transform/fp8/product.hpp: products of one input in float8, as one autograd node.
//
// Forward reads x once: its rows for the products, its transposed copy (a byte for each element) for the weights' gradients, which is all that is kept.
// Backward reads each output gradient once, in the same two layouts. x's gradient is one buffer that the products add to.
#pragma once

#include <vector>

#include "plugins/transform/fp8/fp8.hpp"

namespace sf::fp8 {

/// y_p = x @ W_p^T (+ bias) for each product. x [..., i] float32 or bfloat16; results in its type.
[[nodiscard]] std::vector<at::Tensor> products_of(const Fp8& fp8, const std::vector<LinearProduct>& products, const at::Tensor& x);

}  // namespace sf::fp8
