// core/checkpoint/retention.hpp: which step folders stay. Names in a run's folder:
//
//   step-00000100   a checkpoint
//   latest          a link to the one saved last
//   best.json       which one scored best
//   .partial-...    being written
//   .removed-...    being deleted
//
// A folder loses its name before its files are deleted, so a killed deletion leaves no damaged checkpoint
// behind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "sf/json.hpp"

namespace sf {

/// best.json: the step with the highest score so far.
struct BestRecord {
  int64_t step = 0;
  double score = 0;
  std::string metric = {};        // "acceptance_length"
  Json metrics = Json::object();  // what else was measured then
  std::string measured_on = {};   // which samples; empty: it does not say
};

/// Whether their scores say which is better: both were measured on the same samples, as far as they say so.
[[nodiscard]] bool are_comparable(const BestRecord& a, const BestRecord& b);

/// Nothing when there is no record, its folder is gone, or (with a warning) it can't be read. Never throws for what the file holds.
[[nodiscard]] std::optional<BestRecord> read_best(const std::filesystem::path& run_folder);
/// Records a committed step when its score is finite, and higher than the best so far where the two are comparable. True when it is the new
/// best.
bool offer_best(const std::filesystem::path& run_folder, const BestRecord& record);

/// Which checkpoints stay.
struct RetentionPolicy {
  int64_t newest = 0;  // so many; 0: all
  int64_t every = 0;   // and those whose step is a multiple of this; 0: none for that
};
/// Of whole checkpoints' steps, newest first, those that go: never the best one, never `just_saved`, never the only one.
[[nodiscard]] std::vector<int64_t> superfluous_steps(const std::vector<int64_t>& whole, const RetentionPolicy& policy, std::optional<int64_t> best,
                                                     std::optional<int64_t> just_saved);

/// Deletes what the policy does not keep. Damaged checkpoints don't count, neither among the newest nor for deletion: a person
/// should look at them. Returns the deleted steps.
std::vector<int64_t> rotate_checkpoints(const std::filesystem::path& run_folder, const RetentionPolicy& policy, int64_t just_saved);

/// After the first save of a run that went on from `step`: deletes the checkpoints of the abandoned future, which are the steps above it but for
/// `just_saved`, and a best record of that future, also one that names what had `just_saved`'s number before. Returns the deleted steps.
std::vector<int64_t> discard_newer_than(const std::filesystem::path& run_folder, int64_t step, int64_t just_saved);

/// Makes the link `latest` point to `step_folder`, in one move.
void point_latest(const std::filesystem::path& run_folder, const std::filesystem::path& step_folder);

/// Takes a folder's name away, then deletes it. Throws Error(kCheckpoint).
void remove_folder(const std::filesystem::path& folder);

/// Deletes what killed runs left: partial and removed folders, temporary files. A run folder belongs to one
/// run at a time.
void remove_leftovers(const std::filesystem::path& run_folder);

}  // namespace sf
