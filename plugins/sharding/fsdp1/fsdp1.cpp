#include "plugins/sharding/fsdp1/fsdp1.hpp"

#include "plugins/sharding/fsdp1/flat_buffers.hpp"

namespace sf::fsdp {

Settings fsdp1_settings(const std::string& fsdp_sharding) {
  Settings settings;
  settings.mode = mode_of(fsdp_sharding);
  settings.cut = flat_layout;
  settings.cut_frozen_gradients = true;
  settings.make_whole = [](std::vector<GroupParts> groups, const Placement& placement, GatherCodec*) {
    return std::make_unique<FlatBuffers>(std::move(groups), placement);
  };
  settings.whole_memory = FlatBuffers::memory;
  return settings;
}

}  // namespace sf::fsdp
