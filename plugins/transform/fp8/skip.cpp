#include "plugins/transform/fp8/skip.hpp"

namespace sf::fp8 {
namespace {

bool matches_part(std::string_view pattern, std::string_view part) {
  if (pattern.empty()) {
    return part.empty();
  }
  if (pattern.front() == '*') {
    return matches_part(pattern.substr(1), part) || (!part.empty() && matches_part(pattern, part.substr(1)));
  }
  return !part.empty() && pattern.front() == part.front() && matches_part(pattern.substr(1), part.substr(1));
}

// The part behind the last dot, cut off.
std::string_view take_last(std::string_view& name) {
  const size_t dot = name.rfind('.');
  const std::string_view part = dot == std::string_view::npos ? name : name.substr(dot + 1);
  name = dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
  return part;
}

}  // namespace

bool names_linear(std::string_view pattern, std::string_view name) {
  if (pattern.empty() || pattern.front() == '.') {  // an empty part names nothing
    return false;
  }
  while (!pattern.empty()) {
    if (name.empty() || !matches_part(take_last(pattern), take_last(name))) {
      return false;
    }
  }
  return true;
}

}  // namespace sf::fp8
