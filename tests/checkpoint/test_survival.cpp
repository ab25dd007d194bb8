// What a checkpoint must survive: kill -9 at any moment, a full disk, a writer that fails. About 4 s.
#include "core/base/error.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/retention.hpp"
#include "tests/checkpoint/fixture.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sf {
namespace {

using test::checkpoint_error;
using test::SmallRun;
using test::TempFolder;
namespace fs = std::filesystem;

// Saves step after step, keeps two and offers each as best, until it is killed. Never returns.
[[noreturn]] void save_forever(const fs::path& run_folder, int64_t first_step, int64_t rows, bool beside) {
  try {
    SyncWriter sync;
    std::unique_ptr<test::AsyncPlugin> async = beside ? std::make_unique<test::AsyncPlugin>() : nullptr;
    CheckpointSaver saver(run_folder, beside ? async->writer() : sync.writer(), {}, beside);
    for (int64_t step = first_step;; ++step) {
      auto run = std::make_shared<SmallRun>(step, rows);
      CheckpointSaver::Request request = run->request();
      request.keep_alive = run;
      request.after_commit = [run_folder, step] {
        BestRecord record;
        record.step = step;
        record.score = static_cast<double>(step % 5);
        offer_best(run_folder, record);
        (void)rotate_checkpoints(run_folder, {.newest = 2}, step);
      };
      saver.start(std::move(request));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
  }
  _exit(1);
}

TEST_CASE(
    "checkpoint: killed at any moment, the newest committed step is whole and never older than the last one "
    "seen") {
  constexpr int64_t kRows = 20000;  // 360 KB: long enough to be killed within
  for (const bool beside : {false, true}) {
    CAPTURE(beside);
    TempFolder folder;
    std::mt19937 random(11);
    std::uniform_int_distribution<int> delay_ms(3, 90);
    int64_t newest = 0;
    int kills_within_a_save = 0;
    // Ten kills at least, and on a slow machine (or with sanitizers) as many, and as late, as it takes to have met enough saves.
    const auto has_shown_enough = [&] { return newest > 10 && kills_within_a_save > 3; };
    for (int kill_number = 0; kill_number < 10 || (kill_number < 100 && !has_shown_enough()); ++kill_number) {
      const pid_t child = fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        save_forever(folder.path(), newest + 1, kRows, beside);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms(random) * (1 + kill_number / 10)));
      REQUIRE(kill(child, SIGKILL) == 0);
      int status = 0;
      REQUIRE(waitpid(child, &status, 0) == child);
      REQUIRE(WIFSIGNALED(status));  // it had not failed by itself

      for (const FoundCheckpoint& found :
           list_checkpoints(folder.path(), CheckpointReader::Verify::checksums)) {
        CAPTURE(found.folder.string());
        CAPTURE(found.why);
        CHECK(found.state != FoundCheckpoint::State::damaged);
        kills_within_a_save += found.state == FoundCheckpoint::State::unfinished ? 1 : 0;
      }
      const std::optional<CheckpointReader> reader = open_checkpoint(folder.path(), "auto");
      if (newest > 0) {
        REQUIRE(reader.has_value());
      }
      if (reader) {
        CHECK(reader->index().step >= newest);
        CHECK(test::holds_its_step(*reader, kRows));
        newest = reader->index().step;
      }
      CHECK_NOTHROW((void)read_best(folder.path()));
    }
    CHECK(has_shown_enough());  // else the kills came at harmless moments and this test shows nothing
  }
}

// In a child: saves step 1, then a larger step 2 with no room for it, then a small step 3. 0 when step 2
// failed as it should.
int save_without_room(const fs::path& run_folder, bool beside) {
  std::signal(SIGXFSZ, SIG_IGN);
  SyncWriter sync;
  std::unique_ptr<test::AsyncPlugin> async = beside ? std::make_unique<test::AsyncPlugin>() : nullptr;
  CheckpointSaver saver(run_folder, beside ? async->writer() : sync.writer(), {}, beside);
  const SmallRun first(1, 100), second(2, 20000), third(3, 100);
  saver.start(first.request());
  (void)saver.wait();
  const rlimit limit{.rlim_cur = 100000,
                     .rlim_max = 100000};  // stands for the disk: a write fails in the middle of a file
  setrlimit(RLIMIT_FSIZE, &limit);
  const std::string message = checkpoint_error([&] {
    saver.start(second.request());
    (void)saver.wait();
  });
  saver.start(third.request());  // the saver is still good for smaller things
  (void)saver.wait();
  for (const char* expected : {"saving step 2", "rank00000.safetensors", "free some space"}) {
    if (message.find(expected) == std::string::npos) {
      std::fprintf(stderr, "child: no '%s' in: %s\n", expected, message.c_str());
      return 2;
    }
  }
  return 0;
}

TEST_CASE(
    "checkpoint: a disk that is full in the middle of a save is an error, and the step before is untouched") {
  for (const bool beside : {false, true}) {
    CAPTURE(beside);
    TempFolder folder;
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      int code = 1;
      try {
        code = save_without_room(folder.path(), beside);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "child: %s\n", error.what());
      }
      _exit(code);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(test::names_in(folder.path()) ==
          std::vector<std::string>{"latest", "step-00000001", "step-00000003"});  // no torn step 2
    CHECK(test::holds_its_step(*open_checkpoint(folder.path(), folder.path() / "step-00000001"), 100));
    CHECK(test::holds_its_step(*open_checkpoint(folder.path(), "auto"), 100));
  }
}

