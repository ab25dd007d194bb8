// Compiled once for each kind of processor (CMakeLists.txt beside it), which SF_ROW_TILES names. Nothing of the standard library is called here: an inline function of it that
// the linker took from this file would need that processor everywhere.
#include "core/kernels/row_tiles.hpp"

#include "core/kernels/exponential.hpp"

namespace sf {

extern const RowTiles SF_ROW_TILES;

// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result): places within a tile are products of two constants of a few bits
namespace {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kParts = 1;       // registers for kLanes values
constexpr int kTileRows = 4, kTileOuts = 4;
#else
constexpr int kParts = 2;
constexpr int kTileRows = 2, kTileOuts = 2;
#endif
constexpr int kPartBytes = 64 / kParts, kPartLanes = kLanes / kParts;

using Part = float __attribute__((vector_size(kPartBytes)));
using Loose = float __attribute__((vector_size(kPartBytes), aligned(4), may_alias));  // as it lies in memory
using Ints = int32_t __attribute__((vector_size(kPartBytes)));
using Quad = float __attribute__((vector_size(16)));
using LooseQuad = float __attribute__((vector_size(16), aligned(4), may_alias));

#define SF_INLINE inline __attribute__((always_inline))

struct Lanes {
  Part part[kParts];
};

SF_INLINE Part spread(float x) { return x - Part{}; }

SF_INLINE Lanes load(const float* from) {
  Lanes lanes;
#pragma GCC unroll 2
  for (int p = 0; p < kParts; ++p) lanes.part[p] = *reinterpret_cast<const Loose*>(from + p * kPartLanes);
  return lanes;
}

SF_INLINE Lanes load_some(const float* from, int64_t count) {
  float some[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = from[i];
  return load(some);
}

SF_INLINE void store(float* to, const Lanes& lanes) {
#pragma GCC unroll 2
  for (int p = 0; p < kParts; ++p) *reinterpret_cast<Loose*>(to + p * kPartLanes) = lanes.part[p];
}

SF_INLINE void store_some(float* to, const Lanes& lanes, int64_t count) {
  float some[kLanes];
  store(some, lanes);
  for (int64_t i = 0; i < count; ++i) to[i] = some[i];
}

// sum += a * b, fused.
SF_INLINE void add_product(Lanes& sum, const Lanes& a, const Lanes& b) {
#pragma GCC unroll 2
  for (int p = 0; p < kParts; ++p) sum.part[p] += a.part[p] * b.part[p];
}

// Four partial sums: lanes 0, 4, 8, 12 in the first, and so on.
SF_INLINE Quad quarter(const Lanes& lanes) {
#if defined(__AVX512F__)
  const Part v = lanes.part[0] + __builtin_shufflevector(lanes.part[0], lanes.part[0], 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  const Part v = lanes.part[0] + lanes.part[1];
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#endif
}

SF_INLINE float sum_of(const Lanes& lanes) {
  const Quad q = quarter(lanes);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

SF_INLINE Part exp_of(Part x) {
  exponentiate<Ints>(x);
  return x;
}

// y for kRows rows and kOuts outputs. Each step of 16 columns loads kRows + kOuts vectors for kRows * kOuts products, which keeps the loads below the multipliers' pace, and
// asks memory for kAhead lines of what comes next.
template <int kRows, int kOuts, int kAhead>
SF_INLINE void tile(const float* x, const float* weight, float* y, int64_t columns, int64_t stride, const char* ahead) {
  Lanes sum[kRows][kOuts];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) sum[r][o] = {};
  }
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) {
#pragma GCC unroll 4
    for (int k = 0; k < kAhead; ++k) __builtin_prefetch(ahead + 64 * k, 0, 2);
    ahead += 64 * kAhead;
    Lanes w[kOuts];
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) w[o] = load(weight + o * columns + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Lanes a = load(x + r * columns + i);
#pragma GCC unroll 4
      for (int o = 0; o < kOuts; ++o) add_product(sum[r][o], a, w[o]);
    }
  }
  if (i < columns) {
    Lanes w[kOuts];
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) w[o] = load_some(weight + o * columns + i, columns - i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Lanes a = load_some(x + r * columns + i, columns - i);
#pragma GCC unroll 4
      for (int o = 0; o < kOuts; ++o) add_product(sum[r][o], a, w[o]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kOuts == 4) {
      const Quad a = quarter(sum[r][0]), b = quarter(sum[r][1]), c = quarter(sum[r][2]), d = quarter(sum[r][3]);
      const Quad ab02 = __builtin_shufflevector(a, b, 0, 4, 2, 6), ab13 = __builtin_shufflevector(a, b, 1, 5, 3, 7);
      const Quad cd02 = __builtin_shufflevector(c, d, 0, 4, 2, 6), cd13 = __builtin_shufflevector(c, d, 1, 5, 3, 7);
      const Quad even = __builtin_shufflevector(ab02, cd02, 0, 1, 4, 5) + __builtin_shufflevector(ab02, cd02, 2, 3, 6, 7);
      const Quad odd = __builtin_shufflevector(ab13, cd13, 0, 1, 4, 5) + __builtin_shufflevector(ab13, cd13, 2, 3, 6, 7);
      *reinterpret_cast<LooseQuad*>(y + r * stride) = even + odd;
    } else {
#pragma GCC unroll 4
      for (int o = 0; o < kOuts; ++o) y[r * stride + o] = sum_of(sum[r][o]);
    }
  }
}

// All rows for kOuts outputs. The group that follows is asked for in equal shares by all tiles.
template <int kOuts, int kAhead>
void all_rows(const float* x, int64_t rows, int64_t columns, const float* weight, float* y, int64_t stride) {
  const char* ahead = reinterpret_cast<const char*>(weight + kOuts * columns);
  const int64_t step = columns / kLanes * 64 * kAhead;
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows, ahead += step) tile<kTileRows, kOuts, kAhead>(x + r * columns, weight, y + r * stride, columns, stride, ahead);
  const float* rest = x + r * columns;
  if constexpr (kTileRows == 4) {
    if (rows - r == 3) return tile<3, kOuts, kAhead>(rest, weight, y + r * stride, columns, stride, ahead);
    if (rows - r == 2) return tile<2, kOuts, kAhead>(rest, weight, y + r * stride, columns, stride, ahead);
  }
  if (rows - r == 1) tile<1, kOuts, kAhead>(rest, weight, y + r * stride, columns, stride, ahead);
}

