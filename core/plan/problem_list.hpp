// core/plan/problem_list.hpp: every kind of problem that the way from recipe to running plugins can report,
// for docs/errors.md. A test compares it with the sources and wants a test for each id.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/recipe/manifest.hpp"

namespace sf {

struct ProblemKind {
  const char* id;
  ExitCode code;        // what the program ends with when this is the problem
  const char* meaning;  // and what to do, where the message itself does not say it
};

[[nodiscard]] std::span<const ProblemKind> problem_kinds();

/// docs/errors.md: exit codes, problems, and the rules of host and plugins.
[[nodiscard]] std::string errors_markdown(const std::vector<Manifest>& manifests);

}  // namespace sf
