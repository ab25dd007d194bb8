// core/kernels/decode.hpp: what a target does for one new token of each sequence of a batch, without a question to the device: all that changes from step to step is a
// tensor on it, so that a step can be recorded once and replayed. No gradients.
//
// Shapes: b sequences · n query heads · m key/value heads · e head size · f rotated pairs · c tokens of room · i inner width
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sf {

struct DecodeAttention {
  at::Tensor qkv_bx;            // x = (n + 2 m) e: queries, keys, values of the new tokens
  int64_t query_heads = 0, key_heads = 0;
  at::Tensor query_weight_e, key_weight_e;   // norms of heads; undefined: none
  double eps = 0;
  at::Tensor cos_bf, sin_bf;    // float32, already rounded to the type of computation
  at::Tensor positions_b;       // int64: where the new token stands, below c
  at::Tensor keys_bmce, values_bmce;         // written at that place
};

/// Attention of each new token over its sequence, [b, n * e]. On a GPU one kernel for bfloat16 and float32 and heads of 64 and 128; elsewhere a composition that looks
/// at all c places and is right and slow.
[[nodiscard]] at::Tensor decode_attention(const DecodeAttention& attention);
/// The composition, on any device.
[[nodiscard]] at::Tensor decode_attention_aten(const DecodeAttention& attention);

/// silu(gate) * up, [b, 2 i] -> [b, i], rounded after each of the two.
[[nodiscard]] at::Tensor decode_gate(const at::Tensor& gate_up_b2i);

}  // namespace sf
