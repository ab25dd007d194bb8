#include "core/kernels/products.hpp"

#include "core/kernels/cuda_library.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>

namespace sf {
namespace {

constexpr int64_t kProductWorkspace = int64_t{32} << 20;  // bytes, what cuBLAS asks for on this generation of cards

}  // namespace

at::ScalarType factor_type(const at::Tensor& tensor) {
  return tensor.is_cpu() ? wide_type(tensor.scalar_type()) : tensor.scalar_type();
}

at::Tensor wide_bmm(const at::Tensor& a, const at::Tensor& b, at::ScalarType factor) {
  if (factor == at::kFloat || factor == at::kDouble) {
    return at::bmm(a, b);
  }
  return at::bmm(a.to(factor), b.to(factor), at::kFloat);
}

void add_weight_gradient(const at::Tensor& buffer_oi, const at::Tensor& grad_ro, const at::Tensor& x_ri) {
  if (buffer_oi.scalar_type() == grad_ro.scalar_type()) {
    buffer_oi.addmm_(grad_ro.t(), x_ri);
  } else if (has_kernels({grad_ro, x_ri}) && grad_ro.scalar_type() == at::kBFloat16 && buffer_oi.scalar_type() == at::kFloat &&
             buffer_oi.is_contiguous()) {
    const at::Tensor a = whole(grad_ro), b = whole(x_ri);
    const at::Tensor workspace = at::empty({kProductWorkspace}, a.options().dtype(at::kByte));
    check_launch("weight gradient",
                 cuda_launchers()->accumulate_product({.m = a.size(1), .n = b.size(1), .k = a.size(0), .a_km = pointer(a), .b_kn = pointer(b),
                                                       .c_mn = buffer_oi.data_ptr<float>(), .workspace = workspace.mutable_data_ptr(),
                                                       .workspace_bytes = kProductWorkspace}, stream_of(a)));
  } else {
    buffer_oi.add_(at::mm(grad_ro.t(), x_ri));
  }
}

}  // namespace sf
