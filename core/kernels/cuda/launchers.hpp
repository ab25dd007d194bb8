// core/kernels/cuda/launchers.hpp: what libsf_engine_cuda.so offers to the operations of core/kernels: a table of launchers over raw pointers.
//
// No CUDA header, no LibTorch here. All pointers are device memory, contiguous unless a stride says otherwise, of the type that `type` names ("T" below);
// statistics and sums are float32. Launchers only enqueue on `stream`: they never wait, and they allocate nothing; workspace comes from the caller. Each
// returns null, or CUDA's text for what went wrong. Sums are made in an order that depends on shapes alone, so the same inputs give the same bits.
//
// `amax`, where a launcher has it, is null or the largest magnitude so far of what is written (as rounded), which the launcher raises: a float8 cast of that tensor then
// needs no look at it before.
//
// Shapes: r rows · h hidden · b batch · s context tokens · q draft rows · j rows of a block · n query heads · m key/value heads · g = n/m · e head size ·
//         f rotated pairs · t taps · c channel groups · v vocabulary · k candidates · p partial sums
#pragma once

#include <cstdint>

namespace sf::cuda {

enum class Type : int32_t { float32, bfloat16 };

using Error = const char*;

struct RmsNormForward {
  Type type;
  int64_t r, h;
  double eps;
  const void* x_rh;
  const void* residual_rh;   // null: plain norm
  const void* weight_h;
  void* sum_rh;              // x + residual; unused without residual
  void* y_rh;
  float* inverse_r;          // 1 / sqrt(mean(x^2) + eps)
  float* amax;               // of y
};

struct RmsNormBackward {
  Type type;
  int64_t r, h;
  const void* x_rh;          // what was normed
  const void* weight_h;
  const float* inverse_r;
  const void* grad_y_rh;
  const void* other_grad_y_rh;  // null, or another part of y's gradient: added to the first
  const void* grad_sum_rh;   // null, or added to the result
  void* grad_x_rh;
  void* grad_weight_h;       // null: not wanted
  float* partial_ph;         // workspace, p = rms_norm_partials(r, h), when the weight's gradient is wanted
  float* amax;               // of grad_x
};

struct HeadNormRope {
  Type type;
  int64_t rows, heads, e, f; // rows = b*q; f even, e even and at most 256
  int64_t angle_rows;        // rows of the angles: rows, or q when one set serves the whole batch
  double eps;
  const void* x_rne;
  const void* weight_e;      // null: no norm
  const float* cos_rf;
  const float* sin_rf;
  void* y_rne;
  float* inverse_rn;         // written by forward, read by backward; unused without a weight
  const void* grad_y_rne;    // backward only, as all below
  void* grad_x_rne;
  void* grad_weight_e;       // null: not wanted
  float* partial_pe;         // workspace, p = head_norm_partials(rows)
  float* amax;               // of grad_x
};

struct Swiglu {
  Type type;
  int64_t count;
  const void* gate;
  const void* up;
  void* y;
  const void* grad_y;        // backward only
  void* grad_gate;
  void* grad_up;
  float* amax;               // of y, or of grad_gate
  float* amax_up;            // of grad_up
};

struct GroupedConvolution {
  Type type;
  int64_t rows, h, taps, groups, block_size;  // rows = b*q
  int64_t delta_row_stride;                   // elements from a row's coefficients [t, c] to the next row's
  const void* x_rh;
  const void* delta_rtc;
  const void* base_th;
  void* y_rh;
  const void* grad_y_rh;     // backward only
  void* grad_x_rh;
  void* grad_delta_rtc;      // contiguous
  void* grad_base_th;
  float* partial_pth;        // workspace, p = convolution_partials(rows / block_size, h)
  float* amax;               // of y, or of grad_x
};

/// Block attention (sf/ops.hpp). bfloat16 alone; e is 64 or 128. A "flat row" of a key/value head is (draft row, query head of the group): row * g + head.
struct BlockAttention {
  int64_t b, s, w, j, n, m, e;
  int64_t q;                   // w * j
  int64_t own;                 // own keys of a sample: w * own_per_block
  int64_t own_per_block;       // j, or how many keys stand beside each block; 0: none
  int64_t window_tokens;
  bool causal;
  float scale;
  const void* query_bqne;
  const void* context_key_bsme;
  const void* context_value_bsme;
  const void* block_key_bqme;
  const void* block_value_bqme;
  const int64_t* anchors_bw;   // null: block i sees the context up to i itself (attention of a row and what is before it)
  const bool* keep_bw;         // null: all live
  void* out_bqne;
  float* log_sum_exp_bmr;      // r = q*g flat rows, in units of log2
  int32_t* bounds_bq4;         // per row: context keys [0], [1] and own keys [2], [3], each a half-open range; written by forward
  const void* grad_out_bqne;   // backward only, as all below
  float* along_bmr;            // workspace: sum over e of out * grad_out
  int32_t* tiles_bt4;          // workspace, t = ceil(q*g / 64): of the rows of a tile the least low and largest high end, the largest low and least high end
  float* partial_key;          // workspace, [splits, b, s, m, e], splits = attention_splits()
  float* partial_value;
  void* grad_query_bqne;
  void* grad_context_key_bsme;
  void* grad_context_value_bsme;
  void* grad_block_key_bqme;
  void* grad_block_value_bqme;
  float* amax;                 // of out, or of grad_block_value
  float* amax_context_value;   // of grad_context_value
};

/// What a loss needs of each row of logits (one read of them).
struct HeadRowsForward {
  Type type;
  int64_t r, v, k;             // k at most 32
  float multiplier, softcap;   // u = softcap * tanh(multiplier * logit / softcap); softcap 0: u = multiplier * logit
  const void* logits_rv;
  const int64_t* labels_r;
  const int64_t* wanted_r;     // null, or tokens whose value is asked for
  float* log_sum_exp_r;
  float* nll_r;                // log_sum_exp - u[label], at least 0
  int64_t* argmax_r;           // lowest token among equals
  float* max_probability_r;    // of that token
  float* top_values_rk;        // descending, lower tokens first among equals
  int64_t* top_ids_rk;
  float* wanted_values_r;
};

/// Writes over the logits the gradient of the loss with respect to them: d/d nll * (softmax - [label]) + d/d candidates, through softcap and multiplier.
struct HeadRowsBackward {
  Type type;
  int64_t r, v, k;             // k at most 32; 0: no gradient from candidates
  float multiplier, softcap;
  void* logits_rv;
  const int64_t* labels_r;
  const float* log_sum_exp_r;
  const float* grad_nll_r;     // null: zero
  const int64_t* ids_rk;
  const float* grad_values_rk;
  // null, or the gradient of the distance to a teacher: + d/d distance * p * (sign(p - q) - tilt)
  const float* grad_distance_r;
  const float* tilt_r;
  const void* teacher_tv;
  const float* teacher_log_sum_exp_t;
  const int64_t* teacher_index_r;
};

/// How far the distributions p of rows of logits are from those of a teacher, q = softmax(teacher[index]): one read of both.
struct HeadDistance {
  Type type;
  int64_t r, v;
  float multiplier, softcap;   // of the rows; the teacher's logits count as they are
  const void* logits_rv;
  const float* log_sum_exp_r;
  const void* teacher_tv;
  const float* teacher_log_sum_exp_t;
  const int64_t* teacher_index_r;
  float* distance_r;           // sum over v of |p - q|
  float* tilt_r;               // sum over v of p * sign(p - q)
};

/// A draft's rows against a teacher's (sf/ops.hpp, distill_head). Forward reads both and writes the sums; backward writes the gradient over the draft's logits.
struct DistillRows {
  Type type;
  int64_t r, w;
  void* logits_rw;
  const void* teacher_rw;
  const float* log_sum_exp_r;                // of the draft's rows
  const float* teacher_kept_log_sum_exp_r;   // over the draft's tokens
  const float* teacher_log_sum_exp_r;        // over the whole vocabulary
  float* cross_entropy_r;
  float* acceptance_r;
  float* below_r;                            // sum of p where p < Q
  const float* grad_cross_entropy_r;         // backward only; null: zero
  const float* grad_acceptance_r;
};

/// table[ids[i]] += rows[order[i]] for ids sorted in ascending order, a run of equal ids summed in order.
struct SegmentSum {
  Type row_type;
  int64_t count, x;
  const int64_t* sorted_ids;
  const int64_t* order;
  const void* rows;            // [count, x] of row_type
  float* table_vx;
  float* partial;              // workspace, [ceil(count / 64), 2, x]
};

/// One update of AdamW over a list of tensors, and nothing when `ok` is false.
struct AdamwTensor {
  int64_t count;
  float* master;               // float32
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  float* steps;                // scalar, counts this update
  void* weight;                // bfloat16 copy of the master, or null
};

struct Adamw {
  const AdamwTensor* tensors;  // host memory, copied when called
  int64_t tensors_count;
  const float* norm;           // scalars on the device
  const float* denominator;
  double max_norm, learning_rate, beta1, beta2, eps, weight_decay;
};

/// c_mn += a_km^T b_kn in one product with float32 sums: a, b bfloat16, c float32, all row-major.
struct AccumulateProduct {
  int64_t m, n, k;
  const void* a_km;
  const void* b_kn;
  float* c_mn;
  void* workspace;
  int64_t workspace_bytes;
};

/// Formats of 8-bit floats: e4m3 has 448 as its largest number and no infinity, e5m2 57344.
enum class Float8 : int32_t { e4m3, e5m2 };

/// Largest magnitudes of a matrix; NaN and infinity survive. Either of the whole, or (amax null) of each row and column.
struct Float8Amax {
  Type type;
  int64_t r, c;
  const void* x_rc;
  float* amax;
  float* amax_r;             // with amax null, as below: c is a multiple of 16
  float* amax_c;
};

/// Float8 values of a matrix, row by row and transposed, from one read: clamp(x * scale) to the nearest, scale = largest number of the format / max(amax, 1e-12), computed in
/// float64 and kept in float32. One scale for all, or (amax null) one for each row of values_rc and another for each row of values_cr. Where an amax is NaN or infinite all values
/// under it are NaN.
struct Float8Encode {
  Type type;
  Float8 format;
  int64_t r, c;              // c a multiple of 16
  const void* x_rc;
  const float* amax;
  const float* amax_r;       // with amax null, as below
  const float* amax_c;
  void* values_rc;           // null: not wanted
  void* values_cr;           // [c, float8_padded(r)], zeros behind the end of a row; null: not wanted
  float* inverse_scale;      // 1 / scale: number = value * inverse_scale
  float* inverse_scale_r;    // row-wise; null: not wanted
  float* inverse_scale_c;
  float* alarm;              // null, or set to 1 when an amax is NaN or infinite, and left alone otherwise
};

/// The transposed copy of values that are encoded already.
struct Float8Transpose {
  int64_t r, c;              // c a multiple of 16
  const void* values_rc;
  void* values_cr;           // [c, float8_padded(r)], zeros behind the end of a row
};

/// d_mn = a_mk b_nk^T in 8-bit floats on tensor cores, all row-major, times both scales; with `adds` it is added to d. Needs compute capability 8.9; k and n are multiples
/// of 16, and not both factors are e5m2. Fast accumulation keeps fewer bits of sums inside the tensor cores.
struct Float8Product {
  int64_t m, n, k;
  Float8 a_format, b_format;
  Type d_type;
  bool adds, fast_accumulation;
  bool row_wise;             // scales are [m] and [n] instead of scalars
  int32_t choice;            // which of cuBLASLt's proposals, best first; 0 outside of measurements
  const void* a_mk;
  const void* b_nk;
  const float* a_scale;      // at multiples of 16 bytes, as all of cuBLASLt's
  const float* b_scale;
  void* d_mn;
  void* workspace;
  int64_t workspace_bytes;
};

struct Launchers {
  Error (*rms_norm_forward)(const RmsNormForward&, void* stream);
  Error (*rms_norm_backward)(const RmsNormBackward&, void* stream);
  Error (*head_norm_rope_forward)(const HeadNormRope&, void* stream);
  Error (*head_norm_rope_backward)(const HeadNormRope&, void* stream);
  Error (*swiglu_forward)(const Swiglu&, void* stream);
  Error (*swiglu_backward)(const Swiglu&, void* stream);
  Error (*grouped_convolution_forward)(const GroupedConvolution&, void* stream);
  Error (*grouped_convolution_backward)(const GroupedConvolution&, void* stream);
  Error (*block_attention_forward)(const BlockAttention&, void* stream);
  Error (*block_attention_backward)(const BlockAttention&, void* stream);
  Error (*head_rows_forward)(const HeadRowsForward&, void* stream);
  Error (*head_rows_backward)(const HeadRowsBackward&, void* stream);
  Error (*head_distance)(const HeadDistance&, void* stream);
  Error (*distill_rows_forward)(const DistillRows&, void* stream);
  Error (*distill_rows_backward)(const DistillRows&, void* stream);
  Error (*segment_sum)(const SegmentSum&, void* stream);
  Error (*adamw)(const Adamw&, void* stream);
  Error (*accumulate_product)(const AccumulateProduct&, void* stream);
  Error (*float8_amax)(const Float8Amax&, void* stream);
  Error (*float8_encode)(const Float8Encode&, void* stream);
  Error (*float8_transpose)(const Float8Transpose&, void* stream);
  Error (*float8_product)(const Float8Product&, void* stream);
};

// Rows of the workspaces above: numbers of partial sums, from shapes alone.
// Short rows leave room for more blocks, and need them.
constexpr int64_t more_blocks(int64_t h) { return h >= 4096 ? 1 : h >= 2048 ? 2 : 4; }
constexpr int64_t rms_norm_partials(int64_t r, int64_t h) { return r < 264 * more_blocks(h) ? r : 264 * more_blocks(h); }
constexpr int64_t head_norm_partials(int64_t rows) { return rows < 264 ? rows : 264; }
constexpr int64_t convolution_partials(int64_t blocks, int64_t h) { return blocks < 128 * more_blocks(h) ? blocks : 128 * more_blocks(h); }
constexpr int64_t attention_splits() { return 2; }
constexpr int64_t kSegmentRows = 64;
constexpr int64_t kHeadCandidates = 32;
constexpr int64_t kConvolutionTaps = 4;
// Columns of a transposed float8 copy of r rows: the inner size of a float8 product is a multiple of 16.
#ifdef __CUDACC__
__host__ __device__
#endif
constexpr int64_t float8_padded(int64_t r) { return (r + 15) / 16 * 16; }

}  // namespace sf::cuda

/// The table; null when the library was built without nvcc.
extern "C" const sf::cuda::Launchers* sf_cuda_launchers_v1();
