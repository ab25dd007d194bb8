// sf-host export: a checkpoint as the folder that serving engines load, checked as they read it.
#include <cstdio>

#include "tools/sf-host/run_session.hpp"

namespace sf {

ExitCode run_export(const Command& command) {
  if (command.output.empty()) {
    throw Error(ExitCode::kUsage, "export needs --output, the folder to make",
                "for example --output export/my-draft");
  }
  if (command.no_check && command.check_only) {
    throw Error(ExitCode::kUsage, "--no-check and --check-only exclude each other", "leave one of them out");
  }
  if (command.no_check && command.check) {
    throw Error(ExitCode::kUsage, "--check and --no-check exclude each other", "leave one of them out; without both the check is done");
  }
  if (command.no_check && !command.features.empty()) {
    throw Error(ExitCode::kUsage, "--features does nothing with --no-check", "they are what the check replays; leave one of them out");
  }
  RunSession session(command);
  if (!session.plan(true) || !session.open(true)) {
    return session.code();
  }
  Json summary = session.engine().export_draft(session.context(), {.checkpoint = command.checkpoint.empty() ? "best" : command.checkpoint,
                                                                   .output = command.output,
                                                                   .check = !command.no_check,
                                                                   .write = !command.check_only,
                                                                   .features = command.features});
  if (command.json) {
    std::puts(summary.dump(2).c_str());
  }
  session.close();
  const Json* check = summary.find("check");
  return check == nullptr || check->at("fine").as_bool() ? ExitCode::kOk : ExitCode::kCheckpoint;
}

}  // namespace sf