template <int kAhead>
SF_INLINE void product_ahead(const float* x, int64_t rows, int64_t columns, const float* weight, int64_t outs, float* y, int64_t stride) {
  int64_t o = 0;
  for (; o + kTileOuts <= outs; o += kTileOuts) all_rows<kTileOuts, kAhead>(x, rows, columns, weight + o * columns, y + o, stride);
  for (; o < outs; ++o) all_rows<1, 0>(x, rows, columns, weight + o * columns, y + o, stride);
}

void product(const float* x, int64_t rows, int64_t columns, const float* weight, int64_t outs, float* y, int64_t stride) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  if (tiles >= kTileOuts) {
    product_ahead<1>(x, rows, columns, weight, outs, y, stride);
  } else if (tiles == 1) {
    product_ahead<kTileOuts>(x, rows, columns, weight, outs, y, stride);
  } else {
    product_ahead<(kTileOuts + 1) / 2>(x, rows, columns, weight, outs, y, stride);
  }
}

void gate(const float* x, int64_t rows, int64_t columns, const float* gate_oi, const float* up_oi, const float* gate_bias, const float* up_bias, int64_t outs, float* y,
          int64_t stride) {
  constexpr int64_t kOuts = 32, kRows = 16;  // of a block: 4 KiB of intermediate values
  float gates[kRows * kOuts], ups[kRows * kOuts];
  for (int64_t o = 0; o < outs; o += kOuts) {
    const int64_t width = outs - o < kOuts ? outs - o : kOuts;
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t count = rows - first < kRows ? rows - first : kRows;
      product(x + first * columns, count, columns, gate_oi + o * columns, width, gates, kOuts);
      product(x + first * columns, count, columns, up_oi + o * columns, width, ups, kOuts);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t k = 0; k < width; k += kLanes) {
          const int64_t left = width - k < kLanes ? width - k : kLanes;
          Lanes g = load(gates + r * kOuts + k), u = load(ups + r * kOuts + k);
          if (gate_bias != nullptr) {
            const Lanes more = load_some(gate_bias + o + k, left);
            for (int p = 0; p < kParts; ++p) g.part[p] += more.part[p];
          }
          if (up_bias != nullptr) {
            const Lanes more = load_some(up_bias + o + k, left);
            for (int p = 0; p < kParts; ++p) u.part[p] += more.part[p];
          }
          Lanes active;
          for (int p = 0; p < kParts; ++p) active.part[p] = g.part[p] / (1.0F + exp_of(-g.part[p])) * u.part[p];
          float* to = y + (first + r) * stride + o + k;
          left == kLanes ? store(to, active) : store_some(to, active, left);
        }
      }
    }
  }
}

void add_norm(const float* x, const float* delta, const float* weight, int64_t h, float eps, float* sum, float* normed) {
  Lanes squares = {};
  int64_t i = 0;
  for (; i < h; i += kLanes) {
    const int64_t left = h - i;
    Lanes value = left >= kLanes ? load(x + i) : load_some(x + i, left);
    if (delta != nullptr) {
      const Lanes more = left >= kLanes ? load(delta + i) : load_some(delta + i, left);
      for (int p = 0; p < kParts; ++p) value.part[p] += more.part[p];
      left >= kLanes ? store(sum + i, value) : store_some(sum + i, value, left);
    }
    add_product(squares, value, value);
  }
  const float inverse = 1.0F / __builtin_sqrtf(sum_of(squares) / static_cast<float>(h) + eps);
  const float* from = delta != nullptr ? sum : x;
  for (i = 0; i < h; ++i) normed[i] = from[i] * inverse * weight[i];
}

