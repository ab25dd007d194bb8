// The float8 kernels and products against float64 on the CPU: bytes of casts, both layouts, sums. Without a GPU each test says so and passes.
#include <doctest/doctest.h>

#include "core/kernels/cuda_library.hpp"
#include "core/kernels/float8.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/kernels/ops.hpp"
#include "tests/kernels/finite_difference.hpp"
#include "tests/kernels/gpu.hpp"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

using sf::test::has_gpu;
using sf::test::random;
using sf::test::relative_distance;

namespace {

const at::Device kGpu(at::kCUDA, 0);
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kWorkspace = int64_t{32} << 20;

at::TensorOptions on_gpu(at::ScalarType type) { return at::TensorOptions(kGpu).dtype(type); }
at::ScalarType type_of(sf::cuda::Float8 format) { return format == sf::cuda::Float8::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2; }
double largest(sf::cuda::Float8 format) { return format == sf::cuda::Float8::e4m3 ? 448 : 57344; }

struct Encoded {
  at::Tensor rows, columns;                       // on the CPU, bytes
  at::Tensor scale_r, scale_c;                    // inverse scales, on the CPU
  float alarm = 0;
};

float amax_of(const at::Tensor& x) {
  at::Tensor amax = at::full({}, 7.0, on_gpu(at::kFloat));
  sf::check_launch("amax", sf::cuda_launchers()->float8_amax({.type = sf::kernel_type(x), .r = 1, .c = x.numel(), .x_rc = x.const_data_ptr(), .amax = amax.data_ptr<float>(),
                                                               .amax_r = nullptr, .amax_c = nullptr}, sf::stream_of(x)));
  return amax.item<float>();
}

Encoded encode(const at::Tensor& x_rc, sf::cuda::Float8 format, bool row_wise) {
  const int64_t r = x_rc.size(0), c = x_rc.size(1), padded = sf::cuda::float8_padded(r);
  const at::Tensor x = x_rc.to(kGpu);
  at::Tensor amax_r = at::full({row_wise ? r : 1}, 7.0, on_gpu(at::kFloat)), amax_c = at::full({c}, 7.0, on_gpu(at::kFloat));
  const void* stream = sf::stream_of(x);
  sf::check_launch("amax", sf::cuda_launchers()->float8_amax({.type = sf::kernel_type(x), .r = r, .c = c, .x_rc = x.const_data_ptr(), .amax = row_wise ? nullptr : amax_r.data_ptr<float>(),
                                                               .amax_r = row_wise ? amax_r.data_ptr<float>() : nullptr, .amax_c = row_wise ? amax_c.data_ptr<float>() : nullptr},
                                                              const_cast<void*>(stream)));
  at::Tensor rows = at::full({r, c}, 0x55, on_gpu(at::kByte)), columns = at::full({c, padded}, 0x55, on_gpu(at::kByte));
  at::Tensor scale_r = at::full({row_wise ? r : 1}, -1.0, on_gpu(at::kFloat)), scale_c = at::full({row_wise ? c : 1}, -1.0, on_gpu(at::kFloat)), alarm = at::zeros({}, on_gpu(at::kFloat));
  sf::cuda::Float8Encode arguments{.type = sf::kernel_type(x), .format = format, .r = r, .c = c, .x_rc = x.const_data_ptr()};
  if (row_wise) {
    arguments.amax_r = amax_r.data_ptr<float>();
    arguments.amax_c = amax_c.data_ptr<float>();
    arguments.inverse_scale_r = scale_r.data_ptr<float>();
    arguments.inverse_scale_c = scale_c.data_ptr<float>();
  } else {
    arguments.amax = amax_r.data_ptr<float>();
    arguments.inverse_scale = scale_r.data_ptr<float>();
  }
  arguments.alarm = alarm.data_ptr<float>();
  for (const bool both : {false, true}) {  // one layout at a time gives the bytes of both together
    const at::Tensor rows_before = rows.clone();
    arguments.values_rc = rows.mutable_data_ptr();
    arguments.values_cr = both ? columns.mutable_data_ptr() : nullptr;
    sf::check_launch("encode", sf::cuda_launchers()->float8_encode(arguments, const_cast<void*>(stream)));
    if (both) {
      CHECK(at::equal(rows, rows_before));
    }
  }
  at::Tensor alone = at::full({c, padded}, 0x55, on_gpu(at::kByte));
  arguments.values_rc = nullptr;
  arguments.values_cr = alone.mutable_data_ptr();
  sf::check_launch("encode", sf::cuda_launchers()->float8_encode(arguments, const_cast<void*>(stream)));
  CHECK(at::equal(alone, columns));
  if (!row_wise) {  // bytes that are there already, transposed
    at::Tensor transposed = at::full({c, padded}, 0x55, on_gpu(at::kByte));
    sf::check_launch("transpose", sf::cuda_launchers()->float8_transpose({.r = r, .c = c, .values_rc = rows.const_data_ptr(), .values_cr = transposed.mutable_data_ptr()},
                                                                         const_cast<void*>(stream)));
    CHECK(at::equal(transposed, columns));
  }
  return {rows.cpu(), columns.cpu(), scale_r.cpu(), row_wise ? scale_c.cpu() : scale_r.cpu(), alarm.item<float>()};
}

// What clamp(x * scale) rounded gives, computed by LibTorch on the CPU; scale of all or of each row.
std::pair<at::Tensor, at::Tensor> expected_bytes(const at::Tensor& x, sf::cuda::Float8 format, bool row_wise) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor amax = row_wise ? std::get<0>(wide.abs().max(1, true)) : wide.abs().max();
  const at::Tensor scale = at::div(at::full({}, largest(format), at::kDouble), amax.to(at::kDouble).clamp_min(1e-12)).to(at::kFloat);
  const at::Tensor values = wide.mul(scale).clamp(-largest(format), largest(format)).to(type_of(format));
  return {values.view(at::kByte), scale.reciprocal()};
}

