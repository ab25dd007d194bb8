// core/kernels/decode.hpp: what a target does for one new token of each sequence of a batch, or on a CPU a few, without a question to the device: all that changes from step
// to step is a tensor on it, so that a step can be recorded once and replayed. No gradients.
//
// Shapes: b sequences, or with several tokens of each b * tokens, those of a sequence side by side · n query heads · m key/value heads · e head size · f rotated pairs · c tokens of room · i inner width
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace sf {

struct DecodeAttention {
  at::Tensor qkv_bx;            // x = (n + 2 m) e: queries, keys, values of the new tokens
  int64_t query_heads = 0, key_heads = 0;
  at::Tensor query_weight_e, key_weight_e;   // norms of heads; undefined: none
  double eps = 0;
  at::Tensor cos_bf, sin_bf;    // float32, already rounded to the type of computation
  at::Tensor positions_b;       // int64: where the new token stands, below c
  at::Tensor keys_bmce, values_bmce;         // written at that place
  int64_t tokens = 1;                        // new ones of each sequence, each of which sees those before it
  std::vector<int64_t> cache_rows;           // of the sequences; empty: 0, 1, 2 ...
};

/// Attention of each new token over its sequence, [b, n * e]. On a GPU one kernel for bfloat16 and float32 and heads of 64 and 128; on a CPU one pass over
/// keys and values where can_decode_few() says so; elsewhere a composition that looks at all c places, for one token of each sequence, and is right and slow.
[[nodiscard]] at::Tensor decode_attention(const DecodeAttention& attention);
/// The composition, on any device.
[[nodiscard]] at::Tensor decode_attention_aten(const DecodeAttention& attention);

/// Whether decode_attention() takes several tokens of each sequence and rows of a larger cache: float32 on a CPU with the vectors that row_tiles.hpp needs.
[[nodiscard]] bool can_decode_few(const at::Tensor& like, int64_t head_size);

/// What a step begins with.
struct StepStart {
  at::Tensor x_bh;              // embeddings
  at::Tensor cos_bf, sin_bf;    // float32, times `scaling`, rounded to the embedding's type
};
[[nodiscard]] StepStart decode_start(const at::Tensor& ids_b, const at::Tensor& positions_b, const at::Tensor& embedding_vh, const at::Tensor& inverse_frequencies_f, double scaling);

/// What a greedy step ends with: the first of a row's largest logits into said_b and ids_b, and positions_b + 1. All of them int64 [b].
void decode_choose(const at::Tensor& logits_bv, const at::Tensor& said_b, const at::Tensor& ids_b, const at::Tensor& positions_b);

/// silu(gate) * up, [b, 2 i] -> [b, i], rounded after each of the two.
[[nodiscard]] at::Tensor decode_gate(const at::Tensor& gate_up_b2i);

}  // namespace sf
