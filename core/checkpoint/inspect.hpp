// core/checkpoint/inspect.hpp: checkpoints for people: what a run holds, what one consists of, how two differ, which may go.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/reader.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/retention.hpp"
#include "sf/json.hpp"

namespace sf {

/// One checkpoint of a run as a line of a list.
struct ListedCheckpoint {
  FoundCheckpoint found;
  bool is_latest = false, is_best = false;
  uint64_t bytes = 0;       // of its files
  int64_t position = 0, ranks = 0;
  std::string sharding;     // empty: it does not say
};
/// Newest first; with `verify` every byte is read. Throws Error(kCheckpoint) when the folder does not exist.
[[nodiscard]] std::vector<ListedCheckpoint> list_run(const std::filesystem::path& run_folder, CheckpointReader::Verify verify);
[[nodiscard]] Json to_json(const ListedCheckpoint& listed);

/// All about one: state, layout, files, tensors by kind ("weights", "exp_avg" ...), options that may not change.
[[nodiscard]] Json describe_checkpoint(const CheckpointReader& reader);

/// How one tensor differs in two checkpoints.
struct TensorDifference {
  std::string name;
  std::string what;                  // "only in the first", "F32 [2, 3] and BF16 [2, 3]", "17 of 6 numbers differ"
  int64_t elements = 0, differing = 0;
  double largest = 0, mean = 0;      // of |a - b|; 0 for types that are no floats
};
struct CheckpointDifference {
  std::vector<std::string> values;   // "training.seed: 42 and 43", one line each
  std::vector<TensorDifference> tensors;
  int64_t equal_tensors = 0;
  [[nodiscard]] bool is_none() const { return values.empty() && tensors.empty(); }
};
/// State by value, tensors by element; the layout may differ without that counting as a difference of tensors.
[[nodiscard]] CheckpointDifference compare_checkpoints(const CheckpointReader& first, const CheckpointReader& second);

/// What a policy would delete of a run: superfluous checkpoints, and with `damaged` those that are damaged or unfinished, but never the last whole one.
[[nodiscard]] std::vector<FoundCheckpoint> prunable(const std::filesystem::path& run_folder, const RetentionPolicy& policy, bool damaged);

}  // namespace sf
