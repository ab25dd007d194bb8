// A draft's golden case: facts, tables and weights out of the file, numbers and gradients compared with it.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "tests/draft/algorithm_run.hpp"
#include "tests/parity/golden_case.hpp"

namespace sf::testing {

inline constexpr double kLossError = 1e-5, kGradientError = 2e-5, kHiddenError = 1e-4;  // golden/README.md, float32 on a CPU

inline ModelFacts golden_facts(const GoldenCase& golden) {
  ModelFacts facts;
  facts.draft_config_json = golden.text("draft_config");
  facts.bfloat16 = golden.at("in.hidden_states").scalar_type() == at::kBFloat16;
  return facts;
}

inline TargetTables golden_tables(const GoldenCase& golden) {
  return {golden.at("param.target.embed_tokens.weight"), golden.at("param.target.lm_head.weight")};
}

inline std::map<std::string, at::Tensor> golden_weights(const GoldenCase& golden) {
  std::map<std::string, at::Tensor> weights;
  for (const TensorView& view : golden.file().tensors()) {
    if (view.name.starts_with("param.") && !view.name.starts_with("param.target.")) {
      weights[view.name.substr(6)] = golden.at(view.name);
    }
  }
  return weights;
}

/// Every stored weight has its place, and every place a stored weight.
inline void check_places(const Description& description, const std::map<std::string, at::Tensor>& weights) {
  int64_t placed = 0;
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      CAPTURE(parameter.name);
      CHECK(weights.count(unit.prefix + parameter.name) == 1);
      ++placed;
    }
  }
  CHECK(placed == static_cast<int64_t>(weights.size()));
}

inline void check_number(const GoldenCase& golden, const std::string& key, double found, double tolerance) {
  if (!golden.has(key)) {
    return;
  }
  const double expected = golden.number(key);
  CAPTURE(key);
  CAPTURE(found);
  CAPTURE(expected);
  CHECK(std::abs(found - expected) <= tolerance * std::max(1.0, std::abs(expected)));
}

inline void check_gradients(const GoldenCase& golden, const StepOutcome& step, double tolerance) {
  int64_t compared = 0;
  for (const TensorView& view : golden.file().tensors()) {
    if (!view.name.starts_with("grad.")) {
      continue;
    }
    const std::string name = view.name.substr(5);
    CAPTURE(name);
    REQUIRE(step.gradients.count(name) == 1);
    CHECK(relative_error(step.gradients.at(name), golden.at(view.name)) <= tolerance);
    ++compared;
  }
  CHECK(compared == static_cast<int64_t>(step.gradients.size()));
}

}  // namespace sf::testing
