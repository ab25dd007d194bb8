// tests/dflash2/draft_run.hpp: a draft in memory: the plugin's algorithm over the real tape and the single backend, with given weights and batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/train/tape.hpp"
#include "plugins/algorithm/dflash2/dflash.hpp"
#include "plugins/sharding/single/single.hpp"

namespace sf::testing {

struct Ratio {
  at::Tensor numerator, denominator;  // float64
  [[nodiscard]] double value() const;
};

struct StepOutcome {
  double loss = 0;                                // numerators over denominators of the window
  double denominator = 0;
  std::map<std::string, at::Tensor> gradients;    // by full name; missing when nothing touched the parameter
  std::map<std::string, Ratio> metrics;
  at::Tensor rows;                                // [b, q, h], last block's output of the last micro-step

  [[nodiscard]] double metric(const std::string& name) const { return metrics.at(name).value(); }
};

class DraftRun {
 public:
  /// Weights not in `weights` keep what describe() says, drawn from a fixed seed.
  DraftRun(const DflashOptions& options, const ModelFacts& facts, const TargetTables& tables, const std::map<std::string, at::Tensor>& weights,
           at::ScalarType dtype = at::kFloat);

  /// A batch as the loader would hand it over: input_ids, loss_mask, hidden_states, anchors, keep. finish() is called here.
  [[nodiscard]] Batch batch(const std::map<std::string, at::Tensor>& tensors);

  /// One window over these micro-batches.
  StepOutcome train(const std::vector<Batch>& batches, const StepInfo& step = {});
  StepOutcome evaluate(const std::vector<Batch>& batches);

  at::Tensor weight(const std::string& name);     // the tensor itself
  [[nodiscard]] Dflash& algorithm() { return algorithm_; }
  [[nodiscard]] const Description& description() const { return description_; }
  /// The last norm over all rows.
  [[nodiscard]] at::Tensor normed(const at::Tensor& rows);

 private:
  Dflash algorithm_;
  Description description_;
  SingleSharding sharding_;
  std::unique_ptr<TapeRunner> runner_;
};

/// A small DFlash2 configuration as JSON text. `edits` are "key": value pairs in JSON, put over it ("dflash_config.x" goes inside).
[[nodiscard]] std::string tiny_config(const std::map<std::string, std::string>& edits = {});

struct TinyProblem {
  TargetTables tables;
  std::map<std::string, at::Tensor> weights, batch;
};

/// Random weights (selector and convolution too) and a batch of two sequences with gaps in the mask, a dead slot and an anchor at 0.
[[nodiscard]] TinyProblem tiny_problem(const DflashOptions& options, const std::string& config, at::ScalarType dtype = at::kFloat);

}  // namespace sf::testing
