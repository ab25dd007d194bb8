// Checks of trackers.
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.hpp"
#include "core/plugin/tracker_call.hpp"
#include "sdk/check/byte_checks.hpp"
#include "sf/tracker.h"

namespace sf::check {
namespace {

using sf::testing::TemporaryFolder;

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
    std::vector<std::pair<std::string, double>> named;
    for (int i = 0; i < count; ++i) {
      const double value = i == 1 ? std::numeric_limits<double>::quiet_NaN() : i == 2 ? std::numeric_limits<double>::infinity() : 1.0 / static_cast<double>(step);
      named.emplace_back(i == 0 ? "loss" : format("group/figure_{}", i), value);
    }
    return record(step, named);
  }
  std::int32_t record(std::int64_t step, const std::vector<std::pair<std::string, double>>& named) {
    status = empty_status();
    return record_figures(functions, instance, step, named, status);
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

Outcome tracker_bad_input(const Candidate& candidate) {
  const TemporaryFolder folder;
  int refused = 0;
  std::string silent;
  const auto told = [&](const TrackerRun& run, std::int32_t code, const std::string& call) {
    refused += code == SF_OK ? 0 : 1;
    silent = code != SF_OK && run.status.what[0] == 0 ? format("{} returned code {} without a text", call, code) : silent;
  };
  {
    TrackerRun run(candidate, folder.path().string());
    told(run, run.begin(), "begin");
    told(run, run.finish(), "finish of a run without figures");
  }
  const std::vector<std::string> names = {"two words", "line\nbreak", "\"quoted\"", "comma,semicolon;", "größe/日本語", "%s%n", "../outside", std::string(5000, 'n')};
  for (const std::string& name : names) {
    TrackerRun run(candidate, folder.path().string());
    told(run, run.begin(), "begin");
    for (const double value : {std::numeric_limits<double>::max(), std::numeric_limits<double>::lowest(), std::numeric_limits<double>::denorm_min(), -0.0}) {
      told(run, run.record(1, {{name, value}}), "record");
    }
    told(run, run.record(std::numeric_limits<std::int64_t>::max(), {{name, 1.0}}), "record of the last step that there is");
    told(run, run.finish(), "finish");
  }
  {
    TrackerRun run(candidate, folder.path().string());
    told(run, run.begin(), "begin");
    told(run, run.record(1), "record");
  }   // stopped and destroyed without finish
  return silent.empty() ? passed(refused == 0 ? "" : format("{} calls were refused with a text", refused)) : failed(silent);
}

}  // namespace

std::vector<Check> tracker_checks() {
  return {{"tracker/figures", "it takes a hundred steps of figures, NaN and infinity among them", figures_are_taken},
          {"tracker/resume", "it goes on in the folder of an earlier run", tracker_resumes},
          {"tracker/no-folder", "a run folder that is not there is a status and no crash", tracker_without_folder},
          {"tracker/full-disk", "a full disk is a status and no crash", tracker_on_full_disk},
          {"tracker/bad-input", "odd names, huge numbers, an empty run and a stop before finish are told or taken", tracker_bad_input}};
}

}  // namespace sf::check
