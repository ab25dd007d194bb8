// core/recipe/toml_reader.hpp: TOML text as a tree in which every key and value knows its line and column.
// TOML++ stays in the .cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/diagnostics.hpp"

namespace sf {

struct TomlEntry;

struct TomlNode {
  enum class Kind { boolean, integer, real, string, array, table, date };

  Kind kind = Kind::table;
  Place place;
  bool boolean = false;
  std::int64_t integer = 0;
  double real = 0;
  std::string string;
  std::vector<TomlNode> items;     // of an array
  std::vector<TomlEntry> entries;  // of a table, in the order of the text

  /// The value at `key` of a table, or null.
  [[nodiscard]] const TomlNode* find(std::string_view key) const;
  /// "a bool", "an int", "a table", ... for messages.
  [[nodiscard]] const char* kind_text() const;
};

struct TomlEntry {
  std::string key;
  Place place;  // of the key
  TomlNode value;
};

/// Parses the whole text. On a syntax error adds a diagnostic `id` with the place and returns false.
bool parse_toml(std::string_view text, const std::string& source, TomlNode& root, Diagnostics& problems,
                const std::string& id);

}  // namespace sf
