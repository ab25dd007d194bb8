// core/dist/watchdog.hpp: why a run with many ranks never hangs. A thread of each rank writes to the store what its rank does, looks there for another
// rank's failure, and ends the process when a collective takes too long. The first failure that is written wins: every rank ends with its code, rank 0
// tells it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/dist/store.hpp"
#include "core/dist/world.hpp"

namespace sf {

/// Collectives that this rank has issued, numbered from 1 in the order that all ranks share. Written by the training thread, read by the watchdog.
class Progress {
 public:
  /// `is_done` is asked by the watchdog (on a GPU: has the event passed?); without it finish() says so.
  int64_t issue(const std::string& label, std::function<bool()> is_done = {});
  void finish(int64_t number);

  struct State {
    int64_t issued = 0;          // number of the last one
    std::string label;           // its label
    int64_t stuck = 0;           // oldest one in flight; 0: none
    std::string stuck_label;
    std::chrono::milliseconds stuck_for{0};   // since it was issued and all before it were done
  };
  /// Also forgets what is done.
  State look();

 private:
  struct Entry {
    int64_t number;
    std::string label;
    std::chrono::steady_clock::time_point issued;
    std::function<bool()> is_done;
    bool finished = false;
  };
  std::mutex mutex_;
  std::deque<Entry> in_flight_;
  std::chrono::steady_clock::time_point last_done_{};
  int64_t issued_ = 0;
  std::string label_;
};

struct Failure {
  int64_t rank = 0;              // that told it
  ExitCode code = ExitCode::kCommunication;
  std::string what, hint;

  [[nodiscard]] std::string to_text() const;
  static Failure from_text(const std::string& text);
};

/// Ends the process at once with this code; empty `what`: without a word. May return in tests.
using Leave = std::function<void(ExitCode code, const std::string& what, const std::string& hint)>;

class Watchdog {
 public:
  struct Options {
    World world;
    std::chrono::milliseconds limit{600'000};   // of a collective, and of a rank's silence
    std::chrono::milliseconds tick{250};
    Leave leave;
  };
  /// Starts the thread; `store` is its own connection.
  Watchdog(Options options, std::unique_ptr<RunStore> store, Progress& progress);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// What aborts collectives in flight, called before the process ends. It may hang; the process ends all the same.
  void set_abort(std::function<void()> abort);
  /// What tells of an error that no call has returned; empty: there is none.
  void set_problem(std::function<std::string()> problem);

  /// The run's failure, as soon as this rank knows of one.
  std::optional<Failure> failure() const;
  /// Waits for one at most `limit`.
  std::optional<Failure> wait_for_failure(std::chrono::milliseconds limit) const;
  /// Ranks whose watchdogs have been silent for `window`. Waits that long.
  std::vector<int64_t> silent_ranks(RunStore& store, std::chrono::milliseconds window) const;

  /// Stops looking after this rank: it leaves on its own account now.
  void stand_down();

 private:
  void run();
  void tick();
  void tell(Failure failure);
  void look_for_dead_ranks();
  void look_for_problem(const Progress::State& state);
  template <class Wait>
  [[nodiscard]] std::vector<int64_t> unchanged_ranks(RunStore& store, const Wait& wait) const;
  void beat(const Progress::State& state);
  [[nodiscard]] std::vector<int64_t> silent_others(const Progress::State& state);
  void look_for_stuck(const Progress::State& state);
  void look_for_silence();
  void end_process(const Failure& failure);

  Options options_;
  std::unique_ptr<RunStore> store_;
  Progress& progress_;
  int64_t beat_ = 0;
  std::vector<std::pair<std::string, std::chrono::steady_clock::time_point>> seen_;   // rank 0: last word of each rank, and when it changed

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Failure> failure_;
  std::function<void()> abort_;
  std::function<std::string()> problem_;
  bool stop_ = false;
  std::thread thread_;
};

/// Says that this rank leaves. Rank 0, whose process keeps the store, waits for the others at most `limit`, so that they can read why.
void wait_for_others(RunStore& store, const World& world, std::chrono::milliseconds limit);

/// "rank 2", "ranks 1, 3 and 4"; more than eight are counted.
[[nodiscard]] std::string rank_list(const std::vector<int64_t>& ranks);

}  // namespace sf
