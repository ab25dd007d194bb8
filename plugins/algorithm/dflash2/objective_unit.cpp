#include "plugins/algorithm/dflash2/objective_unit.hpp"

#include "sdk/draft/block_rows.hpp"
#include "sdk/draft/selector.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace sf {
namespace {

constexpr int64_t kDetailCandidates = 16;
constexpr int64_t kTeacherChunkRows = 512;  // two distributions over the vocabulary in float32 for each row
constexpr int64_t kChunkRowsCpu = 256;  // 256 rows of 49152 float32 logits are 48 MiB: large enough for the product, small enough to stay mapped

const char* const kProjectionWeight = "candidate_selector.hidden_projection.weight";

at::Tensor joined(const std::vector<at::Tensor>& parts) { return parts.size() == 1 ? parts[0] : at::cat(parts, 0); }

draft::Dpace dpace_kind(LossType type) {
  return type == LossType::kDpace             ? draft::Dpace::both
         : type == LossType::kDpaceConfidence ? draft::Dpace::confidence
                                              : draft::Dpace::continuation;
}

}  // namespace

// The loss of a row is float32 for plain DFlash, too. The reference's is bfloat16 there, because its framework returns log-probabilities in the
// type of the logits: a loss of 3.1 then moves in steps of 0.016 and the gradient is made from that. It has no reason but the framework, no
// golden case has it, and drafts are served without it; docs/training.md lists it among the differences.

// What the chunks leave behind, per row and without graph.
struct ObjectiveUnit::Rows {
  at::Tensor nll, weight, argmax;
  at::Tensor selector_nll, selector_hit, covered;
  at::Tensor top_values, top_ids, log_sum_exp;  // strict candidates
  at::Tensor overlap, agreement, teacher_mass;  // with teacher rows only
};

int64_t ObjectiveUnit::candidates() const {
  return config_.dflash2 ? config_.selector_top_k : std::min(kDetailCandidates, config_.layers.vocab_size);
}

std::vector<ParameterSpec> objective_parameters(const DflashConfig& config, const DflashOptions& options) {
  const int64_t h = config.layers.hidden_size, v = config.layers.vocab_size, x = config.selector_rank;
  std::vector<ParameterSpec> list = {{.name = "norm.weight", .shape = {h}, .init = Init::ones}};
  if (config.dflash2) {
    const bool trainable = options.selector_loss_alpha > 0;
    const double std = config.layers.initializer_range;
    list.push_back({.name = kPredecessor, .shape = {v, x}, .init = Init::normal, .init_std = std, .trainable = trainable});
    list.push_back({.name = kSuccessor, .shape = {v, x}, .init = Init::zeros, .trainable = trainable});
    list.push_back({.name = kProjectionWeight, .shape = {x, h}, .init = Init::normal, .init_std = std, .trainable = trainable});
  }
  return list;
}

int64_t head_chunk_rows(const DflashConfig& config, const DflashOptions& options) {
  const int64_t blocks = options.objective_chunk_blocks > 0 ? options.objective_chunk_blocks : std::numeric_limits<int32_t>::max();
  const int64_t rows = blocks * (config.block_size - 1);
  return options.uses_dpace() ? rows : draft::whole_head_tiles(rows);  // D-PACE weighs whole blocks
}

// Weights of a chunk's rows; with D-PACE the rows are whole blocks.
at::Tensor ObjectiveUnit::row_weights(const at::Tensor& nll_r, const at::Tensor& mask_r, const at::Tensor& weight_r) const {
  if (!options_.uses_dpace()) {
    return weight_r;
  }
  const int64_t p = config_.block_size - 1;
  const at::Tensor probability = nll_r.detach().neg().exp().view({-1, p});
  const at::Tensor factors = draft::dpace_weights(probability, mask_r.view({-1, p}), options_.dpace_alpha, dpace_kind(options_.loss_type));
  return at::mul(factors.view({-1}), weight_r);
}

