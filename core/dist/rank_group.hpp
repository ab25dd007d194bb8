// core/dist/rank_group.hpp: the ranks of this run, found and compared: store, watchdog and what is left of a run when one of them fails.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/dist/store.hpp"
#include "core/dist/watchdog.hpp"
#include "core/dist/world.hpp"

namespace sf {

class RankGroup {
 public:
  struct Options {
    World world;
    std::chrono::milliseconds limit{600'000};   // training.dist_timeout
    Leave leave;
    std::function<bool()> stop_requested = {};  // ends the wait for other ranks
  };
  /// Finds the store and begins to watch. Throws Error(kCommunication) when rank 0 is not there within the limit, Error(kInterrupted) on a stop request.
  static std::unique_ptr<RankGroup> open(Options options);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  [[nodiscard]] const World& world() const { return options_.world; }
  [[nodiscard]] std::chrono::milliseconds limit() const { return options_.limit; }
  [[nodiscard]] RunStore& store() { return *store_; }
  [[nodiscard]] Progress& progress() { return progress_; }
  [[nodiscard]] Watchdog& watchdog() { return *watchdog_; }

  /// Waits for all ranks. Throws as gather_texts, and Error(kInterrupted) on a stop request while it waits.
  void meet();

  /// One text of each rank, in rank order; all ranks call it with the same label. Throws what ended the run when a rank fails meanwhile, and
  /// Error(kCommunication) with those that did not come within the limit.
  std::vector<std::string> gather_texts(const std::string& text, std::string_view label);

  /// Do all ranks have the same values? Throws Error(kCommunication), on all ranks, with a key that differs and who has what.
  void require_same(const std::map<std::string, std::string>& values, std::string_view what,
                    const char* hint = "start all ranks with the same recipe, flags and build");

  /// A collective failed on this rank. Waits a moment for the reason to become known and throws it.
  [[noreturn]] void explain(const std::string& label, int64_t number, const std::string& reason);

  /// This rank ends with `error`. The others learn it and end, too. Returns what is to be told here: the error itself, or the earlier failure of another rank
  /// that caused it. Its rank is -1 when no single rank is to blame, -2 when the store is gone.
  Failure report(const Error& error);

  /// All is done: waits until every rank is, and ends the watch.
  void finish();

 private:
  explicit RankGroup(Options options) : options_(std::move(options)) {}
  void throw_failure() const;

  Options options_;
  std::unique_ptr<RunStore> store_;
  Progress progress_;
  std::unique_ptr<Watchdog> watchdog_;
  int64_t gathers_ = 0;
};

}  // namespace sf
