#include "core/train/linear.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/base/error.hpp"
#include "core/kernels/products.hpp"

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight_oi,
                            const std::optional<at::Tensor>& bias_o, int64_t weight_sink, int64_t bias_sink) {
    context->save_for_backward({x, weight_oi});
    context->saved_data["weight_sink"] = weight_sink;
    context->saved_data["bias_sink"] = bias_sink;
    return at::linear(x, weight_oi, bias_o);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight_oi = saved[1];
    const at::Tensor grad_ro = gradients[0].reshape({-1, weight_oi.size(0)});
    auto* weight_sink = reinterpret_cast<GradientSink*>(context->saved_data["weight_sink"].toInt());
    auto* bias_sink = reinterpret_cast<GradientSink*>(context->saved_data["bias_sink"].toInt());
    at::Tensor grad_x;
    if (context->needs_input_grad(0)) {
      grad_x = at::mm(grad_ro, weight_oi).view(x.sizes());
    }
    if (weight_sink != nullptr) {
      add_weight_gradient(weight_sink->buffer, grad_ro, x.reshape({-1, weight_oi.size(1)}));
      weight_sink->touch();
    }
    if (bias_sink != nullptr) {
      bias_sink->buffer.add_(grad_ro.sum(0, false, bias_sink->buffer.scalar_type()));
      bias_sink->touch();
    }
    return {grad_x, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o, GradientSink* weight_sink,
                  GradientSink* bias_sink) {
  SF_CHECK(x.dim() >= 1 && weight_oi.dim() == 2 && x.size(-1) == weight_oi.size(1),
           "linear: x has {} columns, the weight takes {}", x.dim() ? x.size(-1) : 0, weight_oi.size(-1));
  const std::optional<at::Tensor> bias = bias_o.defined() ? std::optional(bias_o) : std::nullopt;
  return Linear::apply(x, weight_oi, bias, reinterpret_cast<int64_t>(weight_sink), reinterpret_cast<int64_t>(bias_sink));
}

}  // namespace sf
