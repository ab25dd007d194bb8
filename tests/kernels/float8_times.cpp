// Times of casts and products in float8 at the shapes of three drafts for Qwen3-8B (docs/benchmarks/fp8.md). Each line: milliseconds, TB/s of memory that has to move, TFLOP/s.
#include "core/kernels/cuda_library.hpp"
#include "tests/kernels/gpu.hpp"
#include "tests/kernels/times.hpp"

#include <ATen/ATen.h>

#include <string>
#include <utility>

namespace {

using sf::cuda::Float8;
using sf::test::milliseconds;
using sf::test::time_line;

const at::TensorOptions kHalf = at::TensorOptions(at::Device(at::kCUDA, 0)).dtype(at::kBFloat16);
constexpr int64_t kWorkspace = int64_t{32} << 20;
at::Tensor workspace, scalar, inverse;  // set and dropped by main: they must not outlive CUDA

at::Tensor normal(int64_t r, int64_t c) { return at::randn({r, c}, kHalf); }
at::Tensor bytes(at::IntArrayRef shape) { return at::empty(shape, kHalf.dtype(at::kByte)); }

void encode(const at::Tensor& x, Float8 format, void* rows, void* columns) {
  sf::check_launch("encode", sf::cuda_launchers()->float8_encode({.type = sf::kernel_type(x), .format = format, .r = x.size(0), .c = x.size(1), .x_rc = x.const_data_ptr(),
                                                                  .amax = scalar.const_data_ptr<float>(), .amax_r = nullptr, .amax_c = nullptr, .values_rc = rows, .values_cr = columns,
                                                                  .inverse_scale = inverse.data_ptr<float>(), .inverse_scale_r = nullptr, .inverse_scale_c = nullptr, .alarm = nullptr},
                                                                 sf::stream_of(x)));
}

void casts(const at::Tensor& x, const std::string& name) {
  const int64_t r = x.size(0), c = x.size(1);
  const double numbers = static_cast<double>(r * c), size = static_cast<double>(x.element_size());
  const at::Tensor rows = bytes({r, c}), columns = bytes({c, sf::cuda::float8_padded(r)}), amax = at::empty({r + c}, kHalf.dtype(at::kFloat));
  time_line(name + " amax", milliseconds([&] {
              sf::check_launch("amax", sf::cuda_launchers()->float8_amax({.type = sf::kernel_type(x), .r = r, .c = c, .x_rc = x.const_data_ptr(), .amax = amax.data_ptr<float>(),
                                                                          .amax_r = nullptr, .amax_c = nullptr}, sf::stream_of(x)));
            }),
            numbers * size);
  time_line(name + " amax of rows and columns", milliseconds([&] {
              sf::check_launch("amax", sf::cuda_launchers()->float8_amax({.type = sf::kernel_type(x), .r = r, .c = c, .x_rc = x.const_data_ptr(), .amax = nullptr,
                                                                          .amax_r = amax.data_ptr<float>(), .amax_c = amax.data_ptr<float>() + r}, sf::stream_of(x)));
            }),
            numbers * size);
  time_line(name + " rows", milliseconds([&] { encode(x, Float8::e4m3, rows.mutable_data_ptr(), nullptr); }), numbers * (size + 1));
  time_line(name + " columns", milliseconds([&] { encode(x, Float8::e4m3, nullptr, columns.mutable_data_ptr()); }), numbers * (size + 1));
  time_line(name + " both", milliseconds([&] { encode(x, Float8::e4m3, rows.mutable_data_ptr(), columns.mutable_data_ptr()); }), numbers * (size + 2));
  time_line(name + " both, e5m2", milliseconds([&] { encode(x, Float8::e5m2, rows.mutable_data_ptr(), columns.mutable_data_ptr()); }), numbers * (size + 2));
  time_line(name + " transpose", milliseconds([&] {
              sf::check_launch("transpose", sf::cuda_launchers()->float8_transpose({.r = r, .c = c, .values_rc = rows.const_data_ptr(), .values_cr = columns.mutable_data_ptr()}, sf::stream_of(x)));
            }),
            numbers * 2);
}

struct Variant {
  const char* name;
  Float8 a_format;
  sf::cuda::Type d_type;
  bool adds, fast;
};

void products(const std::string& name, int64_t m, int64_t n, int64_t k, std::initializer_list<Variant> variants, int proposals) {
  const double flop = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const at::Tensor a_half = normal(m, k), b_half = normal(n, k);
  at::Tensor half = at::empty({m, n}, kHalf);
  const std::string shape = name + " " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
  time_line(shape + " bf16", milliseconds([&] { at::mm_out(half, a_half, b_half.t()); }), 2.0 * static_cast<double>(m * k + n * k + m * n), flop);
  const at::Tensor b = bytes({n, k}), a = bytes({m, k});
  encode(b_half, Float8::e4m3, b.mutable_data_ptr(), nullptr);
  for (const Variant& variant : variants) {
    encode(a_half, variant.a_format, a.mutable_data_ptr(), nullptr);
    const at::Tensor d = at::zeros({m, n}, kHalf.dtype(variant.d_type == sf::cuda::Type::bfloat16 ? at::kBFloat16 : at::kFloat));
    const auto once = [&](int32_t choice) {
      return sf::cuda_launchers()->float8_product({.m = m, .n = n, .k = k, .a_format = variant.a_format, .b_format = Float8::e4m3, .d_type = variant.d_type, .adds = variant.adds,
                                                   .fast_accumulation = variant.fast, .row_wise = false, .choice = choice, .a_mk = a.const_data_ptr(), .b_nk = b.const_data_ptr(),
                                                   .a_scale = inverse.const_data_ptr<float>(), .b_scale = inverse.const_data_ptr<float>(), .d_mn = d.mutable_data_ptr(),
                                                   .workspace = workspace.mutable_data_ptr(), .workspace_bytes = kWorkspace}, sf::stream_of(d));
    };
    const double size = d.element_size() * (variant.adds ? 2.0 : 1.0);
    std::string best;
    double least = 0;
    for (int choice = 0; choice < proposals; ++choice) {
      if (const auto error = once(choice)) {
        if (choice == 0) {
          std::printf("%s %s: %s\n", shape.c_str(), variant.name, error);
        }
        break;
      }
      const double ms = milliseconds([&] { (void)once(choice); });
      if (choice == 0) {
        time_line(shape + " " + variant.name, ms, static_cast<double>(m * k + n * k) + size * static_cast<double>(m * n), flop);
      } else if (least == 0 || ms < least) {
        least = ms;
        best = std::to_string(choice);
      }
    }
    if (least > 0) {
      std::printf("    the best of other proposals: %s, %.3f ms, %.1f TFLOP/s\n", best.c_str(), least, flop / least / 1e9);
    }
  }
}

}  // namespace

