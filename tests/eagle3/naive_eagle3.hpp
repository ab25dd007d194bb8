// tests/eagle3/naive_eagle3.hpp: EAGLE3 written down from its description, one autograd graph, dense masks, nothing shared with the plugin. The judge
// of everything that no reference number fixes.
//
// Shapes: b batch · s tokens · h hidden · v target vocabulary · w draft vocabulary
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "sf/ops.hpp"

namespace sf::testing {

struct NaiveDraft {
  int64_t heads = 2, kv_heads = 1, head_dim = 8, uses = 3;
  double eps = 1e-6;
  std::vector<float> inverse_frequencies;
  double attention_scaling = 1;
  bool fc_norm = false, norm_output = true;
  DistillLoss loss = DistillLoss::kl;
  double kl_scale = 1, kl_decay = 1;
  std::map<std::string, at::Tensor> weights;  // by checkpoint name, "embed_tokens.weight" among them; leaves when gradients are wanted
  at::Tensor target_head_vx, tokens_w;        // tokens_w: target tokens of the draft, ascending
};

struct NaiveBatch {
  at::Tensor input_ids_bs, counted_bs, features_bsx, last_state_bsx;
};

struct NaiveResult {
  at::Tensor loss;                      // scalar with graph
  std::vector<at::Tensor> step_losses;  // scalars
  std::vector<double> correct, count, acceptance;
};

[[nodiscard]] NaiveResult naive_unroll(const NaiveDraft& draft, const NaiveBatch& batch);

/// Tokens that greedy decoding drafts behind token `anchor` of row `row`: each use reads the embedding of the token guessed before it. [uses]
[[nodiscard]] std::vector<int64_t> naive_greedy(const NaiveDraft& draft, const NaiveBatch& batch, int64_t row, int64_t anchor);

}  // namespace sf::testing
