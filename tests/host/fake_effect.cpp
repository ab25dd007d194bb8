// single, with options whose effect counts are what the recipe says.
#include <string_view>

#include "plugins/sharding/single/single.hpp"
#include "sf/plugin.hpp"

namespace {

class Counting final : public sf::SingleSharding {
 public:
  explicit Counting(const sf::Options& options)
      : options_(options), at_build_(options.get<int64_t>("at_build")), in_window_(options.get<int64_t>("in_window")) {}

  void build(const std::vector<sf::UnitSpec>& units, const sf::Placement& placement) override {
    SingleSharding::build(units, placement);
    options_.report_effect("at_build", at_build_);
  }
  std::vector<at::Tensor> end_window() override {
    options_.report_effect("in_window", in_window_);
    return SingleSharding::end_window();
  }

 private:
  sf::Options options_;
  int64_t at_build_, in_window_;
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
