// core/plan: recipe + manifests + facts become a Plan, or all the reasons why not. Decides everything,
// allocates nothing, opens no plugin.
//
// plan.hpp: the Plan. Engine and verbs read options from it: plan.get<std::int64_t>("training.batch_size").
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/recipe/schema.hpp"

namespace sf {

/// One place of the stack and the plugin in it. `path` is empty for what is built in (the checkpoint writer
/// "sync").
struct PlanPlugin {
  std::string slot;  // "algorithm", "transform", "sharding", "checkpoint", "tracker"
  std::string name, version, sha256;
  std::filesystem::path path;
  std::vector<std::string> provides;
};

/// The processes of a run, as its launcher counts them.
struct PlanRanks {
  std::int64_t count = 1, on_this_machine = 1;
  std::string origin;       // "torchrun (RANK=0, WORLD_SIZE=2 ...)"; empty: started as one process by hand
};

struct Plan {
  std::filesystem::path recipe;        // the recipe's own path, absolute
  PlanValues values;                   // by full key: "training.batch_size", "plugin.fp8.gather"
  std::map<std::string, Value> facts;  // "fact.world_size", "model.hidden_size": what is known here
  PlanRanks ranks;
  std::vector<PlanPlugin> stack;       // algorithm, transforms in order, sharding, checkpoint, trackers
  std::vector<std::string> undecided;  // "F9: needs fact.device.sm"
  std::vector<Rule> device_rules;      // the same: the engine decides them once it has the device
  Diagnostics warnings;
  std::vector<std::string> unsafe_paths;  // folders accepted by --allow-unsafe-path

  /// The option's value. bool, int64_t (also bytes), double (also duration), std::string (also choice),
  /// std::filesystem::path (absolute; empty when not given) or a vector of int64_t, double, std::string. A
  /// key that no manifest declares is an internal error.
  template <class T>
  [[nodiscard]] T get(std::string_view key) const {
    return value_as<T>(at(key).value, key);
  }
  [[nodiscard]] const PlanValue& at(std::string_view key) const;
  [[nodiscard]] bool has(std::string_view key) const { return values.find(std::string(key)) != values.end(); }

  /// The resolved recipe as TOML: every value, so that this text alone repeats the run. Paths are absolute.
  /// Origins are comments.
  [[nodiscard]] std::string recipe_text() const;
};

}  // namespace sf
