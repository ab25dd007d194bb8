// Checks of the kinds that see bytes and numbers only: checkpoint writers and trackers.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "sdk/check/check.hpp"
#include "sdk/testing/lone_plugin.hpp"
#include "sf/checkpoint.h"
#include "sf/tracker.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sf::check {
namespace {

namespace fs = std::filesystem;
using sf::testing::LonePlugin;
using sf::testing::TemporaryFolder;

sf_status empty_status() {
  sf_status status{};
  status.struct_size = sizeof(sf_status);
  return status;
}

/// A plugin that is created and started, and stopped and destroyed at the end.
struct Started {
  LonePlugin plugin;
  explicit Started(const Candidate& candidate) : plugin(candidate.file, candidate.entry, candidate.values(), candidate.services) {
    plugin.require(plugin.create(), "create");
    plugin.require(plugin.start(), "start");
  }
};

/// Files can't grow beyond `bytes` while this lives; a write then fails as on a full disk.
class SmallDisk {
 public:
  explicit SmallDisk(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SmallDisk() { setrlimit(RLIMIT_FSIZE, &before_); }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

 private:
  rlimit before_{};
};

// ---- checkpoint writers

struct Lease {
  std::atomic<int> released = 0;
  std::string bytes;
};

struct WriterRun {
  Started started;
  const sf_checkpoint_writer& functions;
  sf_instance* instance;

