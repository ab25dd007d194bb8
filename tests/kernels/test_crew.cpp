// A crew's threads do each task once, whoever asks and however short the work is. About 0.3 s.
#include <doctest/doctest.h>

#include "core/kernels/crew.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

// How often each task was done, over many pieces in a row of any size.
bool does_each_once(int threads, int pieces) {
  std::vector<std::atomic<int>> counts(100);
  bool is_right = true;
  for (int piece = 0; piece < pieces; ++piece) {
    const int64_t tasks = piece % 100;
    for (auto& count : counts) count = 0;
    sf::in_crew(tasks, threads, [&](int64_t task) { ++counts[static_cast<size_t>(task)]; });
    for (int64_t i = 0; i < 100; ++i) is_right = is_right && counts[static_cast<size_t>(i)] == (i < tasks ? 1 : 0);
  }
  return is_right;
}

}  // namespace

TEST_CASE("crew: each task is done once, for any number of threads and tasks, piece behind piece") {
  for (const int threads : {1, 2, 3, 7}) {
    CAPTURE(threads);
    CHECK(does_each_once(threads, 2000));
  }
  CHECK(does_each_once(2, 2000));  // fewer than there are
}

TEST_CASE("crew: threads that went to sleep come back") {
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(does_each_once(3, 50));
  }
}

TEST_CASE("crew: what is asked inside a task, or while another thread's piece runs, is done as well") {
  std::atomic<int> inside{0};
  sf::in_crew(8, 2, [&](int64_t) { sf::in_crew(8, 2, [&](int64_t) { ++inside; }); });
  CHECK(inside == 64);
  std::atomic<bool> is_right{true};
  std::vector<std::thread> askers;
  for (int i = 0; i < 3; ++i) {
    askers.emplace_back([&] {
      if (!does_each_once(2, 1000)) is_right = false;
    });
  }
  for (std::thread& asker : askers) asker.join();
  CHECK(is_right);
}

TEST_CASE("crew: a forked child, which has none of the threads, does its work alone and ends") {
  CHECK(does_each_once(2, 10));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(does_each_once(2, 200) ? 0 : 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
