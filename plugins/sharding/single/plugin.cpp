#include <string_view>

#include "single.hpp"
#include "sf/plugin.hpp"

namespace {

class Single final {
 public:
  Single(const sf::Host&, const sf::Options&) {}

  const void* get_interface(std::string_view id) {
    return id == sf::kShardingInterface ? static_cast<sf::Sharding*>(&sharding_) : nullptr;
  }

 private:
  sf::SingleSharding sharding_;
};

}  // namespace

SF_PLUGIN(Single, SF_KIND_SHARDING, SF_TIER_TORCH_CXX)
