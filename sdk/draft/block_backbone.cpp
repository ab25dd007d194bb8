#include "sdk/draft/block_backbone.hpp"

#include <ATen/ATen.h>

#include "sdk/draft/block.hpp"
#include "sdk/draft/block_rows.hpp"
#include "sdk/draft/draft_memory.hpp"
#include "sf/error.hpp"

#include <algorithm>

namespace sf::draft {
namespace {

constexpr const char* kAnchorStream = "anchors";
constexpr const char* kFeatures = "hidden_states";
constexpr const char* kContextMemory = "context";

}  // namespace

void BlockBackbone::describe(const BlockConfig& config, const BlockConvolution& convolution, Description& description,
                             std::vector<std::unique_ptr<Unit>>& units) {
  config_ = config;
  const DraftConfig& layers = config.layers;
  const auto feature_columns = static_cast<int64_t>(config.target_layer_ids.size()) * layers.hidden_size;
  description.units.push_back({.name = "context",
                               .prefix = "",
                               .shard_group = "root",
                               .parameters = context_parameters(layers.hidden_size, feature_columns, layers.initializer_range)});
  units.push_back(std::make_unique<ContextUnit>(layers.rms_norm_eps));
  for (int64_t i = 0; i < layers.layers; ++i) {
    BlockShape shape = block_shape(layers, i, config.block_size);
    shape.conv_taps = convolution.taps;
    shape.conv_groups = convolution.groups;
    const std::string name = "block." + std::to_string(i);
    description.units.push_back({.name = name,
                                 .prefix = "layers." + std::to_string(i) + ".",
                                 .shard_group = name,
                                 .parameters = block_parameters(shape, layers.initializer_range),
                                 .saved_columns = block_saved_columns(shape)});
    units.push_back(std::make_unique<DraftBlock>(shape));
  }
  description.reads = {{.name = "input_ids"},
                       {.name = "loss_mask"},
                       {.name = kFeatures, .columns = feature_columns, .layer_ids = config.target_layer_ids}};
  description.fields = {{.name = "anchors", .axis = Axis::slots}, {.name = "keep", .axis = Axis::slots}};
  description.rows_per_slot = config.block_size;
}

void BlockBackbone::bind(const TargetTables& tables) {
  tables_ = tables;
  const DraftConfig& layers = config_.layers;
  for (const auto& [name, table] : {std::pair<const char*, const at::Tensor*>{"embedding", &tables.embedding_vh}, {"head", &tables.head_vh}}) {
    if (!table->defined() || table->dim() != 2 || table->size(0) != layers.vocab_size || table->size(1) != layers.hidden_size) {
      throw Error(ExitCode::kData, std::string("the target's ") + name + " is not [" + std::to_string(layers.vocab_size) + ", " +
                                       std::to_string(layers.hidden_size) + "] as the draft's configuration says",
                  "let vocab_size and hidden_size of the draft's configuration agree with the target");
    }
  }
  inverse_frequencies_ = at::tensor(at::ArrayRef<float>(layers.rope.inverse_frequencies), at::TensorOptions().dtype(at::kFloat))
                             .to(tables.embedding_vh.device());
}

// Embedding of the blocks: the known token in slot 0 of a live block, the mask token everywhere else. [b, q, h]
at::Tensor BlockBackbone::noise(const at::Tensor& anchor_ids_bw, const at::Tensor& keep_bw) const {
  const int64_t b = keep_bw.size(0), w = keep_bw.size(1), j = config_.block_size, h = config_.layers.hidden_size;
  const at::Tensor mask_row = tables_.embedding_vh.narrow(0, config_.mask_token_id, 1);
  at::Tensor rows = mask_row.view({1, 1, 1, h}).expand({b, w, j, h}).contiguous();
  const at::Tensor known = at::where(keep_bw, anchor_ids_bw, config_.mask_token_id);
  rows.select(2, 0).copy_(tables_.embedding_vh.index_select(0, known.reshape({-1})).view({b, w, h}));
  return rows.view({b, w * j, h});
}

// All inputs of a block but the context, which comes from a unit.
std::vector<at::Tensor> BlockBackbone::block_inputs(const Rows& rows) const {
  const Rope& rope = config_.layers.rope;
  const auto integers = rows.anchors_bw.options();
  const Angles there = rope_angles(at::arange(rows.context_tokens, integers).unsqueeze(0), inverse_frequencies_, rope.attention_scaling);
  const at::Tensor positions = at::add(rows.anchors_bw.unsqueeze(-1), at::arange(config_.block_size, integers)).view({rows.noise_bqh.size(0), -1});
  const Angles here = rope_angles(positions, inverse_frequencies_, rope.attention_scaling);
  std::vector<at::Tensor> inputs(kBlockInputs);
  inputs[kRowsIn] = rows.noise_bqh;
  inputs[kContextCos] = there.cos;
  inputs[kContextSin] = there.sin;
  inputs[kRowsCos] = here.cos;
  inputs[kRowsSin] = here.sin;
  inputs[kAnchors] = rows.anchors_bw;
  inputs[kKeep] = rows.keep_bw;
  return inputs;
}

TapeValue BlockBackbone::run(Runner& runner, const Batch& batch) const {
  const at::Tensor &anchors = batch.at("anchors"), &keep = batch.at("keep");
  const at::Tensor features = batch.at(kFeatures).to(tables_.embedding_vh.scalar_type());
  const std::vector<at::Tensor> given = block_inputs(
      {.noise_bqh = noise(batch.at("anchor_ids"), keep), .anchors_bw = anchors, .keep_bw = keep, .context_tokens = features.size(1)});
  std::vector<TapeValue> inputs(kBlockInputs);
  inputs[kContext] = runner.run(0, {runner.constant(features)})[0];
  for (size_t i = 0; i < kBlockInputs; ++i) {
    if (i != kContext) {
      inputs[i] = runner.constant(given[i]);
    }
  }
  for (int64_t i = 0; i < config_.layers.layers; ++i) {
    inputs[kRowsIn] = runner.run(1 + i, inputs)[0];
  }
  return inputs[kRowsIn];
}

void BlockBackbone::remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const {
  put_rows(memory, kContextMemory, units.run(0, {seen.features.at(kFeatures)})[0], seen);
}

at::Tensor BlockBackbone::draft_rows(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const {
  const at::Tensor& context = memory.tensors.at(kContextMemory);
  const at::Tensor anchors_bw = question.positions_b.unsqueeze(1);
  const at::Tensor keep_bw = at::ones(anchors_bw.sizes(), anchors_bw.options().dtype(at::kBool));
  const int64_t seen = std::max<int64_t>(1, question.positions_b.max().item<int64_t>());  // rows behind a sequence's known token are hidden from it
  std::vector<at::Tensor> inputs = block_inputs(
      {.noise_bqh = noise(question.known_ids_b.unsqueeze(1), keep_bw), .anchors_bw = anchors_bw, .keep_bw = keep_bw, .context_tokens = seen});
  inputs[kContext] = context.narrow(1, 0, seen).contiguous();
  for (int64_t i = 0; i < config_.layers.layers; ++i) {
    inputs[kRowsIn] = units.run(1 + i, inputs)[0];
  }
  return inputs[kRowsIn];
}

std::string draw_anchors(Sample& sample, const SampleContext& context, int64_t num_anchors) {
  const at::Tensor& mask = sample.tensors.at("loss_mask");
  std::vector<int64_t> anchors = valid_anchors(mask);
  if (anchors.empty()) {
    return "no two consecutive supervised tokens in its " + std::to_string(sample.tokens) + " tokens, so no block can start";
  }
  if (!context.evaluating && static_cast<int64_t>(anchors.size()) > num_anchors) {
    anchors = choose_anchors(std::move(anchors), context.draw(kAnchorStream, mask.numel()), num_anchors);
  }
  sample.tensors["keep"] = at::ones({static_cast<int64_t>(anchors.size())}, at::TensorOptions().dtype(at::kBool));
  sample.tensors["anchors"] = at::tensor(at::ArrayRef<int64_t>(anchors), at::TensorOptions().dtype(at::kLong));
  return "";
}

void add_anchor_ids(Batch& batch) { batch.tensors["anchor_ids"] = batch.at("input_ids").gather(1, batch.at("anchors")); }

void fix_block_settings(std::map<std::string, std::string>& fixed, const std::string& prefix, const BlockConfig& config, int64_t num_anchors,
                        const std::string& rope_rounding) {
  fixed[prefix + "_draft_num_hidden_layers"] = std::to_string(config.layers.layers);
  fixed[prefix + "_target_layer_ids"] = comma_list(config.target_layer_ids);
  fixed[prefix + "_block_size"] = std::to_string(config.block_size);
  fixed[prefix + "_mask_token_id"] = std::to_string(config.mask_token_id);
  fixed[prefix + "_num_anchors"] = std::to_string(num_anchors);
  fixed["rope_rounding"] = rope_rounding;
}

std::vector<ParameterSpec> full_parameters(const std::vector<UnitSpec>& units) {
  std::vector<ParameterSpec> list;
  for (const UnitSpec& unit : units) {
    for (ParameterSpec parameter : unit.parameters) {
      parameter.name = unit.prefix + parameter.name;
      list.push_back(std::move(parameter));
    }
  }
  return list;
}

}  // namespace sf::draft
