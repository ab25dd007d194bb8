// core/train/acceptance_stats.hpp: what the passes of speculative decoding say about a draft. No LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "sf/json.hpp"

namespace sf {

/// Tokens and passes of one prompt.
struct PromptAcceptance {
  std::string category;
  int64_t passes = 0;
  int64_t tokens = 0;   // 1 + accepted guesses of each pass
};

/// Tokens per pass over prompts, with the 95 % interval of a ratio whose prompts are drawn independently (linearised). Without two prompts that have a pass
/// the interval is the value itself.
struct AcceptanceLength {
  double value = 0, low = 0, high = 0;
  int64_t prompts = 0, passes = 0;

  [[nodiscard]] Json to_json() const;
};
[[nodiscard]] AcceptanceLength acceptance_of(const std::vector<PromptAcceptance>& prompts);
[[nodiscard]] std::map<std::string, AcceptanceLength> acceptance_by_category(const std::vector<PromptAcceptance>& prompts);

/// How passes fared at each drafted token: how many came to it (it was drafted, the answer went on so far, and all before it were accepted), how many were right.
struct PositionAcceptance {
  int64_t reached = 0, accepted = 0;
};
void add_pass(std::vector<PositionAcceptance>& positions, int64_t drafted, int64_t accepted);

/// The report of eval --speculative as one HTML page without anything from elsewhere.
[[nodiscard]] std::string speculative_page(const Json& report);

}  // namespace sf
