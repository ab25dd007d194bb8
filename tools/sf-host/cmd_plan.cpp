// sf-host plan: what a run would do, with the origin of every value, and what it needs; starts nothing.
#include <cstdio>

#include "core/plan/print.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {

ExitCode run_plan(const Command& command) {
  RunSession session(command);
  if (!session.plan(false) ||
      !session.open(false)) {  // created for the algorithm's parameter list, not started
    return session.code();
  }
  std::vector<PlanSize> sizes;
  for (const SizeLine& line : session.engine().sizes(session.context())) {
    sizes.push_back({line.name, line.bytes, line.detail});
  }
  std::fputs(command.json ? (plan_json(session.resolved(), sizes).dump(2) + "\n").c_str()
                          : plan_text(session.resolved(), sizes).c_str(),
             stdout);
  session.close();
  return ExitCode::kOk;
}

}  // namespace sf
