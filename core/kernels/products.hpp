// core/kernels/products.hpp: matrix products whose sums are wide, whatever the type of the factors.
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// The type that attention multiplies: half types as they are on a GPU, which sums them in float32; wide ones elsewhere.
[[nodiscard]] at::ScalarType factor_type(const at::Tensor& tensor);

/// a @ b batch by batch with wide results. Factors are rounded to `factor` first, which factor_type() gave.
[[nodiscard]] at::Tensor wide_bmm(const at::Tensor& a, const at::Tensor& b, at::ScalarType factor);

/// buffer += grad^T x, as one product when the types agree, and on a GPU when a bfloat16 product is summed in float32. grad [r, o], x [r, i], buffer [o, i].
void add_weight_gradient(const at::Tensor& buffer_oi, const at::Tensor& grad_ro, const at::Tensor& x_ri);

}  // namespace sf
