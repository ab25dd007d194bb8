// sf-host export: a checkpoint as the folder that serving engines load.
#include <cstdio>

#include "tools/sf-host/run_session.hpp"

namespace sf {

ExitCode run_export(const Command& command) {
  if (command.output.empty()) {
    throw Error(ExitCode::kUsage, "export needs --output, the folder to make",
                "for example --output export/my-draft");
  }
  RunSession session(command);
  if (!session.plan(true) || !session.open(true)) {
    return session.code();
  }
  Json summary = session.engine().export_draft(
      session.context(),
      {.checkpoint = command.checkpoint.empty() ? "best" : command.checkpoint, .output = command.output});
  if (command.json) {
    std::puts(summary.dump(2).c_str());
  }
  session.close();
  return ExitCode::kOk;
}

}  // namespace sf
