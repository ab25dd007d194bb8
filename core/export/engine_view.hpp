// core/export/engine_view.hpp: an exported draft as serving engines read it. In: the folder and the target's config.json. Out: everything that an engine would
// stumble over or, worse, take in silence. It knows nothing of the trainer: names and shapes follow from config.json alone, by the engines' own model
// definitions (SGLang, vLLM), so a mistake of the trainer shows here. No LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "sf/json.hpp"

namespace sf {

struct EngineView {
  std::vector<std::string> problems;   // one sentence each; empty: an engine reads what was meant
  std::string architecture;            // empty when config.json has none
  Json facts = Json::object();         // what an engine computes with: "rope_theta", "target_layer_ids", "block_size" ...
};

/// Reads config.json and model.safetensors. `target`: the target's config.json, null when it is not known. Never throws for what the folder holds.
[[nodiscard]] EngineView look_as_engine(const std::filesystem::path& folder, const Json& target);

/// How each engine is started with the draft, a shell command each, by engine.
[[nodiscard]] Json serve_commands(const std::string& architecture, const std::filesystem::path& folder, const std::filesystem::path& target, int64_t drafted_tokens);

}  // namespace sf
