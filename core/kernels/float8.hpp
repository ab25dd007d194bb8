// core/kernels/float8.hpp: the pieces of float8 products (sf/ops.hpp): largest magnitude, encoding in both layouts, product.
//
// On the CPU they are compositions of ATen calls over LibTorch's own float8 types: the twin that the kernels are compared with, and what `emulate` runs.
#pragma once

#include "sf/ops.hpp"

namespace sf {

[[nodiscard]] double float8_largest(Float8Format numbers);
[[nodiscard]] at::ScalarType float8_type(Float8Format numbers);

at::Tensor float8_amax(const at::Tensor& x);
Float8Matrix float8_encode(const Float8Encode& encode);
void float8_transpose(const at::Tensor& values_rc, const at::Tensor& into_cr);
at::Tensor float8_product(const Float8Product& product);

}  // namespace sf
