// core/plan/print.hpp: a plan for people and for scripts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/plan/plan.hpp"
#include "sf/json.hpp"

namespace sf {

/// One line of the size table, as the engine computes it; the last one is the total.
struct PlanSize {
  std::string name;
  std::int64_t bytes = 0;
  std::string detail;
};

/// Stack, facts, all values with origin, sizes, undecided rules, warnings.
[[nodiscard]] std::string plan_text(const Plan& plan, const std::vector<PlanSize>& sizes);
/// Stack and the values that are not defaults: what train prints before it starts.
[[nodiscard]] std::string plan_summary(const Plan& plan);
[[nodiscard]] Json plan_json(const Plan& plan, const std::vector<PlanSize>& sizes);
[[nodiscard]] Json diagnostics_json(const Diagnostics& problems);

/// At most this many tokens go into one optimizer step.
[[nodiscard]] std::int64_t tokens_per_step(const Plan& plan);

}  // namespace sf