// The lambda mix needs the mean probability of the whole micro-batch before the first row can be weighted: a pass over the head without gradient.
at::Tensor ObjectiveUnit::kl_weight(UnitContext& context, const HeadObjective& objective, const at::Tensor& mask_r) const {
  at::NoGradGuard no_gradient;
  HeadObjective first = objective;
  first.top_k = 0;
  first.must_include_r = at::Tensor();
  first.candidate_table_vx = at::Tensor();
  first.parameters.clear();
  const at::Tensor probability = context.ops().head_objective(first, [&](const HeadRows& rows) {
    return at::mul(rows.nll_r.neg().exp(), mask_r.narrow(0, rows.row_begin, rows.row_end - rows.row_begin)).sum();
  });
  return draft::lambda_weight(probability, mask_r.sum(), options_.kl_scale, options_.kl_decay);
}

std::vector<at::Tensor> ObjectiveUnit::forward(UnitContext& context, const std::vector<at::Tensor>& inputs) {
  const bool wants_details = inputs.size() > kRowCell;
  const bool has_selector = config_.dflash2 && (options_.selector_loss_alpha > 0 || wants_details);
  const bool has_selector_loss = config_.dflash2 && options_.selector_loss_alpha > 0;
  const at::Tensor &label_r = inputs[kRowLabel], &mask_r = inputs[kRowMask], &weight_r = inputs[kRowWeight], &seed = inputs[kSeed];
  const int64_t h = config_.layers.hidden_size, p = config_.block_size - 1;

  // The last norm works row by row, so only rows that the head looks at are normed.
  const at::Tensor out_rh = context.ops().rms_norm(draft::take_rows(inputs[kDraftRows].reshape({-1, h}), inputs[kRowIndex]),
                                                   context.parameter("norm.weight"), config_.layers.rms_norm_eps);
  HeadObjective objective;
  objective.hidden_rh = out_rh;
  objective.head_vh = inputs[kHead];
  objective.labels_r = label_r;
  objective.logit_multiplier = config_.output_multiplier;
  objective.softcap = config_.final_logit_softcapping;
  objective.chunk_rows = head_chunk_rows(config_, options_);
  if (out_rh.is_cpu()) {
    objective.chunk_rows = std::min(objective.chunk_rows / p, std::max<int64_t>(1, kChunkRowsCpu / p)) * p;
  }
  if (has_selector || wants_details) {
    objective.top_k = candidates();
  }

  at::Tensor projected_rx, context_rx;
  if (has_selector) {
    projected_rx = context.linear(kProjection, options_.selector_stop_gradient ? out_rh.detach() : out_rh);
  }
  if (has_selector_loss) {
    context_rx = at::mul(context.ops().lookup(context.parameter(kPredecessor), inputs[kRowPredecessor]), projected_rx);
    objective.parameters = {context_rx};
    objective.candidate_table_vx = context.parameter(kSuccessor);
    if (options_.insert_gold) {
      objective.must_include_r = label_r;
    }
  }
  const at::Tensor kl = options_.lk == draft::Lk::lambda ? kl_weight(context, objective, mask_r) : at::ones({}, seed.options());

  struct Parts {
    std::vector<at::Tensor> nll, weight, argmax, selector_nll, selector_hit, covered, top_values, top_ids, log_sum_exp;
  } parts;
  at::Tensor token_sum = at::zeros({}, seed.options());
  const at::Tensor numerator = context.ops().head_objective(objective, [&](const HeadRows& rows) {
    const int64_t begin = rows.row_begin, count = rows.row_end - rows.row_begin;
    const at::Tensor weight = row_weights(rows.nll_r, mask_r.narrow(0, begin, count), weight_r.narrow(0, begin, count));
    const at::Tensor token = draft::token_objective(rows.nll_r, weight, options_.lk, kl);
    token_sum.add_(token.detach());
    at::Tensor loss = token;
    at::Tensor strict_ids, strict_values;
    if (objective.top_k > 0) {
      strict_ids = at::cat({rows.top_ids_rk.narrow(1, 0, objective.top_k - 1), rows.last_id_r.unsqueeze(1)}, 1);
      strict_values = at::cat({rows.top_values_rk.detach().narrow(1, 0, objective.top_k - 1), rows.last_value_r.unsqueeze(1)}, 1);
      parts.covered.push_back(at::eq(strict_ids, label_r.narrow(0, begin, count).unsqueeze(1)).any(1));
    }
    if (has_selector_loss) {
      const at::Tensor values = options_.selector_stop_gradient ? rows.top_values_rk.detach() : rows.top_values_rk;
      const at::Tensor scores = draft::selector_scores(values, context_rx.narrow(0, begin, count), rows.candidate_rows_rkx);
      const draft::SelectorLoss selector = draft::selector_loss(scores, rows.top_ids_rk, label_r.narrow(0, begin, count));
      loss = at::add(loss, at::mul(at::mul(selector.cross_entropy_r, at::mul(weight, selector.covered_r)).sum(), inputs[kSelectorAlpha]));
      parts.selector_nll.push_back(selector.cross_entropy_r.detach());
      parts.selector_hit.push_back(selector.hit_r);
    }
    parts.nll.push_back(rows.nll_r.detach());
    parts.weight.push_back(weight);
    parts.argmax.push_back(rows.argmax_r);
    if (wants_details) {
      parts.top_values.push_back(strict_values);
      parts.top_ids.push_back(strict_ids);
      parts.log_sum_exp.push_back(rows.log_sum_exp_r);
    }
    return at::mul(loss, seed);
  });

  at::NoGradGuard no_gradient;
  Rows rows;
  rows.nll = joined(parts.nll);
  rows.weight = joined(parts.weight);
  rows.argmax = joined(parts.argmax);
  const at::Tensor hit = at::logical_and(at::eq(rows.argmax, label_r), at::gt(mask_r, 0.5));
  const at::Tensor zero = at::zeros({}, seed.options());
  std::vector<at::Tensor> sums(kObjectiveSums, zero);
  sums[kSumMask] = mask_r.sum();
  sums[kSumHit] = hit.sum().to(at::kFloat);
  sums[kSumProbability] = at::mul(rows.nll.neg().exp(), mask_r).sum();
  sums[kSumToken] = token_sum;
  sums[kSumKlWeight] = kl;
  if (objective.top_k > 0) {
    rows.covered = joined(parts.covered);
    sums[kSumCovered] = at::mul(mask_r, rows.covered).sum();
  }
  if (has_selector_loss) {
    rows.selector_nll = joined(parts.selector_nll);
    rows.selector_hit = joined(parts.selector_hit);
    const at::Tensor learnt = options_.insert_gold ? rows.weight : at::mul(rows.weight, rows.covered);
    sums[kSumSelector] = at::mul(rows.selector_nll, learnt).sum();
    sums[kSumSelectorWeight] = learnt.sum();
    sums[kSumSelectorHit] = at::mul(learnt, rows.selector_hit).sum();
    sums[kSumCoveredProbability] = at::mul(rows.selector_nll.neg().exp(), at::mul(mask_r, rows.covered)).sum();
  }
  std::vector<at::Tensor> outputs = {numerator, at::stack(sums)};
  if (wants_details) {
    rows.top_values = joined(parts.top_values);
    rows.top_ids = joined(parts.top_ids);
    rows.log_sum_exp = joined(parts.log_sum_exp);
    if (inputs.size() > kTeacherRows) {
      compare_with_teacher(out_rh.detach(), inputs[kTeacherRows], inputs[kHead], std::min(objective.chunk_rows, kTeacherChunkRows), rows);
    }
    outputs.push_back(grids(context, inputs, rows, projected_rx));
  }
  return outputs;
}

