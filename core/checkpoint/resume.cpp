#include "core/checkpoint/resume.hpp"

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/retention.hpp"

#include <algorithm>
#include <system_error>

namespace sf {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPartialPrefix = ".partial-";

// The newest checkpoint in `run_folder` whose every byte is right, but for `except`.
std::string good_one_beside(const fs::path& run_folder, const fs::path& except) {
  for (const FoundCheckpoint& found : list_checkpoints(run_folder)) {
    std::error_code error;
    if (found.state != FoundCheckpoint::State::complete || fs::equivalent(found.folder, except, error)) {
      continue;
    }
    try {
      (void)CheckpointReader::open(found.folder);
      return found.folder.string();
    } catch (const Error&) {
      continue;
    }
  }
  return "";
}

CheckpointReader open_or_advise(const fs::path& folder, const fs::path& run_folder) {
  try {
    return CheckpointReader::open(folder);
  } catch (const Error& error) {
    const std::string good = good_one_beside(run_folder, folder);
    throw Error(
        error.code(), error.what(),
        good.empty()
            ? format("no other complete checkpoint is in {}; start afresh with another run_id", run_folder)
            : format("go on from the newest good one: --resume {}", good));
  }
}

std::optional<fs::path> newest_in(const fs::path& run_folder) {
  for (const FoundCheckpoint& found : list_checkpoints(run_folder)) {
    if (found.state != FoundCheckpoint::State::unfinished) {
      return found.folder;  // a damaged one too: passing it over in silence would lose steps
    }
  }
  return std::nullopt;
}

}  // namespace

std::vector<FoundCheckpoint> list_checkpoints(const fs::path& run_folder, CheckpointReader::Verify verify) {
  std::vector<FoundCheckpoint> out;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(run_folder, missing)) {
    std::string name = entry.path().filename().string();
    const bool partial = name.starts_with(kPartialPrefix);
    const std::optional<int64_t> step =
        step_of_folder_name(partial ? std::string_view(name).substr(kPartialPrefix.size()) : name);
    if (!step || !entry.is_directory()) {
      continue;
    }
    FoundCheckpoint found{.folder = entry.path(), .step = *step};
    if (partial || !fs::exists(entry.path() / kMarkerFile)) {
      found.state = FoundCheckpoint::State::unfinished;
      found.why = "its save was cut short";
    } else {
      try {
        (void)CheckpointReader::open(entry.path(), verify);
      } catch (const Error& error) {
        found.state = FoundCheckpoint::State::damaged;
        found.why = error.what();
      }
    }
    out.push_back(std::move(found));
  }
  std::sort(out.begin(), out.end(), [](const FoundCheckpoint& a, const FoundCheckpoint& b) {
    return a.step != b.step ? a.step > b.step : a.folder < b.folder;
  });
  return out;
}

std::optional<CheckpointReader> open_checkpoint(const fs::path& run_folder, const std::string& which) {
  if (which == "auto" || which == "best") {
    if (which == "best") {
      if (const std::optional<BestRecord> best = read_best(run_folder)) {
        return open_or_advise(run_folder / step_folder_name(best->step), run_folder);
      }
    }
    const std::optional<fs::path> newest = newest_in(run_folder);
    return newest ? std::optional(open_or_advise(*newest, run_folder)) : std::nullopt;
  }
  fs::path folder = which;
  if (!folder.has_filename()) {
    folder = folder.parent_path();  // "runs/step-00000100/"
  }
  if (!fs::exists(folder / kMarkerFile)) {
    if (const std::optional<fs::path> newest = newest_in(folder)) {
      return open_or_advise(*newest, folder);
    }
  }
  return open_or_advise(folder, folder.has_parent_path() ? folder.parent_path() : fs::path("."));
}

}  // namespace sf
