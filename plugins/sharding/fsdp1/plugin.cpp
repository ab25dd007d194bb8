#include <string_view>

#include "plugins/sharding/fsdp1/fsdp1.hpp"
#include "sf/plugin.hpp"

namespace {

class Fsdp1 final {
 public:
  Fsdp1(const sf::Host& host, const sf::Options& options)
      : host_(host), options_(options), sharding_(settings(options)) {}

  const void* get_interface(std::string_view id) {
    return id == sf::kShardingInterface ? static_cast<sf::Sharding*>(&sharding_) : nullptr;
  }

 private:
  sf::fsdp::Settings settings(const sf::Options& options) {
    sf::fsdp::Settings made = sf::fsdp::fsdp1_settings(options.get<std::string>("training.fsdp_sharding"));
    made.on_built = [this](const sf::fsdp::GroupedSharding& built) {
      if (built.ranks() == 1) {
        host_.log(sf::Level::kInfo, "one rank: nothing is sharded, every parameter is whole");
      } else {
        options_.report_effect("training.fsdp_sharding", built.groups());
      }
    };
    return made;
  }

  sf::Host host_;
  sf::Options options_;
  sf::fsdp::GroupedSharding sharding_;
};

}  // namespace

SF_PLUGIN(Fsdp1, SF_KIND_SHARDING, SF_TIER_TORCH_CXX)
