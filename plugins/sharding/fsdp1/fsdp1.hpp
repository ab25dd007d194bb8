// plugins/sharding/fsdp1: one flat buffer for each shard group, cut into equal parts over the ranks wherever that falls in a parameter. A group that
// has a trainable parameter reduces its whole buffer, frozen parameters included. Addresses of whole parameters are not stable.
#pragma once

#include <string>

#include "plugins/sharding/fsdp/grouped_sharding.hpp"

namespace sf::fsdp {

[[nodiscard]] Settings fsdp1_settings(const std::string& fsdp_sharding);

}  // namespace sf::fsdp
