#include "sdk/draft/unroll_chain.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace sf::draft {
namespace {

struct Projected {
  UnitContext& context;
  const UnrollBlockShape& shape;
  at::Tensor x;  // the embedding's half comes first
  const at::Tensor &cos, &sin;

  at::Tensor heads(const char* name, int64_t count) const { return context.linear(name, x).view({x.size(0), x.size(1), count, shape.head_dim}); }
  at::Tensor rotated(const at::Tensor& rows) const { return context.ops().head_norm_rope(rows, at::Tensor(), cos, sin, shape.eps); }
  UnrollKeys keys() const { return {rotated(heads("self_attn.k_proj", shape.kv_heads)), heads("self_attn.v_proj", shape.kv_heads)}; }
};

Projected project(UnitContext& context, const UnrollBlockShape& shape, const at::Tensor& states, const at::Tensor& embeddings, const at::Tensor& cos,
                  const at::Tensor& sin) {
  Ops& ops = context.ops();
  const at::Tensor x = at::cat({ops.rms_norm(embeddings, context.parameter("input_layernorm.weight"), shape.eps),
                                ops.rms_norm(states, context.parameter("hidden_norm.weight"), shape.eps)},
                               -1);
  return {context, shape, x, cos, sin};
}

}  // namespace

UnrollKeys unroll_keys(UnitContext& context, const UnrollBlockShape& shape, const at::Tensor& states_bth, const at::Tensor& embeddings_bth,
                       const at::Tensor& cos_btf, const at::Tensor& sin_btf) {
  return project(context, shape, states_bth, embeddings_bth, cos_btf, sin_btf).keys();
}

at::Tensor unroll_row(UnitContext& context, const UnrollBlockShape& shape, const at::Tensor& states_b1h, const at::Tensor& embeddings_b1h,
                      const at::Tensor& cos_b1f, const at::Tensor& sin_b1f, bool is_first_use, ChainSight& sight) {
  const Projected projected = project(context, shape, states_b1h, embeddings_b1h, cos_b1f, sin_b1f);
  const int64_t b = states_b1h.size(0), n = shape.heads, m = shape.kv_heads, e = shape.head_dim, c = sight.keys_bcme.size(1);
  const at::Tensor query = projected.rotated(projected.heads("self_attn.q_proj", n));
  if (!is_first_use) {
    sight.later.push_back(projected.keys());
  }
  std::vector<at::Tensor> keys = {sight.keys_bcme}, values = {sight.values_bcme};
  for (const UnrollKeys& use : sight.later) {
    keys.push_back(use.keys_btme);
    values.push_back(use.values_btme);
  }
  const auto by_head = [](const std::vector<at::Tensor>& rows) { return at::cat(rows, 1).to(at::kFloat).transpose(1, 2); };  // [b, m, c + x, e]
  at::Tensor scores = at::matmul(query.to(at::kFloat).view({b, m, n / m, e}), by_head(keys).transpose(2, 3)).mul_(1.0 / std::sqrt(static_cast<double>(e)));
  const at::Tensor hidden = at::ge(at::arange(c, sight.counts_b.options()).unsqueeze(0), sight.counts_b.unsqueeze(1));  // [b, c]
  scores.narrow(3, 0, c).masked_fill_(hidden.view({b, 1, 1, c}), -std::numeric_limits<double>::infinity());
  const at::Tensor attended = at::matmul(at::softmax(scores, -1), by_head(values)).to(states_b1h.scalar_type()).view({b, 1, n * e});

  Ops& ops = context.ops();
  const std::vector<at::Tensor> residual =
      ops.residual_rms_norm(context.linear("self_attn.o_proj", attended), states_b1h, context.parameter("post_attention_layernorm.weight"), shape.eps);
  const at::Tensor gated = ops.swiglu(context.linear("mlp.gate_proj", residual[1]), context.linear("mlp.up_proj", residual[1]));
  return at::add(residual[0], context.linear("mlp.down_proj", gated));
}

}  // namespace sf::draft
