// core/kernels/cuda/decode_launchers.hpp: kernels of one decoding step, where each sequence of a batch has one new token. As launchers.hpp says: raw device
// pointers, nothing waits, nothing is allocated; all that changes from step to step is read from the device, so that a step can be recorded.
//
// Shapes: b sequences · n query heads · m key/value heads · e head size · f rotated pairs · i inner width
#pragma once

#include <cstdint>

#include "core/kernels/cuda/launchers.hpp"

namespace sf::cuda {

/// Puts the new tokens' keys and values into the cache, and attends over all of a sequence's tokens, the new one included. Norms and rotation round as the
/// target's forward pass does, operation by operation.
struct DecodeAttention {
  Type type;
  int64_t b, n, m, e, f;         // e is 64 or 128
  int64_t capacity;              // tokens of a sequence in the cache
  double eps;
  float scale;
  const void* qkv_bxe;           // x = n + 2 m: queries, keys, values
  const void* query_weight_e;    // null: no norm of heads
  const void* key_weight_e;
  const float* cos_bf;
  const float* sin_bf;
  const int64_t* positions_b;    // where the new token stands; tokens before it are in the cache
  void* keys_bmce;               // c = capacity
  void* values_bmce;
  void* out_bne;
};

/// silu(gate) * up of rows in which both stand side by side.
struct DecodeGate {
  Type type;
  int64_t b, i;
  const void* gate_up_b2i;
  void* out_bi;
};

/// What a step begins with: embeddings of the tokens, and the angles' cosines and sines, times `scaling`, rounded to the type and kept as float32.
struct DecodeStart {
  Type type;
  int64_t b, h, f;
  float scaling;
  const int64_t* ids_b;          // below the embedding's rows
  const int64_t* positions_b;
  const void* embedding_vh;
  const float* inverse_frequencies_f;
  void* x_bh;
  float* cos_bf;
  float* sin_bf;
};

/// What a greedy step ends with: the place of the largest logit, the first among equals, as the token that was said and the next one in; positions go on by one.
struct DecodeChoice {
  Type type;
  int64_t b, v;
  const void* logits_bv;
  int64_t* said_b;
  int64_t* ids_b;
  int64_t* positions_b;
};

struct DecodeLaunchers {
  Error (*start)(const DecodeStart&, void* stream);
  Error (*choose)(const DecodeChoice&, void* stream);
  Error (*attention)(const DecodeAttention&, void* stream);
  Error (*gate)(const DecodeGate&, void* stream);
};

}  // namespace sf::cuda

/// The table; null when the library was built without nvcc.
extern "C" const sf::cuda::DecodeLaunchers* sf_cuda_decode_launchers_v1();
