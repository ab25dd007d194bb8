// Checks of checkpoint writers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "sdk/check/byte_checks.hpp"
#include "sf/checkpoint.h"

#include <sys/wait.h>
#include <unistd.h>

namespace sf::check {
namespace {

namespace fs = std::filesystem;
using sf::testing::TemporaryFolder;

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

char byte_at(std::int64_t step, int file, std::size_t at) { return static_cast<char>(step * 31 + std::int64_t{file} * 7 + static_cast<std::int64_t>(at * 13 % 251)); }

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
  constexpr int kRounds = 12, kMostRounds = 36;
  int committed = 0, round = 0, milliseconds = 0;
  for (; round < kRounds || (committed == 0 && round < kMostRounds); ++round) {  // later and later on a machine where nothing was done so far
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
    milliseconds = (30'000 + round * 7'919 % 40'000) / 1000 * (committed > 0 ? 1 : 1 + round / 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
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
  return committed > 0 ? passed(format("{} kills, {} committed steps, all whole", round, committed)) : failed(format("no step was done within {} ms", milliseconds));
}

std::int32_t put_one(WriterRun& run, std::size_t offset, std::size_t bytes, std::vector<std::unique_ptr<Lease>>& leases, sf_status& status) {
  leases.push_back(std::make_unique<Lease>());
  Lease& lease = *leases.back();
  lease.bytes.assign(bytes, 'x');
  const sf_write write{.struct_size = sizeof(sf_write), .reserved = 0, .file = "rank0.safetensors", .offset = offset, .data = lease.bytes.data(),
                       .bytes = bytes, .lease = &lease};
  return run.functions.put(run.instance, &write, [](void* given) { ++static_cast<Lease*>(given)->released; }, &status);
}

Outcome bad_input(const Candidate& candidate) {
  const TemporaryFolder folder;
  std::vector<std::unique_ptr<Lease>> leases;
  std::string told;
  {
    WriterRun run(candidate);
    sf_status status = empty_status();
    if (run.functions.wait(run.instance, 0, &status) != SF_OK) {
      return failed(format("wait with nothing in flight: {}", status.what));
    }
    const fs::path lost = folder.path() / "lost";
    fs::create_directories(lost);
    std::int32_t code = run.functions.begin(run.instance, lost.c_str(), 1, &status);
    fs::remove_all(lost);
    code = code == SF_OK ? put_one(run, 0, 1000, leases, status) : code;
    code = code == SF_OK ? run.functions.finish(run.instance, &status) : code;
    code = code == SF_OK ? run.functions.wait(run.instance, -1, &status) : code;
    if (code == SF_OK || status.what[0] == 0) {
      return failed(code == SF_OK ? "its folder was removed after begin, and nothing said so" : format("code {} came without a text", code));
    }
    told = status.what;
    std::int64_t done = -1;
    sf_status later = empty_status();
    (void)run.functions.wait(run.instance, -1, &later);
    (void)run.functions.poll(run.instance, &done, &later);
    if (done >= 1) {
      return failed("a step whose folder is gone counts as done");
    }
    const fs::path good = folder.path() / "good";
    fs::create_directories(good);
    later = empty_status();
    code = run.functions.begin(run.instance, good.c_str(), 2, &later);
    code = code == SF_OK ? put_one(run, 0, 0, leases, later) : code;   // the first tensor of a file may be empty
    code = code == SF_OK ? put_one(run, 0, 1000, leases, later) : code;
    code = code == SF_OK ? run.functions.finish(run.instance, &later) : code;
    code = code == SF_OK ? run.functions.wait(run.instance, -1, &later) : code;
    if (code != SF_OK) {
      return failed(format("a step with a piece of no bytes, after one that failed: {}", later.what));
    }
    if (read_file(good / "rank0.safetensors") != std::string(1000, 'x')) {
      return failed("a piece of no bytes has changed its file");
    }
    const fs::path open = folder.path() / "open";
    fs::create_directories(open);
    later = empty_status();
    run.started.plugin.require(run.functions.begin(run.instance, open.c_str(), 3, &later), "begin");
    for (std::size_t i = 0; i < 20; ++i) {
      (void)put_one(run, i * 1000, 1000, leases, later);
    }
  }   // stopped and destroyed in the middle of a step
  const std::string wrong = wrong_releases(leases);
  return wrong.empty() ? passed(told) : failed(wrong);
}

}  // namespace

std::vector<Check> writer_checks() {
  return {{"checkpoint/steps", "three steps are on disk byte by byte, and every buffer is given back once", steps_are_written},
          {"checkpoint/full-disk", "a full disk is a status with a text, the step is not done, and the next one works", full_disk},
          {"checkpoint/killed", "killed at any moment, what it said was done is whole", killed},
          {"checkpoint/bad-input", "a folder that is not there, a piece without bytes and a stop in the middle are told or taken, and every buffer comes back", bad_input}};
}

}  // namespace sf::check
