#include "core/plan/plan.hpp"

#include <utility>

#include "core/base/text.hpp"

namespace sf {
namespace {

// An empty text or list that nobody asked for is left out: written down it would count as given.
bool is_empty_default(const PlanValue& value) {
  if (value.is_set) {
    return false;
  }
  return std::visit(
      [](const auto& held) {
        if constexpr (requires { held.empty(); }) {
          return held.empty();
        } else {
          return false;
        }
      },
      value.value);
}

bool is_bare_key(std::string_view part) {
  return !part.empty() &&
         part.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") ==
             std::string_view::npos;
}

std::string section_name(const std::string& key) {
  std::vector<std::string> parts = split(key, '.');
  parts.pop_back();
  for (std::string& part : parts) {
    if (!is_bare_key(part)) {
      part = toml_quoted(part);
    }
  }
  return join(parts, ".");
}

}  // namespace

const PlanValue& Plan::at(std::string_view key) const {
  auto found = values.find(std::string(key));
  SF_CHECK(found != values.end(), "no manifest in this plan declares option {}", key);
  return found->second;
}

std::string Plan::recipe_text() const {
  std::map<std::string, std::string> sections;  // "" comes first, as TOML wants it
  for (const auto& [key, value] : values) {
    if (!is_empty_default(value)) {
      std::string name = key.substr(key.rfind('.') + 1);
      sections[section_name(key)] += format("{} = {}  # {}\n", name, toml_text(value.value, value.type), value.origin);
    }
  }
  std::string out;
  for (const auto& [section, lines] : sections) {
    out += section.empty() ? lines : format("\n[{}]\n{}", section, lines);
  }
  return out;
}

}  // namespace sf
