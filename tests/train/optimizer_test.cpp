// What the optimizer and the schedules do beyond the golden cases.
#include "core/train/optimizer.hpp"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <limits>

#include "core/train/initialize.hpp"
#include "core/train/schedule.hpp"
#include "core/train/step.hpp"
#include "plugins/sharding/single/single.hpp"
#include "sf/error.hpp"

namespace {

sf::SingleSharding built(at::ScalarType dtype) {
  sf::UnitSpec unit{.name = "u", .prefix = "u.", .shard_group = "root", .parameters = {{.name = "a", .shape = {4, 3}}, {.name = "b", .shape = {5}}}};
  sf::SingleSharding sharding;
  sharding.build({unit}, {.device = at::kCPU, .dtype = dtype});
  for (sf::Shard& shard : sharding.shards()) {
    shard.local.fill_(1.0);
  }
  return sharding;
}

}  // namespace

TEST_CASE("optimizer: a norm or denominator that is not finite, or no denominator, changes nothing") {
  for (const auto& [norm, denominator] : {std::pair<double, double>{NAN, 1.0}, {INFINITY, 1.0}, {1.0, NAN}, {1.0, 0.0}, {1.0, -1.0}}) {
    CAPTURE(norm);
    CAPTURE(denominator);
    sf::SingleSharding sharding = built(at::kBFloat16);
    sf::AdamW optimizer(sharding.shards(), {});
    const at::Tensor gradient = at::full({4, 3}, norm);
    const at::Tensor updated = optimizer.step({gradient, at::Tensor()}, at::full({}, norm), at::full({}, denominator), 0.1);
    CHECK_FALSE(updated.item<bool>());
    CHECK(at::equal(sharding.shards()[0].local, at::ones({4, 3}, at::kBFloat16)));
    CHECK(at::equal(optimizer.states()[0].master, at::ones({4, 3})));
    CHECK(at::equal(optimizer.states()[0].exp_avg, at::zeros({4, 3})));
    CHECK(optimizer.states()[0].steps.item<float>() == 0);
  }
}

TEST_CASE("optimizer: a parameter without gradient is skipped, not decayed, and its step does not count") {
  sf::SingleSharding sharding = built(at::kFloat);
  sf::AdamW optimizer(sharding.shards(), {.weight_decay = 0.5});
  (void)optimizer.step({at::ones({4, 3}), at::Tensor()}, at::full({}, 1.0), at::ones({}), 0.1);
  CHECK(at::equal(sharding.shards()[1].local, at::ones({5})));
  CHECK(optimizer.states()[1].steps.item<float>() == 0);
  CHECK(optimizer.states()[0].steps.item<float>() == 1);
  CHECK(sharding.shards()[0].local.max().item<float>() < 0.96);
}

TEST_CASE("schedule: warm-up starts at base / warm and cosine ends near zero") {
  const sf::LearningRate rate("cosine", 1.0, 0.1, 100);
  CHECK(rate.warm() == 10);
  CHECK(rate.at(0) == doctest::Approx(0.1));
  CHECK(rate.at(9) == doctest::Approx(1.0));
  CHECK(rate.at(10) == doctest::Approx(1.0));
  CHECK(rate.at(55) == doctest::Approx(0.5));
  CHECK(rate.at(99) < 1e-3);
  CHECK(rate.at(99) > 0);
}

TEST_CASE("schedule: what leaves no room after warm-up is refused") {
  CHECK_THROWS_AS(sf::LearningRate("cosine", 1.0, 1.0, 10), sf::Error);
  CHECK_THROWS_AS(sf::LearningRate("cosine", 1.0, 0.0, 0), sf::Error);
  CHECK_THROWS_AS(sf::LearningRate("cosine_reference", 1.0, 0.8, 10), sf::Error);
  CHECK_NOTHROW(sf::LearningRate("cosine", 1.0, 0.9, 10));
}

