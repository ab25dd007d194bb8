#include "core/kernels/swiglu.hpp"

#include "core/base/error.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Swiglu : torch::autograd::Function<Swiglu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return at::silu(wide(gate)).mul_(wide(up)).to(gate.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor gate = wide(saved[0]);
    const at::Tensor gradient = wide(gradients[0]);
    at::Tensor grad_gate = at::silu_backward(at::mul(gradient, wide(saved[1])), gate);
    at::Tensor grad_up = at::silu(gate).mul_(gradient);
    return {grad_gate.to(saved[0].scalar_type()), grad_up.to(saved[1].scalar_type())};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  SF_CHECK(gate.sizes() == up.sizes(), "swiglu: gate has shape {}, up {}", gate.sizes().vec(), up.sizes().vec());
  return Swiglu::apply(gate, up);
}

}  // namespace sf
