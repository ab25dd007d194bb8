// core/plan/facts.hpp: what the machine and the target model are, as far as it can be known without a GPU
// library or weights.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "core/base/diagnostics.hpp"
#include "core/recipe/value.hpp"

namespace sf {

using Facts = std::map<std::string, Value>;

struct Machine {
  std::int64_t gpus = 0;  // device files of the driver; capability and memory are the engine's to ask
  std::int64_t processors = 1;
};
[[nodiscard]] Machine this_machine();

/// fact.world_size, fact.shard_degree, fact.device.kind ("cpu" or "cuda"), fact.device.count,
/// fact.device.sm (0 on a CPU; left out for a GPU, which only the engine opens), fact.processors, fact.torch.version.
[[nodiscard]] Facts machine_facts(const Machine& machine, const std::string& device,
                                  const std::string& torch_variant, std::int64_t ranks = 1);

/// The numbers of the target's config.json as model.hidden_size, model.vocab_size ..., model.model_type;
/// nested ones (text_config) as if they stood at the top. Problems: model/no-config, model/bad-config (also when
/// numbers contradict each other, or hidden_size or num_hidden_layers is missing).
[[nodiscard]] Facts model_facts(const std::filesystem::path& folder, const Place& place,
                                Diagnostics& problems);

/// Is the named draft configuration there, and a JSON object? Problem: recipe/bad-draft-config. What it says is the algorithm's to judge.
void check_draft_config(const std::filesystem::path& path, const Place& place, Diagnostics& problems);

}  // namespace sf
