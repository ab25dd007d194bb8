// core/recipe/schema.hpp: all options of the host and the chosen plugins, and what a recipe makes of them.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/recipe/manifest.hpp"
#include "core/recipe/recipe_reader.hpp"
#include "core/recipe/value.hpp"

namespace sf {

/// A value with where it comes from.
struct PlanValue {
  Value value;
  Type type = Type::string;
  std::string origin = {};  // "default", "default (fp8 0.3.1)", "qwen3.toml:14", "--set", "--backend", "auto:
                            // no GPU on this machine"
  std::string owner = {};   // "host" or the plugin that declares it
  Place place = {};         // in the recipe, for messages
  bool is_set = false;      // given by recipe or flag; not a default
  bool is_fixed = false;    // may not differ from the checkpoint that is resumed
};
using PlanValues = std::map<std::string, PlanValue>;

class Schema {
 public:
  /// Adds a manifest's options. Two manifests with one key: plugin/option-clash.
  void add(const Manifest& manifest, Diagnostics& problems);

  [[nodiscard]] const Option* find(std::string_view key) const;
  [[nodiscard]] const std::vector<Option>& options() const { return options_; }

  /// Checks and types all raw values, fills in defaults, makes paths absolute. Problems: recipe/unknown-key
  /// (with a suggestion, or the plugin of `installed` that has the key), recipe/moved-key, recipe/missing,
  /// recipe/deprecated (a warning), and those of read_value. `is_partial`: a manifest could not be had, so
  /// unknown keys that may be that plugin's are not reported.
  [[nodiscard]] PlanValues resolve(const RawValues& raw, const std::vector<Manifest>& installed,
                                   bool is_partial, Diagnostics& problems) const;

 private:
  void report_unknown(const std::string& key, const RawValue& raw, const std::vector<Manifest>& installed,
                      Diagnostics& problems) const;

  std::vector<Option> options_;
  std::vector<MovedKey> moved_;
};

}  // namespace sf
