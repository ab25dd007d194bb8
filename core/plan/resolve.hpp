// core/plan/resolve.hpp: one pass from a recipe to a Plan, or to all that is wrong with it. Reads files,
// opens no plugin.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/base/error.hpp"
#include "core/plan/facts.hpp"
#include "core/plan/plan.hpp"
#include "core/plugin/catalog.hpp"
#include "core/plugin/stack.hpp"

namespace sf {

struct ResolveRequest {
  std::filesystem::path recipe;
  std::vector<std::string> overrides = {};     // --set, in order
  std::string backend = {};                    // --backend; empty: as the recipe says
  std::vector<std::string> unsafe_paths = {};  // recorded in the plan
  /// Another algorithm than the recipe's: keys that only the recipe's own knows are left out, and so are the draft's configuration and, where the two
  /// do not draft in the same way, its layers and block size.
  std::string instead = {};
  bool will_run = false;                // false: plan; a device that this machine lacks is then a warning
  std::optional<Machine> machine = {};  // for tests; else this machine
  std::string torch_variant = {};
  PlanRanks ranks = {};
};

struct Resolution {
  std::optional<Plan> plan;  // nothing when there are errors
  Stack stack;               // points into the catalog
  Diagnostics problems;      // warnings of a good plan too
  /// 2 recipe, 3 a plugin was refused, 4 the target, 5 device: the first of these kinds that has an error.
  ExitCode code = ExitCode::kOk;
};

/// `catalog_problems`: what making the catalog found; they count as problems of this plan.
[[nodiscard]] Resolution resolve(const ResolveRequest& request, const Catalog& catalog,
                                 const Diagnostics& catalog_problems);

/// What kind of failure a diagnostic's id stands for.
[[nodiscard]] ExitCode exit_code_of(const Diagnostics& problems);

}  // namespace sf
