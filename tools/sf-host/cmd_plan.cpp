// sf-host plan: what a run would do, with the origin of every value, and what it needs; starts nothing.
#include <cstdio>

#include "core/plan/print.hpp"
#include "core/plan/window_note.hpp"
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
  const std::vector<std::string> slow_paths = session.engine().slow_paths(session.context());
  const std::string note = window_note(session.resolved());
  if (command.json) {
    Json json = plan_json(session.resolved(), sizes);
    json.set("slow_paths", Json::array_of(slow_paths));
    json.set("window_note", note.empty() ? Json() : Json(note));
    std::puts(json.dump(2).c_str());
  } else {
    std::fputs(plan_text(session.resolved(), sizes).c_str(), stdout);
    if (!note.empty()) {
      std::printf("data\n  %s\n", note.c_str());
    }
    if (!slow_paths.empty()) {
      std::printf("slower paths on this GPU\n  %s\n", join(slow_paths, "\n  ").c_str());
    }
  }
  session.close();
  return ExitCode::kOk;
}

}  // namespace sf
