#include "plugins/algorithm/dflash2/dflash.hpp"

#include "plugins/algorithm/dflash2/metrics.hpp"
#include "sdk/draft/block_rows.hpp"
#include "sdk/draft/selector.hpp"
#include "sf/error.hpp"

#include <ATen/ATen.h>

#include <algorithm>

namespace sf {
namespace {

constexpr const char* kAnchorStream = "anchors";
constexpr int64_t kRowMultipleCuda = 128;  // of matrix products; also keeps the number of different shapes small
constexpr int64_t kBlockMultipleCuda = 32;
constexpr int64_t kRowMultipleCpu = 8;

std::string names_of(const std::vector<int64_t>& ids) {
  std::string text;
  for (const int64_t id : ids) {
    text += (text.empty() ? "" : ",") + std::to_string(id);
  }
  return text;
}

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
  const draft::DraftConfig& layers = config_.layers;
  const auto feature_layers = static_cast<int64_t>(config_.target_layer_ids.size());
  description_ = Description();
  units_.clear();

  description_.units.push_back({.name = "context",
                                .prefix = "",
                                .shard_group = "root",
                                .parameters = draft::context_parameters(layers.hidden_size, feature_layers * layers.hidden_size,
                                                                        layers.initializer_range)});
  units_.push_back(std::make_unique<draft::ContextUnit>(layers.rms_norm_eps));
  for (int64_t i = 0; i < layers.layers; ++i) {
    draft::BlockShape shape = draft::block_shape(layers, i, config_.block_size);
    if (config_.dflash2) {
      shape.conv_taps = config_.conv_taps;
      shape.conv_groups = layers.hidden_size / config_.conv_group_size;
    }
    const std::string name = "block." + std::to_string(i);
    description_.units.push_back({.name = name,
                                  .prefix = "layers." + std::to_string(i) + ".",
                                  .shard_group = name,
                                  .parameters = draft::block_parameters(shape, layers.initializer_range)});
    units_.push_back(std::make_unique<draft::DraftBlock>(shape));
  }
  description_.units.push_back(
      {.name = "objective", .prefix = "", .shard_group = "root", .parameters = objective_parameters(config_, options_)});
  auto objective = std::make_unique<ObjectiveUnit>(config_, options_);
  objective_ = objective.get();
  units_.push_back(std::move(objective));

  description_.reads = {{.name = "input_ids"},
                        {.name = "loss_mask"},
                        {.name = "hidden_states",
                         .columns = feature_layers * layers.hidden_size,
                         .layer_ids = config_.target_layer_ids}};
  description_.fields = {{.name = "anchors", .axis = Axis::slots}, {.name = "keep", .axis = Axis::slots}};
  description_.pooling = Pooling::window;
  description_.slots = facts.static_shapes ? options_.num_anchors : 0;
  description_.slots_at_most = options_.num_anchors;
  description_.rows_per_slot = config_.block_size;
  description_.head_rows_at_most = options_.objective_chunk_blocks * (config_.block_size - 1);
  description_.draft_config_json = config_.json;

