#include "core/kernels/swiglu.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Swiglu : torch::autograd::Function<Swiglu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    if (has_kernels({gate, up})) {
      const at::Tensor gate_whole = whole(gate), up_whole = whole(up);
      context->save_for_backward({gate_whole, up_whole});
      at::Tensor y = at::empty(gate.sizes(), gate.options());
      const at::Tensor magnitude = open_magnitude(y);
      check_launch("swiglu", cuda_launchers()->swiglu_forward({.type = kernel_type(gate), .count = gate.numel(), .gate = pointer(gate_whole),
                                                               .up = pointer(up_whole), .y = pointer_to_write(y), .amax = magnitude_pointer(magnitude)}, stream_of(gate)));
      note_magnitude(y, magnitude);
      return y;
    }
    context->save_for_backward({gate, up});
    return at::silu(wide(gate)).mul_(wide(up)).to(gate.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    if (has_kernels({saved[0], saved[1], gradients[0]})) {
      const at::Tensor grad_y = whole(gradients[0]);
      at::Tensor grad_gate = at::empty(saved[0].sizes(), saved[0].options()), grad_up = at::empty(saved[1].sizes(), saved[1].options());
      const at::Tensor of_gate = open_magnitude(grad_y), of_up = open_magnitude(grad_y);
      check_launch("swiglu backward",
                   cuda_launchers()->swiglu_backward({.type = kernel_type(grad_y), .count = grad_y.numel(), .gate = pointer(saved[0]),
                                                      .up = pointer(saved[1]), .grad_y = pointer(grad_y),
                                                      .grad_gate = pointer_to_write(grad_gate), .grad_up = pointer_to_write(grad_up),
                                                      .amax = magnitude_pointer(of_gate), .amax_up = magnitude_pointer(of_up)},
                                                     stream_of(grad_y)));
      note_magnitude(grad_gate, of_gate);
      note_magnitude(grad_up, of_up);
      return {grad_gate, grad_up};
    }
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
