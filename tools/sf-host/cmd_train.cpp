// sf-host train: the plan, then the engine's loop; with --nproc the ranks that do so.
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/plan/print.hpp"
#include "tools/sf-host/launcher.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {
namespace {

// Started by --nproc, this process is one of the ranks already.
bool is_rank() { return process_environment()("SF_LAUNCHER").has_value(); }

void refuse_two_launchers(const Command& command) {
  const World world = world_from(process_environment());
  if (world.size > 1 && command.launch.nnodes == 1) {
    throw Error(ExitCode::kUsage, format("--nproc {}, but this process is rank {} of {} already: {}", command.launch.nproc, world.rank, world.size, world.origin),
                "leave --nproc out; or start one process on each machine and give --nnodes, --node-rank and --rendezvous");
  }
}

}  // namespace

ExitCode run_train(const Command& command) {
  const bool starts_ranks = command.launch.starts_ranks() && !is_rank();
  if (starts_ranks) {
    refuse_two_launchers(command);
  }
  RunSession session(command);
  if (!session.plan(true)) {
    return session.code();
  }
  if (!command.resume.empty() && !command.init_from.empty()) {
    throw Error(ExitCode::kUsage, "--resume and --init-from exclude each other",
                "--resume goes on with a run; --init-from starts a new one from weights alone");
  }
  std::error_code ignored;
  if ((command.init_from == "auto" || command.init_from == "best") && !std::filesystem::exists(command.init_from, ignored)) {
    throw Error(ExitCode::kUsage, format("--init-from is \"{}\", expected a folder with weights", command.init_from),
                "--resume auto goes on with this run's newest checkpoint; --init-from takes the folder of a step, of a run or of an export, "
                "and starts anew from its weights");
  }
  const World& world = session.world();
  if (starts_ranks && world.size > 1) {
    return launch_ranks(command.launch);
  }
  if (!world.is_lead() && !is_logged(Level::kDebug)) {
    set_log_level(Level::kWarn);
  }
  if (!command.json && world.is_lead()) {
    std::fputs(plan_summary(session.resolved()).c_str(), stdout);
    std::fflush(stdout);
  }
  if (!session.open(true)) {
    return session.code();
  }
  Json summary =
      session.engine().train(session.context(), {.resume = command.resume, .init_from = command.init_from});
  if (command.json && world.is_lead()) {
    std::puts(summary.dump(2).c_str());
  }
  const Json* interrupted = summary.find("interrupted");
  bool is_interrupted = interrupted != nullptr && interrupted->is_bool() && interrupted->as_bool();
  session.close();
  return is_interrupted ? ExitCode::kInterrupted : ExitCode::kOk;
}

}  // namespace sf