TEST_CASE("checkpoint: a folder that may only be read is an error of the checkpoint, for either writer") {
  for (const bool beside : {false, true}) {
    CAPTURE(beside);
    TempFolder folder;
    const fs::path run_folder = folder.path() / "run";
    fs::create_directories(run_folder);
    fs::permissions(folder.path(), fs::perms(0755));
    fs::permissions(run_folder, fs::perms(0555));
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      if (geteuid() == 0 && seteuid(65534) != 0) {  // root may write everywhere
        _exit(3);
      }
      SyncWriter sync;
      std::unique_ptr<test::AsyncPlugin> async = beside ? std::make_unique<test::AsyncPlugin>() : nullptr;
      CheckpointSaver saver(run_folder, beside ? async->writer() : sync.writer(), {}, beside);
      const SmallRun run(1);
      const std::string message = checkpoint_error([&] {
        saver.start(run.request());
        (void)saver.wait();
      });
      const bool is_told = message.find("saving step 1") != std::string::npos && message.find("Permission denied") != std::string::npos &&
                           message.find("check the permissions") != std::string::npos;
      std::fprintf(stderr, "%s", is_told ? "" : ("child: " + message + "\n").c_str());
      _exit(is_told ? 0 : 2);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
    fs::permissions(run_folder, fs::perms(0755));
  }
}

TEST_CASE("checkpoint: a save that can't fit is refused before anything is written") {
  TempFolder folder;
  SyncWriter writer;
  CheckpointSaver saver(folder.path(), writer.writer());
  const SmallRun run(1);
  CheckpointSaver::Request request = run.request();
  request.tensors[0].bytes = uint64_t{1} << 60;
  const std::string message = checkpoint_error([&] { saver.start(std::move(request)); });
  CHECK(message.find("saving step 1 takes") != std::string::npos);
  CHECK(test::names_in(folder.path()).empty());
}

TEST_CASE("checkpoint: a folder that can't be made is an error of the checkpoint") {
  TempFolder folder;
  std::fclose(std::fopen((folder.path() / "file").c_str(), "w"));
  SyncWriter writer;
  CheckpointSaver saver(folder.path() / "file" / "run", writer.writer());
  const SmallRun run(1);
  CHECK(checkpoint_error([&] { saver.start(run.request()); }).find("saving step 1") != std::string::npos);
}

// A writer that keeps what it gets and writes it when it is waited for: what an asynchronous plugin looks
// like from the host.
struct SlowWriter {
  SyncWriter sync;
  std::vector<std::pair<sf_write, void (*)(void*)>> kept;
  bool fails = false;

  static SlowWriter& of(sf_instance* instance) { return *reinterpret_cast<SlowWriter*>(instance); }
  static int32_t begin(sf_instance* instance, const char* directory, int64_t step, sf_status* status) {
    const auto [functions, inner] = of(instance).sync.writer();
    return functions->begin(inner, directory, step, status);
  }
  static int32_t put(sf_instance* instance, const sf_write* piece, void (*release)(void*), sf_status*) {
    of(instance).kept.emplace_back(*piece, release);
    of(instance).kept.back().first.file = "rank00000.safetensors";  // the struct is borrowed for the call
    return SF_OK;
  }
  static int32_t finish(sf_instance*, sf_status*) { return SF_OK; }
  static int32_t poll(sf_instance* instance, int64_t* done, sf_status* status) {
    const auto [functions, inner] = of(instance).sync.writer();
    return functions->poll(inner, done, status);
  }
  static int32_t wait(sf_instance* instance, int64_t, sf_status* status) {
    const auto [functions, inner] = of(instance).sync.writer();
    std::vector<std::pair<sf_write, void (*)(void*)>> pieces;
    pieces.swap(of(instance).kept);
    if (pieces.empty()) {
      return SF_OK;
    }
    for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {  // any order
      functions->put(inner, &piece->first, piece->second, status);
    }
    if (of(instance).fails) {
      std::snprintf(status->what, sizeof status->what, "the cable is out");
      return SF_IO;
    }
    return functions->finish(inner, status);
  }
  static constexpr sf_checkpoint_writer kFunctions = {.struct_size = sizeof(sf_checkpoint_writer),
                                                      .reserved = 0,
                                                      .begin = begin,
                                                      .put = put,
                                                      .finish = finish,
                                                      .poll = poll,
                                                      .wait = wait};
  CheckpointWriter writer() { return {&kFunctions, reinterpret_cast<sf_instance*>(this)}; }
};

TEST_CASE(
    "checkpoint: with a writer that works later, a step appears only when it is done, and what it borrows is "
    "kept until then") {
  TempFolder folder;
  SlowWriter slow;
  CheckpointSaver saver(folder.path(), slow.writer());
  auto run = std::make_shared<SmallRun>(1);
  CheckpointSaver::Request request = run->request();
  request.keep_alive = run;
  saver.start(std::move(request));
  CHECK(run.use_count() == 2);
  CHECK_FALSE(saver.poll().has_value());
  CHECK_FALSE(open_checkpoint(folder.path(), "auto").has_value());
  saver.wait();
  CHECK(run.use_count() == 1);
  CHECK(test::holds_its_step(*open_checkpoint(folder.path(), "auto")));

  slow.fails = true;
  const SmallRun second(2), third(3);
  saver.start(second.request());
  CHECK(checkpoint_error([&] { saver.wait(); }).find("saving step 2: the cable is out") != std::string::npos);
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"latest", "step-00000001"});
  slow.fails = false;
  saver.start(third.request());
  saver.wait();
  CHECK(open_checkpoint(folder.path(), "auto")->index().step == 3);
}

}  // namespace
}  // namespace sf
