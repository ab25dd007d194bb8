// sdk/testing/plugin_test.hpp: what Sf::plugin_test gives to tests of a plugin: a host around one plugin, the real tape and optimizer over a tiny model for
// algorithms, and ranks over collectives on the CPU. Everything happens as in sf-host, with its own code; failures are thrown as sf::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sf/algorithm.hpp"
#include "sf/backend.hpp"
#include "sf/comm.hpp"
#include "sf/error.hpp"
#include "sf/level.hpp"
#include "sf/plugin.h"

#define SF_PLUGIN_TEST_API __attribute__((visibility("default")))

namespace sf::testing {

struct LogLine {
  Level level = Level::kInfo;
  std::string text;   // "my_draft: created"
};

/// One plugin, judged, resolved, opened, created and started. Log lines are kept and not printed. One at a time.
class SF_PLUGIN_TEST_API FakeHost {
 public:
  struct Setup {
    std::string plugin;        // absolute path of the .so
    std::string recipe = {};   // TOML, what a recipe would say: "[plugin.my_draft]\nwidth = 8\n"; keys of the host are allowed, too
    bool start = true;         // false: created only
    Comm* comm = nullptr;      // what the plugin gets as "sf.comm/1", of run_ranks; outlives the host
  };
  /// Throws Error(kPlugin) or Error(kUsage) with every problem's text when sf-host would refuse the file or the options.
  explicit FakeHost(const Setup& setup);
  /// Stops and destroys the plugin; the library stays open.
  ~FakeHost();
  FakeHost(const FakeHost&) = delete;
  FakeHost& operator=(const FakeHost&) = delete;

  /// The plugin's interface `id`, "sf.algorithm/1", "sf.tracker/1" ... Throws Error(kPlugin) when it offers none.
  template <class T>
  [[nodiscard]] T& get_interface(const char* id) const {
    return *static_cast<T*>(const_cast<void*>(find_interface(id)));
  }
  /// What the functions of a C interface want as their first argument.
  [[nodiscard]] sf_instance* instance() const;
  /// Stops the plugin before the end of the scope; throws Error(kPlugin) with its text when it can't.
  void stop();

  [[nodiscard]] const std::vector<LogLine>& log() const;
  /// Options of the manifest that the plugin has not read so far, by key. A run that sets one of them ends.
  [[nodiscard]] std::vector<std::string> unread_options() const;
  /// How many things an option was reported to have changed; -1: nothing was reported.
  [[nodiscard]] std::int64_t effect(const std::string& option) const;
  /// A folder of this host, removed with it: run folders and the like.
  [[nodiscard]] std::string folder() const;

  /// What the recipe says of the model, for describe().
  [[nodiscard]] ModelFacts model_facts() const;

 private:
  [[nodiscard]] const void* find_interface(const char* id) const;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

struct TinySetup {
  std::int64_t samples = 8;            // random ones, tokens 0 .. 94 of 96
  std::int64_t tokens = 24;            // of each
  std::int64_t batch_size = 4, accumulation_steps = 1;
  double learning_rate = 1e-2;
  std::vector<std::string> recompute = {};   // as training.recompute
  std::uint64_t seed = 1;
};

struct TinyOutcome {
  double loss = 0;                                // as the algorithm's pooling makes it of the window
  double gradient_norm = 0;
  double denominator = 0;
  std::map<std::string, double> metrics;          // as metrics.jsonl has them
  std::map<std::string, at::Tensor> gradients;    // by full name, as summed up by the tape; those that nothing touched are missing
};

/// An algorithm over the real tape, loader and optimizer, on a target with random weights: 12 layers, 64 hidden units, 96 tokens, float32 on the CPU.
class SF_PLUGIN_TEST_API TinyRun {
 public:
  /// The host's algorithm. Its parameters are in the hands of `sharding`, or of a backend that keeps them whole.
  explicit TinyRun(FakeHost& host, const TinySetup& setup = {}, Sharding* sharding = nullptr, Comm* comm = nullptr);
  TinyRun(Algorithm& algorithm, const ModelFacts& facts, const TinySetup& setup = {}, Sharding* sharding = nullptr, Comm* comm = nullptr);
  ~TinyRun();
  TinyRun(const TinyRun&) = delete;
  TinyRun& operator=(const TinyRun&) = delete;

  /// The next window: forward, backward, update.
  TinyOutcome train();
  /// Forward and backward over the first window, without an update: the same every time.
  TinyOutcome gradients();
  /// The same over a window in which no sample is live.
  TinyOutcome dead();
  /// Every sample once, without gradients.
  TinyOutcome evaluate();

  [[nodiscard]] const Description& description() const;
  /// The parameters themselves, by full name.
  [[nodiscard]] std::map<std::string, at::Tensor> weights();
  [[nodiscard]] const TargetTables& tables() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// Runs `body` as each of `ranks` ranks, on threads of this process, with collectives over gloo as a run on CPUs has them. Throws the first failure.
SF_PLUGIN_TEST_API void run_ranks(std::int64_t ranks, const std::function<void(Comm& comm)>& body);

}  // namespace sf::testing
