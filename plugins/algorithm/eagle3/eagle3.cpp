#include "plugins/algorithm/eagle3/eagle3.hpp"

#include "plugins/algorithm/eagle3/metrics.hpp"
#include "plugins/algorithm/eagle3/units.hpp"
#include "plugins/algorithm/eagle3/unroll_rows.hpp"
#include "sdk/draft/block.hpp"
#include "sdk/draft/block_config.hpp"
#include "sdk/draft/draft_vocabulary.hpp"
#include "sdk/draft/unroll_block.hpp"
#include "sf/error.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace sf {
namespace {

constexpr int64_t kRowMultipleCuda = 128;  // of matrix products; also keeps the number of different shapes small
constexpr int64_t kRowMultipleCpu = 8;

const char* name_of(DistillLoss loss) {
  switch (loss) {
    case DistillLoss::kl: return "none";
    case DistillLoss::alpha: return "alpha";
    case DistillLoss::lambda: return "lambda";
  }
  return "";
}

}  // namespace

Description Eagle3::describe(const ModelFacts& facts) {
  config_ = resolve_eagle3_config(facts, options_);
  const draft::DraftConfig& layers = config_.layers;
  const draft::UnrollBlockShape shape = draft::unroll_block_shape(layers);
  description_ = Description();
  units_.clear();
  kept_w_ = kept_host_w_ = is_kept_v_ = at::Tensor();

  const auto add = [&](const char* name, const char* prefix, const char* group, std::vector<ParameterSpec> parameters, std::unique_ptr<Unit> unit) {
    description_.units.push_back({.name = name, .prefix = prefix, .shard_group = group, .parameters = std::move(parameters)});
    units_.push_back(std::move(unit));
  };
  add("fusion", "", "root", fusion_parameters(config_), std::make_unique<FusionUnit>(config_));
  add("midlayer", "midlayer.", "midlayer", draft::unroll_block_parameters(shape, layers.initializer_range),
      std::make_unique<draft::UnrollBlock>(shape));
  description_.units.back().saved_columns = draft::unroll_block_saved_columns(shape, options_.ttt_length);
  add("objective", "", "root", distill_parameters(config_), std::make_unique<DistillUnit>(config_, options_));
  if (options_.train_embedding) {
    add("embedding", "", "root", embedding_parameters(config_), std::make_unique<EmbeddingUnit>());
  }

  description_.reads = {{.name = "input_ids"},
                        {.name = "loss_mask"},
                        {.name = "aux_hidden_state", .columns = kEagle3Layers * config_.target_hidden, .layer_ids = config_.target_layer_ids},
                        {.name = "hidden_state", .columns = config_.target_hidden, .last_state = true}};
  description_.fields = {{.name = "counted", .axis = Axis::tokens}};
  description_.pooling = Pooling::mean;
  description_.drafted_tokens = options_.ttt_length;
  description_.rows_per_token = options_.ttt_length;
  description_.head_rows_at_most = options_.objective_chunk_rows;
  description_.head_columns = config_.draft_vocabulary;
  description_.needs_embedding = !options_.train_embedding || config_.target_hidden == layers.hidden_size;
  description_.draft_config_json = config_.json;
  description_.buffers = {{.name = "t2d", .shape = {layers.vocab_size}, .dtype = at::kBool},
                          {.name = "d2t", .shape = {config_.draft_vocabulary}, .dtype = at::kLong}};
  description_.buffers_file = options_.vocab_mapping_path;
  description_.wants_token_counts = !config_.has_whole_vocabulary();

  auto& fixed = description_.fixed;
  fixed["eagle3_draft_num_hidden_layers"] = "1";
  fixed["eagle3_ttt_length"] = std::to_string(options_.ttt_length);
  fixed["eagle3_lk_loss_type"] = name_of(options_.loss);
  fixed["eagle3_kl_scale"] = std::to_string(options_.kl_scale);
  fixed["eagle3_kl_decay"] = std::to_string(options_.kl_decay);
  fixed["eagle3_draft_vocab_size"] = std::to_string(config_.draft_vocabulary);
  fixed["eagle3_target_layer_ids"] = draft::comma_list(config_.target_layer_ids);
  fixed["eagle3_train_embedding"] = options_.train_embedding ? "true" : "false";
  fixed["rope_rounding"] = facts.rope_rounding;
  return description_;
}

