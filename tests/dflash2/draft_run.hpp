// tests/dflash2/draft_run.hpp: a DFlash or DFlash2 draft in memory, a small configuration and a small problem for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plugins/algorithm/dflash2/dflash.hpp"
#include "tests/draft/algorithm_run.hpp"

namespace sf::testing {

class DraftRun : public AlgorithmRun {
 public:
  /// Weights not in `weights` keep what describe() says, drawn from a fixed seed.
  DraftRun(const DflashOptions& options, const ModelFacts& facts, const TargetTables& tables, const std::map<std::string, at::Tensor>& weights,
           at::ScalarType dtype = at::kFloat, at::Device device = at::kCPU, Ops* ops = nullptr)
      : DraftRun(std::make_unique<Dflash>(options), facts, tables, weights, dtype, device, ops) {}

  [[nodiscard]] Dflash& algorithm() { return *algorithm_; }
  [[nodiscard]] at::Tensor normed(const at::Tensor& rows) { return AlgorithmRun::normed(rows, algorithm_->config().layers.rms_norm_eps); }

 private:
  DraftRun(std::unique_ptr<Dflash> algorithm, const ModelFacts& facts, const TargetTables& tables, const std::map<std::string, at::Tensor>& weights,
           at::ScalarType dtype, at::Device device, Ops* ops)
      : AlgorithmRun(*algorithm, facts, tables, weights, dtype, {}, device, ops), algorithm_(std::move(algorithm)) {}

  std::unique_ptr<Dflash> algorithm_;
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
