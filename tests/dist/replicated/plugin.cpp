// The smallest backend with ranks: `single` on each, and one all-reduce for each gradient.
#include <ATen/ATen.h>

#include <string_view>

#include "plugins/sharding/single/single.hpp"
#include "sf/plugin.hpp"

namespace {

class Sharding final : public sf::Sharding {
 public:
  void build(const std::vector<sf::UnitSpec>& units, const sf::Placement& placement) override {
    comm_ = placement.comm;
    single_.build(units, placement);
  }
  std::vector<sf::Shard>& shards() override { return single_.shards(); }
  at::Tensor whole(int64_t unit, int64_t parameter) override { return single_.whole(unit, parameter); }
  void begin_window() override { single_.begin_window(); }
  void before_use(int64_t, sf::Phase, int64_t) override {}
  void after_use(int64_t, sf::Phase, int64_t) override {}
  void reduce(int64_t unit, const std::vector<at::Tensor>& gradients) override { single_.reduce(unit, gradients); }
  std::vector<at::Tensor> end_window() override {
    std::vector<at::Tensor> gradients = single_.end_window();
    for (size_t i = 0; i < gradients.size() && comm_ != nullptr; ++i) {
      if (gradients[i].defined()) {
        comm_->all_reduce(gradients[i], sf::Reduction::sum, single_.shards()[i].name)->wait();
      }
    }
    return gradients;
  }
  at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) override { return single_.gradient_norm(gradients); }

 private:
  sf::SingleSharding single_;
  sf::Comm* comm_ = nullptr;
};

class Replicated final {
 public:
  Replicated(const sf::Host&, const sf::Options&) {}
  const void* get_interface(std::string_view id) { return id == sf::kShardingInterface ? static_cast<sf::Sharding*>(&sharding_) : nullptr; }

 private:
  Sharding sharding_;
};

}  // namespace

SF_PLUGIN(Replicated, SF_KIND_SHARDING, SF_TIER_TORCH_CXX)
