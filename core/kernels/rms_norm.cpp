#include "core/kernels/rms_norm.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>
#include <utility>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& inverse, const at::Tensor& weight_h) {
  return at::mul(x, inverse).mul_(wide(weight_h));
}

constexpr int64_t kColumnsMost = 32768;  // a kernel keeps a float for each column in shared memory

bool runs_on_kernels(const at::Tensor& x, const at::Tensor& weight_h) { return has_kernels({x, weight_h}) && weight_h.size(0) <= kColumnsMost; }

// One pass of the kernel. With a residual `sum` is made too.
struct NormedRows {
  at::Tensor sum, y, inverse_r;
};

NormedRows norm_rows(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h, double eps) {
  const int64_t h = x.size(-1), r = x.numel() / h;
  NormedRows rows;
  rows.y = at::empty(x.sizes(), x.options());
  rows.sum = residual.defined() ? at::empty(x.sizes(), x.options()) : at::Tensor();
  rows.inverse_r = at::empty({r}, x.options().dtype(at::kFloat));
  const at::Tensor magnitude = open_magnitude(x);
  check_launch("rms_norm", cuda_launchers()->rms_norm_forward({.type = kernel_type(x), .r = r, .h = h, .eps = eps, .x_rh = pointer(x),
                                                               .residual_rh = pointer(residual), .weight_h = pointer(weight_h),
                                                               .sum_rh = pointer_to_write(rows.sum), .y_rh = pointer_to_write(rows.y),
                                                               .inverse_r = rows.inverse_r.data_ptr<float>(), .amax = magnitude_pointer(magnitude)}, stream_of(x)));
  note_magnitude(rows.y, magnitude);
  return rows;
}

// {gradient of what was normed, of the weight}; `other_grad_y` is undefined or added to y's gradient, `grad_sum` to the first.
std::pair<at::Tensor, at::Tensor> norm_rows_backward(const at::Tensor& grad_y, const at::Tensor& other_grad_y, const at::Tensor& grad_sum, const at::Tensor& x,
                                                     const at::Tensor& weight_h, const at::Tensor& inverse_r, bool wants_weight) {
  const int64_t h = x.size(-1), r = x.numel() / h;
  const at::Tensor grad = whole(grad_y), other = whole(other_grad_y), sum = whole(grad_sum);
  at::Tensor grad_x = at::empty(x.sizes(), x.options());
  at::Tensor grad_weight, partial;
  if (wants_weight) {
    grad_weight = at::empty({h}, x.options());
    partial = at::empty({cuda::rms_norm_partials(r, h), h}, inverse_r.options());
  }
  const at::Tensor magnitude = open_magnitude(x);
  check_launch("rms_norm backward",
               cuda_launchers()->rms_norm_backward({.type = kernel_type(x), .r = r, .h = h, .x_rh = pointer(x), .weight_h = pointer(weight_h),
                                                    .inverse_r = inverse_r.const_data_ptr<float>(), .grad_y_rh = pointer(grad),
                                                    .other_grad_y_rh = pointer(other), .grad_sum_rh = pointer(sum), .grad_x_rh = pointer_to_write(grad_x),
                                                    .grad_weight_h = pointer_to_write(grad_weight),
                                                    .partial_ph = static_cast<float*>(pointer_to_write(partial)), .amax = magnitude_pointer(magnitude)},
                                                   stream_of(x)));
  note_magnitude(grad_x, magnitude);
  return {grad_x, grad_weight};
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight_h, double eps) {
    if (runs_on_kernels(x, weight_h)) {
      const at::Tensor x_rh = whole(x), weight = whole(weight_h);
      const NormedRows rows = norm_rows(x_rh, at::Tensor(), weight, eps);
      context->save_for_backward({x_rh, weight, rows.inverse_r});
      return rows.y;
    }
    const at::Tensor x_wide = wide(x);
    const at::Tensor inverse = inverse_rms(x_wide, eps);
    context->save_for_backward({x, weight_h, inverse});
    return scale_rows(x_wide, inverse, weight_h).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    if (runs_on_kernels(saved[0], saved[1])) {
      const auto [grad_x, grad_weight] = norm_rows_backward(gradients[0], at::Tensor(), at::Tensor(), saved[0], saved[1], saved[2], context->needs_input_grad(1));
      return {grad_x, grad_weight, at::Tensor()};
    }
    const RmsNormGradient found =
        rms_norm_backward(wide(gradients[0]), wide(saved[0]), wide(saved[1]), saved[2], context->needs_input_grad(1));
    return {found.x.to(saved[0].scalar_type()),
            found.weight_h.defined() ? found.weight_h.to(saved[1].scalar_type()) : at::Tensor(), at::Tensor()};
  }
};

