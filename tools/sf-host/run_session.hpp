// tools/sf-host/run_session.hpp: what a verb works with, in the order of a run: plan, engine, plugins opened,
// created and started; closed in reverse.
#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "core/data/plugin_services.hpp"
#include "core/plan/resolve.hpp"
#include "core/plugin/catalog.hpp"
#include "core/plugin/registry.hpp"
#include "core/train/engine.hpp"
#include "tools/sf-host/command.hpp"

namespace sf {

/// <folder of this program>/../lib/sf, by the program's real path.
[[nodiscard]] std::filesystem::path library_folder();
/// Throws Error(usage) when no file `path` can be made: its folder is not there, or it is a folder itself. Nothing for an empty path.
void require_place_of_file(const std::string& flag, const std::filesystem::path& path);
[[nodiscard]] HostBuild host_build();
[[nodiscard]] SearchRequest search_request(const Command& command);

/// Opens libsf_engine.so. Throws Error when this installation has none or it does not open.
[[nodiscard]] Engine& open_engine();

/// Help for the keys that the plugins of a recipe's stack add; empty when there are none or the recipe can't
/// be read.
[[nodiscard]] std::string plugin_help(const Command& command);

/// Prints problems: to stderr as text, or to stdout as {"problems": [...], "exit_code": n} with --json.
void print_problems(const Command& command, const Diagnostics& problems, ExitCode code);

/// The run is refused and the reasons are printed: leave with this code.
class RefusedRun : public std::exception {
 public:
  explicit RefusedRun(ExitCode code) : code_(code) {}
  [[nodiscard]] const char* what() const noexcept override { return "the run was refused"; }
  [[nodiscard]] ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

class RunSession {
 public:
  /// `instead`: the recipe is read for this algorithm (ResolveRequest::instead).
  explicit RunSession(const Command& command, std::string instead = {}) : command_(command), instead_(std::move(instead)) {}
  RunSession(const RunSession&) = delete;
  RunSession& operator=(const RunSession&) = delete;
  ~RunSession();

  /// Resolves the recipe. Prints all problems and returns false when there are errors; code() then says which
  /// kind.
  bool plan(bool will_run);
  /// Opens engine and plugins and creates them; with `start` also starts them and checks that every option
  /// that was set is read. The engine's verbs then throw RefusedRun when one of them has no effect.
  bool open(bool start);
  /// Stops and destroys the plugins. Also done by the destructor.
  void close();

  [[nodiscard]] const Plan& resolved() const { return *resolution_->plan; }
  /// Which rank this process is. Before launching, with --nproc: rank 0 of those to come.
  [[nodiscard]] const World& world() const { return world_; }
  [[nodiscard]] ExitCode code() const { return code_; }
  [[nodiscard]] Engine& engine() { return *engine_; }
  [[nodiscard]] const EngineContext& context() const { return context_; }

 private:
  bool refuse(const Diagnostics& problems, ExitCode code);

  const Command& command_;
  World world_;
  std::string instead_;
  std::unique_ptr<Catalog> catalog_;
  std::optional<Resolution> resolution_;
  std::vector<std::unique_ptr<PluginServices>> services_;   // of each plugin; outlive the registry
  PluginRegistry registry_;
  Engine* engine_ = nullptr;
  EngineContext context_;
  bool tells_effects_ = true;  // once, when the stack is built
  ExitCode code_ = ExitCode::kOk;
};

}  // namespace sf
