#include "plugins/algorithm/dspark/objective_unit.hpp"

#include "plugins/algorithm/dspark/markov.hpp"
#include "sdk/draft/block_rows.hpp"
#include "sdk/draft/objective.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace sf {
namespace {

constexpr int64_t kChunkRowsCpu = 256;  // 256 rows of 49152 float32 logits are 48 MiB: large enough for the product, small enough to stay mapped

at::Tensor joined(const std::vector<at::Tensor>& parts) { return parts.size() == 1 ? parts[0] : at::cat(parts, 0); }

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat); }

}  // namespace

std::vector<ParameterSpec> objective_parameters(const DsparkConfig& config, const DsparkOptions& options) {
  const int64_t h = config.layers.hidden_size;
  std::vector<ParameterSpec> list = {{.name = "norm.weight", .shape = {h}, .init = Init::ones}};
  for (ParameterSpec& parameter : markov_parameters(config)) {
    list.push_back(std::move(parameter));
  }
  if (config.confidence_head) {
    const bool trainable = config.trains_confidence(options);
    const int64_t in = h + (config.confidence_with_markov ? config.markov_rank : 0);
    list.push_back({.name = std::string(kConfidence) + ".weight", .shape = {1, in}, .init = Init::normal, .init_std = config.layers.initializer_range,
                    .trainable = trainable});
    list.push_back({.name = std::string(kConfidence) + ".bias", .shape = {1}, .init = Init::zeros, .trainable = trainable});
  }
  return list;
}

int64_t chunk_rows(const DsparkConfig& config, const DsparkOptions& options, bool on_gpu) {
  const int64_t blocks = options.objective_chunk_blocks > 0 ? options.objective_chunk_blocks : std::numeric_limits<int32_t>::max();
  const int64_t rows = blocks * config.block_size;
  return on_gpu ? draft::whole_head_tiles(rows) : std::min(rows, kChunkRowsCpu);
}

