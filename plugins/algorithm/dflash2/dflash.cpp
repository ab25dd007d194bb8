#include "plugins/algorithm/dflash2/dflash.hpp"

#include "plugins/algorithm/dflash2/metrics.hpp"
#include "sdk/draft/block_rows.hpp"
#include "sdk/draft/selector.hpp"
#include "sf/error.hpp"

#include <ATen/ATen.h>

#include <algorithm>

namespace sf {
namespace {

constexpr const char* kTeacherStates = "target_last_hidden_states";
constexpr int64_t kRowMultipleCuda = 128;  // of matrix products; also keeps the number of different shapes small
constexpr int64_t kBlockMultipleCuda = 32;
constexpr int64_t kRowMultipleCpu = 8;

const char* name_of(LossType type) {
  switch (type) {
    case LossType::kDflash: return "dflash";
    case LossType::kDpace: return "dpace";
    case LossType::kDpaceConfidence: return "dpace-cumulative-confidence-only";
    case LossType::kDpaceContinuation: return "dpace-continuation-value-only";
  }
  return "";
}

const char* name_of(draft::Lk kind) {
  switch (kind) {
    case draft::Lk::none: return "none";
    case draft::Lk::alpha: return "alpha";
    case draft::Lk::lambda: return "lambda";
    case draft::Lk::total_variation: return "tv";
  }
  return "";
}

}  // namespace

Description Dflash::describe(const ModelFacts& facts) {
  config_ = resolve_dflash_config(facts, options_);
  description_ = Description();
  units_.clear();
  backbone_.describe(config_, {.taps = config_.conv_taps, .groups = config_.dflash2 ? config_.layers.hidden_size / config_.conv_group_size : 0},
                     description_, units_);
  description_.units.push_back(
      {.name = "objective", .prefix = "", .shard_group = "root", .parameters = objective_parameters(config_, options_)});
  auto objective = std::make_unique<ObjectiveUnit>(config_, options_);
  objective_ = objective.get();
  units_.push_back(std::move(objective));

  description_.reads.push_back({.name = kTeacherStates, .columns = config_.layers.hidden_size, .optional = true, .last_state = true});
  description_.pooling = Pooling::window;
  description_.slots = facts.static_shapes ? options_.num_anchors : 0;
  description_.slots_at_most = options_.num_anchors;
  description_.head_rows_at_most = options_.objective_chunk_blocks > 0 ? head_chunk_rows(config_, options_) : 0;
  description_.draft_config_json = config_.json;

  auto& fixed = description_.fixed;
  draft::fix_block_settings(fixed, "dflash", config_, options_.num_anchors, facts.rope_rounding);
  fixed["dflash_loss_decay_gamma"] = std::to_string(options_.loss_decay_gamma);
  fixed["dflash_loss_type"] = name_of(options_.loss_type);
  fixed["dflash_dpace_alpha"] = std::to_string(options_.dpace_alpha);
  fixed["dflash_lk_loss_type"] = name_of(options_.lk);
  fixed["dflash_kl_scale"] = std::to_string(options_.kl_scale);
  fixed["dflash_kl_decay"] = std::to_string(options_.kl_decay);
  if (config_.dflash2) {
    fixed["dflash2_conv_kernel_size"] = std::to_string(config_.conv_taps);
    fixed["dflash2_conv_group_size"] = std::to_string(config_.conv_group_size);
    fixed["dflash2_selector_rank"] = std::to_string(config_.selector_rank);
    fixed["dflash2_selector_top_k"] = std::to_string(config_.selector_top_k);
    fixed["dflash2_selector_loss_alpha"] = std::to_string(options_.selector_loss_alpha);
    fixed["dflash2_selector_warmup_ratio"] = std::to_string(options_.selector_warmup_ratio);
    fixed["dflash2_selector_ramp_ratio"] = std::to_string(options_.selector_ramp_ratio);
    fixed["dflash2_selector_stop_gradient"] = options_.selector_stop_gradient ? "true" : "false";
    fixed["dflash2_selector_policy"] = options_.insert_gold ? "insert_gold" : "strict_top_k";
  }
  return description_;
}

void Dflash::bind(const TargetTables& tables, Ops&) { backbone_.bind(tables); }

std::string Dflash::prepare(Sample& sample, const SampleContext& context) { return draft::draw_anchors(sample, context, options_.num_anchors); }

void Dflash::finish(Batch& batch) {
  const bool on_gpu = backbone_.on_gpu();
  draft::BlockRowsOptions wanted;
  wanted.block_size = config_.block_size;
  wanted.whole_blocks = options_.uses_dpace();
  wanted.multiple = on_gpu ? (wanted.whole_blocks ? kBlockMultipleCuda : kRowMultipleCuda) : (wanted.whole_blocks ? 1 : kRowMultipleCpu);
  const draft::BlockRows rows =
      draft::collect_block_rows(batch.at("input_ids"), batch.at("loss_mask"), batch.at("anchors"), batch.at("keep"), wanted);
  add_weights(batch, rows.mask_r, rows.slot_r, rows.mask_cp, rows.sequence_c);
  draft::add_anchor_ids(batch);
  batch.tensors["row_index"] = rows.index_r;
  batch.tensors["row_label"] = rows.label_r;
  batch.tensors["row_predecessor"] = rows.predecessor_r;
  batch.tensors["row_mask"] = rows.mask_r;
  batch.tensors["row_cell"] = rows.cell_r;
  batch.tensors["grid_mask"] = rows.mask_cp;
  batch.tensors["grid_block"] = rows.block_c;
  batch.tensors["anchor_token"] = rows.anchor_token_c;
  if (batch.tensors.count(kTeacherStates) != 0) {
    batch.tensors["row_teacher"] = rows.state_r;
  }
}

// "row_weight": M * decay, or for D-PACE the factor of the row's sequence; "denominator": what the window divides by.
void Dflash::add_weights(Batch& batch, at::Tensor mask_r, const at::Tensor& slot_r, const at::Tensor& mask_cp,
                         const at::Tensor& sequence_c) const {
  double denominator = 0;
  at::Tensor weight;
  if (!options_.uses_dpace()) {
    weight = at::mul(mask_r, draft::position_decay(slot_r, options_.loss_decay_gamma));
    denominator = weight.sum(at::kDouble).item<double>();
  } else {
    const at::Tensor has_rows = at::gt(mask_cp, 0).any(1).to(at::kFloat);  // [c]
    at::Tensor blocks = at::zeros({batch.rows}, has_rows.options());
    blocks.index_add_(0, sequence_c, has_rows);
    if (options_.dpace_per_sequence) {
      weight = at::div(has_rows, blocks.clamp_min(1).index_select(0, sequence_c)).repeat_interleave(config_.block_size - 1);
      denominator = at::gt(blocks, 0).sum().item<double>();
    } else {
      weight = has_rows.repeat_interleave(config_.block_size - 1);
      denominator = blocks.sum().item<double>() == 0
                        ? 0
                        : static_cast<double>(std::count_if(batch.sample_indices.begin(), batch.sample_indices.end(), [](int64_t i) { return i >= 0; }));
    }
  }
  batch.tensors["row_weight"] = weight;
  batch.tensors["denominator"] = at::full({}, denominator, at::TensorOptions().dtype(at::kFloat));
}

double Dflash::weigh(const Batch& batch) const { return batch.at("denominator").item<double>(); }

void Dflash::micro_step(Runner& runner, const Batch& batch) {
  const TapeValue rows = backbone_.run(runner, batch);
  const StepInfo& step = runner.step();
  const double alpha = draft::selector_alpha(options_.selector_loss_alpha, options_.selector_warmup_ratio, options_.selector_ramp_ratio,
                                             step.update, step.updates_total);
  const at::Tensor alpha_tensor = at::full({}, alpha, runner.seed().options());
  std::vector<TapeValue> objective = {rows,
                                  runner.constant(backbone_.tables().head_vh),
                                  runner.constant(batch.at("row_index")),
                                  runner.constant(batch.at("row_label")),
                                  runner.constant(batch.at("row_predecessor")),
                                  runner.constant(batch.at("row_mask")),
                                  runner.constant(batch.at("row_weight")),
                                  runner.constant(runner.seed()),
                                  runner.constant(alpha_tensor)};
  const bool wants_details = runner.phase() == Phase::evaluate || step.wants_details;
  if (wants_details) {
    for (const char* name : {"row_cell", "grid_mask", "anchor_token"}) {
      objective.push_back(runner.constant(batch.at(name)));
    }
    if (batch.tensors.count(kTeacherStates) != 0) {
      const at::Tensor& states = batch.at(kTeacherStates);
      objective.push_back(runner.constant(states.reshape({-1, states.size(2)}).index_select(0, batch.at("row_teacher"))));
    }
  }
  const std::vector<TapeValue> results = runner.run(backbone_.next_unit(), objective);
  runner.add_loss(results[0]);

  MetricInputs metrics;
  metrics.sums = results[1].tensor();
  metrics.denominator = batch.at("denominator");
  metrics.alpha = alpha_tensor;
  report_sums(runner, metrics, config_, options_);
  if (wants_details) {
    metrics.grids = results[2].tensor();
    metrics.grid = {.mask_cp = batch.at("grid_mask"), .block_c = batch.at("grid_block"), .anchors_bw = batch.at("anchors")};
    report_details(runner, metrics, config_, objective_->candidates());
  }
}

ExportSpec Dflash::export_spec() const {
  ExportSpec spec;
  spec.config_json = config_.json;
  spec.required_config_keys = required_config_keys(config_);
  spec.tensors = draft::full_parameters(description_.units);
  spec.engine_note = "SGLang: --speculative-algorithm DFLASH with --speculative-draft-model-path set to this folder";
  return spec;
}

}  // namespace sf
