// core/checkpoint/resume.hpp: which checkpoint a run goes on from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/reader.hpp"

namespace sf {

/// Something in a run's folder that is, or wanted to be, a checkpoint.
struct FoundCheckpoint {
  /// unfinished: a save that was cut short, .partial-step-N. A folder with its name that lacks its marker is damaged: the name comes last.
  enum class State { complete, unfinished, damaged };
  std::filesystem::path folder;
  int64_t step = 0;
  State state = State::complete;
  std::string why = {};  // what is wrong with it, empty when it is complete
};

/// All checkpoints of a run, newest first; an empty list when the folder does not exist.
[[nodiscard]] std::vector<FoundCheckpoint> list_checkpoints(
    const std::filesystem::path& run_folder,
    CheckpointReader::Verify verify = CheckpointReader::Verify::sizes);

/// Opens, with all checksums, what `which` names:
///   "auto"   the newest checkpoint of the run that has a marker, nothing when the run has no checkpoint. Saves that were cut short are
///            passed over; step folders without a marker too, with a warning, but when there is nothing else they are an error.
///   "best"   the one of best.json, or the newest when there is no record
///   a path   a step's folder, or a run's folder (its newest)
/// Throws Error(kCheckpoint) when it is damaged, unfinished or missing; the hint names the newest good one beside it, or
/// what was meant.
[[nodiscard]] std::optional<CheckpointReader> open_checkpoint(const std::filesystem::path& run_folder, const std::string& which);

}  // namespace sf