std::vector<at::Tensor> DsparkObjective::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  const bool has_teacher = inputs.size() > kTeacherStates;
  const bool has_confidence = config_.trains_confidence(options_);
  const at::Tensor &label_r = inputs[kRowLabel], &mask_r = inputs[kRowMask], &weight_r = inputs[kRowWeight], &seed = inputs[kSeed];
  const int64_t h = config_.layers.hidden_size, c = inputs[kGridMask].size(0), p = inputs[kGridMask].size(1);

  // The last norm works row by row, so only rows that the head looks at are normed.
  const at::Tensor out_rh = context.ops().rms_norm(draft::take_rows(inputs[kDraftRows].reshape({-1, h}), inputs[kRowIndex]),
                                                   context.parameter("norm.weight"), config_.layers.rms_norm_eps);
  HeadObjective objective;
  objective.hidden_rh = out_rh;
  objective.head_vh = inputs[kHead];
  objective.labels_r = label_r;
  objective.chunk_rows = chunk_rows(config_, options_, out_rh.is_cuda());
  at::Tensor embedded_rx;
  if (config_.markov_rank > 0) {
    embedded_rx = context.ops().lookup(context.parameter(kMarkovEmbedding), inputs[kRowPredecessor]);
    objective.bias_rx =
        markov_bias(context, config_.markov_head, {.hidden_rh = out_rh, .embedded_rx = embedded_rx, .cell_r = inputs[kRowCell], .c = c, .p = p});
    objective.bias_table_vx = context.parameter(kMarkovOutput);
  }
  if (has_teacher) {
    objective.teacher_states_nh = inputs[kTeacherStates].reshape({-1, h});
    objective.teacher_places_mt = inputs[kTeacherPlaces];
    objective.teacher_index_r = inputs[kTeacherIndex];
  }
  at::Tensor confidence_r;  // before the sigmoid
  if (has_confidence) {
    const at::Tensor seen = config_.confidence_with_markov ? at::cat({out_rh, embedded_rx}, 1) : out_rh;
    confidence_r = wide(context.linear(kConfidence, seen).squeeze(1));
    objective.parameters = {confidence_r};
  }

  const auto accept_of = [](const at::Tensor& distance_r) { return distance_r.detach().mul(-0.5).add_(1).clamp_(0, 1); };
  const auto confidence_loss = [](const at::Tensor& logit_r, const at::Tensor& accept_r) {
    return at::sub(at::softplus(logit_r), at::mul(accept_r, logit_r));
  };
  struct Parts {
    std::vector<at::Tensor> nll, argmax, top, distance, teacher_argmax, teacher_top;
  } parts;
  const at::Tensor numerator = context.ops().head_objective(objective, [&](const HeadRows& rows) {
    const int64_t begin = rows.row_begin, count = rows.row_end - rows.row_begin;
    const at::Tensor weight = weight_r.narrow(0, begin, count);
    std::vector<at::Tensor> terms;
    if (options_.ce_loss_alpha > 0) {
      terms.push_back(at::mul(at::mul(rows.nll_r, weight).sum(), options_.ce_loss_alpha));
    }
    if (options_.l1_loss_alpha > 0) {
      terms.push_back(at::mul(at::mul(rows.distance_r, weight).sum(), options_.l1_loss_alpha));
    }
    if (has_confidence) {
      const at::Tensor loss_r = confidence_loss(confidence_r.narrow(0, begin, count), accept_of(rows.distance_r));
      terms.push_back(at::mul(at::mul(loss_r, weight).sum(), options_.confidence_head_alpha));
    }
    parts.nll.push_back(rows.nll_r.detach());
    parts.argmax.push_back(rows.argmax_r);
    parts.top.push_back(rows.max_probability_r);
    if (has_teacher) {
      parts.distance.push_back(rows.distance_r.detach());
      parts.teacher_argmax.push_back(rows.teacher_argmax_r);
      parts.teacher_top.push_back(rows.teacher_probability_r);
    }
    at::Tensor loss = terms[0];
    for (size_t i = 1; i < terms.size(); ++i) {
      loss = at::add(loss, terms[i]);
    }
    return at::mul(loss, seed);
  });

  at::NoGradGuard no_gradient;
  const at::Tensor nll = joined(parts.nll).to(at::kFloat), argmax = joined(parts.argmax);
  const at::Tensor hit = at::eq(argmax, label_r).to(at::kFloat);
  std::vector<at::Tensor> sums(kDsparkSums, at::zeros({}, seed.options()));
  std::vector<at::Tensor> grids(kDsparkGrids, at::zeros_like(nll));
  sums[kSumMask] = mask_r.sum();
  sums[kSumWeight] = weight_r.sum();
  sums[kSumHit] = at::mul(hit, mask_r).sum();
  sums[kSumToken] = at::mul(nll, weight_r).sum();
  sums[kSumDraftTop] = at::mul(joined(parts.top), mask_r).sum();
  grids[kGridHit] = hit;
  grids[kGridToken] = nll;
  if (has_teacher) {
    const at::Tensor distance = joined(parts.distance).to(at::kFloat), accept = accept_of(distance);
    sums[kSumDistance] = at::mul(distance, weight_r).sum();
    sums[kSumAgreement] = at::mul(at::eq(argmax, joined(parts.teacher_argmax)), mask_r).sum();
    sums[kSumTeacherTop] = at::mul(joined(parts.teacher_top), mask_r).sum();
    grids[kGridAccept] = accept;
    if (has_confidence) {
      const at::Tensor logit = confidence_r.detach().to(at::kFloat), confidence = logit.sigmoid(), difference = at::sub(confidence, accept);
      sums[kSumConfidence] = at::mul(confidence_loss(logit, accept), weight_r).sum();
      sums[kSumConfidenceError] = at::mul(difference.abs(), weight_r).sum();
      sums[kSumConfidenceBias] = at::mul(difference, weight_r).sum();
      grids[kGridConfidence] = confidence;
    }
  }
  at::Tensor cells = at::zeros({kDsparkGrids, c * p + 1}, nll.options());
  cells.index_copy_(1, inputs[kRowCell], at::stack(grids));
  return {numerator, at::stack(sums), cells.narrow(1, 0, c * p).reshape({kDsparkGrids, c, p})};
}

}  // namespace sf
