// sdk/testing/tiny_facts.hpp: what the fake host and the checker share about the tiny model.
#pragma once

#include <filesystem>

#include "core/plugin/host_table.hpp"
#include "core/recipe/schema.hpp"
#include "sf/algorithm.hpp"

namespace sf::testing {

/// Folder of this library: where libsf_comm_gloo.so lies, too.
[[nodiscard]] std::filesystem::path library_folder();
/// The services that need tensors: "sf.ops/1".
[[nodiscard]] HostServices tensor_services();
/// [model] of resolved values, as describe() wants it; `target` holds config.json.
[[nodiscard]] ModelFacts facts_from(const PlanValues& values, const std::filesystem::path& target);

}  // namespace sf::testing
