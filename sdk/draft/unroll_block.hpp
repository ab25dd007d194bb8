// sdk/draft/unroll_block.hpp: the layer of a draft that is unrolled over its own output (EAGLE3): attention whose input is the next token's embedding
// beside the state, and the gated MLP. One set of weights serves all uses; what a use adds to the keys and values is handed on as values.
//
// Shapes: b batch · s rows · h hidden · n query heads · m key/value heads · e head size · f rotary pairs · k this use, from 0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "sdk/draft/draft_config.hpp"
#include "sf/unit.hpp"

namespace sf::draft {

struct UnrollBlockShape {
  int64_t hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0;
  double eps = 1e-6;
};

[[nodiscard]] UnrollBlockShape unroll_block_shape(const DraftConfig& config);

/// By checkpoint name below "midlayer.": Normal(0, init_std) for products, ones for norms; no biases. Products of attention take 2h columns.
[[nodiscard]] std::vector<ParameterSpec> unroll_block_parameters(const UnrollBlockShape& shape, double init_std);

/// Elements that a use keeps of each row until its backward, on average over `uses`: each one holds the keys and values of those before it side by side.
[[nodiscard]] int64_t unroll_block_saved_columns(const UnrollBlockShape& shape, int64_t uses);

/// Places of the inputs; after them keys and values of the uses before this one, in pairs, so their number says which use this is.
enum UnrollBlockInput : size_t {
  kStates,         // [b, s, h], not normed
  kEmbeddings,     // [b, s + uses - 1, h], of the token after each position; use k reads rows k .. k + s - 1
  kUnrollCos,      // float32 [1, s, f], at the row's position + k
  kUnrollSin,
  kUnrollHandedOn
};

/// Outputs: {states [b, s, h], keys [b, s, m, e] with this use's rotation, values [b, s, m, e]}. Row i sees the first use's rows <= i, and of each
/// later use row i alone.
class UnrollBlock final : public Unit {
 public:
  explicit UnrollBlock(const UnrollBlockShape& shape) : shape_(shape) {}
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;

 private:
  UnrollBlockShape shape_;
};

}  // namespace sf::draft
