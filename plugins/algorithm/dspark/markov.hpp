// plugins/algorithm/dspark/markov.hpp: the Markov head: a bias of low rank on the logits of a drafted token that depends on the token before it.
//
//   e = w1[previous token]
//   vanilla  bias = e @ w2^T
//   gated    bias = (sigmoid(gate_proj([hidden ; e])) * e) @ w2^T
//   rnn      in order of the block, state 0 at its start: (G, C, O) = joint_proj([state ; e ; hidden]),
//            state = sigmoid(G) * state + (1 - sigmoid(G)) * tanh(C), bias = tanh(O) @ w2^T
//
// Shapes: r rows · h hidden · x rank · c blocks · p tokens that a block drafts
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plugins/algorithm/dspark/dspark_config.hpp"
#include "sf/unit.hpp"

namespace sf {

inline constexpr const char* kMarkovEmbedding = "markov_head.markov_w1.weight";  // [v, x]
inline constexpr const char* kMarkovOutput = "markov_head.markov_w2.weight";     // [v, x]

/// None without a Markov head.
[[nodiscard]] std::vector<ParameterSpec> markov_parameters(const DsparkConfig& config);

struct MarkovRows {
  at::Tensor hidden_rh;    // after the last norm
  at::Tensor embedded_rx;  // w1 of the token before each row's label
  at::Tensor cell_r;       // int64, place in a grid [c, p]; c*p for rows that fill up. Rows of a block are its first ones, without a hole
  int64_t c = 0, p = 0;
};

/// What is multiplied by w2^T to give the bias: [r, x].
[[nodiscard]] at::Tensor markov_bias(UnitContext& context, MarkovHead head, const MarkovRows& rows);

}  // namespace sf
