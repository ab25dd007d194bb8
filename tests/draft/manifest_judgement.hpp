// tests/draft/manifest_judgement.hpp: what an algorithm's manifest says to settings, without its library.
#pragma once

#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/recipe/rules.hpp"

namespace sf::testing {

/// The ids of all problems that `sets` meet in the shipped plugin.toml of `algorithm`, in their order, with a space between.
inline std::string judged_by(const std::string& algorithm, const std::vector<std::string>& sets) {
  Diagnostics problems;
  const std::string path = std::string(SF_TEST_DATA) + "/../plugins/algorithm/" + algorithm + "/plugin.toml";
  const auto manifest = parse_manifest(read_file(path), path, problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(*manifest, problems);
  RawValues raw;
  std::vector<std::string> all = {"model.target_model_path=\"target\"", "algorithm.name=\"" + algorithm + "\""};
  all.insert(all.end(), sets.begin(), sets.end());
  apply_overrides(all, raw, problems);
  const PlanValues values = schema.resolve(raw, {}, false, problems);
  std::vector<std::string> undecided;
  const std::set<std::string> names = {algorithm};
  if (!problems.has_errors()) {  // rules are asked about values that are ones
    check_rules(manifest->rules, {values, {}, {}, names}, problems, undecided);
  }
  CHECK(undecided.empty());
  std::string found;
  for (const Diagnostic& one : problems.all()) {
    found += (found.empty() ? "" : " ") + one.id;
  }
  return found;
}

}  // namespace sf::testing
