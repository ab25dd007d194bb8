// Ranks find each other, compare what they are about to do, and end together.
#include <doctest/doctest.h>

#include "tests/dist/threads.hpp"

using namespace sf;
using namespace sf::test;
using std::chrono::milliseconds;

namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

World world_of(int64_t rank, int64_t size, int64_t port) {
  World world;
  world.rank = world.local_rank = rank;
  world.size = world.local_size = size;
  world.host = "127.0.0.1";
  world.port = port;
  return world;
}

}  // namespace

TEST_CASE("group: texts arrive in rank order, again and again") {
  const auto ends = run_ranks({.ranks = 4}, [](RankGroup& group) {
    for (int round = 0; round < 20; ++round) {
      const auto texts = group.gather_texts(format("{}/{}", group.world().rank, round), "a test");
      REQUIRE(texts.size() == 4);
      for (int64_t rank = 0; rank < 4; ++rank) {
        CHECK(texts[static_cast<size_t>(rank)] == format("{}/{}", rank, round));
      }
    }
  });
  for (const RankEnd& end : ends) {
    CHECK_MESSAGE(end.error.empty(), end.error);
  }
}

TEST_CASE("group: ranks that differ are told who differs in which key") {
  const auto ends = run_ranks({.ranks = 3}, [](RankGroup& group) {
    group.require_same({{"training.seed", group.world().rank == 2 ? "43" : "42"}, {"run_id", "a"}}, "the recipe");
  });
  CHECK_MESSAGE(has(ends[0].error, "rank 2 differs from rank 0 in the recipe: training.seed is 42 on rank 0 and 43 on rank 2"), ends[0].error);
  for (const RankEnd& end : ends) {
    CHECK(end.code == ExitCode::kCommunication);
  }
}

TEST_CASE("group: a rank that fails ends the others with its code, and rank 0 tells") {
  const auto ends = run_ranks({.ranks = 3}, [](RankGroup& group) {
    if (group.world().rank == 1) {
      throw Error(ExitCode::kData, "sample 7 is damaged", "capture again");
    }
    (void)group.gather_texts("", "the first window");
  });
  const std::string& told = ends[0].was_told ? ends[0].told : ends[0].error;
  CHECK_MESSAGE(told == "rank 1: sample 7 is damaged", told);
  for (const RankEnd& end : ends) {
    CHECK(end.code == ExitCode::kData);
  }
  CHECK(!ends[2].was_told);
}

TEST_CASE("group: a rank that never comes is named once the limit is over") {
  const auto start = std::chrono::steady_clock::now();
  const auto ends = run_ranks({.ranks = 3, .limit = milliseconds(1500)}, [](RankGroup& group) {
    if (group.world().rank != 1) {
      (void)group.gather_texts("", "the save of step 7");
    } else {
      (void)group.watchdog().wait_for_failure(milliseconds(5000));
    }
  });
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(6));
  const std::string& told = ends[0].was_told ? ends[0].told : ends[0].error;
  CHECK_MESSAGE(has(told, "rank 1 of 3 did not arrive at the save of step 7"), told);
}

TEST_CASE("group: a port in use is told in plain words") {
  const auto ends = run_ranks({.ranks = 1}, [](RankGroup& group) {
    const std::string place = group.store().place();
    const int64_t port = std::stoll(place.substr(place.rfind(':') + 1));
    (void)RunStore::open(world_of(0, 2, port), milliseconds(500), [] {});
  });
  CHECK_MESSAGE(has(ends[0].error, "in use"), ends[0].error);
  CHECK(ends[0].code == ExitCode::kCommunication);
}

TEST_CASE("group: without rank 0 the others end after the limit") {
  try {
    (void)RunStore::open(world_of(1, 2, 1), milliseconds(300), [] {});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kCommunication);
    CHECK_MESSAGE(has(error.what(), "rank 1 does not reach rank 0's store at 127.0.0.1:1"), error.what());
  }
}

TEST_CASE("watchdog: words in the store that nobody can read end the run with its code, and not the program") {
  const auto ends = run_ranks({.ranks = 2}, [](RankGroup& group) {
    if (group.world().rank == 1) {
      group.store().set("at/1", "nonsense");
      group.store().set("failure", "no JSON");
    }
    (void)group.watchdog().wait_for_failure(milliseconds(8000));
  });
  const std::string& told = ends[0].was_told ? ends[0].told : ends[0].error;
  CHECK_MESSAGE(has(told, "a rank failed, and its reason can't be read"), told);
  for (const RankEnd& end : ends) {
    CHECK(end.code == ExitCode::kCommunication);
  }
}

TEST_CASE("watchdog: long lists of ranks are counted") {
  CHECK(rank_list({2}) == "rank 2");
  CHECK(rank_list({1, 3, 4}) == "ranks 1, 3 and 4");
  CHECK(rank_list({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
}
