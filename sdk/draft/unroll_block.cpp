#include "sdk/draft/unroll_block.hpp"

#include <ATen/ATen.h>

#include <cmath>

namespace sf::draft {

UnrollBlockShape unroll_block_shape(const DraftConfig& config) {
  return {.hidden = config.hidden_size,
          .intermediate = config.intermediate_size,
          .heads = config.heads,
          .kv_heads = config.kv_heads,
          .head_dim = config.head_dim,
          .eps = config.rms_norm_eps};
}

std::vector<ParameterSpec> unroll_block_parameters(const UnrollBlockShape& shape, double init_std) {
  const int64_t h = shape.hidden, query = shape.heads * shape.head_dim, key = shape.kv_heads * shape.head_dim;
  const auto product = [&](const char* name, int64_t out, int64_t in) {
    return ParameterSpec{.name = name, .shape = {out, in}, .init = Init::normal, .init_std = init_std};
  };
  const auto norm = [&](const char* name) { return ParameterSpec{.name = name, .shape = {h}, .init = Init::ones}; };
  return {norm("hidden_norm.weight"),
          norm("input_layernorm.weight"),
          product("self_attn.q_proj.weight", query, 2 * h),
          product("self_attn.k_proj.weight", key, 2 * h),
          product("self_attn.v_proj.weight", key, 2 * h),
          product("self_attn.o_proj.weight", h, query),
          norm("post_attention_layernorm.weight"),
          product("mlp.gate_proj.weight", shape.intermediate, h),
          product("mlp.up_proj.weight", shape.intermediate, h),
          product("mlp.down_proj.weight", h, shape.intermediate)};
}

int64_t unroll_block_saved_columns(const UnrollBlockShape& shape, int64_t uses) {
  const int64_t query = shape.heads * shape.head_dim, key = shape.kv_heads * shape.head_dim;
  return 6 * shape.hidden                                          // embeddings, both norms beside each other, sum, sum normed, output
         + 3 * query + (3 + uses - 1) * key + 3 * shape.intermediate;
}

std::vector<at::Tensor> UnrollBlock::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  const at::Tensor& states = inputs[kStates];
  const int64_t b = states.size(0), s = states.size(1);
  const auto use = static_cast<int64_t>(inputs.size() - kUnrollHandedOn) / 2;
  Ops& ops = context.ops();
  // The embedding's half comes first.
  const at::Tensor x = at::cat({ops.rms_norm(inputs[kEmbeddings].narrow(1, use, s), context.parameter("input_layernorm.weight"), shape_.eps),
                                ops.rms_norm(states, context.parameter("hidden_norm.weight"), shape_.eps)},
                               -1);
  const auto heads = [&](const at::Tensor& rows, int64_t count) { return rows.view({b, s, count, shape_.head_dim}); };
  const auto rotated = [&](const at::Tensor& rows) {
    return ops.head_norm_rope(rows, at::Tensor(), inputs[kUnrollCos], inputs[kUnrollSin], shape_.eps);
  };
  const std::vector<at::Tensor> projected = context.linears({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, x);
  const at::Tensor key = rotated(heads(projected[1], shape_.kv_heads));
  const at::Tensor value = heads(projected[2], shape_.kv_heads);

  UnrollAttention attention;
  attention.query_bsne = rotated(heads(projected[0], shape_.heads));
  attention.scale = 1.0 / std::sqrt(static_cast<double>(shape_.head_dim));
  std::vector<at::Tensor> keys, values;
  for (size_t i = kUnrollHandedOn; i + 1 < inputs.size(); i += 2) {
    keys.push_back(inputs[i]);
    values.push_back(inputs[i + 1]);
  }
  keys.push_back(key);
  values.push_back(value);
  attention.key_bsme = keys.front();
  attention.value_bsme = values.front();
  attention.extra_keys_bsme.assign(keys.begin() + 1, keys.end());
  attention.extra_values_bsme.assign(values.begin() + 1, values.end());
  const at::Tensor attended = context.linear("self_attn.o_proj", ops.unroll_attention(attention).view({b, s, shape_.heads * shape_.head_dim}));

  const std::vector<at::Tensor> residual = ops.residual_rms_norm(attended, states, context.parameter("post_attention_layernorm.weight"), shape_.eps);
  const at::Tensor& in = residual[1];
  const std::vector<at::Tensor> gate_up = context.linears({"mlp.gate_proj", "mlp.up_proj"}, in);
  const at::Tensor gated = ops.swiglu(gate_up[0], gate_up[1]);
  return {at::add(residual[0], context.linear("mlp.down_proj", gated)), key, value};
}

}  // namespace sf::draft
