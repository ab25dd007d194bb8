// sdk/draft/block.hpp: the layer that block drafts are made of, and the unit that turns captured target states into its context.
//
// Shapes: b batch · s context tokens · w block slots · j tokens of a block · q = w*j draft rows · h hidden · f rotary pairs
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sdk/draft/draft_config.hpp"
#include "sf/unit.hpp"

namespace sf::draft {

struct BlockShape {
  int64_t hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t block_size = 0;
  double eps = 1e-6;
  bool attention_bias = false;
  int64_t window_tokens = 0;    // 0: full attention
  bool causal = false;          // inside a block
  int64_t conv_taps = 0;        // 0: no convolution around attention and MLP
  int64_t conv_groups = 0;
};

[[nodiscard]] BlockShape block_shape(const DraftConfig& config, int64_t layer, int64_t block_size);

/// Parameters by checkpoint name below "layers.N.". Normal(0, init_std) for products, ones for norms, zeros for biases; a convolution starts as the
/// identity (first tap 1, projection 0), so that a fresh draft with it equals one without.
[[nodiscard]] std::vector<ParameterSpec> block_parameters(const BlockShape& shape, double init_std);

/// Elements that one use keeps of each draft row until its backward: what products, norms, attention and convolutions save, and the output.
[[nodiscard]] int64_t block_saved_columns(const BlockShape& shape);

/// Places of DraftBlock's inputs.
enum BlockInput : size_t {
  kRowsIn,          // [b, q, h]
  kContext,         // [b, s, h], normed
  kContextCos,      // float32 [1, s, f]
  kContextSin,
  kRowsCos,         // float32 [b, q, f]
  kRowsSin,
  kAnchors,         // int64 [b, w]
  kKeep,            // bool [b, w]
  kBlockInputs
};

/// Attention over context and own block, then the gated MLP, each behind a norm and with a residual. Output: {rows [b, q, h]}.
class DraftBlock final : public Unit {
 public:
  explicit DraftBlock(const BlockShape& shape) : shape_(shape) {}
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;

 private:
  at::Tensor attend(UnitContext& context, const at::Tensor& x_bqh, const std::vector<at::Tensor>& inputs) const;
  at::Tensor transform(UnitContext& context, const at::Tensor& x_bqh, const at::Tensor& again_bqh) const;
  at::Tensor transform_rows(UnitContext& context, const at::Tensor& x_bqh, const at::Tensor& again_bqh) const;

  BlockShape shape_;
};

/// [b, s, K*h] -> {hidden_norm(fc(features)) [b, s, h]}.
class ContextUnit final : public Unit {
 public:
  explicit ContextUnit(double eps) : eps_(eps) {}
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;

 private:
  double eps_;
};

[[nodiscard]] std::vector<ParameterSpec> context_parameters(int64_t hidden, int64_t feature_columns, double init_std);

struct Angles {
  at::Tensor cos, sin;  // float32 [.., f]
};

/// Angles of int64 positions [...]; inverse_frequencies float32 [f] on the same device.
[[nodiscard]] Angles rope_angles(const at::Tensor& positions, const at::Tensor& inverse_frequencies, double attention_scaling);

}  // namespace sf::draft
