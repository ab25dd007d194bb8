// core/kernels/row_tiles.hpp
//
// What a target's pass over few new tokens does on a CPU, in float32, for one thread: products that read each weight once, and what lies between them. Written in vectors of
// sixteen values that a processor with AVX-512 has and one with AVX2 makes of two halves, always added in the same order: the same bits on both, and for a row whatever rows
// stand beside it. Weights are read as they lie, and asked of memory a group of four outputs ahead, so that the multipliers work while memory delivers.
//
// Shapes: r rows · i input columns · o output columns · h hidden · e head size · q queries · s tokens seen
#pragma once

#include <cstdint>

namespace sf {

struct RowTiles {
  /// y[r][o] = sum over i of x[r][i] * weight[o][i], for `outs` outputs that lie side by side; y's rows are `stride` values apart.
  void (*product)(const float* x_ri, int64_t rows, int64_t columns, const float* weight_oi, int64_t outs, float* y, int64_t stride);
  /// y[r][o] = silu(gate) * up of the products with two weights; bias or nullptr.
  void (*gate)(const float* x_ri, int64_t rows, int64_t columns, const float* gate_oi, const float* up_oi, const float* gate_bias_o, const float* up_bias_o, int64_t outs, float* y,
               int64_t stride);
  /// sum = x + delta (or x without one), normed = its RMS norm times weight.
  void (*add_norm)(const float* x_h, const float* delta_h, const float* weight_h, int64_t h, float eps, float* sum_h, float* normed_h);
  /// Attention of q queries, scaled already, over one head's keys and values: query j sees the first seen[j] of them. `scores` is room for q * score_stride(most seen) values.
  void (*attend)(const float* query_qe, int64_t queries, int64_t e, const float* keys_se, const float* values_se, const int64_t* seen, float* scores, float* out_qe);
  /// The place of the largest of `count` values, the first among equals.
  int64_t (*largest)(const float* values, int64_t count);
};

/// Values of room that `attend` needs for each query that sees at most `tokens`.
constexpr int64_t score_stride(int64_t tokens) { return (tokens + 15) / 16 * 16; }

/// The ones for this processor; nullptr when it has neither AVX-512 nor AVX2 with FMA. Head sizes are multiples of kHeadGrain.
[[nodiscard]] const RowTiles* row_tiles();
constexpr int64_t kHeadGrain = 16;

}  // namespace sf
