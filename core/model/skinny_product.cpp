// Shapes: r rows · i input columns · o output columns
#include "core/model/skinny_product.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sf {

namespace {

// Above it the library's blocks pay: a product of 32 rows does as much work for each weight as the processor can do while it reads one.
constexpr int64_t kRowsMax = 32;

#if defined(__x86_64__)

constexpr int64_t kLanes = 16;

using Vector = float __attribute__((vector_size(64)));

// Always in the same order, so a row's product does not depend on the rows beside it.
__attribute__((target("avx512f"))) inline float sum_of_lanes(__m512 lanes) {
  auto v = (Vector)lanes;
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}

// y[row][out] for `kRows` rows and `kOuts` outputs: each step of 16 columns loads kRows + kOuts vectors for kRows * kOuts products, which keeps
// the loads below the multipliers' pace at 4 x 4.
template <int kRows, int kOuts>
__attribute__((target("avx512f"))) void tile(const float* x, const float* weight, float* y, int64_t columns, int64_t outs) {
  __m512 sum[kRows][kOuts];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) sum[r][o] = _mm512_setzero_ps();
  }
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) {
    __m512 w[kOuts];
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) w[o] = _mm512_loadu_ps(weight + o * columns + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 a = _mm512_loadu_ps(x + r * columns + i);
#pragma GCC unroll 4
      for (int o = 0; o < kOuts; ++o) sum[r][o] = _mm512_fmadd_ps(a, w[o], sum[r][o]);
    }
  }
  if (i < columns) {
    const auto left = static_cast<__mmask16>((1U << (columns - i)) - 1);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 a = _mm512_maskz_loadu_ps(left, x + r * columns + i);
#pragma GCC unroll 4
      for (int o = 0; o < kOuts; ++o) sum[r][o] = _mm512_fmadd_ps(a, _mm512_maskz_loadu_ps(left, weight + o * columns + i), sum[r][o]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) y[r * outs + o] = sum_of_lanes(sum[r][o]);
  }
}

template <int kOuts>
void tiles(const float* x, const float* weight, float* y, int64_t rows, int64_t columns, int64_t outs) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) tile<4, kOuts>(x + r * columns, weight, y + r * outs, columns, outs);
  for (; r < rows; ++r) tile<1, kOuts>(x + r * columns, weight, y + r * outs, columns, outs);
}

bool can_be_skinny(const at::Tensor& x, const at::Tensor& weight_oi) {
  static const bool has_vectors = __builtin_cpu_supports("avx512f") != 0;
  return has_vectors && x.is_cpu() && x.scalar_type() == at::kFloat && weight_oi.scalar_type() == at::kFloat && weight_oi.is_contiguous() &&
         x.numel() / std::max<int64_t>(1, x.size(-1)) <= kRowsMax && x.numel() > 0;
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight_oi) {
  const int64_t columns = weight_oi.size(1), outs = weight_oi.size(0), rows = x.numel() / columns;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = outs;
  const at::Tensor in = x.contiguous(), out = at::empty(shape, x.options());
  const auto* a = in.const_data_ptr<float>();
  const auto* w = weight_oi.const_data_ptr<float>();
  auto* y = out.mutable_data_ptr<float>();
  // 64 outputs at least: a thread's start costs as much as some of them.
  at::parallel_for(0, (outs + 3) / 4, 16, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t o = group * 4;
      if (o + 4 <= outs) {
        tiles<4>(a, w + o * columns, y + o, rows, columns, outs);
      } else {
        for (int64_t last = o; last < outs; ++last) tiles<1>(a, w + last * columns, y + last, rows, columns, outs);
      }
    }
  });
  return out;
}

#else

bool can_be_skinny(const at::Tensor&, const at::Tensor&) {
  return false;
}

at::Tensor product(const at::Tensor& x, const at::Tensor&) {
  return x;
}

#endif

}  // namespace

at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o) {
  if (!can_be_skinny(x, weight_oi)) {
    return at::linear(x, weight_oi, bias_o.defined() ? std::optional<at::Tensor>(bias_o) : std::nullopt);
  }
  const at::Tensor out = product(x, weight_oi);
  return bias_o.defined() ? out.add_(bias_o) : out;
}

}  // namespace sf
