// A draft's golden case: facts, tables and weights out of the file, numbers and gradients compared with it. SF_TEST_DEVICE=cuda computes on a GPU, with the
// same tolerances. And a small random draft in bfloat16 on the GPU beside its float32 twin on the CPU.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "tests/draft/algorithm_run.hpp"
#include "tests/kernels/gpu.hpp"
#include "tests/parity/golden_case.hpp"

namespace sf::testing {

inline constexpr double kLossError = 1e-5, kGradientError = 2e-5, kHiddenError = 1e-4;  // golden/README.md, float32 on a CPU

inline at::Device golden_device() {
  const char* wanted = std::getenv("SF_TEST_DEVICE");
  const bool on_gpu = wanted != nullptr && std::string(wanted) == "cuda";
  REQUIRE((!on_gpu || sf::test::has_gpu()));
  return on_gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
}

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

inline at::Tensor rounded(const at::Tensor& tensor) { return tensor.to(at::kBFloat16).to(at::kFloat); }

/// Weights as a trained draft's could be, exact in bfloat16: norms near 1, the rest Normal(0, `std`).
inline std::map<std::string, at::Tensor> random_weights(const Description& description, double std) {
  std::map<std::string, at::Tensor> weights;
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const at::Tensor noise = at::randn(parameter.shape);
      weights[unit.prefix + parameter.name] = rounded(parameter.init == Init::ones ? noise.mul(0.1).add(1) : noise.mul(std));
    }
  }
  return weights;
}

/// How far a window in bfloat16 is from one in float32.
struct Difference {
  double loss = 0;                         // relative
  std::map<std::string, double> gradients; // relative in the norm
  std::map<std::string, double> angles;    // 1 - cosine
  std::string worst;                       // gradient
  [[nodiscard]] double most() const { return gradients.at(worst); }
};

inline Difference difference(const StepOutcome& found, const StepOutcome& expected) {
  Difference d{.loss = std::abs(found.loss - expected.loss) / std::abs(expected.loss)};
  REQUIRE(found.gradients.size() == expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    CAPTURE(name);
    REQUIRE(found.gradients.count(name) == 1);
    const at::Tensor other = found.gradients.at(name).to(at::kDouble), wanted = gradient.to(at::kDouble);
    REQUIRE(wanted.norm().item<double>() > 0);
    d.gradients[name] = relative_error(other, wanted);
    d.angles[name] = 1 - at::sum(other * wanted).item<double>() / (other.norm() * wanted.norm()).item<double>();
    if (d.worst.empty() || d.gradients.at(name) > d.most()) {
      d.worst = name;
    }
  }
  return d;
}

/// The loss within 5e-3, each gradient within 4e-2 in the norm and 0.999 in direction, those in `wider` within what is given there. A tensor near 4e-2
/// wants an explanation: plain ATen in bfloat16 has about 0.01.
inline void check_near(const Difference& d, const std::map<std::string, double>& wider = {}) {
  CHECK(d.loss <= 5e-3);
  for (const auto& [name, error] : d.gradients) {
    CAPTURE(name);
    const auto limit = wider.find(name);
    CHECK(error <= (limit == wider.end() ? 4e-2 : limit->second));
    CHECK(d.angles.at(name) <= (limit == wider.end() ? 1e-3 : limit->second * limit->second));
  }
}

/// The same window in bfloat16 on the GPU and in float32 on the CPU, as check_near wants it. Two runs on the GPU: the same bits.
inline void compare_bfloat16_on_gpu(const std::function<StepOutcome(at::Device, at::ScalarType)>& run, const std::map<std::string, double>& wider = {}) {
  if (!sf::test::has_gpu()) {
    return;
  }
  const StepOutcome found = run(at::Device(at::kCUDA, 0), at::kBFloat16), again = run(at::Device(at::kCUDA, 0), at::kBFloat16), expected = run(at::kCPU, at::kFloat);
  CHECK(found.loss == again.loss);
  for (const auto& [name, gradient] : found.gradients) {
    CAPTURE(name);
    CHECK(at::equal(gradient, again.gradients.at(name)));
  }
  const Difference d = difference(found, expected);
  check_near(d, wider);
  std::printf("bfloat16 on the GPU: loss %.6f, float32 on the CPU %.6f (%.1e); gradients differ by at most %.4f (%s)\n", found.loss, expected.loss, d.loss, d.most(),
              d.worst.c_str());
}

}  // namespace sf::testing