TEST_CASE("seeds: window, micro and mean pooling, with a micro-step that has no weight") {
  const auto seeds = [](const at::Tensor& d, sf::Pooling pooling) {
    return sf::window_seeds({.own_a = d, .pooled_a = d, .live_ranks_a = (d > 0).to(at::kDouble)}, pooling);
  };
  const at::Tensor d = at::tensor({2.0, 0.0, 6.0}, at::kDouble);
  CHECK(at::allclose(seeds(d, sf::Pooling::window), at::tensor({1.0f / 8, 0.0f, 1.0f / 8})));
  CHECK(at::allclose(seeds(d, sf::Pooling::micro), at::tensor({1.0f / 4, 0.0f, 1.0f / 12})));
  CHECK(at::allclose(seeds(d, sf::Pooling::mean), at::tensor({0.5f, 0.0f, 0.5f})));
  CHECK(at::equal(seeds(at::zeros({2}, at::kDouble), sf::Pooling::window), at::zeros({2})));
}

TEST_CASE("seeds: with ranks D is a sum over them, and mean counts pairs of micro-step and rank") {
  // micro-steps 0, 1, 2 here: D 2, 0, 6; elsewhere 1, 0 and 0, 3 on two more ranks: pooled 3, 0, 9, live on 2, 0 and 2 ranks
  const sf::WindowWeights weights{.own_a = at::tensor({2.0, 0.0, 6.0}, at::kDouble), .pooled_a = at::tensor({3.0, 0.0, 9.0}, at::kDouble),
                                  .live_ranks_a = at::tensor({2.0, 0.0, 2.0}, at::kDouble)};
  CHECK(at::allclose(sf::window_seeds(weights, sf::Pooling::window), at::tensor({1.0f / 12, 0.0f, 1.0f / 12})));
  CHECK(at::allclose(sf::window_seeds(weights, sf::Pooling::micro), at::tensor({1.0f / 6, 0.0f, 1.0f / 18})));
  CHECK(at::allclose(sf::window_seeds(weights, sf::Pooling::mean), at::tensor({0.25f, 0.0f, 0.25f})));
  const sf::WindowWeights dead{.own_a = at::zeros({1}, at::kDouble), .pooled_a = at::full({1}, 4.0, at::kDouble), .live_ranks_a = at::ones({1}, at::kDouble)};
  for (const sf::Pooling pooling : {sf::Pooling::window, sf::Pooling::micro, sf::Pooling::mean}) {
    CHECK(at::equal(sf::window_seeds(dead, pooling), at::zeros({1})));
  }
}

TEST_CASE("initialisation: values depend on seed and name alone, and a slice equals that part of the whole") {
  std::vector<sf::UnitSpec> units = {{.name = "u", .prefix = "u.", .shard_group = "root",
                                      .parameters = {{.name = "w", .shape = {64, 33}}, {.name = "k", .shape = {2, 3, 5}, .init = sf::Init::first_tap}}}};
  sf::SingleSharding sharding;
  sharding.build(units, {});
  sf::initialize_weights(units, sharding.shards(), 5);
  const at::Tensor whole = sharding.shards()[0].local;
  CHECK(whole.std().item<double>() == doctest::Approx(0.02).epsilon(0.05));
  CHECK(std::abs(whole.mean().item<double>()) < 0.002);

  std::vector<sf::Shard> part = {{.name = "u.w", .global_shape = {64, 33}, .begin = 7 * 33, .end = 20 * 33, .trainable = true, .local = at::zeros({13, 33})}};
  sf::initialize_weights(units, part, 5);
  CHECK(at::equal(part[0].local, whole.slice(0, 7, 20)));
  sf::initialize_weights(units, part, 6);
  CHECK_FALSE(at::equal(part[0].local, whole.slice(0, 7, 20)));

  const at::Tensor taps = sharding.shards()[1].local;
  CHECK(at::equal(taps.select(1, 0), at::ones({2, 5})));
  CHECK(taps.sum().item<double>() == 10);
}
