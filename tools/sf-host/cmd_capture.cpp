// sf-host capture: the target's hidden states for the recipe's token records.
#include <cstdio>

#include "core/base/text.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {

ExitCode run_capture(const Command& command) {
  if (command.split != "train" && command.split != "eval" && command.split != "all") {
    throw Error(ExitCode::kUsage, format("--split is \"{}\", expected train, eval or all", command.split),
                "all captures what the recipe names");
  }
  RunSession session(command);
  if (!session.plan(true) || !session.open(true)) {
    return session.code();
  }
  Json summary = session.engine().capture(session.context(), {.split = command.split});
  if (command.json) {
    std::puts(summary.dump(2).c_str());
  }
  const Json* interrupted = summary.find("interrupted");
  bool is_interrupted = interrupted != nullptr && interrupted->is_bool() && interrupted->as_bool();
  session.close();
  return is_interrupted ? ExitCode::kInterrupted : ExitCode::kOk;
}

}  // namespace sf