void compare(const std::string& name, const at::Tensor& x) {
  CAPTURE(name);
  for (const auto format : {sf::cuda::Float8::e4m3, sf::cuda::Float8::e5m2}) {
    CAPTURE(static_cast<int>(format));
    for (const bool row_wise : {false, true}) {
      CAPTURE(row_wise);
      const Encoded found = encode(x, format, row_wise);
      const auto [rows, scale] = expected_bytes(x, format, row_wise);
      CHECK(at::equal(found.rows, rows));
      CHECK(at::equal(found.scale_r.reshape(-1), scale.reshape(-1)));
      const auto [columns, scale_c] = expected_bytes(x.t().contiguous(), format, row_wise);
      CHECK(at::equal(found.columns.narrow(1, 0, x.size(0)), columns));
      CHECK(at::equal(found.scale_c.reshape(-1), scale_c.reshape(-1)));
      if (found.columns.size(1) > x.size(0)) {
        CHECK(found.columns.narrow(1, x.size(0), found.columns.size(1) - x.size(0)).max().item<int>() == 0);
      }
      CHECK(found.alarm == 0);
    }
  }
}

}  // namespace

TEST_CASE("cuda: float8 casts give the bytes of a cast on the CPU, in both layouts, with zeros behind the rows") {
  if (!has_gpu()) return;
  at::manual_seed(51);
  struct Shape {
    int64_t r, c;
  };
  for (const Shape& shape : {Shape{1, 16}, Shape{3, 48}, Shape{16, 128}, Shape{129, 144}, Shape{127, 1024}, Shape{260, 272}, Shape{1000, 64}, Shape{5, 4112}}) {
    const std::string name = std::to_string(shape.r) + " x " + std::to_string(shape.c);
    for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      const at::Tensor x = random({shape.r, shape.c}, at::kFloat).to(type);
      compare(name, x);
      compare(name + ", one huge value", x.clone().index_put_({at::tensor({shape.r - 1}), at::tensor({int64_t{7}})}, at::full({1}, -3e4, type)));
      compare(name + ", exponents of all sizes", x.mul(at::exp2(at::randint(-60, 60, {shape.r, shape.c}, at::kFloat))).to(type));
      at::Tensor dead = x.clone();
      dead[shape.r / 2].zero_();
      dead.select(1, shape.c / 2).zero_();
      compare(name + ", a dead row and a dead column", dead);
    }
    compare(name + ", zeros", at::zeros({shape.r, shape.c}, at::kFloat));
    compare(name + ", tiny", at::full({shape.r, shape.c}, 1e-30, at::kFloat));
  }
}

