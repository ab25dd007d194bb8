// sf-host train: the plan, then the engine's loop; with --nproc the ranks that do so.
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "core/plan/print.hpp"
#include "tools/sf-host/launcher.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {
ExitCode run_train(const Command& command) {
  const bool launches = is_launcher(command.launch);
  RunSession session(command);
  if (!session.plan(true)) {
    return session.code();
  }
  if (!command.resume.empty() && command.resume != "none" && !command.init_from.empty()) {
    throw Error(ExitCode::kUsage, "--resume and --init-from exclude each other",
                "--resume goes on with a run; --init-from starts a new one from weights alone");
  }
  std::error_code ignored;
  if ((command.init_from == "auto" || command.init_from == "best") && !std::filesystem::exists(command.init_from, ignored)) {
    throw Error(ExitCode::kUsage, format("--init-from is \"{}\", expected a folder with weights", command.init_from),
                "--resume auto goes on with this run's newest checkpoint; --init-from takes the folder of a step, of a run or of an export, "
                "and starts anew from its weights");
  }
  if (launches) {
    return launch_ranks(command.launch);
  }
  const World& world = session.world();
  if (!command.json && world.is_lead()) {
    std::fputs(plan_summary(session.resolved()).c_str(), stdout);
    std::fflush(stdout);
  }
  if (!session.open(true)) {
    return session.code();
  }
  // A run that has checkpoints goes on unless it is told otherwise; one that starts from weights is a new run.
  const std::string resume = command.resume == "none" ? "" : !command.resume.empty() ? command.resume : command.init_from.empty() ? "auto" : "";
  Json summary = session.engine().train(session.context(), {.resume = resume, .init_from = command.init_from});
  if (command.json && world.is_lead()) {
    std::puts(summary.dump(2).c_str());
  }
  const Json* interrupted = summary.find("interrupted");
  bool is_interrupted = interrupted != nullptr && interrupted->is_bool() && interrupted->as_bool();
  session.close();
  return is_interrupted ? ExitCode::kInterrupted : ExitCode::kOk;
}

}  // namespace sf
