// core/train/tracking.hpp: the trackers of a run beside its metrics.jsonl: each gets every line of figures. No LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/train/engine.hpp"
#include "sf/json.hpp"
#include "sf/tracker.h"

namespace sf {

/// The numbers of a line of metrics by name, in its order; objects inside are spelt out ("eval/loss"), "step" and what is no number are left out.
[[nodiscard]] std::vector<std::pair<std::string, double>> figures_of(const Json& line);

class Trackers {
 public:
  struct Run {
    std::string run_id;
    std::filesystem::path run_folder;
    std::string recipe;                        // TOML text
    int64_t updates_done = 0, updates_total = 0;
  };

  /// Begins with each tracker among the plugins, in their order. Throws Error(kPlugin) with the tracker's own reason when one of them can't; the
  /// others are finished then.
  Trackers(const std::vector<LoadedPlugin>& plugins, const Run& run);
  ~Trackers();
  Trackers(const Trackers&) = delete;
  Trackers& operator=(const Trackers&) = delete;

  /// Hands a line of metrics to all. A failure is counted and the first of each tracker is a warning: training goes on.
  void record(int64_t step, const Json& line);
  /// Everything goes out; tells how often a tracker has failed. Once is enough.
  void finish();

  /// {"tensorboard": 0}: failed calls by tracker.
  [[nodiscard]] Json failures() const;

 private:
  struct One {
    std::string name;
    const sf_tracker* functions = nullptr;
    sf_instance* instance = nullptr;
    int64_t calls = 0, failed = 0;
  };
  void count(One& tracker, const std::string& doing, int32_t code, const sf_status& status);

  std::vector<One> trackers_;   // those that have begun
  bool is_finished_ = false;
};

}  // namespace sf
