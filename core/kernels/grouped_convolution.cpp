#include "core/kernels/grouped_convolution.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/kernels/shape_check.hpp"
#include "core/kernels/slow_paths.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Everything wide, with blocks and groups as axes: x [blocks, j, g, c], delta [blocks, j, t, g], base [t, g, c].
struct Convolution {
  at::Tensor x, delta, base;
  int64_t block_size, taps;

  Convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th, int64_t block_rows)
      : block_size(block_rows), taps(base_th.size(0)) {
    const int64_t groups = delta_bqtg.size(3);
    const int64_t channels = x_bqh.size(2) / groups;
    x = wide(x_bqh).reshape({-1, block_size, groups, channels});
    delta = wide(delta_bqtg).reshape({-1, block_size, taps, groups});
    base = wide(base_th).reshape({taps, groups, channels});
  }

  [[nodiscard]] int64_t taps_used() const { return std::min(taps, block_size); }
  // Coefficients of tap t for the rows i >= t, [blocks, j - t, g, c].
  [[nodiscard]] at::Tensor coefficients(int64_t t) const {
    return at::add(delta.narrow(1, t, block_size - t).select(2, t).unsqueeze(-1), base[t]);
  }
};

bool runs_on_kernels(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& base) {
  if (!has_kernels({x, delta, base})) {
    return false;
  }
  if (const char* why = slow_grouped_convolution(base.size(0), x.size(2) / delta.size(3))) {
    note_slow_path("grouped_convolution", why);
    return false;
  }
  return true;
}

// Rows of coefficients may lie apart (one side of a projection), each row itself in one piece.
at::Tensor row_wise(const at::Tensor& delta) {
  const bool fits = delta.stride(3) == 1 && delta.stride(2) == delta.size(3) && delta.stride(0) == delta.size(1) * delta.stride(1);
  return fits ? delta : delta.contiguous();
}

cuda::GroupedConvolution arguments_of(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& base, int64_t block_size) {
  return {.type = kernel_type(x),
          .rows = x.size(0) * x.size(1),
          .h = x.size(2),
          .taps = base.size(0),
          .groups = delta.size(3),
          .block_size = block_size,
          .delta_row_stride = delta.stride(1),
          .x_rh = pointer(x),
          .delta_rtc = pointer(delta),
          .base_th = pointer(base)};
}

struct GroupedConvolution : torch::autograd::Function<GroupedConvolution> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th,
                            int64_t block_size) {
    context->saved_data["block_size"] = block_size;
    if (runs_on_kernels(x_bqh, delta_bqtg, base_th)) {
      const at::Tensor x = whole(x_bqh), delta = row_wise(delta_bqtg), base = whole(base_th);
      context->save_for_backward({x, delta, base});
      at::Tensor out = at::empty(x.sizes(), x.options());
      cuda::GroupedConvolution arguments = arguments_of(x, delta, base, block_size);
      arguments.y_rh = pointer_to_write(out);
      const at::Tensor magnitude = open_magnitude(out);
      arguments.amax = magnitude_pointer(magnitude);
      check_launch("grouped_convolution", cuda_launchers()->grouped_convolution_forward(arguments, stream_of(x)));
      note_magnitude(out, magnitude);
      return out;
    }
    context->save_for_backward({x_bqh, delta_bqtg, base_th});
    const Convolution conv(x_bqh, delta_bqtg, base_th, block_size);
    at::Tensor y = conv.coefficients(0).mul_(conv.x);
    for (int64_t t = 1; t < conv.taps_used(); ++t) {
      y.narrow(1, t, block_size - t).addcmul_(conv.coefficients(t), conv.x.narrow(1, 0, block_size - t));
    }
    return y.view(x_bqh.sizes()).to(x_bqh.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const int64_t block_size = context->saved_data["block_size"].toInt();
    if (runs_on_kernels(saved[0], saved[1], saved[2])) {
      const at::Tensor grad = whole(gradients[0]);
      at::Tensor x_gradient = at::empty(saved[0].sizes(), saved[0].options());
      at::Tensor delta_gradient = at::empty(saved[1].sizes(), saved[1].options());
      at::Tensor base_gradient = at::empty(saved[2].sizes(), saved[2].options());
      cuda::GroupedConvolution arguments = arguments_of(saved[0], saved[1], saved[2], block_size);
      const at::Tensor partial = at::empty({cuda::convolution_partials(arguments.rows / block_size, arguments.h), arguments.taps, arguments.h},
                                           grad.options().dtype(at::kFloat));
      arguments.grad_y_rh = pointer(grad);
      arguments.grad_x_rh = pointer_to_write(x_gradient);
      arguments.grad_delta_rtc = pointer_to_write(delta_gradient);
      arguments.grad_base_th = pointer_to_write(base_gradient);
      arguments.partial_pth = partial.data_ptr<float>();
      const at::Tensor magnitude = open_magnitude(grad);
      arguments.amax = magnitude_pointer(magnitude);
      check_launch("grouped_convolution backward", cuda_launchers()->grouped_convolution_backward(arguments, stream_of(grad)));
      note_magnitude(x_gradient, magnitude);
      return {x_gradient, delta_gradient, base_gradient, at::Tensor()};
    }
    const Convolution conv(saved[0], saved[1], saved[2], block_size);
    const at::Tensor grad_y = wide(gradients[0]).reshape(conv.x.sizes());
    at::Tensor grad_x;
    at::Tensor grad_delta = at::zeros(conv.delta.sizes(), conv.delta.options());
    at::Tensor grad_base = at::zeros(conv.base.sizes(), conv.base.options());
    for (int64_t t = 0; t < conv.taps_used(); ++t) {
      const int64_t rows = block_size - t;
      const at::Tensor grad_rows = grad_y.narrow(1, t, rows);
      const at::Tensor product = at::mul(grad_rows, conv.x.narrow(1, 0, rows));
      grad_delta.narrow(1, t, rows).select(2, t).copy_(product.sum(-1));
      grad_base[t].copy_(product.flatten(0, 1).sum(0));
      if (t == 0) {
        grad_x = conv.coefficients(0).mul_(grad_y);
      } else {
        grad_x.narrow(1, 0, rows).addcmul_(conv.coefficients(t), grad_rows);
      }
    }
    return {grad_x.view(saved[0].sizes()).to(saved[0].scalar_type()), grad_delta.view(saved[1].sizes()).to(saved[1].scalar_type()),
            grad_base.view(saved[2].sizes()).to(saved[2].scalar_type()), at::Tensor()};
  }
};

}  // namespace

at::Tensor grouped_convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th, int64_t block_size) {
  SF_CHECK(x_bqh.dim() == 3 && delta_bqtg.dim() == 4, "grouped_convolution takes x [b, q, h] and delta [b, q, t, g], found {} and {}",
           x_bqh.sizes().vec(), delta_bqtg.sizes().vec());
  const int64_t b = x_bqh.size(0), q = x_bqh.size(1), h = x_bqh.size(2);
  const int64_t g = delta_bqtg.size(3);
  SF_CHECK(block_size > 0 && q % block_size == 0, "grouped_convolution: {} rows are not whole blocks of {}", q, block_size);
  SF_CHECK(g > 0 && h % g == 0, "grouped_convolution: {} channels do not divide into {} groups", h, g);
  SF_CHECK_SHAPE(base_th, {base_th.size(0), h});
  SF_CHECK_SHAPE(delta_bqtg, {b, q, base_th.size(0), g});
  return GroupedConvolution::apply(x_bqh, delta_bqtg, base_th, block_size);
}

}  // namespace sf
