#include "core/kernels/float8.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/magnitudes.hpp"

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

constexpr int64_t kProductWorkspace = int64_t{32} << 20;  // bytes, what cuBLASLt asks for on this generation of cards

cuda::Float8 format_of(const at::Tensor& values) { return values.scalar_type() == at::kFloat8_e4m3fn ? cuda::Float8::e4m3 : cuda::Float8::e5m2; }

// A tensor to write: the one that was given, which the kernel takes as it is, or a new one.
void prepare(at::Tensor& into, at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!into.defined()) {
    into = at::empty(sizes, options);
    return;
  }
  SF_CHECK(into.sizes() == sizes && into.dtype() == options.dtype() && into.is_contiguous() && into.device() == options.device(),
           "float8_encode writes {} of shape {} to {} of shape {}", c10::toString(c10::typeMetaToScalarType(options.dtype())), sizes.vec(), c10::toString(into.scalar_type()), into.sizes().vec());
}

Float8Matrix encode_on_gpu(const Float8Encode& encode) {
  const at::Tensor x = whole(encode.x_rc);
  const int64_t r = x.size(0), c = x.size(1);
  const bool by_tensor = encode.scaling == Float8Scaling::tensor;
  const auto wide = x.options().dtype(at::kFloat), narrow = x.options().dtype(float8_type(encode.format));
  Float8Matrix made = encode.into;
  cuda::Float8Encode arguments{.type = kernel_type(x), .format = encode.format == Float8Format::e4m3 ? cuda::Float8::e4m3 : cuda::Float8::e5m2, .r = r, .c = c, .x_rc = pointer(x)};
  at::Tensor amax;
  if (by_tensor) {
    amax = encode.amax.defined() ? encode.amax : float8_amax(encode.x_rc);
    arguments.amax = amax.const_data_ptr<float>();
    prepare(made.inverse_scale, {}, wide);
    made.inverse_scale_c = made.inverse_scale;
    arguments.inverse_scale = made.inverse_scale.data_ptr<float>();
  } else {
    amax = at::empty({r + c}, wide);
    float* const amax_r = amax.data_ptr<float>();
    check_launch("float8_amax", cuda_launchers()->float8_amax({.type = arguments.type, .r = r, .c = c, .x_rc = pointer(x), .amax = nullptr, .amax_r = amax_r, .amax_c = amax_r + r}, stream_of(x)));
    arguments.amax_r = amax_r;
    arguments.amax_c = amax_r + r;
    if (encode.rows) {
      prepare(made.inverse_scale, {r, 1}, wide);
      arguments.inverse_scale_r = made.inverse_scale.data_ptr<float>();
    }
    if (encode.columns) {
      prepare(made.inverse_scale_c, {c, 1}, wide);
      arguments.inverse_scale_c = made.inverse_scale_c.data_ptr<float>();
    }
  }
  if (encode.rows) {
    prepare(made.values_rc, {r, c}, narrow);
    arguments.values_rc = pointer_to_write(made.values_rc);
  }
  if (encode.columns) {
    prepare(made.values_cr, {c, cuda::float8_padded(r)}, narrow);
    arguments.values_cr = pointer_to_write(made.values_cr);
  }
  arguments.alarm = encode.alarm.defined() ? encode.alarm.data_ptr<float>() : nullptr;
  check_launch("float8_encode", cuda_launchers()->float8_encode(arguments, stream_of(x)));
  return made;
}

at::Tensor product_on_gpu(const Float8Product& product) {
  const at::Tensor &a = product.a_rk.values_rk, &b = product.b_ck.values_rk;
  const int64_t m = a.size(0), n = b.size(0);
  const bool adds = product.add_to_rc.defined();
  at::Tensor d = adds ? product.add_to_rc : at::empty({m, n}, a.options().dtype(product.type));
  SF_CHECK(d.is_contiguous() && d.sizes() == at::IntArrayRef({m, n}), "float8_product is added to shape {}, expected [{}, {}]", d.sizes().vec(), m, n);
  const at::Tensor workspace = at::empty({kProductWorkspace}, a.options().dtype(at::kByte));
  check_launch("float8_product",
               cuda_launchers()->float8_product({.m = m, .n = n, .k = a.size(1), .a_format = format_of(a), .b_format = format_of(b), .d_type = kernel_type(d), .adds = adds,
                                                 .fast_accumulation = product.fast_accumulation, .row_wise = product.a_rk.inverse_scale.dim() != 0, .choice = 0, .a_mk = pointer(a),
                                                 .b_nk = pointer(b), .a_scale = product.a_rk.inverse_scale.const_data_ptr<float>(),
                                                 .b_scale = product.b_ck.inverse_scale.const_data_ptr<float>(), .d_mn = pointer_to_write(d), .workspace = workspace.mutable_data_ptr(),
                                                 .workspace_bytes = kProductWorkspace}, stream_of(a)));
  return d;
}

bool has_product(const Float8Product& product) {
  const at::Tensor& like = product.add_to_rc;
  const at::ScalarType type = like.defined() ? like.scalar_type() : product.type;
  return cuda_launchers() != nullptr && product.a_rk.values_rk.is_cuda() && product.a_rk.values_rk.numel() > 0 && (type == at::kFloat || type == at::kBFloat16);
}

}  // namespace

double float8_largest(Float8Format numbers) { return numbers == Float8Format::e4m3 ? 448.0 : 57344.0; }

at::ScalarType float8_type(Float8Format numbers) { return numbers == Float8Format::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2; }

at::Tensor float8_amax(const at::Tensor& x) {
  at::NoGradGuard no_grad;
  if (x.numel() == 0) {
    return at::zeros({}, x.options().dtype(at::kFloat));
  }
  if (has_kernels({x})) {
    if (const at::Tensor known = known_magnitude(x); known.defined()) {
      return known;
    }
    const at::Tensor in = x.is_contiguous() ? x : x.contiguous(), amax = at::empty({}, x.options().dtype(at::kFloat));
    check_launch("float8_amax", cuda_launchers()->float8_amax({.type = kernel_type(in), .r = 1, .c = in.numel(), .x_rc = pointer(in), .amax = amax.data_ptr<float>(), .amax_r = nullptr,
                                                               .amax_c = nullptr}, stream_of(in)));
    return amax;
  }
  return x.abs().amax().to(at::kFloat);
}

Float8Matrix float8_encode(const Float8Encode& encode) {
  at::NoGradGuard no_grad;
  const at::Tensor& x_rc = encode.x_rc;
  SF_CHECK(x_rc.dim() == 2 && x_rc.size(1) % kMultiple == 0, "float8_encode: x has shape {}, expected [r, c] with c a multiple of {}", x_rc.sizes().vec(), kMultiple);
  SF_CHECK(encode.rows || encode.columns, "float8_encode: neither layout is asked for");
  if (has_kernels({x_rc})) {
    return encode_on_gpu(encode);
  }
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
  if (cuda_launchers() != nullptr && values_rc.is_cuda() && values_rc.numel() > 0 && c % kMultiple == 0 && values_rc.is_contiguous() && into_cr.is_contiguous()) {
    check_launch("float8_transpose", cuda_launchers()->float8_transpose({.r = r, .c = c, .values_rc = pointer(values_rc), .values_cr = pointer_to_write(into_cr)}, stream_of(values_rc)));
    return;
  }
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
  if (!product.emulate && has_product(product)) {
    return product_on_gpu(product);
  }
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