// Both distributions whole, so in chunks of rows; the head's transform of the logits is the target's own. Only when a window is logged.
void ObjectiveUnit::compare_with_teacher(const at::Tensor& out_rh, const at::Tensor& teacher_rh, const at::Tensor& head_vh, int64_t chunk_rows,
                                         Rows& rows) const {
  const at::Tensor head_hv = head_vh.t();
  const auto probabilities = [&](const at::Tensor& hidden_rh) {
    at::Tensor logits = at::mul(at::matmul(hidden_rh, head_hv).to(at::kFloat), config_.output_multiplier);
    if (config_.final_logit_softcapping > 0) {
      logits = at::mul(at::tanh(at::div(logits, config_.final_logit_softcapping)), config_.final_logit_softcapping);
    }
    return at::softmax(logits, -1);
  };
  std::vector<at::Tensor> overlap, agreement, mass;
  for (int64_t begin = 0; begin < out_rh.size(0); begin += chunk_rows) {
    const int64_t count = std::min(chunk_rows, out_rh.size(0) - begin);
    const at::Tensor teacher_rv = probabilities(teacher_rh.narrow(0, begin, count).to(head_vh.scalar_type()));
    agreement.push_back(at::eq(teacher_rv.argmax(-1), rows.argmax.narrow(0, begin, count)));
    mass.push_back(teacher_rv.gather(1, rows.top_ids.narrow(0, begin, count)).sum(1));
    overlap.push_back(at::minimum(probabilities(out_rh.narrow(0, begin, count)), teacher_rv).sum(1));
  }
  rows.overlap = joined(overlap);
  rows.agreement = joined(agreement);
  rows.teacher_mass = joined(mass);
}

