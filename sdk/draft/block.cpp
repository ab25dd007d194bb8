#include "sdk/draft/block.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace sf::draft {
namespace {

constexpr int64_t kEvaluationRows = 16384;  // of the MLP at a time: with an intermediate size of 12288 a float32 copy is 768 MiB

// Convolution around a sub-layer: its coefficients for both sides come from the sub-layer's input.
class Convolution {
 public:
  Convolution(UnitContext& context, const BlockShape& shape, const char* name, const at::Tensor& x_bqh)
      : context_(context), shape_(shape), bases_(context.parameter(std::string(name) + ".base_kernel").unbind(0)) {
    const at::Tensor projected = context.linear(std::string(name) + ".kernel_projection", x_bqh);
    deltas_ = projected.view({x_bqh.size(0), x_bqh.size(1), 2, shape.conv_taps, shape.conv_groups}).unbind(2);  // whose gradients are joined in one pass
  }

  [[nodiscard]] at::Tensor apply(const at::Tensor& x_bqh, size_t side) const {
    return context_.ops().grouped_convolution(x_bqh, deltas_[side], bases_[side], shape_.block_size);
  }

 private:
  UnitContext& context_;
  const BlockShape& shape_;
  std::vector<at::Tensor> bases_, deltas_;
};

}  // namespace

BlockShape block_shape(const DraftConfig& config, int64_t layer, int64_t block_size) {
  return {.hidden = config.hidden_size,
          .intermediate = config.intermediate_size,
          .heads = config.heads,
          .kv_heads = config.kv_heads,
          .head_dim = config.head_dim,
          .block_size = block_size,
          .eps = config.rms_norm_eps,
          .attention_bias = config.attention_bias,
          .window_tokens = config.sliding[static_cast<size_t>(layer)] ? config.sliding_window : 0,
          .causal = config.causal(layer)};
}

std::vector<ParameterSpec> block_parameters(const BlockShape& shape, double init_std) {
  const int64_t query = shape.heads * shape.head_dim;
  const int64_t key = shape.kv_heads * shape.head_dim;
  std::vector<ParameterSpec> list;
  const auto add = [&](std::string name, std::vector<int64_t> sizes, Init init) {
    list.push_back({.name = std::move(name), .shape = std::move(sizes), .init = init, .init_std = init_std});
  };
  const auto add_projection = [&](const std::string& name, int64_t out, int64_t in) {
    add("self_attn." + name + ".weight", {out, in}, Init::normal);
    if (shape.attention_bias) {
      add("self_attn." + name + ".bias", {out}, Init::zeros);
    }
  };
  add("input_layernorm.weight", {shape.hidden}, Init::ones);
  add_projection("q_proj", query, shape.hidden);
  add_projection("k_proj", key, shape.hidden);
  add_projection("v_proj", key, shape.hidden);
  add_projection("o_proj", shape.hidden, query);
  add("self_attn.q_norm.weight", {shape.head_dim}, Init::ones);
  add("self_attn.k_norm.weight", {shape.head_dim}, Init::ones);
  add("post_attention_layernorm.weight", {shape.hidden}, Init::ones);
  add("mlp.gate_proj.weight", {shape.intermediate, shape.hidden}, Init::normal);
  add("mlp.up_proj.weight", {shape.intermediate, shape.hidden}, Init::normal);
  add("mlp.down_proj.weight", {shape.hidden, shape.intermediate}, Init::normal);
  if (shape.conv_taps > 0) {
    for (const char* name : {"attention_conv", "mlp_conv"}) {
      add(std::string(name) + ".base_kernel", {2, shape.conv_taps, shape.hidden}, Init::first_tap);
      add(std::string(name) + ".kernel_projection.weight", {2 * shape.conv_taps * shape.conv_groups, shape.hidden}, Init::zeros);
    }
  }
  return list;
}

int64_t block_saved_columns(const BlockShape& shape) {
  const int64_t query = shape.heads * shape.head_dim, key = shape.kv_heads * shape.head_dim;
  int64_t columns = 4 * shape.hidden                               // input normed, sum, sum normed, output
                    + 3 * query + 3 * key + 3 * shape.intermediate;  // each of q, k as projected and as rotated, v; attention's output; gate, up and their product
  if (shape.conv_taps > 0) {
    columns += 4 * shape.hidden + 4 * shape.conv_taps * shape.conv_groups;  // before and after both sub-layers; coefficients
  }
  return columns;
}

std::vector<at::Tensor> DraftBlock::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  const std::vector<at::Tensor> normed = context.ops().residual_rms_norm(inputs[kRowsIn], at::Tensor(), context.parameter("input_layernorm.weight"), shape_.eps);
  const at::Tensor &h = normed[0], &x = normed[1];
  at::Tensor attended;
  if (shape_.conv_taps > 0) {
    const Convolution convolution(context, shape_, "attention_conv", normed[2]);
    attended = convolution.apply(attend(context, convolution.apply(x, 0), inputs), 1);
  } else {
    attended = attend(context, x, inputs);
  }

  const std::vector<at::Tensor> summed =
      context.ops().residual_rms_norm(attended, h, context.parameter("post_attention_layernorm.weight"), shape_.eps);
  return {at::add(summed[0], transform(context, summed[1], summed[2]))};
}