int64_t largest(const float* values, int64_t count) {
  // A block is looked at closely only when something in it is above what was found before.
  float best = values[0];
  int64_t place = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i < kLanes ? count - i : kLanes;
    bool is_above = left < kLanes;
    if (!is_above) {
      const Lanes lanes = load(values + i);
      Ints above = {};
      for (int p = 0; p < kParts; ++p) above |= lanes.part[p] > best;
      int32_t any = 0;
      for (int k = 0; k < kPartLanes; ++k) any |= above[k];
      is_above = any != 0;
    }
    if (!is_above) continue;
    for (int64_t k = 0; k < left; ++k) {
      if (values[i + k] > best) {
        best = values[i + k];
        place = i + k;
      }
    }
  }
  return place;
}

// out[row] += sum over tokens of probability[row][token] * values[token], for kWidth vectors of a head.
template <int kRows, int kWidth>
SF_INLINE void weigh(const float* probability, int64_t stride, int64_t tokens, const float* values, int64_t e, float* out) {
  Lanes sum[kRows][kWidth];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kWidth; ++k) sum[r][k] = {};
  }
  for (int64_t s = 0; s < tokens; ++s) {
    Lanes value[kWidth];
#pragma GCC unroll 4
    for (int k = 0; k < kWidth; ++k) value[k] = load(values + s * e + k * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Lanes weight;
#pragma GCC unroll 2
      for (int p = 0; p < kParts; ++p) weight.part[p] = spread(probability[r * stride + s]);
#pragma GCC unroll 4
      for (int k = 0; k < kWidth; ++k) add_product(sum[r][k], weight, value[k]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kWidth; ++k) store(out + r * e + k * kLanes, sum[r][k]);
  }
}

template <int kRows>
void weigh_rows(const float* probability, int64_t stride, int64_t tokens, const float* values, int64_t e, float* out) {
  int64_t i = 0;
  for (; i + kTileOuts * kLanes <= e; i += kTileOuts * kLanes) weigh<kRows, kTileOuts>(probability, stride, tokens, values + i, e, out + i);
  for (; i < e; i += kLanes) weigh<kRows, 1>(probability, stride, tokens, values + i, e, out + i);
}

void attend(const float* query, int64_t queries, int64_t e, const float* keys, const float* values, const int64_t* seen, float* scores, float* out) {
  int64_t tokens = 0;
  for (int64_t j = 0; j < queries; ++j) tokens = seen[j] > tokens ? seen[j] : tokens;
  const int64_t stride = score_stride(tokens);
  product(query, queries, e, keys, tokens, scores, stride);
  for (int64_t j = 0; j < queries; ++j) {
    float* row = scores + j * stride;
    float top = row[0];
    for (int64_t s = 1; s < seen[j]; ++s) top = row[s] > top ? row[s] : top;
    for (int64_t s = seen[j]; s < stride; ++s) row[s] = top;
    Lanes total = {};
    for (int64_t s = 0; s < stride; s += kLanes) {
      Lanes weight = load(row + s);
      for (int p = 0; p < kParts; ++p) weight.part[p] = exp_of(weight.part[p] - top);
      store(row + s, weight);
      if (s + kLanes > seen[j]) {
        for (int64_t k = seen[j] > s ? seen[j] - s : 0; k < kLanes; ++k) row[s + k] = 0;
        weight = load(row + s);
      }
      for (int p = 0; p < kParts; ++p) total.part[p] += weight.part[p];
    }
    const float inverse = 1.0F / sum_of(total);
    for (int64_t s = 0; s < stride; ++s) row[s] *= inverse;
  }
  int64_t j = 0;
  for (; j + kTileRows <= queries; j += kTileRows) weigh_rows<kTileRows>(scores + j * stride, stride, tokens, values, e, out + j * e);
  if constexpr (kTileRows == 4) {
    if (queries - j == 3) return weigh_rows<3>(scores + j * stride, stride, tokens, values, e, out + j * e);
    if (queries - j == 2) return weigh_rows<2>(scores + j * stride, stride, tokens, values, e, out + j * e);
  }
  if (queries - j == 1) weigh_rows<1>(scores + j * stride, stride, tokens, values, e, out + j * e);
}

}  // namespace
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)

const RowTiles SF_ROW_TILES = {.product = product, .gate = gate, .add_norm = add_norm, .attend = attend, .largest = largest};

}  // namespace sf
