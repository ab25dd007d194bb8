#include "tests/dflash2/draft_run.hpp"

#include "core/kernels/ops.hpp"
#include "core/train/initialize.hpp"
#include "sf/json.hpp"

#include <ATen/ATen.h>

namespace sf::testing {
namespace {

// Hands calls on to the tape and remembers what the last block returned.
class Spy final : public Runner {
 public:
  Spy(TapeRunner& runner, int64_t last_block) : runner_(runner), last_block_(last_block) {}

  std::vector<TapeValue> run(int64_t index, const std::vector<TapeValue>& inputs) override {
    std::vector<TapeValue> out = runner_.run(index, inputs);
    if (index == last_block_) {
      rows = out[0].tensor().detach().clone();
    }
    return out;
  }
  TapeValue constant(const at::Tensor& tensor) override { return runner_.constant(tensor); }
  void add_loss(const TapeValue& numerator) override { runner_.add_loss(numerator); }
  void add_metric(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator) override {
    runner_.add_metric(name, numerator, denominator);
  }
  void add_count(std::string_view name, const at::Tensor& count) override { runner_.add_count(name, count); }
  const at::Tensor& seed() const override { return runner_.seed(); }
  Phase phase() const override { return runner_.phase(); }
  const StepInfo& step() const override { return runner_.step(); }

  at::Tensor rows;

 private:
  TapeRunner& runner_;
  int64_t last_block_;
};

std::map<std::string, Ratio> ratios(const TapeRunner& runner) {
  std::map<std::string, Ratio> found;
  for (const auto& [name, sum] : runner.metrics()) {
    found[name] = {sum.numerator, sum.denominator};
  }
  return found;
}

}  // namespace

double Ratio::value() const { return !denominator.defined() ? numerator.item<double>() : numerator.item<double>() / std::max(denominator.item<double>(), 1e-12); }

DraftRun::DraftRun(const DflashOptions& options, const ModelFacts& facts, const TargetTables& tables,
                   const std::map<std::string, at::Tensor>& weights, at::ScalarType dtype)
    : algorithm_(options), description_(algorithm_.describe(facts)) {
  const Placement placement{at::kCPU, dtype};
  sharding_.build(description_.units, placement);
  initialize_weights(description_.units, sharding_.shards(), 1);
  for (Shard& shard : sharding_.shards()) {
    const auto found = weights.find(shard.name);
    if (found != weights.end()) {
      at::NoGradGuard no_grad;
      shard.local.copy_(found->second);
    }
  }
  std::vector<Unit*> units;
  for (size_t i = 0; i < description_.units.size(); ++i) {
    units.push_back(&algorithm_.unit(static_cast<int64_t>(i)));
  }
  algorithm_.bind(tables, cpu_ops());
  runner_ = std::make_unique<TapeRunner>(units, description_.units, sharding_, cpu_ops(), placement, TapeRunner::Options{});
}

Batch DraftRun::batch(const std::map<std::string, at::Tensor>& tensors) {
  Batch made;
  made.tensors = tensors;
  made.rows = tensors.at("input_ids").size(0);
  made.tokens = tensors.at("input_ids").size(1);
  made.slots = tensors.at("anchors").size(1);
  for (int64_t i = 0; i < made.rows; ++i) {
    made.sample_indices.push_back(i);
  }
  algorithm_.finish(made);
  return made;
}

StepOutcome DraftRun::train(const std::vector<Batch>& batches, const StepInfo& step) {
  StepOutcome outcome;
  for (const Batch& one : batches) {
    outcome.denominator += algorithm_.weigh(one);
  }
  runner_->begin_window(at::full({}, 1 / outcome.denominator, at::TensorOptions().dtype(at::kFloat)), step);
  Spy spy(*runner_, algorithm_.config().layers.layers);
  for (size_t i = 0; i < batches.size(); ++i) {
    runner_->begin_micro_step();
    algorithm_.micro_step(spy, batches[i]);
    runner_->backward(i + 1 == batches.size());
  }
  const std::vector<at::Tensor> gradients = sharding_.end_window();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) {
      outcome.gradients[sharding_.shards()[i].name] = gradients[i].clone();
    }
  }
  outcome.loss = runner_->loss_sum().item<double>();
  outcome.metrics = ratios(*runner_);
  outcome.rows = spy.rows;
  return outcome;
}

StepOutcome DraftRun::evaluate(const std::vector<Batch>& batches) {
  StepOutcome outcome;
  at::NoGradGuard no_grad;
  runner_->begin_evaluation({});
  Spy spy(*runner_, algorithm_.config().layers.layers);
  for (const Batch& one : batches) {
    outcome.denominator += algorithm_.weigh(one);
    runner_->begin_micro_step();
    algorithm_.micro_step(spy, one);
  }
  outcome.loss = runner_->loss_sum().item<double>() / outcome.denominator;
  outcome.metrics = ratios(*runner_);
  outcome.rows = spy.rows;
  runner_->end_evaluation();
  return outcome;
}

at::Tensor DraftRun::weight(const std::string& name) {
  for (const Shard& shard : sharding_.shards()) {
    if (shard.name == name) {
      return shard.local;
    }
  }
  throw std::runtime_error("no parameter " + name);
}

at::Tensor DraftRun::normed(const at::Tensor& rows) {
  at::NoGradGuard no_grad;
  return cpu_ops().rms_norm(rows, weight("norm.weight"), algorithm_.config().layers.rms_norm_eps);
}

std::string tiny_config(const std::map<std::string, std::string>& edits) {
  Json config = Json::parse(R"({
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "block_size": 4,
    "num_target_layers": 12,
    "dflash_config": {"target_layer_ids": [2, 7], "mask_token_id": 39, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3,
                      "selector_top_k": 5}
  })");
  for (const auto& [key, value] : edits) {
    const size_t dot = key.find('.');
    Json& place = dot == std::string::npos ? config : *config.find(key.substr(0, dot));
    const std::string name = dot == std::string::npos ? key : key.substr(dot + 1);
    if (value.empty()) {
      place.remove(name);
    } else {
      place.set(name, Json::parse(value));
    }
  }
  return config.dump();
}

TinyProblem tiny_problem(const DflashOptions& options, const std::string& config, at::ScalarType dtype) {
  at::manual_seed(7);
  Dflash algorithm(options);
  ModelFacts facts;
  facts.draft_config_json = config;
  const Description description = algorithm.describe(facts);
  const int64_t h = algorithm.config().layers.hidden_size, v = algorithm.config().layers.vocab_size;
  TinyProblem problem;
  problem.tables = {at::randn({v, h}).to(dtype), at::randn({v, h}).to(dtype)};
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const at::Tensor noise = at::randn(parameter.shape).mul(0.3);
      const bool is_norm = parameter.init == Init::ones;
      problem.weights[unit.prefix + parameter.name] = is_norm ? noise.add(1) : noise;
    }
  }
  const int64_t s = 12;
  problem.batch["input_ids"] = at::randint(v - 1, {2, s}, at::kLong);
  problem.batch["loss_mask"] = at::tensor({0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, /**/ 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, at::kLong).view({2, s});
  problem.batch["hidden_states"] = at::randn({2, s, static_cast<int64_t>(algorithm.config().target_layer_ids.size()) * h}).to(dtype);
  problem.batch["anchors"] = at::tensor({1, 2, 5, 10, 0, 0, 0, 0}, at::kLong).view({2, 4});
  problem.batch["keep"] = at::tensor({1, 1, 1, 1, 1, 0, 0, 0}, at::kLong).view({2, 4}).to(at::kBool);
  return problem;
}

}  // namespace sf::testing
