// core/doctor/feature_check.hpp: are stored features what they say they are? The target's own head, applied to the stored last state, must tell the
// stored next token from others; the last state must be behind the final norm; deeper layers must look deeper. Shifted, swapped, pre-norm and
// other-model features fail here, and nowhere else before serving.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "sf/json.hpp"

#include "core/data/weight_folder.hpp"

namespace sf {

struct FeatureCheckRequest {
  std::filesystem::path features;
  std::filesystem::path target;
  TargetTableKeys keys = {};
  int64_t max_length = 0;
  int64_t places = 512;              // that are looked at
  std::filesystem::path tokens = {};  // the token file that they should come from; empty: not compared
  std::string named_by = {};          // the recipe's key for `features`, for messages
};

struct FeatureFinding {
  std::string what;  // "the head predicts the next token"
  bool is_fine = true;
  std::string text;  // figures; what is wrong and what it means
};

/// Findings in the order in which a fault of one explains the others. Every record and checksum is read. Throws Error(data) where nothing can be
/// checked: no features, no target, features of another vocabulary.
[[nodiscard]] std::vector<FeatureFinding> check_features(const FeatureCheckRequest& request);

}  // namespace sf
