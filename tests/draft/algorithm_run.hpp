// tests/draft/algorithm_run.hpp: a draft in memory: an algorithm over the real tape and the single backend, with given weights and batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/train/tape.hpp"
#include "plugins/sharding/single/single.hpp"
#include "sf/algorithm.hpp"

namespace sf::testing {

struct Ratio {
  at::Tensor numerator, denominator;  // float64
  [[nodiscard]] double value() const;
};

struct StepOutcome {
  double loss = 0;                                // as the algorithm's pooling makes it of the window
  double denominator = 0;                         // of all micro-steps together
  std::map<std::string, at::Tensor> gradients;    // by full name; missing when nothing touched the parameter
  std::map<std::string, Ratio> metrics;
  // All tensors are on the CPU, wherever they were computed.
  at::Tensor rows;                                // output of the last unit but one in the last micro-step: the last block's rows

  [[nodiscard]] double metric(const std::string& name) const { return metrics.at(name).value(); }
  [[nodiscard]] double numerator_of(const std::string& name) const { return metrics.at(name).numerator.item<double>(); }
  [[nodiscard]] double denominator_of(const std::string& name) const { return metrics.at(name).denominator.item<double>(); }
};

class AlgorithmRun {
 public:
  /// Weights not in `weights` keep what describe() says, drawn from a fixed seed. The algorithm outlives the run, and so do `ops` (null: the host's).
  AlgorithmRun(Algorithm& algorithm, const ModelFacts& facts, const TargetTables& tables, const std::map<std::string, at::Tensor>& weights,
               at::ScalarType dtype, TapeRunner::Options options = {}, at::Device device = at::kCPU, Ops* ops = nullptr);

  /// A batch as the loader would hand it over: the fields that the algorithm reads and those that prepare() leaves. finish() is called here.
  [[nodiscard]] Batch batch(const std::map<std::string, at::Tensor>& tensors);
  /// The same with the samples that its rows are; -1 for a dead one.
  [[nodiscard]] Batch batch(const std::map<std::string, at::Tensor>& tensors, std::vector<int64_t> sample_indices);

  /// One window over these micro-batches.
  StepOutcome train(const std::vector<Batch>& batches, const StepInfo& step = {});
  StepOutcome evaluate(const std::vector<Batch>& batches);

  at::Tensor weight(const std::string& name);     // the tensor itself
  [[nodiscard]] const Description& description() const { return description_; }
  /// The last norm over all rows.
  [[nodiscard]] at::Tensor normed(const at::Tensor& rows, double eps);

 private:
  Algorithm& any_;
  Description description_;
  SingleSharding sharding_;
  at::Device device_;
  std::unique_ptr<TapeRunner> runner_;
};

}  // namespace sf::testing
