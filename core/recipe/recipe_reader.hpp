// core/recipe/recipe_reader.hpp: a recipe with its base recipes and --set, as a flat list of keys with values
// and places. Nothing is judged here but the text itself; schema.hpp says what the keys mean.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/recipe/toml_reader.hpp"

namespace sf {

struct RawValue {
  TomlNode node;
  Place place;                   // of the key
  std::string origin;            // "qwen3.toml:14", "--set", "--backend"
  std::filesystem::path folder;  // paths in the value are relative to this one
};

/// By full key. A later source has replaced an earlier one.
using RawValues = std::map<std::string, RawValue>;

/// Reads `path` and the recipe that its top-level key `include` names (relative to the file), base first.
/// Problems: recipe/not-readable, recipe/syntax, recipe/include-cycle, recipe/wrong-type.
[[nodiscard]] RawValues read_recipe(const std::filesystem::path& path, Diagnostics& problems);

/// Applies "a.b=c" texts in order. The right side is TOML; a bare word counts as a string. Paths are relative
/// to the current folder. Problem: recipe/bad-override.
void apply_overrides(const std::vector<std::string>& overrides, RawValues& values, Diagnostics& problems);

/// A raw string or list of strings from a flag, for --backend.
[[nodiscard]] RawValue raw_text(const std::string& text, const std::string& origin);
[[nodiscard]] RawValue raw_texts(const std::vector<std::string>& texts, const std::string& origin);

}  // namespace sf
