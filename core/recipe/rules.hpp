// core/recipe/rules.hpp: rules over resolved values, facts and capabilities. No loops, no "or", no
// arithmetic: plugin-abi.md 5.2.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/recipe/manifest.hpp"
#include "core/recipe/schema.hpp"

namespace sf {

struct RuleInput {
  const PlanValues& values;
  const std::map<std::string, Value>& facts;  // those that are known here
  const std::set<std::string>& provided;      // capabilities of the stack
  const std::set<std::string>& plugins;       // names in the stack
};

/// Judges all rules. A broken one becomes an error or a warning with its id; its note lists the values it
/// spoke about. A rule that needs an unknown fact goes to `undecided` as "id: needs fact.device.sm". A
/// condition on an option of a plugin outside the stack is false; a key that nobody has, or a test that its
/// type does not have, is plugin/bad-manifest.
void check_rules(const std::vector<Rule>& rules, const RuleInput& input, Diagnostics& problems,
                 std::vector<std::string>& undecided);

/// The capabilities that plugins want and refuse: plugin/unmet-want, plugin/conflict.
void check_capabilities(const std::vector<Manifest>& stack, Diagnostics& problems);

}  // namespace sf