at::Tensor ObjectiveUnit::grids(UnitContext& context, const std::vector<at::Tensor>& inputs, const Rows& rows,
                                const at::Tensor& projected_rx) const {
  const int64_t c = inputs[kGridMask].size(0), p = inputs[kGridMask].size(1);
  const at::Tensor& cell_r = inputs[kRowCell];
  const at::Tensor& label_r = inputs[kRowLabel];
  const auto grid = [&](const at::Tensor& values_r) { return draft::to_grid(values_r.to(at::kFloat), cell_r, c, p); };

  std::vector<at::Tensor> result(rows.overlap.defined() ? kObjectiveGridsWithTeacher : kObjectiveGrids);
  result[kGridHit] = grid(at::eq(rows.argmax, label_r));
  result[kGridProbability] = grid(rows.nll.neg().exp());
  result[kGridCovered] = grid(rows.covered);
  result[kGridMass] = grid(at::sub(rows.top_values, rows.log_sum_exp.unsqueeze(1)).exp().sum(1));
  result[kGridWeight] = grid(rows.weight);
  if (rows.overlap.defined()) {
    result[kGridTeacherOverlap] = grid(rows.overlap);
    result[kGridTeacherAgreement] = grid(rows.agreement);
    result[kGridTeacherMass] = grid(rows.teacher_mass);
  }
  result[kGridSelected] = rows.selector_hit.defined() ? grid(rows.selector_hit) : result[kGridHit];
  result[kGridGreedy] = result[kGridHit];
  if (projected_rx.defined()) {
    // Slots behind a block's last supervised one have no row: zeros there, after everything that a chain can reach.
    const auto block_grid = [&](const at::Tensor& values_rx) {
      at::Tensor flat = at::zeros({c * p + 1, values_rx.size(1)}, values_rx.options());
      return flat.index_copy_(0, cell_r, values_rx.detach()).narrow(0, 0, c * p).view({c, p, values_rx.size(1)});
    };
    const at::Tensor path = draft::selector_path(block_grid(rows.top_values), block_grid(rows.top_ids), block_grid(projected_rx),
                                                 context.parameter(kPredecessor), context.parameter(kSuccessor), inputs[kAnchorToken]);
    at::Tensor labels = at::zeros({c * p + 1}, label_r.options());
    labels.index_copy_(0, cell_r, label_r);
    result[kGridGreedy] = at::eq(path, labels.narrow(0, 0, c * p).view({c, p})).to(at::kFloat);
  }
  return at::stack(result);
}

}  // namespace sf
