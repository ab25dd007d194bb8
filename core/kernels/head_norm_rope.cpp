#include "core/kernels/head_norm_rope.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/kernels/rms_norm.hpp"
#include "core/kernels/shape_check.hpp"
#include "core/kernels/slow_paths.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rotates x by the angles, or back (sign -1); rotation is orthogonal, so its gradient is the rotation back. Writes a new tensor of `type`.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf, double sign, at::ScalarType type) {
  const int64_t f = cos_bqf.size(-1);
  const at::Tensor c = cos_bqf.to(x.scalar_type()).unsqueeze(2);
  const at::Tensor s = sin_bqf.to(x.scalar_type()).unsqueeze(2);
  const at::Tensor first = x.narrow(-1, 0, f);
  const at::Tensor second = x.narrow(-1, f, f);
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(type));
  out.narrow(-1, 0, f).copy_(at::mul(first, c).addcmul_(second, s, -sign));
  out.narrow(-1, f, f).copy_(at::mul(second, c).addcmul_(first, s, sign));
  if (2 * f < x.size(-1)) {
    out.narrow(-1, 2 * f, x.size(-1) - 2 * f).copy_(x.narrow(-1, 2 * f, x.size(-1) - 2 * f));
  }
  return out;
}

bool runs_on_kernels(const at::Tensor& x, const at::Tensor& weight_e, const at::Tensor& cos_bqf) {
  const int64_t e = x.size(3), f = cos_bqf.size(-1);
  if (!has_kernels({x, weight_e}) || !has_kernels({cos_bqf}) || cos_bqf.scalar_type() != at::kFloat) {
    return false;
  }
  if (const char* why = slow_head_norm_rope(e, f)) {
    note_slow_path("head_norm_rope", why);
    return false;
  }
  return true;
}

cuda::HeadNormRope arguments_of(const at::Tensor& x, const at::Tensor& weight_e, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf,
                                const at::Tensor& inverse) {
  const int64_t rows = x.size(0) * x.size(1);
  return {.type = kernel_type(x),
          .rows = rows,
          .heads = x.size(2),
          .e = x.size(3),
          .f = cos_bqf.size(-1),
          .angle_rows = cos_bqf.size(0) * cos_bqf.size(1),
          .x_rne = pointer(x),
          .weight_e = pointer(weight_e),
          .cos_rf = cos_bqf.const_data_ptr<float>(),
          .sin_rf = sin_bqf.const_data_ptr<float>(),
          .inverse_rn = static_cast<float*>(pointer_to_write(inverse))};
}

struct HeadNormRope : torch::autograd::Function<HeadNormRope> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& weight_e,
                            const at::Tensor& cos_bqf, const at::Tensor& sin_bqf, double eps) {
    if (runs_on_kernels(x, weight_e.value_or(at::Tensor()), cos_bqf)) {
      const at::Tensor x_whole = whole(x), weight = whole(weight_e.value_or(at::Tensor())), cos = whole(cos_bqf), sin = whole(sin_bqf);
      at::Tensor inverse;
      if (weight.defined()) {
        inverse = at::empty({x.size(0) * x.size(1), x.size(2)}, cos.options());
      }
      at::Tensor out = at::empty(x.sizes(), x.options());
      cuda::HeadNormRope arguments = arguments_of(x_whole, weight, cos, sin, inverse);
      arguments.eps = eps;
      arguments.y_rne = pointer_to_write(out);
      check_launch("head_norm_rope", cuda_launchers()->head_norm_rope_forward(arguments, stream_of(x)));
      context->save_for_backward({x_whole, weight, cos, sin, inverse});
      return out;
    }
    at::Tensor y = wide(x);
    at::Tensor inverse;
    if (weight_e) {
      inverse = inverse_rms(y, eps);
      y = at::mul(y, inverse).mul_(wide(*weight_e));
    }
    context->save_for_backward({x, weight_e.value_or(at::Tensor()), cos_bqf, sin_bqf, inverse});
    return rotate(y, cos_bqf, sin_bqf, 1, x.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight_e = saved[1];
    if (runs_on_kernels(x, weight_e, saved[2])) {
      const at::Tensor grad_y = whole(gradients[0]);
      at::Tensor grad = at::empty(x.sizes(), x.options()), weight_grad, partial;
      cuda::HeadNormRope arguments = arguments_of(x, weight_e, saved[2], saved[3], saved[4]);
      if (weight_e.defined() && context->needs_input_grad(1)) {
        weight_grad = at::empty(weight_e.sizes(), weight_e.options());
        partial = at::empty({cuda::head_norm_partials(arguments.rows), arguments.e}, saved[2].options());
      }
      arguments.grad_y_rne = pointer(grad_y);
      arguments.grad_x_rne = pointer_to_write(grad);
      arguments.grad_weight_e = pointer_to_write(weight_grad);
      arguments.partial_pe = static_cast<float*>(pointer_to_write(partial));
      const at::Tensor magnitude = open_magnitude(grad);
      arguments.amax = magnitude_pointer(magnitude);
      check_launch("head_norm_rope backward", cuda_launchers()->head_norm_rope_backward(arguments, stream_of(x)));
      note_magnitude(grad, magnitude);
      return {grad, weight_grad, at::Tensor(), at::Tensor(), at::Tensor()};
    }
    at::Tensor grad_x = rotate(wide(gradients[0]), saved[2], saved[3], -1, wide_type(x.scalar_type()));
    at::Tensor grad_weight;
    if (weight_e.defined()) {
      const RmsNormGradient found = rms_norm_backward(grad_x, wide(x), wide(weight_e), saved[4], context->needs_input_grad(1));
      grad_x = found.x;
      grad_weight = found.weight_h.defined() ? found.weight_h.to(weight_e.scalar_type()) : at::Tensor();
    }
    return {grad_x.to(x.scalar_type()), grad_weight, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor head_norm_rope(const at::Tensor& x_bqne, const at::Tensor& weight_e, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf,
                          double eps) {
  SF_CHECK(x_bqne.dim() == 4, "head_norm_rope takes [b, q, heads, e], found {}", x_bqne.sizes().vec());
  const int64_t b = x_bqne.size(0), q = x_bqne.size(1), e = x_bqne.size(3);
  const int64_t f = cos_bqf.size(-1);
  const int64_t angle_rows = cos_bqf.size(0);
  SF_CHECK(2 * f <= e, "head_norm_rope: {} pairs do not fit a head of {}", f, e);
  SF_CHECK(angle_rows == b || angle_rows == 1, "head_norm_rope: angles for {} samples, x has {}", angle_rows, b);
  SF_CHECK_SHAPE(cos_bqf, {angle_rows, q, f});
  SF_CHECK_SHAPE(sin_bqf, {angle_rows, q, f});
  if (weight_e.defined()) {
    SF_CHECK_SHAPE(weight_e, {e});
  }
  return HeadNormRope::apply(x_bqne, weight_e.defined() ? std::optional<at::Tensor>(weight_e) : std::nullopt, cos_bqf, sin_bqf, eps);
}

}  // namespace sf
