#include "core/train/linear.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/base/error.hpp"
#include "core/kernels/products.hpp"

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Where the gradients of a call's products go; the node keeps it.
struct Sinks final : torch::CustomClassHolder {
  struct Pair {
    GradientSink* weight;
    GradientSink* bias;
  };
  std::vector<Pair> of_product;
};

struct Linears : torch::autograd::Function<Linears> {
  // `trigger`: a weight, which wants gradient where x does not; the node gives it none.
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& trigger, const std::vector<LinearProduct>* products) {
    (void)trigger;
    variable_list saved = {x}, results;
    auto sinks = c10::make_intrusive<Sinks>();
    for (const LinearProduct& product : *products) {
      saved.push_back(product.weight_oi);
      sinks->of_product.push_back({product.weight_sink, product.bias_sink});
      results.push_back(at::linear(x, product.weight_oi, product.bias_o.defined() ? std::optional(product.bias_o) : std::nullopt));
    }
    context->save_for_backward(saved);
    context->saved_data["sinks"] = c10::IValue::make_capsule(std::move(sinks));
    context->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto sinks = c10::static_intrusive_pointer_cast<Sinks>(context->saved_data["sinks"].toCapsule());
    const at::Tensor& x = saved[0];
    const at::Tensor x_ri = x.reshape({-1, x.size(-1)});
    at::Tensor grad_x;
    for (size_t p = 0; p < gradients.size(); ++p) {
      if (!gradients[p].defined()) {
        continue;
      }
      const at::Tensor& weight_oi = saved[p + 1];
      const auto [weight_sink, bias_sink] = sinks->of_product[p];
      const at::Tensor grad_ro = gradients[p].reshape({-1, weight_oi.size(0)});
      if (context->needs_input_grad(0)) {
        if (grad_x.defined()) {
          grad_x.addmm_(grad_ro, weight_oi);
        } else {
          grad_x = at::mm(grad_ro, weight_oi);
        }
      }
      if (weight_sink != nullptr) {
        add_weight_gradient(weight_sink->buffer, grad_ro, x_ri);
        weight_sink->touch();
      }
      if (bias_sink != nullptr) {
        bias_sink->buffer.add_(grad_ro.sum(0, false, bias_sink->buffer.scalar_type()));
        bias_sink->touch();
      }
    }
    return {grad_x.defined() ? grad_x.view(x.sizes()) : grad_x, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::vector<at::Tensor> linears(const std::vector<LinearProduct>& products, const at::Tensor& x) {
  SF_CHECK(!products.empty(), "linears: no product");
  at::Tensor trigger;
  for (const LinearProduct& product : products) {
    SF_CHECK(x.dim() >= 1 && product.weight_oi.dim() == 2 && x.size(-1) == product.weight_oi.size(1), "linear: x has {} columns, the weight takes {}",
             x.dim() ? x.size(-1) : 0, product.weight_oi.size(-1));
    if (!trigger.defined() && product.weight_oi.requires_grad()) {
      trigger = product.weight_oi;
    }
    if (!trigger.defined() && product.bias_o.defined() && product.bias_o.requires_grad()) {
      trigger = product.bias_o;
    }
  }
  return Linears::apply(x, trigger.defined() ? trigger : products.front().weight_oi, &products);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o, GradientSink* weight_sink,
                  GradientSink* bias_sink) {
  return linears({{.linear = 0, .weight_oi = weight_oi, .bias_o = bias_o, .weight_sink = weight_sink, .bias_sink = bias_sink}}, x).front();
}

}  // namespace sf
