#include "core/base/error.hpp"
#include "sdk/check/check.hpp"
#include "sdk/testing/lone_plugin.hpp"

namespace sf::check {

PlanValues Candidate::values(const std::vector<std::string>& more) const {
  std::vector<std::string> all = sets;
  all.insert(all.end(), more.begin(), more.end());
  Diagnostics problems;
  PlanValues out = sf::testing::values_of(manifest(), "", all, target, problems);
  if (problems.has_errors()) {
    throw Error(ExitCode::kUsage, problems.text());
  }
  return out;
}

}  // namespace sf::check
