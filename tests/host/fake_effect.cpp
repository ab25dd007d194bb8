// single, with options whose effect counts are what the recipe says.
#include <ATen/ATen.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "plugins/sharding/single/single.hpp"
#include "sf/plugin.hpp"

namespace {

class Counting final : public sf::Sharding {
 public:
  explicit Counting(const sf::Options& options)
      : options_(options), at_build_(options.get<int64_t>("at_build")), in_window_(options.get<int64_t>("in_window")), throw_in_(options.get<std::string>("throw_in")), forgetful_(options.get<bool>("forgetful")) {}

  void build(const std::vector<sf::UnitSpec>& units, const sf::Placement& placement) override {
    fail("build");
    single_.build(units, placement);
    options_.report_effect("at_build", at_build_);
  }
  std::vector<at::Tensor> end_window() override {
    fail("end_window");
    options_.report_effect("in_window", in_window_);
    std::vector<at::Tensor> gradients = single_.end_window();
    ++windows_;
    for (at::Tensor& gradient : gradients) {
      gradient = forgetful_ && gradient.defined() ? at::mul(gradient, static_cast<double>(windows_)) : gradient;
    }
    return gradients;
  }
  std::vector<sf::Shard>& shards() override { return single_.shards(); }
  void take_tables(const std::vector<at::Tensor>& tables) override {
    fail("take_tables");
    single_.take_tables(tables);
  }
  sf::ShardingMemory memory(const std::vector<sf::UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const override {
    fail("memory");
    return single_.memory(units, ranks, dtype);
  }
  at::Tensor whole(int64_t unit, int64_t parameter) override {
    fail("whole");
    return single_.whole(unit, parameter);
  }
  void plan(sf::Phase phase, const std::vector<int64_t>& order) override {
    fail("plan");
    single_.plan(phase, order);
  }
  void begin_window() override {
    fail("begin_window");
    single_.begin_window();
  }
  void begin_evaluation() override {
    fail("begin_evaluation");
    single_.begin_evaluation();
  }
  void end_evaluation() override {
    fail("end_evaluation");
    single_.end_evaluation();
  }
  void before_use(int64_t unit, sf::Phase phase, int64_t uses_left) override {
    fail("before_use");
    single_.before_use(unit, phase, uses_left);
  }
  void after_use(int64_t unit, sf::Phase phase, int64_t uses_left) override {
    fail("after_use");
    single_.after_use(unit, phase, uses_left);
  }
  void reduce(int64_t unit, const std::vector<at::Tensor>& gradients) override {
    fail("reduce");
    single_.reduce(unit, gradients);
  }
  at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) override {
    fail("gradient_norm");
    return single_.gradient_norm(gradients);
  }
  void abandon() override { single_.abandon(); }

 private:
  struct Private : std::runtime_error {   // a type that nobody else knows
    using std::runtime_error::runtime_error;
  };
  void fail(const std::string& call) const {
    if (throw_in_ == call) {
      throw Private("told to throw");
    }
  }

  sf::Options options_;
  int64_t at_build_, in_window_;
  std::string throw_in_;
  bool forgetful_;
  int64_t windows_ = 0;
  sf::SingleSharding single_;
};

class FakeEffect final {
 public:
  FakeEffect(const sf::Host&, const sf::Options& options) : sharding_(options) {}

  const void* get_interface(std::string_view id) {
    return id == sf::kShardingInterface ? static_cast<sf::Sharding*>(&sharding_) : nullptr;
  }

 private:
  Counting sharding_;
};

}  // namespace

SF_PLUGIN(FakeEffect, SF_KIND_SHARDING, SF_TIER_TORCH_CXX)
