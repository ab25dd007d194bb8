// core/plugin/stack.hpp: the plugins of a run: one algorithm, transforms in the order written, one sharding
// backend, one checkpoint writer, any number of trackers.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/plugin/catalog.hpp"
#include "core/recipe/recipe_reader.hpp"

namespace sf {

struct StackMember {
  std::string slot;  // "algorithm", "transform", "sharding", "checkpoint", "tracker"
  std::string key;   // "backend.transforms"
  std::string name;
  const PluginFile* file = nullptr;  // null: built in
};

struct Stack {
  std::vector<StackMember> members;  // algorithm, transforms, sharding, checkpoint, trackers: the order of creation
  bool is_complete = true;           // false when a plugin could not be had

  [[nodiscard]] std::vector<Manifest> manifests() const;
  [[nodiscard]] std::set<std::string> provided() const;
  [[nodiscard]] std::set<std::string> names() const;
};

/// Spreads "fsdp2+fp8+async_ckpt" over the backend.* keys by each plugin's kind. Problems: those of
/// Catalog::find, plugin/backend-slot.
void apply_backend_flag(const std::string& text, const Catalog& catalog, RawValues& values,
                        Diagnostics& problems);

/// Finds the plugins that the raw values name (or the host's defaults). Problems: those of Catalog::find,
/// plugin/wrong-kind.
[[nodiscard]] Stack pick_stack(const RawValues& values, const Catalog& catalog, Diagnostics& problems);

}  // namespace sf
