#include "plugins/algorithm/dspark/dspark.hpp"

#include "plugins/algorithm/dspark/engines.hpp"
#include "plugins/algorithm/dspark/metrics.hpp"
#include "plugins/algorithm/dspark/objective_unit.hpp"
#include "sdk/draft/block_rows.hpp"
#include "sdk/draft/objective.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

namespace sf {
namespace {

constexpr int64_t kRowMultipleCuda = 128;  // of matrix products; also keeps the number of different shapes small
constexpr int64_t kRowMultipleCpu = 8;

constexpr const char* kLastState = "target_last_hidden_states";

}  // namespace

Description Dspark::describe(const ModelFacts& facts) {
  config_ = resolve_dspark_config(facts, options_);
  description_ = Description();
  units_.clear();
  backbone_.describe(config_, {}, description_, units_);
  description_.units.push_back(
      {.name = "objective", .prefix = "", .shard_group = "root", .parameters = objective_parameters(config_, options_)});
  units_.push_back(std::make_unique<DsparkObjective>(config_, options_));

  if (config_.needs_teacher(options_)) {
    description_.reads.push_back({.name = kLastState, .columns = config_.layers.hidden_size, .last_state = true});
  }
  description_.pooling = Pooling::micro;
  description_.slots = facts.static_shapes ? options_.num_anchors : 0;
  description_.slots_at_most = options_.num_anchors;
  description_.drafted_tokens = config_.block_size;
  description_.head_rows_at_most = chunk_rows(config_, options_, /*on_gpu=*/true);
  description_.draft_config_json = config_.json;

  auto& fixed = description_.fixed;
  draft::fix_block_settings(fixed, "dspark", config_, options_.num_anchors, facts.rope_rounding);
  fixed["dspark_loss_decay_gamma"] = std::to_string(options_.loss_decay_gamma);
  fixed["dspark_ce_loss_alpha"] = std::to_string(options_.ce_loss_alpha);
  fixed["dspark_l1_loss_alpha"] = std::to_string(options_.l1_loss_alpha);
  fixed["dspark_confidence_head_alpha"] = std::to_string(options_.confidence_head_alpha);
  fixed["dspark_markov_rank"] = std::to_string(config_.markov_rank);
  fixed["dspark_markov_head_type"] = name_of(config_.markov_head);
  return description_;
}

void Dspark::bind(const TargetTables& tables, Ops&) { backbone_.bind(tables); }

std::string Dspark::prepare(Sample& sample, const SampleContext& context) { return draft::draw_anchors(sample, context, options_.num_anchors); }

void Dspark::finish(Batch& batch) {
  const int64_t multiple = backbone_.on_gpu() ? kRowMultipleCuda : kRowMultipleCpu;
  const draft::BlockRows rows = draft::collect_block_rows(
      batch.at("input_ids"), batch.at("loss_mask"), batch.at("anchors"), batch.at("keep"),
      {.block_size = config_.block_size, .known_row_drafts = true, .until_gap = true, .by_position = true, .multiple = multiple});
  const at::Tensor weight_r = at::mul(rows.mask_r, draft::position_decay(rows.slot_r, options_.loss_decay_gamma));
  draft::add_anchor_ids(batch);
  batch.tensors["row_index"] = rows.index_r;
  batch.tensors["row_label"] = rows.label_r;
  batch.tensors["row_predecessor"] = rows.predecessor_r;
  batch.tensors["row_mask"] = rows.mask_r;
  batch.tensors["row_weight"] = weight_r;
  batch.tensors["row_cell"] = rows.cell_r;
  batch.tensors["grid_mask"] = rows.mask_cp;
  batch.tensors["grid_block"] = rows.block_c;
  batch.tensors["denominator"] = weight_r.sum(at::kDouble).to(at::kFloat);
  if (config_.needs_teacher(options_)) {
    draft::TeacherPlaces teacher = draft::teacher_places(rows.state_r, chunk_rows(config_, options_, backbone_.on_gpu()), multiple);
    batch.tensors["teacher_places"] = teacher.places_mt;
    batch.tensors["teacher_index"] = teacher.index_r;
  }
}

double Dspark::weigh(const Batch& batch) const { return batch.at("denominator").item<double>(); }

void Dspark::micro_step(Runner& runner, const Batch& batch) {
  const TapeValue rows = backbone_.run(runner, batch);
  const at::Tensor& head = backbone_.tables().head_vh;
  std::vector<TapeValue> inputs = {rows, runner.constant(head)};
  for (const char* name : {"row_index", "row_label", "row_predecessor", "row_mask", "row_weight", "row_cell", "grid_mask"}) {
    inputs.push_back(runner.constant(batch.at(name)));
  }
  inputs.push_back(runner.constant(runner.seed()));
  if (config_.needs_teacher(options_)) {
    inputs.push_back(runner.constant(batch.at(kLastState).to(head.scalar_type())));
    inputs.push_back(runner.constant(batch.at("teacher_places")));
    inputs.push_back(runner.constant(batch.at("teacher_index")));
  }
  const std::vector<TapeValue> results = runner.run(backbone_.next_unit(), inputs);
  runner.add_loss(results[0]);

  const DsparkMetrics metrics{.sums = results[1].tensor(),
                              .grids = results[2].tensor(),
                              .grid = {.mask_cp = batch.at("grid_mask"), .block_c = batch.at("grid_block"), .anchors_bw = batch.at("anchors")}};
  report_sums(runner, metrics, config_, options_);
  if (runner.phase() == Phase::evaluate || runner.step().wants_details) {
    report_details(runner, metrics, config_, options_);
  }
}

ExportSpec Dspark::export_spec() const {
  ExportSpec spec;
  spec.config_json = config_.json;
  spec.required_config_keys = required_config_keys(config_);
  spec.tensors = draft::full_parameters(description_.units);
  for (const EngineContract& engine : kDsparkEngines) {
    const bool serves = config_.markov_rank == 0
                            ? !engine.needs_markov_head
                            : std::any_of(engine.markov_heads.begin(), engine.markov_heads.end(), [&](const char* head) { return std::string(head) == name_of(config_.markov_head); });
    spec.engine_note += std::string(spec.engine_note.empty() ? "" : "; ") + engine.engine + ": " +
                        (serves ? engine.start : config_.markov_rank == 0 ? "does not serve a draft without a Markov head" : "does not serve this Markov head");
  }
  return spec;
}

}  // namespace sf
