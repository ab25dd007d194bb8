#include "core/recipe/toml_reader.hpp"

#include <algorithm>
#include <tuple>

namespace sf {
// What TOML++ 3.3 takes for impossible, bytes of a damaged text can reach: its assertions become refusals instead of an abort.
struct TomlAssertion {};
}  // namespace sf
#define TOML_ASSERT(expr) static_cast<void>((expr) || (throw ::sf::TomlAssertion(), false))
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wterminate"  // noexcept accessors assert, too; nothing here calls them
#include <toml++/toml.h>
#pragma GCC diagnostic pop

namespace sf {
namespace {

Place place_of(const toml::source_region& region, const std::string& source) {
  return {source, static_cast<int>(region.begin.line), static_cast<int>(region.begin.column)};
}

TomlNode convert(const toml::node& node, const std::string& source) {
  using Kind = TomlNode::Kind;
  TomlNode out;
  out.place = place_of(node.source(), source);
  if (const toml::table* table = node.as_table()) {
    out.kind = Kind::table;
    for (const auto& [key, value] : *table) {
      out.entries.push_back({std::string(key.str()), place_of(key.source(), source), convert(value, source)});
    }
    // TOML++ sorts by name; a person reads from the top.
    std::stable_sort(out.entries.begin(), out.entries.end(), [](const TomlEntry& a, const TomlEntry& b) {
      return std::tie(a.place.line, a.place.column) < std::tie(b.place.line, b.place.column);
    });
  } else if (const toml::array* array = node.as_array()) {
    out.kind = Kind::array;
    for (const toml::node& item : *array) {
      out.items.push_back(convert(item, source));
    }
  } else if (const auto* boolean = node.as_boolean()) {
    out.kind = Kind::boolean;
    out.boolean = boolean->get();
  } else if (const auto* integer = node.as_integer()) {
    out.kind = Kind::integer;
    out.integer = integer->get();
  } else if (const auto* real = node.as_floating_point()) {
    out.kind = Kind::real;
    out.real = real->get();
  } else if (const auto* string = node.as_string()) {
    out.kind = Kind::string;
    out.string = string->get();
  } else {
    out.kind = Kind::date;
  }
  return out;
}

}  // namespace

const TomlNode* TomlNode::find(std::string_view key) const {
  for (const TomlEntry& entry : entries) {
    if (entry.key == key) {
      return &entry.value;
    }
  }
  return nullptr;
}

const char* TomlNode::kind_text() const {
  switch (kind) {
    case Kind::boolean:
      return "a bool";
    case Kind::integer:
      return "an int";
    case Kind::real:
      return "a float";
    case Kind::string:
      return "a string";
    case Kind::array:
      return "a list";
    case Kind::table:
      return "a table";
    case Kind::date:
      return "a date or time";
  }
  return "nothing";
}

bool parse_toml(std::string_view text, const std::string& source, TomlNode& root, Diagnostics& problems,
                const std::string& id) {
  const std::string fix = id == "recipe/syntax" ? "correct this place: a recipe is TOML, in UTF-8" : "";
  try {
    root = convert(toml::parse(text, source), source);
    return true;
  } catch (const toml::parse_error& error) {
    problems.error({.id = id,
                    .message = "not valid TOML: " + std::string(error.description()),
                    .place = place_of(error.source(), source),
                    .fix = fix});
    return false;
  } catch (const TomlAssertion&) {
    problems.error({.id = id, .message = "not valid TOML", .place = {source, 0, 0}, .fix = fix});
    return false;
  }
}

}  // namespace sf
