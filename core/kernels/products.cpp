#include "core/kernels/products.hpp"

#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>

namespace sf {

at::ScalarType factor_type(const at::Tensor& tensor) {
  return tensor.is_cpu() ? wide_type(tensor.scalar_type()) : tensor.scalar_type();
}

at::Tensor wide_bmm(const at::Tensor& a, const at::Tensor& b, at::ScalarType factor) {
  if (factor == at::kFloat || factor == at::kDouble) {
    return at::bmm(a, b);
  }
  return at::bmm(a.to(factor), b.to(factor), at::kFloat);
}

void add_weight_gradient(at::Tensor& buffer_oi, const at::Tensor& grad_ro, const at::Tensor& x_ri) {
  if (buffer_oi.scalar_type() == grad_ro.scalar_type()) {
    buffer_oi.addmm_(grad_ro.t(), x_ri);
  } else {
    buffer_oi.add_(at::mm(grad_ro.t(), x_ri));
  }
}

}  // namespace sf