TEST_CASE("cuda: a largest magnitude is exact at any place and length, NaN and infinity among them") {
  if (!has_gpu()) return;
  at::manual_seed(52);
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    for (const int64_t count : {1, 7, 16, 1000, 4099, 3000001}) {
      at::Tensor x = random({count}, at::kFloat).clamp(-5, 5).to(type);
      CHECK(amax_of(x.to(kGpu)) == x.to(at::kFloat).abs().max().item<float>());
      for (const int64_t place : {int64_t{0}, count / 2, count - 1}) {
        for (const double value : {-6.5, kInfinity, -kInfinity, kNaN}) {
          at::Tensor y = x.clone();
          y[place] = value;
          const float found = amax_of(y.to(kGpu));
          CHECK((std::isnan(value) ? std::isnan(found) : found == std::abs(value)));
          y[0] = count > 1 && place > 0 ? kInfinity : value;  // NaN wins over infinity
          CHECK((std::isnan(value) ? std::isnan(amax_of(y.to(kGpu))) : amax_of(y.to(kGpu)) == y[0].abs().to(at::kFloat).item<float>()));
        }
      }
    }
    const at::Tensor odd = at::cat({at::full({1}, 9.0), at::ones({40})}).to(type).to(kGpu);
    CHECK(amax_of(odd.narrow(0, 1, 40)) == 1);  // begins at an address that no vector does
    CHECK(amax_of(at::zeros({33}, on_gpu(type))) == 0);
  }
}

TEST_CASE("cuda: NaN and infinity raise the alarm, and every value under their scale is NaN") {
  if (!has_gpu()) return;
  at::manual_seed(53);
  for (const auto format : {sf::cuda::Float8::e4m3, sf::cuda::Float8::e5m2}) {
    for (const double bad : {kNaN, kInfinity, -kInfinity}) {
      at::Tensor x = random({20, 32}, at::kFloat).to(at::kBFloat16);
      x[13][5] = bad;
      const Encoded whole = encode(x, format, false);
      CHECK(whole.alarm == 1);
      CHECK(whole.rows.view(type_of(format)).to(at::kFloat).isnan().all().item<bool>());
      CHECK(std::isnan(whole.scale_r.item<float>()));
      const Encoded by_row = encode(x, format, true);
      CHECK(by_row.alarm == 1);
      const at::Tensor is_nan = by_row.rows.view(type_of(format)).to(at::kFloat).isnan();
      CHECK(is_nan[13].all().item<bool>());
      CHECK(is_nan.sum().item<int64_t>() == 32);
      CHECK(by_row.columns.narrow(1, 0, 20).contiguous().view(type_of(format)).to(at::kFloat).isnan().sum().item<int64_t>() == 20);
    }
  }
}

namespace {

struct Operand {
  at::Tensor values, scale;  // on the GPU
  at::Tensor exact;          // what they mean, float64 on the CPU
};

Operand operand(int64_t r, int64_t k, sf::cuda::Float8 format, bool row_wise) {
  const at::Tensor x = random({r, k}, at::kFloat).mul(at::exp2(random({r, 1}, at::kFloat)));
  const Encoded encoded = encode(x, format, row_wise);
  const at::Tensor exact = encoded.rows.view(type_of(format)).to(at::kDouble).mul(encoded.scale_r.to(at::kDouble).reshape({row_wise ? r : 1, 1}));
  return {encoded.rows.to(kGpu), encoded.scale_r.to(kGpu), exact};
}

}  // namespace

