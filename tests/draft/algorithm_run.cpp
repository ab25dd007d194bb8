#include "tests/draft/algorithm_run.hpp"

#include "core/kernels/ops.hpp"
#include "core/train/initialize.hpp"
#include "core/train/step.hpp"

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
    found[name] = {sum.numerator.cpu(), sum.denominator.defined() ? sum.denominator.cpu() : at::Tensor()};
  }
  return found;
}

}  // namespace

double Ratio::value() const { return !denominator.defined() ? numerator.item<double>() : numerator.item<double>() / std::max(denominator.item<double>(), 1e-12); }

AlgorithmRun::AlgorithmRun(Algorithm& algorithm, const ModelFacts& facts, const TargetTables& tables,
                           const std::map<std::string, at::Tensor>& weights, at::ScalarType dtype, TapeRunner::Options options, at::Device device, Ops* ops)
    : any_(algorithm), description_(algorithm.describe(facts)), device_(device) {
  const Placement placement{device, dtype};
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
    units.push_back(&any_.unit(static_cast<int64_t>(i)));
  }
  const auto here = [&](const at::Tensor& table) { return table.defined() ? table.to(device) : table; };
  Ops& used = ops != nullptr ? *ops : cpu_ops();
  any_.bind({here(tables.embedding_vh), here(tables.head_vh)}, used);
  runner_ = std::make_unique<TapeRunner>(units, description_.units, sharding_, used, placement, std::move(options));
}

Batch AlgorithmRun::batch(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < tensors.at("input_ids").size(0); ++i) {
    indices.push_back(i);
  }
  return batch(tensors, std::move(indices));
}

Batch AlgorithmRun::batch(const std::map<std::string, at::Tensor>& tensors, std::vector<int64_t> sample_indices) {
  Batch made;
  made.tensors = tensors;
  made.rows = tensors.at("input_ids").size(0);
  made.tokens = tensors.at("input_ids").size(1);
  const auto anchors = tensors.find("anchors");
  made.slots = anchors == tensors.end() ? 0 : anchors->second.size(1);
  made.sample_indices = std::move(sample_indices);
  any_.finish(made);
  for (auto& [name, tensor] : made.tensors) {
    tensor = tensor.to(device_);
  }
  return made;
}

StepOutcome AlgorithmRun::train(const std::vector<Batch>& batches, const StepInfo& step) {
  StepOutcome outcome;
  std::vector<double> denominators;
  for (const Batch& one : batches) {
    denominators.push_back(any_.weigh(one));
    outcome.denominator += denominators.back();
  }
  const at::Tensor d_a = at::tensor(denominators, at::TensorOptions().dtype(at::kDouble));
  const at::Tensor seeds = window_seeds({.own_a = d_a, .pooled_a = d_a, .live_ranks_a = (d_a > 0).to(at::kDouble)}, description_.pooling).to(device_);
  runner_->begin_window(seeds[0], step);
  Spy spy(*runner_, static_cast<int64_t>(description_.units.size()) - 2);
  for (size_t i = 0; i < batches.size(); ++i) {
    runner_->begin_micro_step();
    runner_->set_seed(seeds[static_cast<int64_t>(i)]);
    any_.micro_step(spy, batches[i]);
    runner_->backward(i + 1 == batches.size());
  }
  const std::vector<at::Tensor> gradients = sharding_.end_window();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) {
      outcome.gradients[sharding_.shards()[i].name] = gradients[i].cpu().clone();
    }
  }
  outcome.loss = runner_->loss_sum().item<double>();
  outcome.metrics = ratios(*runner_);
  outcome.rows = spy.rows.cpu();
  return outcome;
}

StepOutcome AlgorithmRun::evaluate(const std::vector<Batch>& batches) {
  StepOutcome outcome;
  at::NoGradGuard no_grad;
  runner_->begin_evaluation({});
  Spy spy(*runner_, static_cast<int64_t>(description_.units.size()) - 2);
  for (const Batch& one : batches) {
    outcome.denominator += any_.weigh(one);
    runner_->begin_micro_step();
    any_.micro_step(spy, one);
  }
  outcome.loss = runner_->loss_sum().item<double>() / outcome.denominator;
  outcome.metrics = ratios(*runner_);
  outcome.rows = spy.rows.cpu();
  runner_->end_evaluation();
  return outcome;
}

at::Tensor AlgorithmRun::weight(const std::string& name) {
  for (const Shard& shard : sharding_.shards()) {
    if (shard.name == name) {
      return shard.local;
    }
  }
  throw std::runtime_error("no parameter " + name);
}

at::Tensor AlgorithmRun::normed(const at::Tensor& rows, double eps) {
  at::NoGradGuard no_grad;
  return cpu_ops().rms_norm(rows, weight("norm.weight").cpu(), eps);
}

}  // namespace sf::testing
