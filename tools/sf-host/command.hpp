// tools/sf-host: the program. main.cpp parses the few flags, cmd_*.cpp are the verbs, run_session opens what
// a verb needs. No LibTorch is linked: libsf_engine.so is opened by the verbs that need tensors.
//
// command.hpp: what was typed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/dist/world.hpp"

namespace sf {

/// generate, eval --speculative
struct DecodingFlags {
  std::string prompts, stop_tokens;
  std::int64_t max_prompts = 0, max_new_tokens = 0, batch_size = 16;
  double temperature = 0, top_p = 1;                  // generate
  std::int64_t top_k = 0, seed = 0;                   // generate
  bool speculative = false;                           // eval
  std::vector<std::string> drafts;                    // eval: exported folders
  std::int64_t draft_tokens = 0;                      // eval
  std::string sweep, page;                            // eval
  bool schedule = false;                              // eval
  double draft_cost = 0;                              // eval
};

struct Command {
  std::string verb;
  std::vector<std::string> positional;  // recipe, or a plugin's name
  std::vector<std::string> overrides;   // --set
  std::string backend;
  std::vector<std::string> plugins;       // --plugin name=/file.so
  std::vector<std::string> plugin_paths;  // --plugin-path
  std::vector<std::string> unsafe_paths;  // --allow-unsafe-path
  std::string resume, init_from;          // train
  LaunchFlags launch;                     // train, plan
  std::string checkpoint, features;       // eval, export
  std::string output;                     // export, generate
  bool check = false, no_check = false, check_only = false;  // export
  DecodingFlags decoding;
  std::string split = "all";              // capture
  std::string readers;                    // capture --for: algorithms and recipes, with commas
  std::int64_t workers = 0;               // prepare
  std::string label, compare;             // bench
  std::vector<std::string> variants;      // bench matrix
  std::string mode = "step";              // bench: step, run
  std::int64_t warmup = 3, steps = 6, repeats = 3, samples = 0;  // bench
  bool variable_mask = false, variable_length = false;           // bench
  std::int64_t keep = 0, keep_every = 0;  // checkpoints prune
  bool damaged = false, dry_run = false;  // checkpoints prune
  bool json = false;
  bool markdown = false;  // schema
  int verbosity = 0;      // -v debug, -vv trace
};

/// True after SIGINT, SIGTERM or SIGHUP.
[[nodiscard]] bool is_stop_requested();
/// How many of them came.
[[nodiscard]] int stop_signal_count();

/// Ends the process at once, from any thread: tells `what` as main() would (nothing when it is empty) and leaves by _exit.
[[noreturn]] void leave(ExitCode code, const std::string& what, const std::string& hint);

// The verbs. Each prints its result to stdout and returns what the process ends with; failures of the world
// are thrown as Error.
ExitCode run_train(const Command& command);
ExitCode run_plan(const Command& command);
ExitCode run_plugins(const Command& command);
ExitCode run_prepare(const Command& command);
ExitCode run_capture(const Command& command);
ExitCode run_eval(const Command& command);
ExitCode run_export(const Command& command);
ExitCode run_generate(const Command& command);
ExitCode run_schema(const Command& command);
ExitCode run_doctor(const Command& command);
ExitCode run_bench(const Command& command);
ExitCode run_checkpoints(const Command& command);

}  // namespace sf
