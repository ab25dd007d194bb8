// plugins/transform/fp8/skip.hpp: which linears a pattern of plugin.fp8.skip names.
#pragma once

#include <string_view>

namespace sf::fp8 {

/// The last parts of a dotted name, one by one; * matches any run of characters within a part. "mlp.*" names "block.0.mlp.up_proj".
[[nodiscard]] bool names_linear(std::string_view pattern, std::string_view name);

}  // namespace sf::fp8