  auto& fixed = description_.fixed;
  fixed["dflash_draft_num_hidden_layers"] = std::to_string(layers.layers);
  fixed["dflash_target_layer_ids"] = names_of(config_.target_layer_ids);
  fixed["dflash_block_size"] = std::to_string(config_.block_size);
  fixed["dflash_mask_token_id"] = std::to_string(config_.mask_token_id);
  fixed["dflash_num_anchors"] = std::to_string(options_.num_anchors);
  fixed["dflash_loss_decay_gamma"] = std::to_string(options_.loss_decay_gamma);
  fixed["dflash_loss_type"] = name_of(options_.loss_type);
  fixed["dflash_dpace_alpha"] = std::to_string(options_.dpace_alpha);
  fixed["dflash_lk_loss_type"] = name_of(options_.lk);
  fixed["dflash_kl_scale"] = std::to_string(options_.kl_scale);
  fixed["dflash_kl_decay"] = std::to_string(options_.kl_decay);
  fixed["rope_rounding"] = facts.rope_rounding;
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

void Dflash::bind(const TargetTables& tables, Ops&) {
  tables_ = tables;
  for (const auto& [name, table] : {std::pair<const char*, const at::Tensor*>{"embedding", &tables.embedding_vh}, {"head", &tables.head_vh}}) {
    if (!table->defined() || table->dim() != 2 || table->size(0) != config_.layers.vocab_size || table->size(1) != config_.layers.hidden_size) {
      throw Error(ExitCode::kData, std::string("the target's ") + name + " is not [" + std::to_string(config_.layers.vocab_size) + ", " +
                                       std::to_string(config_.layers.hidden_size) + "] as the draft's configuration says",
                  "let vocab_size and hidden_size of the draft's configuration agree with the target");
    }
  }
  inverse_frequencies_ = at::tensor(at::ArrayRef<float>(config_.layers.rope.inverse_frequencies), at::TensorOptions().dtype(at::kFloat))
                             .to(tables.embedding_vh.device());
}

std::string Dflash::prepare(Sample& sample, const SampleContext& context) {
  const at::Tensor& mask = sample.tensors.at("loss_mask");
  std::vector<int64_t> anchors = draft::valid_anchors(mask);
  if (anchors.empty()) {
    return "no two consecutive supervised tokens in its " + std::to_string(sample.tokens) + " tokens, so no block can start";
  }
  if (!context.evaluating && static_cast<int64_t>(anchors.size()) > options_.num_anchors) {
    anchors = draft::choose_anchors(std::move(anchors), context.draw(kAnchorStream, mask.numel()), options_.num_anchors);
  }
  sample.tensors["keep"] = at::ones({static_cast<int64_t>(anchors.size())}, at::TensorOptions().dtype(at::kBool));
  sample.tensors["anchors"] = at::tensor(at::ArrayRef<int64_t>(anchors), at::TensorOptions().dtype(at::kLong));
  return "";
}

void Dflash::finish(Batch& batch) {
  const bool on_gpu = tables_.embedding_vh.defined() && tables_.embedding_vh.is_cuda();
  draft::BlockRowsOptions wanted;
  wanted.block_size = config_.block_size;
  wanted.whole_blocks = options_.uses_dpace();
  wanted.multiple = on_gpu ? (wanted.whole_blocks ? kBlockMultipleCuda : kRowMultipleCuda) : (wanted.whole_blocks ? 1 : kRowMultipleCpu);
  const draft::BlockRows rows =
      draft::collect_block_rows(batch.at("input_ids"), batch.at("loss_mask"), batch.at("anchors"), batch.at("keep"), wanted);
  add_weights(batch, rows.mask_r, rows.slot_r, rows.mask_cp, rows.sequence_c);
  batch.tensors["anchor_ids"] = batch.at("input_ids").gather(1, batch.at("anchors"));
  batch.tensors["row_index"] = rows.index_r;
  batch.tensors["row_label"] = rows.label_r;
  batch.tensors["row_predecessor"] = rows.predecessor_r;
  batch.tensors["row_mask"] = rows.mask_r;
  batch.tensors["row_cell"] = rows.cell_r;
  batch.tensors["grid_mask"] = rows.mask_cp;
  batch.tensors["grid_block"] = rows.block_c;
  batch.tensors["anchor_token"] = rows.anchor_token_c;
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

// Embedding of the blocks: the known token in slot 0 of a live block, the mask token everywhere else. [b, q, h]
at::Tensor Dflash::noise(const Batch& batch) const {
  const at::Tensor& anchors = batch.at("anchors");
  const int64_t b = anchors.size(0), w = anchors.size(1), j = config_.block_size, h = config_.layers.hidden_size;
  const at::Tensor mask_row = tables_.embedding_vh.narrow(0, config_.mask_token_id, 1);
  at::Tensor rows = mask_row.view({1, 1, 1, h}).expand({b, w, j, h}).contiguous();
  const at::Tensor known = at::where(batch.at("keep"), batch.at("anchor_ids"), config_.mask_token_id);
  rows.select(2, 0).copy_(tables_.embedding_vh.index_select(0, known.reshape({-1})).view({b, w, h}));
  return rows.view({b, w * j, h});
}

void Dflash::micro_step(Runner& runner, const Batch& batch) {
  const at::Tensor& anchors = batch.at("anchors");
  const at::Tensor features = batch.at("hidden_states").to(tables_.embedding_vh.scalar_type());
  const int64_t b = features.size(0), s = features.size(1), j = config_.block_size, q = anchors.size(1) * j;
  const draft::Rope& rope = config_.layers.rope;

  const TapeValue context = runner.run(0, {runner.constant(features)})[0];
  const auto integers = anchors.options();
  const draft::Angles there = draft::rope_angles(at::arange(s, integers).unsqueeze(0), inverse_frequencies_, rope.attention_scaling);
  const at::Tensor positions = at::add(anchors.unsqueeze(-1), at::arange(j, integers)).view({b, q});
  const draft::Angles here = draft::rope_angles(positions, inverse_frequencies_, rope.attention_scaling);
  std::vector<TapeValue> inputs(draft::kBlockInputs);
  inputs[draft::kRowsIn] = runner.constant(noise(batch));
  inputs[draft::kContext] = context;
  inputs[draft::kContextCos] = runner.constant(there.cos);
  inputs[draft::kContextSin] = runner.constant(there.sin);
  inputs[draft::kRowsCos] = runner.constant(here.cos);
  inputs[draft::kRowsSin] = runner.constant(here.sin);
  inputs[draft::kAnchors] = runner.constant(anchors);
  inputs[draft::kKeep] = runner.constant(batch.at("keep"));
  for (int64_t i = 0; i < config_.layers.layers; ++i) {
    inputs[draft::kRowsIn] = runner.run(1 + i, inputs)[0];
  }

  const StepInfo& step = runner.step();
  const double alpha = draft::selector_alpha(options_.selector_loss_alpha, options_.selector_warmup_ratio, options_.selector_ramp_ratio,
                                             step.update, step.updates_total);
  const at::Tensor alpha_tensor = at::full({}, alpha, inverse_frequencies_.options());
  std::vector<TapeValue> objective = {inputs[draft::kRowsIn],
                                  runner.constant(tables_.head_vh),
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
  }
  const std::vector<TapeValue> results = runner.run(1 + config_.layers.layers, objective);
  runner.add_loss(results[0]);

  MetricInputs metrics;
  metrics.sums = results[1].tensor();
  metrics.denominator = batch.at("denominator");
  metrics.alpha = alpha_tensor;
  report_sums(runner, metrics, config_, options_);
  if (wants_details) {
    metrics.grids = results[2].tensor();
    metrics.mask_cp = batch.at("grid_mask");
    metrics.block_c = batch.at("grid_block");
    metrics.anchors_bw = anchors;
    report_details(runner, metrics, config_, objective_->candidates());
  }
}

ExportSpec Dflash::export_spec() const {
  ExportSpec spec;
  spec.config_json = config_.json;
  spec.required_config_keys = required_config_keys(config_);
  for (const UnitSpec& unit : description_.units) {
    for (ParameterSpec parameter : unit.parameters) {
      parameter.name = unit.prefix + parameter.name;
      spec.tensors.push_back(std::move(parameter));
    }
  }
  spec.engine_note = "SGLang: --speculative-algorithm DFLASH with --speculative-draft-model-path set to this folder";
  return spec;
}

}  // namespace sf
