#include "plugins/sharding/fsdp2/fsdp2.hpp"

#include "plugins/sharding/fsdp2/slots.hpp"

namespace sf::fsdp {

Settings fsdp2_settings(const Fsdp2Options& options) {
  Settings settings;
  settings.mode = mode_of(options.fsdp_sharding);
  settings.reduce_dtype = options.reduce_dtype == "float32" ? at::kFloat : at::kBFloat16;
  settings.max_reduce_inputs = options.reduce_scatter_max_input_buffers;
  settings.separate_reduction_channel = options.separate_reduce_scatter_group;
  settings.shard_tables = options.shard_frozen_tables;
  settings.cut = row_layout;
  settings.make_whole = [](std::vector<GroupParts> groups, const Placement& placement, GatherCodec* codec) {
    return std::make_unique<Slots>(std::move(groups), placement, codec);
  };
  settings.whole_memory = Slots::memory;
  return settings;
}

}  // namespace sf::fsdp
