#include "core/checkpoint/retention.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/format.hpp"
#include "core/checkpoint/presence.hpp"
#include "core/checkpoint/resume.hpp"

#include <algorithm>
#include <cmath>
#include <system_error>

namespace sf {
namespace fs = std::filesystem;
namespace {

constexpr const char* kBestFile = "best.json";
constexpr const char* kLatestLink = "latest";

// Steps with a committed folder, newest first.
std::vector<int64_t> committed_steps(const fs::path& run_folder) {
  std::vector<int64_t> steps;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(run_folder, missing)) {
    const std::optional<int64_t> step = step_of_folder_name(entry.path().filename().string());
    if (step && is_there(entry.path() / kMarkerFile)) {
      steps.push_back(*step);
    }
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

}  // namespace

std::optional<BestRecord> read_best(const fs::path& run_folder) {
  const fs::path file = run_folder / kBestFile;
  if (!is_there(file)) {
    return std::nullopt;
  }
  try {
    const Json json = Json::parse(read_file(file, ExitCode::kCheckpoint), file.string());
    BestRecord record{.step = json.at("step").as_int(),
                      .score = json.at("score").as_double(),
                      .metric = json.at("metric").as_string(),
                      .metrics = json.at("metrics")};
    if (const Json* samples = json.find("measured_on")) {  // records of earlier versions have none
      record.measured_on = samples->as_string();
    }
    if (!is_there(run_folder / step_folder_name(record.step) / kMarkerFile)) {
      return std::nullopt;
    }
    return record;
  } catch (const std::exception& error) {  // a derived file: no reason to lose a step over it
    log_warn("{} is not readable, so no step counts as the best until the next one that is: {}", file, error.what());
    return std::nullopt;
  }
}

bool are_comparable(const BestRecord& a, const BestRecord& b) {
  return a.measured_on.empty() || b.measured_on.empty() || a.measured_on == b.measured_on;
}

bool offer_best(const fs::path& run_folder, const BestRecord& record) {
  if (!std::isfinite(record.score)) {
    return false;
  }
  const std::optional<BestRecord> before = read_best(run_folder);
  if (before && are_comparable(*before, record) && before->score >= record.score) {
    return false;
  }
  const Json json = Json::object({{"step", record.step},
                                  {"folder", step_folder_name(record.step)},
                                  {"metric", record.metric},
                                  {"score", record.score},
                                  {"measured_on", record.measured_on},
                                  {"metrics", record.metrics}});
  atomic_write(run_folder / kBestFile, json.dump(2) + "\n", ExitCode::kCheckpoint);
  return true;
}

std::vector<int64_t> superfluous_steps(const std::vector<int64_t>& whole, const RetentionPolicy& policy, std::optional<int64_t> best,
                                       std::optional<int64_t> just_saved) {
  std::vector<int64_t> out;
  if (policy.newest <= 0) {
    return out;
  }
  for (size_t i = static_cast<size_t>(policy.newest); i < whole.size(); ++i) {  // at least the first one stays
    const int64_t step = whole[i];
    const bool stays = step == just_saved || step == best || (policy.every > 0 && step % policy.every == 0);
    if (!stays) {
      out.push_back(step);
    }
  }
  return out;
}

std::vector<int64_t> rotate_checkpoints(const fs::path& run_folder, const RetentionPolicy& policy, int64_t just_saved) {
  if (policy.newest <= 0) {
    return {};
  }
  std::vector<int64_t> whole;
  for (const FoundCheckpoint& found : list_checkpoints(run_folder)) {
    if (found.state == FoundCheckpoint::State::complete) {
      whole.push_back(found.step);
    }
  }
  const std::optional<BestRecord> best = read_best(run_folder);
  std::vector<int64_t> removed =
      superfluous_steps(whole, policy, best ? std::optional(best->step) : std::nullopt, just_saved);
  for (const int64_t step : removed) {
    remove_folder(run_folder / step_folder_name(step));
  }
  return removed;
}

std::vector<int64_t> discard_newer_than(const fs::path& run_folder, int64_t step, int64_t just_saved) {
  std::vector<int64_t> removed;
  const std::optional<BestRecord> best = read_best(run_folder);
  if (best && best->step > step) {
    std::error_code ignored;  // a record of a step that is gone counts as none
    fs::remove(run_folder / kBestFile, ignored);
  }
  for (const int64_t found : committed_steps(run_folder)) {
    if (found > step && found != just_saved) {
      remove_folder(run_folder / step_folder_name(found));
      removed.push_back(found);
    }
  }
  return removed;
}

void point_latest(const fs::path& run_folder, const fs::path& step_folder) {
  const fs::path link = run_folder / kLatestLink;
  const fs::path partial = run_folder / ".partial-latest";
  std::error_code error;
  fs::remove(partial, error);
  fs::create_directory_symlink(step_folder.filename(), partial, error);
  if (!error) {
    fs::rename(partial, link, error);
  }
  if (error) {
    // The step has its name already, and the link is for people: nothing here reads it.
    log_warn("{} can't be made to point to {} ({}); the step itself is saved. Is there something else of this name? Move it away", link,
             step_folder.filename(), error.message());
    fs::remove(partial, error);
  }
}

void remove_folder(const fs::path& folder) {
  fs::path removed = folder.parent_path() / (".removed-" + folder.filename().string());
  std::error_code error;
  fs::remove_all(removed, error);
  fs::rename(folder, removed, error);
  if (!error) {
    fs::remove_all(removed, error);
  }
  if (error) {
    throw Error(ExitCode::kCheckpoint, format("deleting {}: {}", folder, error.message()),
                "check the permissions of its folder");
  }
}

void remove_leftovers(const fs::path& run_folder) {
  std::error_code error;
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(run_folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".partial-") || name.starts_with(".removed-") ||
        name.find(".partial-") != std::string::npos) {
      leftovers.push_back(entry.path());
    }
  }
  for (const fs::path& path : leftovers) {
    fs::remove_all(path, error);
    if (error) {
      throw Error(ExitCode::kCheckpoint, format("deleting {}: {}", path, error.message()),
                  "check the permissions of its folder");
    }
  }
}

}  // namespace sf