void Eagle3::bind(const TargetTables& tables, Ops& ops) {
  tables_ = tables;
  ops_ = &ops;
  const int64_t v = config_.layers.vocab_size;
  const auto require = [&](const char* name, const at::Tensor& table, int64_t columns) {
    if (!table.defined() || table.dim() != 2 || table.size(0) != v || table.size(1) != columns) {
      throw Error(ExitCode::kData, std::string("the target's ") + name + " is not [" + std::to_string(v) + ", " + std::to_string(columns) +
                                       "] as the draft's configuration says",
                  "let vocab_size, hidden_size and target_hidden_size of the draft's configuration agree with the target");
    }
  };
  require("head", tables.head_vh, config_.target_hidden);
  if (!options_.train_embedding) {
    require("embedding", tables.embedding_vh, config_.layers.hidden_size);
  }
  inverse_frequencies_ = at::tensor(at::ArrayRef<float>(config_.layers.rope.inverse_frequencies), at::TensorOptions().dtype(at::kFloat))
                             .to(tables.head_vh.device());
  if (config_.has_whole_vocabulary()) {
    std::vector<int64_t> all(static_cast<size_t>(v));
    std::iota(all.begin(), all.end(), 0);
    keep_tokens(all);
  }
}

void Eagle3::keep_tokens(const std::vector<int64_t>& tokens) {
  kept_host_w_ = at::tensor(at::ArrayRef<int64_t>(tokens), at::TensorOptions().dtype(at::kLong));
  at::Tensor is_kept = at::zeros({config_.layers.vocab_size}, at::TensorOptions().dtype(at::kBool));
  is_kept.index_fill_(0, kept_host_w_, 1);
  kept_w_ = kept_host_w_.to(tables_.head_vh.device());
  is_kept_v_ = is_kept.to(tables_.head_vh.device());
}

Remark Eagle3::set_token_counts(const std::vector<TokenCount>& counts) {
  keep_tokens(draft::choose_draft_tokens(counts, config_.draft_vocabulary));
  const at::Tensor is_kept = is_kept_v_.cpu();
  const auto* kept = is_kept.const_data_ptr<bool>();
  int64_t all = 0, covered = 0;
  for (const TokenCount& entry : counts) {
    all += entry.count;
    covered += kept[entry.token] ? entry.count : 0;
  }
  char share[16];
  std::snprintf(share, sizeof share, "%.2f", 100.0 * static_cast<double>(covered) / static_cast<double>(std::max<int64_t>(all, 1)));
  Remark remark;
  remark.text = "draft vocabulary: " + std::to_string(config_.draft_vocabulary) + " of " + std::to_string(config_.layers.vocab_size) + " tokens, " +
                share + " % of the " + std::to_string(all) + " supervised tokens in the training samples";
  constexpr double kUsualCoverage = 0.9;   // below, a draft can't say many of the words that it hears
  if (static_cast<double>(covered) < kUsualCoverage * static_cast<double>(all)) {
    remark.text += ": what the draft can't say, it never gets right; a larger draft_vocab_size would cover more";
    remark.is_warning = true;
  }
  const auto distinct = static_cast<int64_t>(counts.size());
  if (distinct < config_.draft_vocabulary) {
    remark.text += "; only " + std::to_string(distinct) + " different ones occur, so " + std::to_string(config_.draft_vocabulary - distinct) +
                   " that never do fill it up: more samples, or a smaller draft_vocab_size, would use the head better";
    remark.is_warning = true;
  }
  return remark;
}

void Eagle3::set_buffers(const std::map<std::string, at::Tensor>& buffers, const std::string& source) {
  const auto numbers = [&](const char* name, at::ScalarType type) {
    const auto found = buffers.find(name);
    if (found == buffers.end() || found->second.dim() != 1) {
      throw Error(ExitCode::kData, source + (found == buffers.end() ? ": there is no \"" : ": not a list of numbers: \"") + name + "\"",
                  "a vocabulary mapping holds t2d (bool, one entry for each target token) and d2t (int64, one for each draft token)");
    }
    return found->second.to(type).contiguous();
  };
  const at::Tensor t2d = numbers("t2d", at::kByte), d2t = numbers("d2t", at::kLong);
  const auto* offsets = d2t.const_data_ptr<int64_t>();
  const auto* kept = t2d.const_data_ptr<uint8_t>();
  keep_tokens(draft::tokens_of({offsets, offsets + d2t.numel()}, {kept, kept + t2d.numel()}, config_.layers.vocab_size, config_.draft_vocabulary,
                               source));
}

