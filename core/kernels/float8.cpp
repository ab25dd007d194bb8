#include "core/kernels/float8.hpp"

#include "core/base/error.hpp"

#include <ATen/ATen.h>

#include <limits>

namespace sf {
namespace {

constexpr double kLeastAmax = 1e-12;   // a matrix of zeros gets a finite scale
constexpr int64_t kMultiple = 16;      // of the dimension that a float8 product sums along

int64_t round_up(int64_t count) { return (count + kMultiple - 1) / kMultiple * kMultiple; }

// Rounded once from double; NaN where amax is not finite, so that nothing made of it looks sound.
at::Tensor scale_of(const at::Tensor& amax, double largest) {
  const at::Tensor scale = at::reciprocal(at::clamp_min(amax.to(at::kDouble), kLeastAmax)).mul_(largest).to(at::kFloat);
  return at::where(at::isfinite(amax), scale, at::full({}, std::numeric_limits<float>::quiet_NaN(), scale.options()));
}

void raise_alarm(const at::Tensor& alarm, const at::Tensor& amax) {
  if (alarm.defined()) {
    alarm.copy_(at::maximum(alarm, at::isfinite(amax).logical_not().any().to(at::kFloat).view_as(alarm)));
  }
}

at::Tensor rounded(const at::Tensor& x_rc, const at::Tensor& scale, Float8Format format) {
  const double largest = float8_largest(format);
  return at::mul(x_rc.to(at::kFloat), scale).clamp_(-largest, largest).to(float8_type(format));
}

// Copies go by bytes: few operations know the float8 types.
at::Tensor bytes_of(const at::Tensor& values) { return values.view(at::kByte); }

void write(at::Tensor& into, const at::Tensor& values) {
  if (!into.defined()) {
    into = values;
    return;
  }
  SF_CHECK(into.sizes() == values.sizes() && into.scalar_type() == values.scalar_type(), "float8_encode writes {} of shape {} to {} of shape {}",
           c10::toString(values.scalar_type()), values.sizes().vec(), c10::toString(into.scalar_type()), into.sizes().vec());
  into.copy_(values);
}

at::Tensor transposed(const at::Tensor& values_rc) {
  at::Tensor into = at::empty({values_rc.size(1), round_up(values_rc.size(0))}, values_rc.options());
  float8_transpose(values_rc, into);
  return into;
}

}  // namespace

double float8_largest(Float8Format format) { return format == Float8Format::e4m3 ? 448.0 : 57344.0; }

at::ScalarType float8_type(Float8Format format) { return format == Float8Format::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2; }

at::Tensor float8_amax(const at::Tensor& x) {
  at::NoGradGuard no_grad;
  if (x.numel() == 0) {
    return at::zeros({}, x.options().dtype(at::kFloat));
  }
  return x.abs().amax().to(at::kFloat);
}

Float8Matrix float8_encode(const Float8Encode& encode) {
  at::NoGradGuard no_grad;
  const at::Tensor& x_rc = encode.x_rc;
  SF_CHECK(x_rc.dim() == 2 && x_rc.size(1) % kMultiple == 0, "float8_encode: x has shape {}, expected [r, c] with c a multiple of {}", x_rc.sizes().vec(), kMultiple);
  SF_CHECK(encode.rows || encode.columns, "float8_encode: neither layout is asked for");
  const double largest = float8_largest(encode.format);
  Float8Matrix made = encode.into;
  if (encode.scaling == Float8Scaling::tensor) {
    const at::Tensor amax = encode.amax.defined() ? encode.amax : float8_amax(x_rc);
    raise_alarm(encode.alarm, amax);
    const at::Tensor scale = scale_of(amax, largest);
    const at::Tensor values_rc = rounded(x_rc, scale, encode.format);
    write(made.inverse_scale, scale.reciprocal());
    made.inverse_scale_c = made.inverse_scale;
    if (encode.rows) {
      write(made.values_rc, values_rc);
    }
    if (encode.columns) {
      write(made.values_cr, transposed(values_rc));
    }
    return made;
  }
  const auto amax_over = [&](int64_t axis) {
    return x_rc.size(axis) == 0 ? at::zeros({x_rc.size(1 - axis)}, x_rc.options().dtype(at::kFloat)).unsqueeze(axis)
                                : x_rc.abs().amax(axis, /*keepdim=*/true).to(at::kFloat);
  };
  if (encode.rows) {
    const at::Tensor amax_r1 = amax_over(1);
    raise_alarm(encode.alarm, amax_r1);
    const at::Tensor scale_r1 = scale_of(amax_r1, largest);
    write(made.values_rc, rounded(x_rc, scale_r1, encode.format));
    write(made.inverse_scale, scale_r1.reciprocal());
  }
  if (encode.columns) {
    const at::Tensor amax_1c = amax_over(0);
    raise_alarm(encode.alarm, amax_1c);
    const at::Tensor scale_1c = scale_of(amax_1c, largest);
    write(made.values_cr, transposed(rounded(x_rc, scale_1c, encode.format)));
    write(made.inverse_scale_c, scale_1c.reciprocal().t().contiguous());
  }
  return made;
}

void float8_transpose(const at::Tensor& values_rc, const at::Tensor& into_cr) {
  at::NoGradGuard no_grad;
  const int64_t r = values_rc.size(0), c = values_rc.size(1);
  SF_CHECK(into_cr.dim() == 2 && into_cr.size(0) == c && into_cr.size(1) == round_up(r), "float8_transpose: [{}, {}] goes to {}", r, c, into_cr.sizes().vec());
  const at::Tensor to = bytes_of(into_cr);
  to.narrow(1, 0, r).copy_(bytes_of(values_rc).t());
  to.narrow(1, r, to.size(1) - r).zero_();
}

at::Tensor float8_product(const Float8Product& product) {
  at::NoGradGuard no_grad;
  const Float8Operand& a = product.a_rk;
  const Float8Operand& b = product.b_ck;
  SF_CHECK(a.values_rk.dim() == 2 && b.values_rk.dim() == 2 && a.values_rk.size(1) == b.values_rk.size(1) && a.values_rk.size(1) % kMultiple == 0,
           "float8_product: factors of shapes {} and {}, expected [r, k] and [c, k] with k a multiple of {}", a.values_rk.sizes().vec(), b.values_rk.sizes().vec(),
           kMultiple);
  SF_CHECK(a.values_rk.scalar_type() == at::kFloat8_e4m3fn || b.values_rk.scalar_type() == at::kFloat8_e4m3fn, "float8_product: both factors are e5m2");
  SF_CHECK((a.inverse_scale.dim() == 0) == (b.inverse_scale.dim() == 0), "float8_product: one factor is scaled by rows, the other as a whole");
  at::Tensor found;
  if (product.emulate || a.values_rk.is_cpu()) {
    const at::Tensor sums = a.values_rk.is_cpu() ? at::mm(a.values_rk.to(at::kFloat), b.values_rk.to(at::kFloat).t())
                                                 : at::mm(a.values_rk.to(at::kBFloat16), b.values_rk.to(at::kBFloat16).t(), at::kFloat);
    found = at::mul(sums, a.inverse_scale);
    found.mul_(b.inverse_scale.dim() == 0 ? b.inverse_scale : b.inverse_scale.t());
  } else {
    const at::Tensor scale_b = b.inverse_scale.dim() == 0 ? b.inverse_scale : b.inverse_scale.t();
    found = at::_scaled_mm(a.values_rk, b.values_rk.t(), a.inverse_scale, scale_b, std::nullopt, std::nullopt, product.type, product.fast_accumulation);
  }
  return product.add_to_rc.defined() ? product.add_to_rc.add_(found) : found.to(product.type);
}

}  // namespace sf
