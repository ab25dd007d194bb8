// sf-host eval: loss and acceptance length of a checkpoint on held-out features.
#include <cstdio>

#include "tools/sf-host/run_session.hpp"

namespace sf {

ExitCode run_eval(const Command& command) {
  RunSession session(command);
  if (!session.plan(true) || !session.open(true)) {
    return session.code();
  }
  Json summary = session.engine().evaluate(
      session.context(),
      {.checkpoint = command.checkpoint.empty() ? "auto" : command.checkpoint, .features = command.features});
  if (command.json) {
    std::puts(summary.dump(2).c_str());
  }
  session.close();
  return summary.contains("interrupted") ? ExitCode::kInterrupted : ExitCode::kOk;
}

}  // namespace sf