std::map<std::string, at::Tensor> Eagle3::buffers() const {
  if (!kept_host_w_.defined()) {
    return {};
  }
  return {{"t2d", is_kept_v_.cpu()}, {"d2t", at::sub(kept_host_w_, at::arange(kept_host_w_.size(0), kept_host_w_.options()))}};
}

std::string Eagle3::prepare(Sample& sample, const SampleContext&) {
  const at::Tensor& mask = sample.tensors.at("loss_mask");
  at::Tensor counted = mask.clone();
  counted.narrow(0, sample.tokens - 1, 1).zero_();  // behind the last token there is no state to learn from
  if (!at::gt(counted, 0).any().item<bool>()) {
    return "no supervised token before the last of its " + std::to_string(sample.tokens) + " tokens";
  }
  sample.tensors["counted"] = counted;
  return "";
}

void Eagle3::finish(Batch& batch) {
  const bool on_gpu = tables_.head_vh.defined() && tables_.head_vh.is_cuda();
  const UnrollRows rows = collect_unroll_rows(batch.at("input_ids"), batch.at("loss_mask"), batch.at("counted"), options_.ttt_length,
                                              on_gpu ? kRowMultipleCuda : kRowMultipleCpu);
  const auto live = std::count_if(batch.sample_indices.begin(), batch.sample_indices.end(), [](int64_t i) { return i >= 0; });
  const auto scalar = at::TensorOptions().dtype(at::kFloat);
  batch.tensors["live_rows"] = at::full({}, static_cast<double>(live), scalar);
  // The mean is over all rows of real samples, padding included, as the reference has it.
  batch.tensors["divisor"] = at::full({}, static_cast<double>(std::max<int64_t>(live, 1) * batch.at("input_ids").size(1)), scalar);
  batch.tensors["row_base"] = rows.base_r;
  batch.tensors["row_position"] = rows.position_r;
  batch.tensors["row_teacher"] = rows.teacher_r;
  batch.tensors["row_weight"] = rows.weight_r;
  batch.tensors["row_label"] = rows.label_r;
  batch.tensors["chain_row"] = rows.chain_row_cp;
  batch.tensors["chain_mask"] = rows.chain_mask_cp;
  batch.tensors["chain_place"] = rows.chain_place_c;
}

double Eagle3::weigh(const Batch& batch) const { return batch.at("live_rows").item<double>() > 0 ? 1 : 0; }