// Without a residual the sum is x itself: its gradient and the norm's meet in one pass.
struct ResidualRmsNorm : torch::autograd::Function<ResidualRmsNorm> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& residual, const at::Tensor& weight_h, double eps) {
    context->set_materialize_grads(false);
    const at::Tensor added = residual.value_or(at::Tensor());
    context->saved_data["has_residual"] = added.defined();
    if (has_kernels({x, added}) && runs_on_kernels(x, weight_h)) {
      const at::Tensor weight = whole(weight_h), x_rh = whole(x);
      const NormedRows rows = norm_rows(x_rh, whole(added), weight, eps);
      const at::Tensor sum = added.defined() ? rows.sum : x_rh.detach();
      context->save_for_backward({sum, weight, rows.inverse_r});
      return {sum, rows.y, rows.y.detach()};
    }
    const at::Tensor sum = added.defined() ? at::add(x, added) : x.detach();
    const at::Tensor sum_wide = wide(sum);
    const at::Tensor inverse = inverse_rms(sum_wide, eps);
    context->save_for_backward({sum, weight_h, inverse});
    const at::Tensor y = scale_rows(sum_wide, inverse, weight_h).to(sum.scalar_type());
    return {sum, y, y.detach()};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::ScalarType type = saved[0].scalar_type();
    const bool has_residual = context->saved_data["has_residual"].toBool();
    const bool wants_weight = context->needs_input_grad(has_residual ? 2 : 1);  // counted among the tensors that are there
    at::Tensor grad_y = gradients[1].defined() ? gradients[1] : gradients[2];
    const at::Tensor other = gradients[1].defined() ? gradients[2] : at::Tensor();
    at::Tensor grad_sum, grad_weight;
    if (!grad_y.defined()) {
      grad_sum = gradients[0];
    } else if (runs_on_kernels(saved[0], saved[1])) {
      std::tie(grad_sum, grad_weight) = norm_rows_backward(grad_y, other, gradients[0], saved[0], saved[1], saved[2], wants_weight);
    } else {
      grad_y = other.defined() ? at::add(wide(grad_y), wide(other)) : wide(grad_y);
      const RmsNormGradient found = rms_norm_backward(grad_y, wide(saved[0]), wide(saved[1]), saved[2], wants_weight);
      grad_sum = gradients[0].defined() ? at::add(found.x, gradients[0]).to(type) : found.x.to(type);
      grad_weight = found.weight_h.defined() ? found.weight_h.to(saved[1].scalar_type()) : at::Tensor();
    }
    return {grad_sum, has_residual ? grad_sum : at::Tensor(), grad_weight, at::Tensor()};
  }
};

}  // namespace

at::Tensor inverse_rms(const at::Tensor& x, double eps) { return at::mul(x, x).mean(-1, true).add_(eps).rsqrt_(); }

RmsNormGradient rms_norm_backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight_h,
                                  const at::Tensor& inverse, bool wants_weight) {
  const int64_t h = x.size(-1);
  const at::Tensor unit = at::mul(x, inverse);  // rows of root mean square 1
  RmsNormGradient result;
  if (wants_weight) {
    result.weight_h = at::mul(gradient, unit).reshape({-1, h}).sum(0);
  }
  at::Tensor scaled = at::mul(gradient, weight_h);
  const at::Tensor along = at::mul(scaled, unit).mean(-1, true);
  result.x = scaled.addcmul_(unit, along, -1).mul_(inverse);
  return result;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_h, double eps) {
  SF_CHECK(x.dim() >= 1, "rms_norm takes rows, found a scalar");
  SF_CHECK_SHAPE(weight_h, {x.size(-1)});
  return RmsNorm::apply(x, weight_h, eps);
}

std::vector<at::Tensor> residual_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h, double eps) {
  SF_CHECK(x.dim() >= 1, "residual_rms_norm takes rows, found a scalar");
  SF_CHECK(!residual.defined() || x.sizes() == residual.sizes(), "residual_rms_norm: x has shape {}, the residual {}", x.sizes().vec(), residual.sizes().vec());
  SF_CHECK_SHAPE(weight_h, {x.size(-1)});
  return ResidualRmsNorm::apply(x, residual.defined() ? std::optional<at::Tensor>(residual) : std::nullopt, weight_h, eps);
}

}  // namespace sf
