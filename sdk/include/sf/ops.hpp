// sf/ops.hpp: fused operations that the host offers to plugins as the service "sf.ops/1".
//
// Each is differentiable (an autograd function), accumulates in float32 and rounds once per output. The same call runs on the CPU (a
// short composition of ATen calls, the twin that tests compare with) and on the GPU. Shapes are checked at entry; a wrong one is
// an internal error that names both. Nothing here is random and nothing keeps state, so calling twice gives the same bits.
//
// Shapes: b batch · s context tokens · w block slots · j tokens of a block · q = w*j draft rows · n query heads · m key/value heads ·
//         e head size · h hidden · v vocabulary · r rows · k candidates · t taps, or a teacher's states in a chunk · g channel groups ·
//         x columns of a table · m chunks of rows · c columns · i, o columns of a product's input and output
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace sf {

struct BlockAttention {
  at::Tensor query_bqne;             // rope applied; q = w * block_size, blocks in slot order
  at::Tensor context_key_bsme;       // rope applied
  at::Tensor context_value_bsme;
  at::Tensor block_key_bqme;         // rope applied
  at::Tensor block_value_bqme;
  at::Tensor anchors_bw;             // int64, position of each block's first token in its row of the context
  at::Tensor keep_bw;                // bool, false for a dead block
  int64_t block_size = 0;
  int64_t window_tokens = 0;         // 0: full attention; w: a row at position p sees keys at positions >= p - (w - 1)
  bool causal = false;               // true: a row sees its own block only up to itself
  double scale = 0.0;                // of the scores, usually 1 / sqrt(e)
};

/// What the head says about a chunk of rows. The tensors marked "leaf" carry gradient inside the callback of head_objective.
struct HeadRows {
  int64_t row_begin = 0, row_end = 0;  // which rows of the call these are
  at::Tensor hidden_rh;                // leaf, the input rows
  at::Tensor nll_r;                    // leaf, float32: -log softmax(logits)[label]
  at::Tensor top_values_rk;            // leaf, float32: the largest logits, descending; undefined when top_k = 0
  at::Tensor top_ids_rk;               // int64, their tokens
  at::Tensor last_value_r, last_id_r;  // the last candidate as it was before must_include took its place
  at::Tensor candidate_rows_rkx;       // leaf, candidate_table_vx[top_ids]; undefined without a table
  at::Tensor argmax_r;                 // int64, lowest token among equals
  at::Tensor log_sum_exp_r;            // float32
  at::Tensor max_probability_r;        // float32, of argmax
  at::Tensor distance_r;               // leaf, float32: sum over v of |p - q|, q the teacher's distribution; undefined without a teacher
  at::Tensor teacher_argmax_r;         // int64, lowest token among equals
  at::Tensor teacher_probability_r;    // float32, of teacher_argmax
};

struct HeadObjective {
  at::Tensor hidden_rh;                // rows of the draft's output, any float type
  at::Tensor head_vh;                  // frozen output projection, same type; gets no gradient
  at::Tensor labels_r;                 // int64
  at::Tensor must_include_r;           // int64 or undefined: tokens that have to be among the candidates; one that is not in the top k
                                       // takes the place of the last candidate, with its own logit
  int64_t top_k = 0;                   // 0: no candidates
  double logit_multiplier = 1.0;       // logits are multiplied by it in float32 ...
  double softcap = 0.0;                // ... then c * tanh(logits / c) when c > 0
  int64_t chunk_rows = 2048;           // rows at a time; memory is chunk_rows x v; a multiple of what the callback pools over
  at::Tensor candidate_table_vx;       // undefined, or a table with a row for each token; its gradient is summed token by token, in row order
  at::Tensor bias_rx, bias_table_vx;   // undefined, or a bias of low rank: logits += bias_rx @ bias_table_vx^T before multiplier and softcap; same
                                       // type as hidden, and both get gradient
  // A teacher, or undefined: final states of the target, whose distribution over the same head (without multiplier and softcap) the callback gets the
  // distance to. Each chunk of rows has its own list of states, so a state that many rows ask for is looked at once. No gradient.
  at::Tensor teacher_states_nh;        // same type as hidden
  at::Tensor teacher_places_mt;        // int64, rows of teacher_states that chunk m asks for; m = rows / chunk_rows, rounded up
  at::Tensor teacher_index_r;          // int64, a row's column in its chunk's list
  std::vector<at::Tensor> parameters;  // other tensors that the callback's result depends on and that want gradient
};

/// A draft unrolled over its own output (EAGLE3): use x of a block sees the keys of the first use causally, and of each later use only its own row.
struct UnrollAttention {
  at::Tensor query_bsne;                            // of this use, rope applied
  at::Tensor key_bsme, value_bsme;                  // of the first use: row i sees those at rows <= i
  std::vector<at::Tensor> extra_keys_bsme;          // of later uses, this one included: row i sees row i alone
  std::vector<at::Tensor> extra_values_bsme;
  double scale = 0.0;
};

/// The target's head over rows of its states, for a draft whose vocabulary is part of the target's.
struct VocabularyTeacher {
  at::Tensor hidden_rh;            // the target's states, as its head takes them
  at::Tensor head_vh;              // frozen, same type
  at::Tensor kept_w, kept_host_w;  // int64, ascending: the draft's tokens, on the device and on the host; both undefined: all
  int64_t chunk_columns = 0;       // tokens at a time; 0: as the device likes
};

struct VocabularyTeaching {
  at::Tensor argmax_r;             // int64, over the whole vocabulary, the lowest token among equals
  at::Tensor log_sum_exp_r;        // wide, over the whole vocabulary
  at::Tensor kept_log_sum_exp_r;   // wide, over the draft's tokens
  at::Tensor kept_logits_rw;       // in the type of the states, rounded as the product rounds them
};

/// kl: cross-entropy sum over rows / divisor. alpha: minus the mean of log A (0 where A is 0). lambda: w kl + (1 - w) (1 - mean A) with
/// w = kl_scale exp(-kl_decay mean A), which carries no gradient. A = sum over tokens of min(teacher's true probability, draft's): what speculative
/// sampling accepts (LK losses). Means are over rows with mask.
enum class DistillLoss { kl, alpha, lambda };

/// A trainable head that learns a teacher's distribution, in row chunks: nothing of size r x w but the teacher's logits outlives a chunk.
struct DistillHead {
  at::Tensor hidden_rh;                   // the head's input rows
  at::Tensor head_wh;                     // trainable, same type; its gradient goes to head_gradient_wh, not through autograd
  at::Tensor head_gradient_wh;            // added to in the forward pass; undefined: no gradient of the head
  at::Tensor teacher_logits_rw;           // any float type; the target distribution is their softmax
  at::Tensor teacher_kept_log_sum_exp_r;  // their own log-sum-exp ...
  at::Tensor teacher_log_sum_exp_r;       // ... and the whole vocabulary's
  at::Tensor mask_r;                      // 0 or 1; a row with 0 gives nothing, exactly
  at::Tensor divisor;                     // scalar, of the cross-entropy's sum
  at::Tensor factor;                      // scalar, of the loss: seed and weight
  DistillLoss loss = DistillLoss::kl;
  double kl_scale = 1.0, kl_decay = 1.0;  // of lambda
  int64_t chunk_rows = 2048;
};

struct DistillResult {
  at::Tensor loss;          // scalar, factor included
  at::Tensor step_loss;     // scalar without factor and gradient
  at::Tensor acceptance;    // scalar, mean of A
  at::Tensor acceptance_r;  // A of each row
  at::Tensor argmax_r;      // int64, the head's best token, lowest among equals
};

enum class Float8Format { e4m3, e5m2 };    // largest magnitudes 448 and 57344
enum class Float8Scaling { tensor, row };  // one scale for all, or one for each row and for each row of the transposed copy

/// A factor of a float8 product: its rows are what is summed along.
struct Float8Operand {
  at::Tensor values_rk;         // kFloat8_e4m3fn or kFloat8_e5m2, row-major, k a multiple of 16
  at::Tensor inverse_scale;     // float32, scalar or [r, 1]: number = value * inverse_scale
};

/// A matrix in float8, in one or both layouts.
struct Float8Matrix {
  at::Tensor values_rc;         // row-major; undefined when not asked for
  at::Tensor values_cr;         // the transposed copy [c, r rounded up to 16], zero behind r; undefined when not asked for
  at::Tensor inverse_scale;     // float32, scalar or [r, 1]
  at::Tensor inverse_scale_c;   // row-wise: [c, 1], of values_cr; tensor-wise: the same scalar

  [[nodiscard]] Float8Operand rows() const { return {values_rc, inverse_scale}; }
  [[nodiscard]] Float8Operand columns() const { return {values_cr, inverse_scale_c}; }
};

/// value = round(clamp(x * scale)), scale = largest magnitude of the format / max(amax, 1e-12). Where amax is not finite all values of it are NaN.
struct Float8Encode {
  at::Tensor x_rc;              // float32 or bfloat16
  Float8Format format = Float8Format::e4m3;
  Float8Scaling scaling = Float8Scaling::tensor;
  at::Tensor amax;              // tensor-wise: largest magnitude, float32 scalar; undefined: found with float8_amax. Row-wise: unused
  bool rows = true, columns = false;  // which layouts
  at::Tensor alarm;             // undefined, or a float32 element that is set to 1 when an amax is not finite
  Float8Matrix into;            // tensors that are written instead of new ones, where defined
};

/// a @ b^T, summed in float32.
struct Float8Product {
  Float8Operand a_rk, b_ck;     // not both e5m2
  at::ScalarType type = at::kBFloat16;  // of the result: bfloat16 or float32
  at::Tensor add_to_rc;         // defined: the product is added to it (beta = 1), rounded once, and it is the result
  bool fast_accumulation = false;
  bool emulate = false;         // factors as bfloat16, which holds every float8 number exactly: runs on every device, slowly
};

/// Turns a chunk into the sum of its loss contributions, float32, seed included: a scalar. Called once per chunk, in row order.
using RowLoss = std::function<at::Tensor(const HeadRows&)>;

class Ops {
 public:
  /// weight_h * x / sqrt(mean(x^2) + eps) over the last axis. x [..., h].
  virtual at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_h, double eps) = 0;

  /// {sum, rms_norm(sum), rms_norm(sum)} with sum = x + residual, rounded once; x itself where the residual is undefined. The norm stands there twice, one
  /// tensor for each of two readers: their gradients, and the sum's, meet in one pass instead of being added before.
  virtual std::vector<at::Tensor> residual_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h,
                                                    double eps) = 0;

  /// RMS norm over each head (skipped when weight_e is undefined), then rotation of pairs (i, i + e'/2) for i < e'/2, e' = 2 * cos.size(-1)
  /// (the rest of the head passes). x [b, q, heads, e]; cos, sin float32 [b or 1, q, e'/2].
  virtual at::Tensor head_norm_rope(const at::Tensor& x_bqne, const at::Tensor& weight_e, const at::Tensor& cos_bqf,
                                    const at::Tensor& sin_bqf, double eps) = 0;

  /// silu(gate) * up.
  virtual at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) = 0;

  /// Input-dependent depthwise convolution inside each block of `block_size` rows (spec: DFlash2 7.1):
  /// y[i, c] = sum over t <= i of (base[t, c] + delta[i, t, group(c)]) * x[i - t, c], i the row's index in its block.
  /// x [b, q, h], delta [b, q, t, g], base [t, h] -> [b, q, h]. Channels of a group are neighbours: group(c) = c / (h / g).
  virtual at::Tensor grouped_convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th,
                                         int64_t block_size) = 0;

  /// Block attention of DFlash: each row sees the context strictly before its block's anchor and its own block. No mask is
  /// materialised beyond a chunk. Rows of dead blocks are exactly zero and send no gradient. Returns [b, q, n, e].
  virtual at::Tensor block_attention(const BlockAttention&) = 0;

  /// Loss over a frozen head in row chunks: logits, log-sum-exp, arg-max and top k in one pass, then the gradient in the same
  /// pass (4 FLOP per weight and row; nothing of size rows x v outlives the chunk). While gradients are recorded the callback's result is
  /// differentiated at once: its gradient is taken to be 1, as Runner::add_loss promises. Returns the sum over chunks, a scalar float32.
  virtual at::Tensor head_objective(const HeadObjective&, const RowLoss&) = 0;

  /// Causal attention plus one key per row of each later use, one softmax over both. No mask of size s x s outlives a row chunk. Returns [b, s, n, e].
  virtual at::Tensor unroll_attention(const UnrollAttention&) = 0;

  /// Arg-max and log-sum-exp over the target's vocabulary and the logits of the draft's tokens, streamed: no float32 tensor of rows x v. No gradient.
  virtual VocabularyTeaching vocabulary_teacher(const VocabularyTeacher&) = 0;

  /// Loss of a trainable head against a teacher. While gradients are recorded both gradients are formed in this call, as head_objective does: the
  /// result's gradient is taken to be 1, as Runner::add_loss promises. 6 FLOP per weight and row; lambda 8.
  virtual DistillResult distill_head(const DistillHead&) = 0;

  /// table_vx[ids] whose gradient sorts by id and adds segment by segment: the same bits every run.
  virtual at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids) = 0;

  // Pieces of float8 products; none is differentiable.

  /// max |x|, float32 scalar; NaN and Inf come through, 0 for an empty one.
  virtual at::Tensor float8_amax(const at::Tensor& x) = 0;

  /// Reads x once and writes the layouts that are asked for.
  virtual Float8Matrix float8_encode(const Float8Encode&) = 0;

  /// The transposed copy of values that are encoded: [c, r rounded up to 16] from [r, c], written to `into_cr`.
  virtual void float8_transpose(const at::Tensor& values_rc, const at::Tensor& into_cr) = 0;

  virtual at::Tensor float8_product(const Float8Product&) = 0;

  /// sum_oi += a_ro^T b_ri: a weight's gradient, one product where the types allow it (float32 sum of bfloat16 factors, too). Not differentiable.
  virtual void add_weight_gradient(const at::Tensor& sum_oi, const at::Tensor& a_ro, const at::Tensor& b_ri) = 0;

 protected:
  ~Ops() = default;  // owned by the host
};

}  // namespace sf
