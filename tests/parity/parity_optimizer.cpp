// 20 steps of AdamW on float32 masters, with clipping and both schedules, against the reference's numbers.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "core/train/optimizer.hpp"
#include "core/train/schedule.hpp"
#include "plugins/sharding/single/single.hpp"
#include "tests/parity/golden_case.hpp"

namespace {

using sf::testing::GoldenCase;
using sf::testing::relative_error;

const std::vector<std::string> kNames = {"0.weight", "0.bias", "1.weight"};

void run_case(const std::string& name, const char* schedule) {
  const GoldenCase golden(name);
  const at::ScalarType dtype = golden.at("param.0.weight").scalar_type();
  sf::UnitSpec unit{.name = "model", .prefix = "", .shard_group = "root", .parameters = {}};
  for (const std::string& parameter : kNames) {
    unit.parameters.push_back({.name = parameter, .shape = golden.at("param." + parameter).sizes().vec()});
  }
  sf::SingleSharding sharding;
  sharding.build({unit}, {.device = at::kCPU, .dtype = dtype});
  for (size_t i = 0; i < kNames.size(); ++i) {
    sharding.shards()[i].local.copy_(golden.at("param." + kNames[i]));
  }
  sf::AdamW optimizer(sharding.shards(), {.weight_decay = 0.01, .max_grad_norm = 0.5});
  const sf::LearningRate rate(schedule, 0.003, 0.2, 20);

  for (int step = 0; step < 20; ++step) {
    CAPTURE(step);
    std::vector<at::Tensor> gradients;
    for (const std::string& parameter : kNames) {
      gradients.push_back(golden.at("in.grad." + std::to_string(step) + "." + parameter).to(at::kFloat));
    }
    const at::Tensor norm = sharding.gradient_norm(gradients);
    CHECK(norm.item<double>() == doctest::Approx(golden.number("out.grad_norm." + std::to_string(step))).epsilon(1e-6));
    CHECK(rate.at(step) == doctest::Approx(golden.number("out.lr." + std::to_string(step))).epsilon(1e-12));
    const at::Tensor updated = optimizer.step(gradients, norm, at::ones({}), rate.at(step));
    CHECK(updated.item<bool>());
    if (!golden.has("out.param." + std::to_string(step) + ".0.weight")) {
      continue;
    }
    for (size_t i = 0; i < kNames.size(); ++i) {
      CAPTURE(kNames[i]);
      const std::string key = std::to_string(step) + "." + kNames[i];
      CHECK(relative_error(optimizer.states()[i].master, golden.at("out.master." + key)) < 1e-6);
      if (dtype == at::kBFloat16) {
        CHECK(at::equal(sharding.shards()[i].local, golden.at("out.param." + key)));
      } else {
        CHECK(relative_error(sharding.shards()[i].local, golden.at("out.param." + key)) < 1e-6);
      }
    }
  }
}

}  // namespace

TEST_CASE("optimizer parity: float32 model, constant rate") { run_case("optimizer_fp32_constant", "constant"); }
TEST_CASE("optimizer parity: float32 model, the reference's cosine") { run_case("optimizer_fp32_cosine", "cosine_reference"); }
TEST_CASE("optimizer parity: bfloat16 model, constant rate") { run_case("optimizer_bf16_constant", "constant"); }
TEST_CASE("optimizer parity: bfloat16 model, the reference's cosine") { run_case("optimizer_bf16_cosine", "cosine_reference"); }
