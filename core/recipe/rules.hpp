// core/recipe/rules.hpp: rules over resolved values, facts and capabilities. No loops, no "or", no
// arithmetic: plugin-abi.md 5.2.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
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

/// Judges all rules; "{key}" in a message is the value of that option. A broken one becomes an error or a warning with its id; its note lists the values it
/// spoke about. A rule that needs an unknown fact goes to `undecided` as "id: needs fact.device.sm". A
/// condition on an option of a plugin outside the stack is false; a key that nobody has, or a test that its
/// type does not have, is plugin/bad-manifest.
void check_rules(const std::vector<Rule>& rules, const RuleInput& input, Diagnostics& problems,
                 std::vector<std::string>& undecided);

/// A rule of the host that is met while a run goes on (phase = "run"), with "{name}" in its texts replaced by the value of that name. An id that
/// host.toml lacks is an internal error.
struct RunRule {
  std::string message, why, fix;
};
[[nodiscard]] RunRule run_rule(std::string_view id, const std::map<std::string, std::string>& values);

/// Options of the host that are for a plugin of the stack: one that differs from its default and that no manifest claims is
/// recipe/not-offered; a claim on a key that the host lacks is plugin/bad-manifest. `installed` names who would claim it.
void check_claims(const std::vector<Manifest>& stack, const std::vector<Manifest>& installed, const PlanValues& values, Diagnostics& problems);

/// The capabilities that plugins want and refuse: plugin/unmet-want, plugin/conflict.
void check_capabilities(const std::vector<Manifest>& stack, Diagnostics& problems);

}  // namespace sf
