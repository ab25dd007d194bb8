#include <string>
#include <string_view>

#include "plugins/sharding/fsdp2/fsdp2.hpp"
#include "sf/plugin.hpp"

namespace {

class Fsdp2 final {
 public:
  Fsdp2(const sf::Host& host, const sf::Options& options)
      : host_(host), options_(options), sharding_(settings(options)) {}

  const void* get_interface(std::string_view id) {
    return id == sf::kShardingInterface ? static_cast<sf::Sharding*>(&sharding_) : nullptr;
  }

 private:
  sf::fsdp::Settings settings(const sf::Options& options) {
    const sf::fsdp::Fsdp2Options read = {
        .fsdp_sharding = options.get<std::string>("training.fsdp_sharding"),
        .reduce_dtype = options.get<std::string>("training.reduce_dtype"),
        .shard_frozen_tables = options.get<bool>("training.shard_frozen_tables"),
        .reduce_scatter_max_input_buffers = options.get<std::int64_t>("training.reduce_scatter_max_input_buffers"),
        .separate_reduce_scatter_group = options.get<bool>("training.separate_reduce_scatter_group")};
    sf::fsdp::Settings made = sf::fsdp::fsdp2_settings(read);
    made.on_built = [this](const sf::fsdp::GroupedSharding& built) {
      if (built.ranks() == 1) {
        host_.log(sf::Level::kInfo, "one rank: nothing is sharded, every parameter is whole");  // rules of the manifest name what has no effect then
        return;
      }
      options_.report_effect("training.fsdp_sharding", built.groups());
      options_.report_effect("training.reduce_dtype", built.groups());
      options_.report_effect("training.reduce_scatter_max_input_buffers", built.reduce_buffers());
      options_.report_effect("training.separate_reduce_scatter_group", built.has_reduction_channel() ? 1 : 0);
    };
    made.on_tables = [this, asked = read.shard_frozen_tables](std::int64_t count) {
      if (count > 0) {
        options_.report_effect("training.shard_frozen_tables", count);
      } else if (asked) {
        host_.log(sf::Level::kInfo, "training.shard_frozen_tables: this draft reads no frozen table, 0 tables are sharded");
      }
    };
    return made;
  }

  sf::Host host_;
  sf::Options options_;
  sf::fsdp::GroupedSharding sharding_;
};

}  // namespace

SF_PLUGIN(Fsdp2, SF_KIND_SHARDING, SF_TIER_TORCH_CXX)
