// tests/dspark/dflash_algorithm.hpp: DFlash beside DSpark. Their objectives name their inputs alike, so no file includes both.
#pragma once

#include <string>

#include "sf/algorithm.hpp"

namespace sf::testing {

/// Dflash::prepare with so many anchors.
[[nodiscard]] std::string dflash_prepare(int64_t num_anchors, Sample& sample, const SampleContext& context);

}  // namespace sf::testing