TEST_CASE("cuda: float8 products equal float64 ones of the same bytes: formats, scales, results and sums") {
  if (!has_gpu()) return;
  at::manual_seed(54);
  struct Shape {
    int64_t m, n, k;
  };
  const at::Tensor workspace = at::empty({kWorkspace}, on_gpu(at::kByte));
  for (const Shape& shape : {Shape{1, 16, 16}, Shape{37, 48, 64}, Shape{128, 256, 4096}, Shape{300, 1024, 512}, Shape{64, 64, 16384}}) {
    CAPTURE(shape.m);
    CAPTURE(shape.n);
    CAPTURE(shape.k);
    for (const auto& [a_format, b_format] : {std::pair{sf::cuda::Float8::e4m3, sf::cuda::Float8::e4m3}, {sf::cuda::Float8::e5m2, sf::cuda::Float8::e4m3}, {sf::cuda::Float8::e4m3, sf::cuda::Float8::e5m2}}) {
      CAPTURE(static_cast<int>(a_format));
      CAPTURE(static_cast<int>(b_format));
      for (const bool row_wise : {false, true}) {
        const Operand a = operand(shape.m, shape.k, a_format, row_wise), b = operand(shape.n, shape.k, b_format, row_wise);
        const at::Tensor exact = at::mm(a.exact, b.exact.t());
        for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
          for (const bool adds : {false, true}) {
            for (const bool fast : {false, true}) {
              CAPTURE(row_wise);
              CAPTURE(static_cast<int>(type));
              CAPTURE(adds);
              CAPTURE(fast);
              const at::Tensor start = random({shape.m, shape.n}, at::kFloat).mul(exact.abs().max().item<double>()).to(type);
              const auto run = [&] {
                at::Tensor d = (adds ? start : at::full_like(start, kNaN)).to(kGpu);
                const auto error = sf::cuda_launchers()->float8_product(
                    {.m = shape.m, .n = shape.n, .k = shape.k, .a_format = a_format, .b_format = b_format, .d_type = sf::kernel_type(d), .adds = adds, .fast_accumulation = fast,
                     .row_wise = row_wise, .choice = 0, .a_mk = a.values.const_data_ptr(), .b_nk = b.values.const_data_ptr(), .a_scale = a.scale.const_data_ptr<float>(),
                     .b_scale = b.scale.const_data_ptr<float>(), .d_mn = d.mutable_data_ptr(), .workspace = workspace.mutable_data_ptr(), .workspace_bytes = kWorkspace},
                    sf::stream_of(d));
                CAPTURE(std::string(error == nullptr ? "" : error));
                CHECK(error == nullptr);
                return d.cpu();
              };
              const at::Tensor found = run();
              CHECK(at::equal(found, run()));
              const at::Tensor expected = adds ? at::add(exact, start.to(at::kDouble)) : exact;
              // Fast accumulation keeps 14 bits of a sum (3e-3 seen at k = 16384); otherwise sums are float32.
              CHECK(relative_distance(found.to(at::kDouble), expected) < (type == at::kBFloat16 ? 4e-3 : 2e-4) + (fast ? 4e-3 : 0));
            }
          }
        }
      }
    }
  }
}

namespace {

// What producers note about a tensor equals a look at it.
void check_noted(const char* name, const at::Tensor& tensor) {
  CAPTURE(name);
  const at::Tensor known = sf::known_magnitude(tensor);
  REQUIRE(known.defined());
  CHECK(known.item<float>() == tensor.abs().max().item<float>());
}

}  // namespace

TEST_CASE("cuda: kernels that make a tensor note its largest magnitude") {
  if (!has_gpu()) return;
  at::manual_seed(55);
  sf::Ops& ops = sf::cpu_ops();
  (void)sf::known_magnitude(at::zeros({1}));  // from here on they are asked for
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    const auto leaf = [&](at::IntArrayRef shape) { return random(shape, at::kFloat).to(on_gpu(type)).requires_grad_(); };
    at::AutoGradMode record(true);
    for (const int64_t rows : {5, 300}) {
      sf::forget_magnitudes();
      for (const int64_t h : {24, 4096, 12296}) {
        const at::Tensor x = leaf({rows, h}), residual = leaf({rows, h}), weight = leaf({h});
        check_noted("rms_norm", ops.rms_norm(x, weight, 1e-6));
        const auto summed = ops.residual_rms_norm(x, residual, weight, 1e-6);
        check_noted("residual_rms_norm", summed[1]);
        CHECK(!sf::known_magnitude(summed[0]).defined());
        check_noted("residual_rms_norm, gradient", torch::autograd::grad({summed[1]}, {x}, {random({rows, h}, at::kFloat).to(on_gpu(type))})[0]);
        const at::Tensor y = ops.swiglu(x, residual);
        check_noted("swiglu", y);
        check_noted("swiglu, a view", y.view({h, rows}));
        CHECK(!sf::known_magnitude(y.narrow(0, 0, 1)).defined());
        const auto gradients = torch::autograd::grad({y}, {x, residual}, {random({rows, h}, at::kFloat).to(on_gpu(type))});
        check_noted("swiglu, gradient of gate", gradients[0]);
        check_noted("swiglu, gradient of up", gradients[1]);
        at::NoGradGuard no_grad;
        gradients[1].add_(1);
        CHECK(!sf::known_magnitude(gradients[1]).defined());  // it was written since
      }
      const int64_t block = 5, h = 96;
      const at::Tensor x = leaf({1, rows / block * block, h}), delta = leaf({1, rows / block * block, 2, 6}), base = leaf({2, h});
      const at::Tensor y = ops.grouped_convolution(x, delta, base, block);
      check_noted("grouped_convolution", y);
      check_noted("grouped_convolution, gradient", torch::autograd::grad({y}, {x}, {random(y.sizes(), at::kFloat).to(on_gpu(type))})[0]);
      const at::Tensor heads = leaf({1, rows, 3, 64}), weight = leaf({64}), angle = at::rand({1, rows, 32}, on_gpu(at::kFloat));
      check_noted("head_norm_rope, gradient",
                  torch::autograd::grad({ops.head_norm_rope(heads, weight, angle.cos(), angle.sin(), 1e-6)}, {heads}, {random(heads.sizes(), at::kFloat).to(on_gpu(type))})[0]);
    }
  }
  const auto half = [&](at::IntArrayRef shape) { return random(shape, at::kFloat).to(on_gpu(at::kBFloat16)).requires_grad_(); };
  at::AutoGradMode record(true);
  sf::BlockAttention a;
  a.query_bqne = half({2, 24 * 7, 8, 128});
  a.context_key_bsme = half({2, 200, 2, 128});
  a.context_value_bsme = half({2, 200, 2, 128});
  a.block_key_bqme = half({2, 24 * 7, 2, 128});
  a.block_value_bqme = half({2, 24 * 7, 2, 128});
  a.anchors_bw = at::randint(1, 190, {2, 24}, on_gpu(at::kLong));
  a.keep_bw = at::ones({2, 24}, on_gpu(at::kBool));
  a.keep_bw[1][3] = false;
  a.block_size = 7;
  a.scale = 0.1;
  const at::Tensor out = ops.block_attention(a);
  check_noted("block_attention", out);
  check_noted("block_attention, as rows", out.view({2, 24 * 7, 8 * 128}));
  const auto gradients = torch::autograd::grad({out}, {a.context_value_bsme, a.block_value_bqme}, {random(out.sizes(), at::kFloat).to(on_gpu(at::kBFloat16))});
  check_noted("block_attention, gradient of context values", gradients[0]);
  check_noted("block_attention, gradient of own values", gradients[1]);
  const at::Tensor other = at::zeros_like(out);
  CHECK(!sf::known_magnitude(other).defined());
  sf::forget_magnitudes();
  CHECK(!sf::known_magnitude(out).defined());
}

