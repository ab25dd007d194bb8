// core/train/engine.hpp: what sf-host asks of libsf_engine.so. sf-host resolves the plan and opens the plugins; the engine does what needs tensors.
// No LibTorch here. Methods throw sf::Error (or std::exception); sf-host turns that into a message and an exit code.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/log.hpp"
#include "core/dist/world.hpp"
#include "sf/error.hpp"
#include "sf/json.hpp"
#include "sf/plugin.h"

namespace sf {

struct Plan;

/// A plugin that has been created; `instance` lives until sf-host destroys it after the verb.
struct LoadedPlugin {
  std::string name, version, sha256;
  uint32_t kind = 0;                 // SF_KIND_*
  const sf_plugin* entry = nullptr;
  sf_instance* instance = nullptr;
};

struct EngineContext {
  const Plan* plan = nullptr;
  std::vector<LoadedPlugin> plugins;
  LogFunction log;                             // level, text
  std::function<bool()> stop_requested;        // true after SIGINT or SIGTERM
  bool random_tables = false;                  // a benchmark: the target's embedding and head are drawn, only its config.json is read
  /// Ends the run, by throwing, when an option that was set has had no effect by now. Every verb that builds a stack calls it before its first
  /// step, and train once more after its first window, for effects that only show there. Empty: nothing is checked.
  std::function<void()> check_effects;
  World world;                                 // which rank this process is
  std::function<void(ExitCode, const std::string& what, const std::string& hint)> leave;  // ends the process at once, from any thread
};

struct TrainArguments {
  std::string resume;       // "", "auto" (newest complete checkpoint, or a fresh start) or a checkpoint folder
  std::string init_from;    // weights only
  int64_t details_interval = 0;   // updates between two windows with metrics that cost something; 0: each window that has a line in the log
};

/// A feature that an algorithm reads.
struct CaptureRead {
  std::string algorithm;
  std::vector<int64_t> layer_ids;
  bool last_state = false;
};

struct CaptureArguments {
  std::string split = "all";   // "train": data.train_data_path -> data.hidden_states_path, "eval": the eval pair, "all": what the recipe names
  std::vector<CaptureRead> reads;  // of these algorithms instead of the recipe's, all layers in one tensor
};

struct EvalArguments {
  std::string checkpoint = "auto";   // "auto": newest complete one; "best"; "untrained"; or a folder
  std::string features;              // empty: data.eval_hidden_states_path
};

struct ExportArguments {
  std::string checkpoint = "best";   // "best" (newest when there is none), "auto" (newest) or a folder
  std::string output;                // folder to make
  bool check = true;                 // read it back and compare what it drafts with the checkpoint's draft
  bool write = true;                 // false: the folder is there already, only check it
  std::string features;              // recorded features to replay; empty: the recipe's held-out ones, else its training ones
};

struct GenerateArguments {
  std::string prompts;               // JSONL of token records; empty: data.train_data_path
  std::string output;                // JSONL to write; its report stands beside it
  int64_t max_prompts = 0;           // the first so many; 0: all
  int64_t max_new_tokens = 256;
  int64_t batch_size = 16;
  double temperature = 0, top_p = 1;
  int64_t top_k = 0;
  int64_t seed = 0;
  std::string stop_tokens;           // "2,5", "none"; empty: as the target's configuration says
};

/// A draft to decode with: an exported folder, or a checkpoint of the context's run.
struct SpeculativeDraft {
  std::string name;
  const EngineContext* context = nullptr;
  std::string folder;                // of an export; empty: a checkpoint
  std::string checkpoint = "best";
};

struct SpeculateArguments {
  std::string prompts;               // JSONL of token records; empty: data.eval_data_path
  int64_t max_prompts = 0;
  int64_t max_new_tokens = 64;
  int64_t batch_size = 16;
  int64_t draft_tokens = 0;          // drafted in a pass; 0: as many as the draft was trained for
  std::vector<int64_t> sweep;        // other numbers of drafted tokens, each a run of its own
  bool use_schedule = false;         // drafts end where the draft's own confidence says so
  double draft_cost = 0;             // of a draft's pass, in passes of the target, for the estimate; 0: bytes of weights that each reads
  std::string stop_tokens;
  std::string page;                  // HTML to write; empty: none
};

struct BenchArguments {
  bool end_to_end = false;      // false: resident batches, step by step; true: the verb train, from feature files on
  int64_t warmup = 3;           // windows before the clock starts
  int64_t steps = 6;            // windows in each repeat
  int64_t repeats = 3;
  int64_t samples = 0;          // distinct random samples; 0: two windows' worth (end to end: as many as the run takes)
  bool variable_mask = false, variable_length = false;
  std::string label;            // names the result
};

/// One line of the plan's size table.
struct SizeLine {
  std::string name;     // "weights", "optimizer", "gradient buffers", "activations (estimate)" ...
  int64_t bytes = 0;
  std::string detail;   // "10.2 M parameters, bfloat16"
};

class Engine {
 public:
  /// A service for plugins ("sf.ops/1", "sf.comm/1"), null when unknown. Throws Error(kPlugin) with the reason when it is known and not there.
  virtual const void* service(std::string_view id) = 0;
  /// Sizes from the algorithm's parameter list; needs a created algorithm, no device and no weights.
  virtual std::vector<SizeLine> sizes(const EngineContext&) = 0;
  /// Operations without a kernel for the recipe's shapes and types, one line each; as sizes().
  virtual std::vector<std::string> slow_paths(const EngineContext&) = 0;
  /// Each verb returns a summary for --json; readable lines go to the log. A stop request ends train and capture after the current window or
  /// batch with everything saved and "interrupted": true in the summary.
  virtual Json train(const EngineContext&, const TrainArguments&) = 0;
  /// What the context's algorithm reads of the target's states.
  virtual std::vector<CaptureRead> reads(const EngineContext&) = 0;
  virtual Json capture(const EngineContext&, const CaptureArguments&) = 0;
  virtual Json evaluate(const EngineContext&, const EvalArguments&) = 0;
  virtual Json export_draft(const EngineContext&, const ExportArguments&) = 0;
  /// The target's answers to prompts, as token records.
  virtual Json generate(const EngineContext&, const GenerateArguments&) = 0;
  /// Speculative decoding with each draft on the same prompts; the target is the first one's. "lossless": false when an output differs from the
  /// target's own.
  virtual Json speculate(const std::vector<SpeculativeDraft>&, const SpeculateArguments&) = 0;
  /// How fast the recipe's run is on random data: docs/benchmarks/README.md says what each figure means.
  virtual Json bench(const EngineContext&, const BenchArguments&) = 0;

 protected:
  ~Engine() = default;
};

}  // namespace sf

/// The one symbol that libsf_engine.so exports; the engine lives as long as the process.
extern "C" sf::Engine* sf_engine_v1();
