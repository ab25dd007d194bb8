// core/doctor/target_facts.hpp: everything that a draft inherits from its target, in one table with where each value comes from. A value taken from the
// wrong place trains without complaint and serves badly.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/data/weight_folder.hpp"

namespace sf {

struct InheritedFact {
  std::string name;    // "rope theta"
  std::string value;   // "100000"
  std::string origin;  // "config.json: rope_parameters.rope_theta"
  std::string doubt;   // why a person should look at it; empty: nothing strange
};

struct TargetFactsRequest {
  std::filesystem::path folder;
  TargetTableKeys keys = {};
  int64_t mask_token_id = -1;                          // model.mask_token_id
  std::filesystem::path draft_config = {};             // model.draft_model_config
  std::vector<int64_t> layer_ids = {};                 // model.target_layer_ids
};

/// Throws Error(data) when the folder is no target.
[[nodiscard]] std::vector<InheritedFact> inherited_facts(const TargetFactsRequest& request);

/// As aligned columns, doubts below their lines.
[[nodiscard]] std::string facts_table(const std::vector<InheritedFact>& facts);

}  // namespace sf
