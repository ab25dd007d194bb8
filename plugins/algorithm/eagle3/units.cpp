#include "plugins/algorithm/eagle3/units.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

namespace sf {
namespace {

constexpr int64_t kChunkRowsCpu = 256;  // 256 rows of 32000 float32 logits are 31 MiB

}  // namespace

std::vector<at::Tensor> FusionUnit::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  at::Tensor features = inputs[0];
  if (fc_norm_) {
    const int64_t width = features.size(-1) / kEagle3Layers;
    std::vector<at::Tensor> parts;
    for (int64_t n = 0; n < kEagle3Layers; ++n) {
      parts.push_back(context.ops().rms_norm(features.narrow(-1, n * width, width).contiguous(),
                                             context.parameter("fc_norm." + std::to_string(n) + ".weight"), eps_));
    }
    features = at::cat(parts, -1);
  }
  return {context.linear("fc", features)};
}

std::vector<at::Tensor> EmbeddingUnit::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  return {context.ops().lookup(context.parameter("embed_tokens.weight"), inputs[0])};
}

DistillUnit::DistillUnit(const Eagle3Config& config, const Eagle3Options& options)
    : norm_output_(config.norm_output),
      eps_(config.layers.rms_norm_eps),
      loss_(options.loss),
      kl_scale_(options.kl_scale),
      kl_decay_(options.kl_decay),
      chunk_rows_(options.objective_chunk_rows) {}

std::vector<at::Tensor> DistillUnit::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  const at::Tensor& states = inputs[kDraftStates];
  at::Tensor rows = states.reshape({-1, states.size(-1)}).index_select(0, inputs[kRowPlace]);
  if (norm_output_) {
    rows = context.ops().rms_norm(rows, context.parameter("norm.weight"), eps_);
  }
  DistillHead distill;
  distill.hidden_rh = rows;
  distill.head_wh = context.parameter("lm_head.weight");
  distill.head_gradient_wh = context.gradient_buffer("lm_head.weight");
  distill.teacher_logits_rw = inputs[kTeacherLogits];
  distill.teacher_kept_log_sum_exp_r = inputs[kTeacherKeptLogSumExp];
  distill.teacher_log_sum_exp_r = inputs[kTeacherLogSumExp];
  distill.mask_r = inputs[kRowMask];
  distill.divisor = inputs[kDivisor];
  distill.factor = inputs[kFactor];
  distill.loss = loss_;
  distill.kl_scale = kl_scale_;
  distill.kl_decay = kl_decay_;
  distill.chunk_rows = rows.is_cpu() ? std::min(chunk_rows_, kChunkRowsCpu) : chunk_rows_;
  const DistillResult result = context.ops().distill_head(distill);
  return {result.loss, result.step_loss, result.acceptance, result.argmax_r};
}

std::vector<ParameterSpec> fusion_parameters(const Eagle3Config& config) {
  std::vector<ParameterSpec> list = {{.name = "fc.weight",
                                      .shape = {config.layers.hidden_size, kEagle3Layers * config.target_hidden},
                                      .init = Init::normal,
                                      .init_std = config.layers.initializer_range}};
  for (int64_t n = 0; config.fc_norm && n < kEagle3Layers; ++n) {
    list.push_back({.name = "fc_norm." + std::to_string(n) + ".weight", .shape = {config.target_hidden}, .init = Init::ones});
  }
  return list;
}

std::vector<ParameterSpec> embedding_parameters(const Eagle3Config& config) {
  return {{.name = "embed_tokens.weight",
           .shape = {config.layers.vocab_size, config.layers.hidden_size},
           .init = config.target_hidden == config.layers.hidden_size ? Init::target_embedding : Init::normal,
           .init_std = config.layers.initializer_range}};
}

std::vector<ParameterSpec> distill_parameters(const Eagle3Config& config) {
  return {{.name = "norm.weight", .shape = {config.layers.hidden_size}, .init = Init::ones, .idle = !config.norm_output},
          {.name = "lm_head.weight",
           .shape = {config.draft_vocabulary, config.layers.hidden_size},
           .init = Init::normal,
           .init_std = config.layers.initializer_range}};
}

}  // namespace sf
