// tests/dist/threads.hpp: ranks of a run as threads of the test, with a store of their own.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/dist/comm_base.hpp"

namespace sf::test {

/// How a rank ended: its error, or what its watchdog said when it would have ended the process.
struct RankEnd {
  std::string error;
  ExitCode code = ExitCode::kOk;
  bool was_told = false;       // by the watchdog, with words
  std::string told;
};

struct RunRanks {
  int64_t ranks = 2;
  std::chrono::milliseconds limit{10'000};
};

/// Opens a group in each thread and runs `body`. Errors are reported to the group as the engine does.
std::vector<RankEnd> run_ranks(const RunRanks& how, const std::function<void(RankGroup&)>& body);

/// The same with collectives over gloo.
std::vector<RankEnd> run_gloo(const RunRanks& how, const std::function<void(RankComm&, RankGroup&)>& body);

}  // namespace sf::test