TEST_CASE("cuda: float8 operations of Ops give the bytes of their twins on the CPU") {
  if (!has_gpu()) return;
  at::manual_seed(56);
  sf::Ops& ops = sf::cpu_ops();
  for (const auto scaling : {sf::Float8Scaling::tensor, sf::Float8Scaling::row}) {
    for (const auto format : {sf::Float8Format::e4m3, sf::Float8Format::e5m2}) {
      const at::Tensor x = random({37, 64}, at::kFloat).to(at::kBFloat16);
      const auto encode = [&](at::Device device, const at::Tensor& alarm) {
        return ops.float8_encode({.x_rc = x.to(device), .format = format, .scaling = scaling, .amax = {}, .rows = true, .columns = true, .alarm = alarm, .into = {}});
      };
      at::Tensor alarm = at::zeros({2}, on_gpu(at::kFloat));
      const sf::Float8Matrix here = encode(at::kCPU, {}), there = encode(kGpu, alarm[1]);
      CHECK(at::equal(here.values_rc.view(at::kByte), there.values_rc.view(at::kByte).cpu()));
      CHECK(at::equal(here.values_cr.view(at::kByte), there.values_cr.view(at::kByte).cpu()));
      CHECK(at::equal(here.inverse_scale, there.inverse_scale.cpu()));
      CHECK(at::equal(here.inverse_scale_c, there.inverse_scale_c.cpu()));
      CHECK(alarm.sum().item<float>() == 0);
      const at::Tensor w = random({48, 64}, at::kFloat).to(at::kBFloat16);
      const auto product = [&](const sf::Float8Matrix& a, at::Device device, const at::Tensor& add_to, bool emulate) {
        const sf::Float8Matrix b = ops.float8_encode({.x_rc = w.to(device), .format = sf::Float8Format::e4m3, .scaling = scaling, .amax = {}, .rows = true, .columns = false, .alarm = {}, .into = {}});
        return ops.float8_product({.a_rk = a.rows(), .b_ck = b.rows(), .type = at::kFloat, .add_to_rc = add_to, .fast_accumulation = false, .emulate = emulate});
      };
      const at::Tensor expected = product(here, at::kCPU, {}, false), found = product(there, kGpu, {}, false);
      CHECK(relative_distance(found.cpu(), expected) < 2e-4);
      CHECK(relative_distance(product(there, kGpu, {}, true).cpu(), expected) < 1e-5);
      CHECK(relative_distance(product(there, kGpu, found.clone(), false).cpu(), expected.mul(2)) < 2e-4);
    }
  }
}
