#include "core/kernels/rms_norm.hpp"

#include "core/base/error.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& inverse, const at::Tensor& weight_h) {
  return at::mul(x, inverse).mul_(wide(weight_h));
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight_h, double eps) {
    const at::Tensor x_wide = wide(x);
    const at::Tensor inverse = inverse_rms(x_wide, eps);
    context->save_for_backward({x, weight_h, inverse});
    return scale_rows(x_wide, inverse, weight_h).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const RmsNormGradient found =
        rms_norm_backward(wide(gradients[0]), wide(saved[0]), wide(saved[1]), saved[2], context->needs_input_grad(1));
    return {found.x.to(saved[0].scalar_type()),
            found.weight_h.defined() ? found.weight_h.to(saved[1].scalar_type()) : at::Tensor(), at::Tensor()};
  }
};

struct ResidualRmsNorm : torch::autograd::Function<ResidualRmsNorm> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h,
                               double eps) {
    const at::Tensor sum = at::add(x, residual);
    const at::Tensor sum_wide = wide(sum);
    const at::Tensor inverse = inverse_rms(sum_wide, eps);
    context->save_for_backward({sum, weight_h, inverse});
    return {sum, scale_rows(sum_wide, inverse, weight_h).to(sum.scalar_type())};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::ScalarType type = saved[0].scalar_type();
    at::Tensor grad_sum;
    at::Tensor grad_weight;
    if (gradients[1].defined()) {
      const RmsNormGradient found =
          rms_norm_backward(wide(gradients[1]), wide(saved[0]), wide(saved[1]), saved[2], context->needs_input_grad(2));
      grad_sum = gradients[0].defined() ? at::add(found.x, gradients[0]).to(type) : found.x.to(type);
      grad_weight = found.weight_h.defined() ? found.weight_h.to(saved[1].scalar_type()) : at::Tensor();
    } else {
      grad_sum = gradients[0];
    }
    return {grad_sum, grad_sum, grad_weight, at::Tensor()};
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
  SF_CHECK(x.dim() >= 1 && x.sizes() == residual.sizes(), "residual_rms_norm: x has shape {}, the residual {}", x.sizes().vec(),
           residual.sizes().vec());
  SF_CHECK_SHAPE(weight_h, {x.size(-1)});
  return ResidualRmsNorm::apply(x, residual, weight_h, eps);
}

}  // namespace sf