  explicit WriterRun(const Candidate& candidate)
      : started(candidate), functions(*static_cast<const sf_checkpoint_writer*>(started.plugin.get_interface(SF_CHECKPOINT_WRITER))),
        instance(started.plugin.instance()) {}
};

char byte_at(std::int64_t step, int file, std::size_t at) { return static_cast<char>(step * 31 + file * 7 + static_cast<std::int64_t>(at * 13 % 251)); }

/// One step of `files` files in pieces of odd sizes, put in an order that mixes files and offsets. Returns the first code that is not SF_OK; leases are the caller's.
std::int32_t write_step(WriterRun& run, const fs::path& folder, std::int64_t step, int files, std::size_t bytes, std::vector<std::unique_ptr<Lease>>& leases,
                        sf_status& status) {
  fs::create_directories(folder);
  std::int32_t first = run.functions.begin(run.instance, folder.c_str(), step, &status);
  if (first != SF_OK) {
    return first;
  }
  struct Piece {
    int file;
    std::size_t offset, bytes;
  };
  std::vector<Piece> pieces;
  for (int file = 0; file < files; ++file) {
    for (std::size_t offset = 0; offset < bytes;) {
      const std::size_t length = std::min(bytes - offset, 1 + (offset * 7 + static_cast<std::size_t>(file) * 1001 + 4099) % 60000);
      pieces.push_back({file, offset, length});
      offset += length;
    }
  }
  std::shuffle(pieces.begin(), pieces.end(), std::mt19937(static_cast<unsigned>(step)));   // NOLINT: the same order every time
  for (const Piece& piece : pieces) {
    auto lease = std::make_unique<Lease>();
    lease->bytes.resize(piece.bytes);
    for (std::size_t i = 0; i < piece.bytes; ++i) {
      lease->bytes[i] = byte_at(step, piece.file, piece.offset + i);
    }
    const std::string name = format("rank{}.safetensors", piece.file);
    const sf_write write{.struct_size = sizeof(sf_write), .reserved = 0, .file = name.c_str(), .offset = piece.offset, .data = lease->bytes.data(),
                         .bytes = piece.bytes, .lease = lease.get()};
    const std::int32_t code = run.functions.put(
        run.instance, &write,
        [](void* given) {
          auto& mine = *static_cast<Lease*>(given);
          ++mine.released;
          std::fill(mine.bytes.begin(), mine.bytes.end(), '\xee');   // the buffer is used again: what is read from it later is wrong
        },
        &status);
    leases.push_back(std::move(lease));
    if (code != SF_OK) {
      first = first == SF_OK ? code : first;
      break;
    }
  }
  const std::int32_t finished = first == SF_OK ? run.functions.finish(run.instance, &status) : first;
  return first == SF_OK ? finished : first;
}

std::string wrong_bytes(const fs::path& folder, std::int64_t step, int files, std::size_t bytes) {
  for (int file = 0; file < files; ++file) {
    const fs::path path = folder / format("rank{}.safetensors", file);
    const std::string found = fs::exists(path) ? read_file(path) : std::string();
    if (found.size() != bytes) {
      return format("{} has {} bytes of {}", path, found.size(), bytes);
    }
    for (std::size_t i = 0; i < bytes; ++i) {
      if (found[i] != byte_at(step, file, i)) {
        return format("{} is wrong at byte {}", path, i);
      }
    }
  }
  return "";
}

std::string wrong_releases(const std::vector<std::unique_ptr<Lease>>& leases) {
  for (const auto& lease : leases) {
    if (lease->released != 1) {
      return format("a buffer was released {} times", lease->released.load());
    }
  }
  return "";
}

constexpr int kFiles = 3;
constexpr std::size_t kBytes = 300'000;

Outcome steps_are_written(const Candidate& candidate) {
  const TemporaryFolder folder;
  WriterRun run(candidate);
  std::vector<std::unique_ptr<Lease>> leases;
  sf_status status = empty_status();
  std::int64_t done = -1;
  run.started.plugin.require(run.functions.poll(run.instance, &done, &status), "poll");
  if (done != -1) {
    return failed(format("before the first step poll says that step {} is done", done));
  }
  for (std::int64_t step = 10; step <= 30; step += 10) {
    const std::int32_t code = write_step(run, folder.path() / to_text(step), step, kFiles, kBytes, leases, status);
    if (code != SF_OK) {
      return failed(format("step {}: code {}: {}", step, code, status.what));
    }
  }
  if (const std::int32_t code = run.functions.wait(run.instance, -1, &status); code != SF_OK) {
    return failed(format("wait: code {}: {}", code, status.what));
  }
  if (const std::int32_t code = run.functions.poll(run.instance, &done, &status); code != SF_OK || done != 30) {
    return failed(format("after wait poll says code {}, step {}", code, done));
  }
  for (std::int64_t step = 10; step <= 30; step += 10) {
    if (const std::string wrong = wrong_bytes(folder.path() / to_text(step), step, kFiles, kBytes); !wrong.empty()) {
      return failed(wrong);
    }
  }
  const std::string wrong = wrong_releases(leases);
  return wrong.empty() ? passed(format("{} pieces", leases.size())) : failed(wrong);
}

Outcome full_disk(const Candidate& candidate) {
  const TemporaryFolder folder;
  WriterRun run(candidate);
  std::vector<std::unique_ptr<Lease>> leases;
  sf_status status = empty_status();
  std::int32_t code = SF_OK;
  {
    const SmallDisk small(100'000);
    code = write_step(run, folder.path() / "1", 1, kFiles, kBytes, leases, status);
    if (code == SF_OK) {
      code = run.functions.wait(run.instance, 20'000, &status);
    }
  }
  if (code == SF_OK) {
    return failed("a file could not be written whole, and neither put, finish nor wait said so");
  }
  if (status.what[0] == 0) {
    return failed(format("code {} came without a text", code));
  }
  const std::string told = status.what;
  std::int64_t done = -1;
  sf_status later = empty_status();
  (void)run.functions.wait(run.instance, 20'000, &later);
  (void)run.functions.poll(run.instance, &done, &later);
  if (done >= 1) {
    return failed("the failed step counts as done");
  }
  later = empty_status();
  code = write_step(run, folder.path() / "2", 2, kFiles, kBytes, leases, later);
  code = code == SF_OK ? run.functions.wait(run.instance, -1, &later) : code;
  if (code != SF_OK) {
    return failed(format("the next step fails, too: {}", later.what));
  }
  if (const std::string wrong = wrong_bytes(folder.path() / "2", 2, kFiles, kBytes); !wrong.empty()) {
    return failed(wrong);
  }
  const std::string wrong = wrong_releases(leases);
  return wrong.empty() ? passed(told) : failed(wrong);
}

// A process that writes step after step, marks each as committed when the writer says that it is done, and is killed at some moment.
Outcome killed(const Candidate& candidate) {
  const TemporaryFolder folder;
  constexpr int kRounds = 12;
  int committed = 0;
  for (int round = 0; round < kRounds; ++round) {
    const fs::path place = folder.path() / to_text(std::int64_t{round});
    fs::create_directories(place);
    const pid_t child = fork();
    if (child == 0) {
      try {
        WriterRun run(candidate);
        std::vector<std::unique_ptr<Lease>> leases;
        for (std::int64_t step = 1; step < 10'000; ++step) {
          sf_status status = empty_status();
          std::int64_t done = -1;
          if (write_step(run, place / to_text(step), step, 2, 200'000, leases, status) != SF_OK) {
            _exit(1);
          }
          while (done < step) {
            if (run.functions.poll(run.instance, &done, &status) != SF_OK) {
              _exit(1);
            }
            if (done >= step - 1 && done > 0) {
              std::ofstream(place / (to_text(done) + ".committed")).put('x');
              break;
            }
            if (run.functions.wait(run.instance, 50, &status) != SF_OK) {
              _exit(1);
            }
          }
        }
      } catch (...) {
      }
      _exit(1);
    }
    usleep(static_cast<useconds_t>(30'000 + round * 7'919 % 40'000));
    kill(child, SIGKILL);
    int ended = 0;
    waitpid(child, &ended, 0);
    if (!WIFSIGNALED(ended)) {
      return failed("a step failed before the process was killed");
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(place)) {
      if (entry.path().extension() == ".committed") {
        const std::int64_t step = std::stoll(entry.path().stem().string());
        ++committed;
        if (const std::string wrong = wrong_bytes(place / to_text(step), step, 2, 200'000); !wrong.empty()) {
          return failed("a step that was done is not whole: " + wrong);
        }
      }
    }
    fs::remove_all(place);
  }
  return committed > 0 ? passed(format("{} kills, {} committed steps, all whole", kRounds, committed)) : failed("no step was done within 30 ms");
}

// ---- trackers

struct TrackerRun {
  Started started;
  const sf_tracker& functions;
  sf_instance* instance;
  std::string folder;
  sf_status status = empty_status();

  TrackerRun(const Candidate& candidate, std::string run_folder)
      : started(candidate), functions(*static_cast<const sf_tracker*>(started.plugin.get_interface(SF_TRACKER))), instance(started.plugin.instance()),
        folder(std::move(run_folder)) {}

  std::int32_t begin(std::int64_t first_step = 1) {
    status = empty_status();
    const sf_tracked_run run{.struct_size = sizeof(sf_tracked_run), .reserved = 0, .run_id = "check", .run_folder = folder.c_str(),
                             .recipe = "run_id = \"check\"\n", .first_step = first_step, .steps_total = 100};
    return functions.begin(instance, &run, &status);
  }
  std::int32_t record(std::int64_t step, int count = 3) {
    status = empty_status();
    std::vector<std::string> names;
    for (int i = 0; i < count; ++i) {
      names.push_back(i == 0 ? "loss" : format("group/figure_{}", i));
    }
    std::vector<sf_figure> figures;
    for (int i = 0; i < count; ++i) {
      const double value = i == 1 ? std::numeric_limits<double>::quiet_NaN() : i == 2 ? std::numeric_limits<double>::infinity() : 1.0 / static_cast<double>(step);
      figures.push_back({.struct_size = sizeof(sf_figure), .reserved = 0, .name = names[static_cast<std::size_t>(i)].c_str(), .value = value});
    }
    std::vector<const sf_figure*> pointers;
    for (const sf_figure& figure : figures) {
      pointers.push_back(&figure);
    }
    pointers.push_back(nullptr);
    return functions.record(instance, step, pointers.data(), &status);
  }
  std::int32_t finish() {
    status = empty_status();
    return functions.finish(instance, &status);
  }
};

Outcome figures_are_taken(const Candidate& candidate) {
  const TemporaryFolder folder;
  TrackerRun run(candidate, folder.path().string());
  if (run.begin() != SF_OK) {
    return failed(format("begin: {}", run.status.what));
  }
  for (std::int64_t step = 1; step <= 100; ++step) {
    if (run.record(step) != SF_OK || (step % 10 == 0 && run.record(step, 1) != SF_OK)) {
      return failed(format("record of step {}: {}", step, run.status.what));
    }
  }
  if (run.record(100, 0) != SF_OK) {
    return failed(format("a list without figures: {}", run.status.what));
  }
  return run.finish() == SF_OK ? passed() : failed(format("finish: {}", run.status.what));
}

Outcome tracker_resumes(const Candidate& candidate) {
  const TemporaryFolder folder;
  for (const std::int64_t first : {1, 8}) {
    TrackerRun run(candidate, folder.path().string());
    if (run.begin(first) != SF_OK || run.record(first) != SF_OK || run.finish() != SF_OK) {
      return failed(format("a run whose first step is {}, in a folder of an earlier one: {}", first, run.status.what));
    }
  }
  return passed();
}

Outcome tracker_without_folder(const Candidate& candidate) {
  TrackerRun run(candidate, "/proc/no-such-folder");
  const std::int32_t code = run.begin();
  if (code == SF_OK) {   // one that writes elsewhere, or late
    const std::int32_t recorded = run.record(1);
    if (recorded != SF_OK && run.status.what[0] == 0) {
      return failed(format("record returned code {} without a text", recorded));
    }
    (void)run.finish();
    return passed("begin does not need the folder");
  }
  return run.status.what[0] != 0 ? passed(run.status.what) : failed(format("begin returned code {} without a text", code));
}

Outcome tracker_on_full_disk(const Candidate& candidate) {
  const TemporaryFolder folder;
  TrackerRun run(candidate, folder.path().string());
  if (run.begin() != SF_OK) {
    return failed(format("begin: {}", run.status.what));
  }
  std::int32_t failure = SF_OK;
  std::string told;
  {
    const SmallDisk small(4'096);
    for (std::int64_t step = 1; step <= 2'000; ++step) {
      if (const std::int32_t code = run.record(step, 20); code != SF_OK) {
        failure = code;
        told = run.status.what;
      }
    }
    if (const std::int32_t code = run.finish(); code != SF_OK) {
      failure = code;
      told = run.status.what;
    }
  }
  return failure == SF_OK || !told.empty() ? passed(failure == SF_OK ? "nothing was written to the run's folder beyond 4 KiB, or its loss was not told" : told)
                                           : failed(format("code {} came without a text", failure));
}

}  // namespace

std::vector<Check> byte_checks(std::uint32_t kind) {
  if (kind == SF_KIND_CHECKPOINT) {
    return {{"checkpoint/steps", "three steps are on disk byte by byte, and every buffer is given back once", steps_are_written},
            {"checkpoint/full-disk", "a full disk is a status with a text, the step is not done, and the next one works", full_disk},
            {"checkpoint/killed", "killed at any moment, what it said was done is whole", killed}};
  }
  if (kind == SF_KIND_TRACKER) {
    return {{"tracker/figures", "it takes a hundred steps of figures, NaN and infinity among them", figures_are_taken},
            {"tracker/resume", "it goes on in the folder of an earlier run", tracker_resumes},
            {"tracker/no-folder", "a run folder that is not there is a status and no crash", tracker_without_folder},
            {"tracker/full-disk", "a full disk is a status and no crash", tracker_on_full_disk}};
  }
  return {};
}

}  // namespace sf::check
