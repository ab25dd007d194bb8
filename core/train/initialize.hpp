// core/train/initialize.hpp: first values of parameters. Each element is a function of (seed, parameter's name, its place), so any split over
// ranks starts from the same draft.
#pragma once

#include <cstdint>
#include <vector>

#include "sf/backend.hpp"

namespace sf {

/// Fills every shard as its ParameterSpec says, rounded from float32 to the model's type. `units` is what the backend was built from.
void initialize_weights(const std::vector<UnitSpec>& units, std::vector<Shard>& shards, uint64_t seed);

}  // namespace sf