// The MLP and its convolution. Nothing in it looks past a block, so an evaluation, which has every position as a block, takes some blocks at a time.
at::Tensor DraftBlock::transform(UnitContext& context, const at::Tensor& x_bqh, const at::Tensor& again_bqh) const {
  const int64_t b = x_bqh.size(0), q = x_bqh.size(1);
  if (context.phase() != Phase::evaluate || b * q <= kEvaluationRows) {
    return transform_rows(context, x_bqh, again_bqh);
  }
  const int64_t step = std::max<int64_t>(1, kEvaluationRows / (b * shape_.block_size)) * shape_.block_size;
  at::Tensor out = at::empty_like(x_bqh);
  for (int64_t begin = 0; begin < q; begin += step) {
    const int64_t rows = std::min(step, q - begin);
    const at::Tensor part = x_bqh.narrow(1, begin, rows).contiguous();
    out.narrow(1, begin, rows).copy_(transform_rows(context, part, part));
  }
  return out;
}

at::Tensor DraftBlock::transform_rows(UnitContext& context, const at::Tensor& x_bqh, const at::Tensor& again_bqh) const {
  const auto mlp = [&](const at::Tensor& in) {
    const std::vector<at::Tensor> gate_up = context.linears({"mlp.gate_proj", "mlp.up_proj"}, in);
    return context.linear("mlp.down_proj", context.ops().swiglu(gate_up[0], gate_up[1]));
  };
  if (shape_.conv_taps == 0) {
    return mlp(x_bqh);
  }
  const Convolution convolution(context, shape_, "mlp_conv", again_bqh);
  return convolution.apply(mlp(convolution.apply(x_bqh, 0)), 1);
}

at::Tensor DraftBlock::attend(UnitContext& context, const at::Tensor& x_bqh, const std::vector<at::Tensor>& inputs) const {
  const int64_t b = x_bqh.size(0), q = x_bqh.size(1);
  const at::Tensor& q_norm = context.parameter("self_attn.q_norm.weight");
  const at::Tensor& k_norm = context.parameter("self_attn.k_norm.weight");
  const auto heads = [&](const at::Tensor& rows, int64_t count) { return rows.view({b, rows.size(1), count, shape_.head_dim}); };
  const auto rotated = [&](const at::Tensor& rows, int64_t count, const at::Tensor& norm, size_t cos, size_t sin) {
    return context.ops().head_norm_rope(heads(rows, count), norm, inputs[cos], inputs[sin], shape_.eps);
  };
  const std::vector<at::Tensor> own = context.linears({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, x_bqh);
  const std::vector<at::Tensor> seen = context.linears({"self_attn.k_proj", "self_attn.v_proj"}, inputs[kContext]);
  BlockAttention attention;
  attention.query_bqne = rotated(own[0], shape_.heads, q_norm, kRowsCos, kRowsSin);
  attention.block_key_bqme = rotated(own[1], shape_.kv_heads, k_norm, kRowsCos, kRowsSin);
  attention.context_key_bsme = rotated(seen[0], shape_.kv_heads, k_norm, kContextCos, kContextSin);
  attention.block_value_bqme = heads(own[2], shape_.kv_heads);
  attention.context_value_bsme = heads(seen[1], shape_.kv_heads);
  attention.anchors_bw = inputs[kAnchors];
  attention.keep_bw = inputs[kKeep];
  attention.block_size = shape_.block_size;
  attention.window_tokens = shape_.window_tokens;
  attention.causal = shape_.causal;
  attention.scale = 1.0 / std::sqrt(static_cast<double>(shape_.head_dim));
  return context.linear("self_attn.o_proj", context.ops().block_attention(attention).view({b, q, shape_.heads * shape_.head_dim}));
}

std::vector<at::Tensor> ContextUnit::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  return {context.ops().rms_norm(context.linear("fc", inputs[0]), context.parameter("hidden_norm.weight"), eps_)};
}

std::vector<ParameterSpec> context_parameters(int64_t hidden, int64_t feature_columns, double init_std) {
  return {{.name = "fc.weight", .shape = {hidden, feature_columns}, .init = Init::normal, .init_std = init_std},
          {.name = "hidden_norm.weight", .shape = {hidden}, .init = Init::ones}};
}

Angles rope_angles(const at::Tensor& positions, const at::Tensor& inverse_frequencies, double attention_scaling) {
  const at::Tensor angles = at::mul(positions.to(at::kFloat).unsqueeze(-1), inverse_frequencies);
  Angles result{angles.cos(), angles.sin()};
  if (attention_scaling != 1.0) {
    result.cos.mul_(attention_scaling);
    result.sin.mul_(attention_scaling);
  }
  return result;
}

}  // namespace sf::draft
