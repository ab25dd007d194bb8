#include "core/checkpoint/resume.hpp"

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/presence.hpp"
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

// Folders in `folder` that hold checkpoints: it is a folder of runs, and easily taken for one.
std::string runs_in(const fs::path& folder) {
  std::vector<std::string> runs;
  std::error_code unknown;
  for (const auto& entry : fs::directory_iterator(folder, unknown)) {
    if (!list_checkpoints(entry.path()).empty()) {
      runs.push_back(entry.path().string());
    }
  }
  std::sort(runs.begin(), runs.end());
  return join(runs, ", ");
}

CheckpointReader open_or_advise(const fs::path& folder, const fs::path& run_folder) {
  try {
    return CheckpointReader::open(folder);
  } catch (const Error& error) {
    const std::string good = good_one_beside(run_folder, folder);
    if (const std::string runs = runs_in(folder); good.empty() && !runs.empty()) {
      throw Error(error.code(), format("{} holds no checkpoint itself", folder), format("name one of the runs in it: {}", runs));
    }
    if (std::error_code unknown; good.empty() && !fs::exists(folder, unknown)) {
      throw Error(error.code(), error.what(), "name a step's folder, or a run's");
    }
    if (is_there(folder / "export.json")) {
      throw Error(error.code(), format("{} is an exported draft and no checkpoint", folder),
                  "name a step's folder, or a run's; sf-host eval --speculative --draft decodes with an export, sf-host train --init-from starts from its weights");
    }
    throw Error(error.code(), error.what(),
                good.empty() ? format("no other complete checkpoint is in {}; train anew, with another run_id", run_folder)
                             : format("name the newest good one instead: {}", good));
  }
}

// The newest one with a marker, damaged or not: passing that over would lose steps that were promised. One without a marker is passed over
// with a warning when there is an older one.
std::optional<fs::path> newest_in(const fs::path& run_folder) {
  std::vector<std::string> without_marker;
  std::optional<fs::path> newest;
  for (const FoundCheckpoint& found : list_checkpoints(run_folder)) {
    if (found.state == FoundCheckpoint::State::unfinished) {
      continue;
    }
    if (is_there(found.folder / kMarkerFile)) {
      newest = found.folder;
      break;
    }
    without_marker.push_back(found.folder.string());
  }
  if (newest) {
    for (const std::string& folder : without_marker) {
      log_warn("{} is damaged: it has no {}; it is passed over for {}", folder, kMarkerFile, newest->filename());
    }
  } else if (!without_marker.empty()) {
    throw Error(ExitCode::kCheckpoint,
                format("{} holds damaged checkpoints only: {} {} no {}", run_folder, join(without_marker, ", "),
                       without_marker.size() == 1 ? "has" : "have", kMarkerFile),
                "copy them again if they are copies; else move them away or train with another run_id: nothing here can be gone on from");
  }
  return newest;
}

// "atuo" is a slip of the pen and no folder.
void refuse_slip(const fs::path& run_folder, const std::string& which) {
  const std::string near = did_you_mean(which, {"auto", "best"});
  if (which.find('/') == std::string::npos && !is_there(which)) {
    const bool is_of_this_run = is_there(run_folder / which);  // as a list shows it
    throw Error(ExitCode::kCheckpoint, format("there is no checkpoint \"{}\": no folder is called so", which),
                is_of_this_run ? format("name it with its run's folder: {}", run_folder / which)
                : near.empty() ? "auto (the newest), best, or the folder of a checkpoint or of a run"
                               : format("did you mean \"{}\"?", near));
  }
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
    if (!step || !entry.is_directory(missing)) {
      continue;
    }
    FoundCheckpoint found{.folder = entry.path(), .step = *step};
    if (partial) {
      found.state = FoundCheckpoint::State::unfinished;
      found.why = "its save is going on, or was cut short";
    } else if (!is_there(entry.path() / kMarkerFile)) {  // a save gives the name last, so the marker was there once
      found.state = FoundCheckpoint::State::damaged;
      found.why = format("it has no {}", kMarkerFile);
    } else {
      try {
        (void)CheckpointReader::open(entry.path(), verify);
      } catch (const Error& error) {
        found.state = FoundCheckpoint::State::damaged;
        found.why = error.what();
      }
    }
    if (found.state != FoundCheckpoint::State::complete && !is_there(entry.path())) {  // a run that goes on has removed it meanwhile, or given it its name
      continue;
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
  refuse_slip(run_folder, which);
  fs::path folder = which;
  if (!folder.has_filename()) {
    folder = folder.parent_path();  // "runs/step-00000100/"
  }
  if (!is_there(folder / kMarkerFile)) {
    if (const std::optional<fs::path> newest = newest_in(folder)) {
      return open_or_advise(*newest, folder);
    }
  }
  return open_or_advise(folder, folder.has_parent_path() ? folder.parent_path() : fs::path("."));
}

}  // namespace sf