void Eagle3::micro_step(Runner& runner, const Batch& batch) {
  if (!kept_w_.defined()) {
    throw Error(ExitCode::kInternal, "the draft's vocabulary is not known yet", "the host sets it before the first batch");
  }
  const int64_t uses = options_.ttt_length;
  const at::ScalarType type = tables_.head_vh.scalar_type();
  const at::Tensor& ids = batch.at("input_ids");
  const int64_t b = ids.size(0), s = ids.size(1);

  // Tokens 1 .. s + uses - 1, zeros behind the last.
  const at::Tensor next_ids = at::constant_pad_nd(ids.narrow(1, 1, s - 1), {0, uses});
  const TapeValue embeddings =
      options_.train_embedding
          ? runner.run(kEmbedding, {runner.constant(next_ids)})[0]
          : runner.constant(tables_.embedding_vh.index_select(0, next_ids.reshape({-1})).view({b, s + uses - 1, config_.layers.hidden_size}));

  const at::Tensor target_states = batch.at("hidden_state").to(type).reshape({b * s, config_.target_hidden}).index_select(0, batch.at("row_teacher"));
  VocabularyTeacher ask;
  ask.hidden_rh = target_states;
  ask.head_vh = tables_.head_vh;
  ask.chunk_columns = options_.teacher_chunk_columns;
  if (!config_.has_whole_vocabulary()) {
    ask.kept_w = kept_w_;
    ask.kept_host_w = kept_host_w_;
  }
  const VocabularyTeaching teacher = ops_->vocabulary_teacher(ask);
  const at::Tensor is_known = is_kept_v_.index_select(0, teacher.argmax_r).to(at::kFloat);

  const at::Tensor &base = batch.at("row_base"), &position = batch.at("row_position"), &weight = batch.at("row_weight");
  const draft::Rope& rope = config_.layers.rope;
  std::vector<TapeValue> block(draft::kUnrollHandedOn);
  block[draft::kStates] = runner.run(kFusion, {runner.constant(batch.at("aux_hidden_state").to(type))})[0];
  block[draft::kEmbeddings] = embeddings;
  std::vector<TapeValue> objective(kFactor + 1);
  objective[kTeacherLogits] = runner.constant(teacher.kept_logits_rw);
  objective[kTeacherKeptLogSumExp] = runner.constant(teacher.kept_log_sum_exp_r);
  objective[kTeacherLogSumExp] = runner.constant(teacher.log_sum_exp_r);
  objective[kDivisor] = runner.constant(batch.at("divisor"));
  UnrollOutcome outcome;
  outcome.teacher_r = teacher.argmax_r;
  outcome.divisor = batch.at("divisor");
  for (int64_t k = 0; k < uses; ++k) {
    const draft::Angles angles =
        draft::rope_angles(at::arange(k, k + s, ids.options()).unsqueeze(0), inverse_frequencies_, rope.attention_scaling);
    block[draft::kUnrollCos] = runner.constant(angles.cos);
    block[draft::kUnrollSin] = runner.constant(angles.sin);
    const std::vector<TapeValue> made = runner.run(kMidlayer, block);
    block[draft::kStates] = made[0];
    block.push_back(made[1]);
    block.push_back(made[2]);

    const at::Tensor is_there = at::ge(position, k);  // position j is guessed by row j - k
    const at::Tensor mask = at::mul(weight, is_there);
    objective[kDraftStates] = made[0];
    objective[kRowPlace] = runner.constant(at::where(is_there, at::sub(base, k), base));
    objective[kRowMask] = runner.constant(at::mul(mask, is_known));
    objective[kFactor] = runner.constant(at::mul(runner.seed(), std::pow(kUseDecay, static_cast<double>(k))));
    const std::vector<TapeValue> results = runner.run(kObjective, objective);
    runner.add_loss(results[kNumerator]);
    outcome.uses.push_back({.step_loss = results[kStepLoss].tensor(),
                            .acceptance = results[kAcceptance].tensor(),
                            .guess_r = kept_w_.index_select(0, results[kArgmax].tensor()),
                            .mask_r = mask});
  }
  report_uses(runner, outcome);
  if (runner.phase() == Phase::evaluate || runner.step().wants_details) {
    report_chains(runner, outcome,
                  {.label_r = batch.at("row_label"), .row_cp = batch.at("chain_row"), .mask_cp = batch.at("chain_mask"), .place_c = batch.at("chain_place"),
                   .b = b, .s = s});
  }
}

void Eagle3::derive_metrics(std::map<std::string, double>& metrics) const { derive_unroll_metrics(metrics, options_.ttt_length); }

ExportSpec Eagle3::export_spec() const {
  ExportSpec spec;
  spec.config_json = config_.json;
  spec.required_config_keys = required_eagle3_keys();
  for (const UnitSpec& unit : description_.units) {
    for (ParameterSpec parameter : unit.parameters) {
      parameter.name = unit.prefix + parameter.name;
      spec.tensors.push_back(std::move(parameter));
    }
  }
  spec.buffers = description_.buffers;
  const std::string sglang = "SGLang: --speculative-algorithm EAGLE3 with --speculative-draft-model-path set to this folder";
  const std::string vllm = "vLLM: --speculative-config '{\"method\": \"eagle3\", \"model\": FOLDER, \"num_speculative_tokens\": " +
                           std::to_string(options_.ttt_length) + "}'";
  spec.engine_note = options_.train_embedding && config_.target_hidden == config_.layers.hidden_size
                         ? vllm + " (SGLang puts the target's embedding in the place of the trained one)"
                         : sglang + "; " + vllm;
  if (config_.fc_norm || !config_.norm_output) {
    spec.engine_note += "; fc_norm and norm_output need a version that knows EAGLE3.1";
  }
  return spec;
}

}  // namespace sf
