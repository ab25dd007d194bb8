// tests/dspark/naive_dspark.hpp: DSpark's objective written down once more, straight from its definition: every slot of every block, whole softmaxes, one
// autograd graph in float64. The rows of the last block are taken from the plugin's own backbone, which DFlash's tests judge.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "plugins/algorithm/dspark/dspark.hpp"

namespace sf::testing {

struct DsparkProblem {
  TargetTables tables;
  std::map<std::string, at::Tensor> weights, batch;
};

struct NaiveDspark {
  double ce = 0, l1 = 0, confidence = 0, denominator = 0, loss = 0;  // numerators of the three terms, unweighted; loss of the micro-step
  double accuracy = 0, tau = 0, bias = 0, abs_error = 0;
  double acceptance_length = 0;                                      // left to right, each draft fed with the token that it drafted before
  double schedule_length = 0, schedule_drafted = 0;                  // along the stored tokens, as the metric is defined
  at::Tensor mask_bwj;                                               // E
  std::map<std::string, at::Tensor> gradients;                       // of the objective's own parameters
  at::Tensor rows_gradient;                                          // with respect to the last block's rows [b, q, h]
};

/// `rows_bqh`: the last block's output, before the last norm.
[[nodiscard]] NaiveDspark naive_dspark(const DsparkConfig& config, const DsparkOptions& options, const DsparkProblem& problem, const at::Tensor& rows_bqh);

/// A small DSpark configuration as JSON text. `edits` are "key": value pairs in JSON, put over it ("dflash_config.x" goes inside; "" takes away).
[[nodiscard]] std::string tiny_dspark_config(const std::map<std::string, std::string>& edits = {});

/// Random weights and a batch of two sequences: a gap inside a block with a supervised slot after it, a dead slot, an anchor at 0, a supervised token 0,
/// a block that runs past the end.
[[nodiscard]] DsparkProblem tiny_dspark_problem(const DsparkOptions& options, const std::string& config, at::ScalarType dtype = at::kFloat);

}  // namespace sf::testing
