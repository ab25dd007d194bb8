#include "tests/dist/threads.hpp"

#include <filesystem>
#include <mutex>
#include <thread>

#include <stdlib.h>

namespace sf::test {

std::vector<RankEnd> run_ranks(const RunRanks& how, const std::function<void(RankGroup&)>& body) {
  std::string folder = (std::filesystem::temp_directory_path() / "sf-dist-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    throw std::runtime_error("no temporary folder");
  }
  std::vector<RankEnd> ends(static_cast<size_t>(how.ranks));
  std::vector<std::thread> threads;
  std::mutex mutex;
  for (int64_t rank = 0; rank < how.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      RankEnd& end = ends[static_cast<size_t>(rank)];
      std::unique_ptr<RankGroup> group;
      try {
        World world;
        world.rank = world.local_rank = rank;
        world.size = world.local_size = how.ranks;
        world.host = "localhost";
        world.folder = folder;
        group = RankGroup::open({.world = world, .limit = how.limit, .leave = [&](ExitCode code, const std::string& what, const std::string&) {
                                   const std::lock_guard lock(mutex);
                                   end.code = code;
                                   end.was_told = !what.empty();
                                   end.told = what;
                                 }});
        group->meet();
        body(*group);
        group->finish();
      } catch (const Error& error) {
        if (group) {
          (void)group->report(error);
        }
        const std::lock_guard lock(mutex);
        if (end.code == ExitCode::kOk) {  // else the watchdog was first, and the process would be gone
          end.error = error.what();
          end.code = error.code();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::filesystem::remove_all(folder);
  return ends;
}

std::vector<RankEnd> run_gloo(const RunRanks& how, const std::function<void(RankComm&, RankGroup&)>& body) {
  return run_ranks(how, [&](RankGroup& group) {
    const auto comm = open_gloo(group, std::filesystem::path(SF_BUILD_DIR) / "lib/sf/libsf_comm_gloo.so");
    body(*comm, group);
  });
}

}  // namespace sf::test
