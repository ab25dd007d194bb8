// core/recipe/render.hpp: help, Markdown and JSON schema, all from manifests, so that no default is written
// twice.
#pragma once

#include <string>
#include <vector>

#include "core/recipe/manifest.hpp"
#include "sf/json.hpp"

namespace sf {

/// The options as a terminal shows them, `width` columns wide:
///   training.batch_size   int, default 1 samples, 1 to 65536
///       samples in a micro-step, on each rank
[[nodiscard]] std::string options_help(const std::vector<Option>& options, std::size_t width);

/// Range, choices and default in a few words: "int, default 16 steps, 1 to 1024, fixed on resume".
[[nodiscard]] std::string option_summary(const Option& option);

/// Tables of options by section and the rules, for docs/recipes.md.
[[nodiscard]] std::string recipes_markdown(const std::vector<Manifest>& manifests);

/// A JSON schema (draft-07) of recipes, for editors.
[[nodiscard]] Json recipe_schema(const std::vector<Manifest>& manifests);

/// One option, one manifest, for --json.
[[nodiscard]] Json option_json(const Option& option);
[[nodiscard]] Json manifest_json(const Manifest& manifest);

[[nodiscard]] Json value_json(const Value& value);

/// docs/plugins.md: each plugin with what it provides and wants, its options and its rules; the host's own manifest is left out.
[[nodiscard]] std::string plugins_markdown(const std::vector<Manifest>& manifests);

}  // namespace sf