int main() {
  if (!sf::test::has_gpu()) {
    return 0;
  }
  workspace = bytes({kWorkspace});
  scalar = at::full({}, 5.0, kHalf.dtype(at::kFloat));
  inverse = at::ones({}, kHalf.dtype(at::kFloat));
  {
    const at::Tensor x = at::randn({int64_t{1} << 30}, kHalf);
    at::Tensor y = at::empty_like(x);
    time_line("copy", milliseconds([&] { y.copy_(x); }), 4e0 * (int64_t{1} << 30));
  }
  casts(normal(16384, 4096), "16384 x 4096 bf16");
  casts(normal(16384, 12288), "16384 x 12288 bf16");
  casts(normal(16384, 1024), "16384 x 1024 bf16");
  casts(normal(7168, 4096), "7168 x 4096 bf16");
  casts(normal(12288, 4096).to(at::kFloat), "12288 x 4096 float32");
  constexpr auto kHalfResult = sf::cuda::Type::bfloat16, kFloatResult = sf::cuda::Type::float32;
  struct Linear {
    int64_t inputs, outputs;
  };
  struct Draft {
    const char* name;
    int64_t rows;
    std::initializer_list<Linear> linears;
  };
  for (const Draft& draft : {Draft{"DFlash2", 16384, {{4096, 12288}, {12288, 4096}, {4096, 4096}, {4096, 1024}}}, Draft{"DSpark", 7168, {{4096, 12288}, {12288, 4096}, {4096, 4096}, {4096, 1024}}},
                             Draft{"EAGLE3", 4096, {{4096, 12288}, {12288, 4096}, {8192, 4096}, {8192, 1024}, {4096, 4096}}}}) {
    std::printf("%s: %ld rows\n", draft.name, static_cast<long>(draft.rows));
    for (const Linear& linear : draft.linears) {
      const int proposals = draft.rows == 16384 ? 8 : 2;
      products("forward", draft.rows, linear.outputs, linear.inputs, {{"fast", Float8::e4m3, kHalfResult, false, true}, {"slow", Float8::e4m3, kHalfResult, false, false}}, proposals);
      products("grad x", draft.rows, linear.inputs, linear.outputs,
               {{"e5m2 fast", Float8::e5m2, kHalfResult, false, true}, {"e5m2 slow", Float8::e5m2, kHalfResult, false, false}, {"e4m3 slow", Float8::e4m3, kHalfResult, false, false},
                {"e5m2 slow adds", Float8::e5m2, kHalfResult, true, false}},
               1);
      products("grad weight", linear.outputs, linear.inputs, draft.rows,
               {{"e5m2 fast f32 adds", Float8::e5m2, kFloatResult, true, true}, {"e5m2 slow f32 adds", Float8::e5m2, kFloatResult, true, false}, {"e5m2 slow bf16", Float8::e5m2, kHalfResult, false, false}},
               draft.rows == 16384 ? 8 : 1);
    }
  }
  workspace = scalar = inverse = at::Tensor();
  return 0;
}
