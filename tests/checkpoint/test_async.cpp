// async_ckpt.so as a host has it, and saves that go on beside their caller. About 2 s.
#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/retention.hpp"
#include "tests/checkpoint/fixture.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace sf {
namespace {

using test::AsyncPlugin;
using test::checkpoint_error;
using test::SmallRun;
using test::TempFolder;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

CheckpointSaver::Request request_of(const std::shared_ptr<SmallRun>& run) {
  CheckpointSaver::Request request = run->request();
  request.keep_alive = run;
  return request;
}

TEST_CASE("async_ckpt: files, index and marker are those of the built-in writer, byte for byte") {
  TempFolder sync_folder, async_folder;
  SyncWriter sync;
  CheckpointSaver sync_saver(sync_folder.path(), sync.writer());
  AsyncPlugin async(3);
  CheckpointSaver async_saver(async_folder.path(), async.writer(), {}, true);
  for (const int64_t step : {1, 2}) {
    const auto run = std::make_shared<SmallRun>(step, 5000);
    sync_saver.start(request_of(run));
    async_saver.start(request_of(run));
    const auto committed = async_saver.wait();
    REQUIRE(committed.has_value());
    CHECK(committed->step == step);
    CHECK(committed->bytes == 5000 * 3 * 6 + 8);
    for (const auto& entry : fs::directory_iterator(sync_folder.path() / step_folder_name(step))) {
      CAPTURE(entry.path().string());
      CHECK(read_file(entry.path()) == read_file(async_folder.path() / step_folder_name(step) / entry.path().filename()));
    }
    CHECK(test::names_in(sync_folder.path()) == test::names_in(async_folder.path()));
  }
}

TEST_CASE("async_ckpt: start returns before the bytes are written, and the step exists only when all of them are (bandwidth)") {
  TempFolder folder;
  AsyncPlugin slow(2, 1000000);  // bytes in a second
  CheckpointSaver saver(folder.path(), slow.writer(), {}, true);
  const auto run = std::make_shared<SmallRun>(1, 20000);  // 360 kB: the last write begins after 0.24 s
  const auto start = Clock::now();
  saver.start(request_of(run));
  CHECK(seconds_since(start) < 0.15);
  CHECK_FALSE(saver.is_settled());
  CHECK_FALSE(open_checkpoint(folder.path(), "auto").has_value());
  while (!saver.is_settled()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  CHECK(seconds_since(start) > 0.2);
  CHECK_FALSE(saver.advance().has_value());  // written: now it is committed, beside us
  CHECK(saver.wait().has_value());
  CHECK(saver.is_idle());
  CHECK(test::holds_its_step(*open_checkpoint(folder.path(), "auto"), 20000));
}

TEST_CASE("rule A2: a save that is asked for while another is pending begins when that one is committed") {
  TempFolder folder;
  AsyncPlugin slow(1, 2000000);
  CheckpointSaver saver(folder.path(), slow.writer(), {}, true);
  for (const int64_t step : {1, 2, 3}) {
    saver.start(request_of(std::make_shared<SmallRun>(step, 5000)));
    CHECK_FALSE(fs::exists(folder.path() / step_folder_name(step)));
    if (step > 1) {
      CHECK(fs::exists(folder.path() / step_folder_name(step - 1) / kMarkerFile));
    }
  }
  (void)saver.wait();
  CHECK(open_checkpoint(folder.path(), "auto")->index().step == 3);
}

TEST_CASE("rule A5: what follows a commit happens when the step has its name, on one rank only, and never for one that failed") {
  TempFolder folder;
  AsyncPlugin async;
  CheckpointSaver saver(folder.path(), async.writer(), {}, true);
  const auto run = std::make_shared<SmallRun>(1);
  CheckpointSaver::Request request = request_of(run);
  std::atomic<int> seen = 0;
  request.after_commit = [&] { seen = fs::exists(folder.path() / "step-00000001" / kMarkerFile) ? 1 : 2; };
  saver.start(std::move(request));
  (void)saver.wait();
  CHECK(seen == 1);

  CheckpointSaver::Request failing = request_of(std::make_shared<SmallRun>(2));
  failing.after_commit = [&] { seen = 3; };
  saver.start(std::move(failing));
  const fs::path partial = folder.path() / ".partial-step-00000002";
  fs::remove_all(partial);
  CHECK(checkpoint_error([&] { (void)saver.wait(); }).find("saving step 2") != std::string::npos);
  CHECK(seen == 1);
  CHECK(saver.is_idle());
  CHECK(open_checkpoint(folder.path(), "auto")->index().step == 1);
}

TEST_CASE("rule A5: what can't be done behind a commit takes nothing from the step that has its name") {
  for (const bool beside : {false, true}) {
    CAPTURE(beside);
    TempFolder folder;
    SyncWriter sync;
    std::unique_ptr<test::AsyncPlugin> async = beside ? std::make_unique<test::AsyncPlugin>() : nullptr;
    CheckpointSaver saver(folder.path(), beside ? async->writer() : sync.writer(), {}, beside);
    std::vector<std::string> told;
    redirect_log([&](Level, std::string_view line) { told.emplace_back(line); });
    for (const int64_t step : {1, 2}) {
      CheckpointSaver::Request request = request_of(std::make_shared<SmallRun>(step));
      request.after_commit = [] { throw Error(ExitCode::kCheckpoint, "deleting step-00000000: Directory not empty", "close it"); };
      saver.start(std::move(request));
      (void)saver.wait();
      CHECK(saver.last_step()->step == step);
    }
    redirect_log({});
    REQUIRE(told.size() == 2);
    CHECK(told[0] == "step 1 is saved, but not all that follows could be done: deleting step-00000000: Directory not empty (close it)");
    CHECK(open_checkpoint(folder.path(), "auto")->index().step == 2);
  }
}

// Three ranks as threads that meet in gather.
struct Meeting {
  explicit Meeting(int ranks) : texts(static_cast<size_t>(ranks)), count(ranks) {}
  std::vector<std::string> gather(int rank, const std::string& text) {
    std::unique_lock lock(mutex);
    const int64_t round = rounds;
    texts[static_cast<size_t>(rank)] = text;
    if (++arrived == count) {
      arrived = 0;
      ++rounds;
      result = texts;
      all_here.notify_all();
    } else {
      all_here.wait(lock, [&] { return rounds > round; });
    }
    return result;
  }
  std::mutex mutex;
  std::condition_variable all_here;
  std::vector<std::string> texts, result;
  int count, arrived = 0;
  int64_t rounds = 0;
};

TEST_CASE("rule A3: what one rank can't write is an error on every rank at the next boundary, and older steps stay") {
  TempFolder folder;
  Meeting meeting(3);
  std::atomic<int> told = 0, good = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      AsyncPlugin async;
      sf_checkpoint_writer functions = *async.writer().functions;
      functions.finish = [](sf_instance*, sf_status* status) {
        std::snprintf(status->what, sizeof status->what, "the disk is on fire");
        return static_cast<int32_t>(SF_IO);
      };
      const sf_checkpoint_writer& good_functions = *async.writer().functions;
      CheckpointWriter writer = async.writer();
      for (const int64_t step : {1, 2, 3}) {
        writer.functions = rank == 1 && step == 2 ? &functions : &good_functions;
        CheckpointSaver saver(folder.path(), writer,
                              {.rank = rank, .world_size = 3, .gather = [&, rank](const std::string& text, std::string_view) { return meeting.gather(rank, text); }}, true);
        (void)meeting.gather(rank, "");  // rank 0 has swept the folder
        const auto run = std::make_shared<SmallRun>(step, 6);
        CheckpointSaver::Request request;
        request.state = run->state();
        request.tensors = {{.name = "weights/fc", .global_shape = {6, 3}, .start = {rank * 2, 0}, .shape = {2, 3}, .data = run->weights.data() + rank * 6, .bytes = 24}};
        request.keep_alive = run;
        try {
          saver.start(std::move(request));
          // As a training loop does: ask without waiting, and go on together when all say so.
          while (!saver.is_idle()) {
            const auto settled = meeting.gather(rank, saver.is_settled() ? "settled" : "");
            if (std::count(settled.begin(), settled.end(), "settled") == 3) {
              (void)saver.advance();
            }
          }
          good += 1;
        } catch (const Error& error) {
          const bool is_right = std::string(error.what()) == "saving step 2: rank 1: saving step 2: the disk is on fire" &&
                                error.code() == ExitCode::kCheckpoint && error.hint().find("last complete checkpoint is untouched") != std::string::npos;
          told += is_right ? 1 : 100;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(good == 6);
  CHECK(told == 3);
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"latest", "step-00000001", "step-00000003"});
  const auto reader = open_checkpoint(folder.path(), "auto");
  CHECK(reader->index().step == 3);
  CHECK(reader->index().world_size == 3);
}

// Pieces of a few bytes each, in a random order, each in memory of its own that is spoilt when it is given back.
class Shreds final : public SnapshotSource {
 public:
  explicit Shreds(std::vector<TensorSlice> tensors) : tensors_(std::move(tensors)) {}
  bool is_ready() override { return true; }
  void hand_over(const std::function<void(TensorPiece)>& put) override {
    std::vector<TensorPiece> pieces;
    std::mt19937 random(3);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      uint64_t offset = 0;
      do {
        const uint64_t bytes = std::min<uint64_t>(tensors_[i].bytes - offset, 8 * (1 + random() % 5));
        auto copy = std::make_shared<std::string>(static_cast<const char*>(tensors_[i].data) + offset, bytes);
        pieces.push_back({.tensor = i, .offset = offset, .data = copy->data(), .bytes = bytes, .given_back = [this, copy] {
                            std::fill(copy->begin(), copy->end(), 'x');
                            ++given_back;
                          }});
        offset += bytes;
      } while (offset < tensors_[i].bytes);
    }
    count = static_cast<int>(pieces.size());
    std::shuffle(pieces.begin(), pieces.end(), random);
    for (TensorPiece& piece : pieces) {
      put(std::move(piece));
    }
  }
  int count = 0;
  std::atomic<int> given_back = 0;

 private:
  std::vector<TensorSlice> tensors_;
};

TEST_CASE("checkpoint: pieces of a tensor in any order make one tensor, and each is given back exactly once") {
  TempFolder folder;
  AsyncPlugin async(4);
  CheckpointSaver saver(folder.path(), async.writer(), {}, true);
  const SmallRun run(7, 100);
  CheckpointSaver::Request request = run.request();
  const auto shreds = std::make_shared<Shreds>(request.tensors);
  for (TensorSlice& tensor : request.tensors) {
    tensor.data = nullptr;
  }
  request.source = shreds;
  saver.start(std::move(request));
  (void)saver.wait();
  const auto reader = open_checkpoint(folder.path(), "auto");
  CHECK(test::holds_its_step(*reader, 100));
  CHECK(shreds->count > 50);
  CHECK(shreds->given_back == shreds->count);
  CHECK(reader->tensor("weights/fc").slices.size() > 20);
  CHECK(reader->tensor("weights/fc").slices[1].shape.size() == 1);
}

TEST_CASE("async_ckpt: a plugin that is stopped writes what it has been given") {
  TempFolder folder;
  const std::string bytes(100000, 'a');
  std::atomic<int> released = 0;
  {
    AsyncPlugin async(1, 2000000);
    const auto [functions, instance] = async.writer();
    sf_status status{};
    status.struct_size = sizeof status;
    REQUIRE(functions->begin(instance, folder.path().c_str(), 1, &status) == SF_OK);
    const sf_write piece = {.struct_size = sizeof(sf_write), .reserved = 0, .file = "file", .offset = 0, .data = bytes.data(), .bytes = bytes.size(), .lease = &released};
    REQUIRE(functions->put(instance, &piece, [](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &status) == SF_OK);
    REQUIRE(functions->finish(instance, &status) == SF_OK);
    int64_t done = 0;
    REQUIRE(functions->poll(instance, &done, &status) == SF_OK);
    CHECK(done == -1);
    REQUIRE(functions->wait(instance, 1, &status) == SF_OK);  // a time that is over is no failure
  }
  CHECK(released == 1);
  CHECK(read_file(folder.path() / "file") == bytes);
}

}  // namespace
}  // namespace sf
