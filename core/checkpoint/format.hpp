// core/checkpoint: a training run on disk, so that it can be stopped at any moment and go on exactly. In:
// slices of tensors in host memory and the state of a run. Out: folders `step-00000100` that are whole or do
// not exist, and readers for them. docs/checkpoint-format.md is the format; the bytes are moved by a
// checkpoint writer (sf/checkpoint.h), the built-in one or a plugin. No LibTorch.
//
// format.hpp: what a checkpoint consists of, as data: files, index, slices, run state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sf/json.hpp"

namespace sf {

inline constexpr int kCheckpointVersion = 1;  // on disk: a reader refuses what is newer
inline constexpr const char* kIndexFile = "index.json";
inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kMarkerFile = "COMMITTED";

/// "step-00000100".
[[nodiscard]] std::string step_folder_name(int64_t step);
/// The step of such a name; nothing for any other name.
[[nodiscard]] std::optional<int64_t> step_of_folder_name(std::string_view name);
/// "rank00003.safetensors".
[[nodiscard]] std::string rank_file_name(int rank);
/// Bytes of one element of a safetensors dtype ("F32", "BF16", "I64" ...); 0 for an unknown one.
[[nodiscard]] uint64_t dtype_bytes(std::string_view dtype);

/// A tensor, or the part of one that this rank holds, in host memory; borrowed until the save is done.
/// Row-major and contiguous. A part is a box, or any run of elements of the row-major whole: then `start` and
/// `shape` have one number each and count elements.
struct TensorSlice {
  std::string name;                        // unique on a rank: "weights/fc.weight"
  std::string dtype = "F32";               // as safetensors writes it
  std::vector<int64_t> global_shape = {};  // of the whole tensor
  std::vector<int64_t> start = {};         // where this slice begins in it; empty: at its origin
  std::vector<int64_t> shape = {};         // of this slice; empty: the whole tensor
  const void* data = nullptr;  // null when a SnapshotSource gives the bytes
  uint64_t bytes = 0;
};
/// Whether the slice is one run of elements of the row-major whole, so that it can be saved in pieces.
[[nodiscard]] bool is_run_of_elements(const TensorSlice& slice);

/// Where a slice lies on disk. `start` and `shape` have as many numbers as the tensor's shape, or one: then the
/// slice is a run of elements of the row-major whole.
struct SavedSlice {
  std::string file;
  uint64_t offset = 0;  // from the start of the file
  uint64_t bytes = 0;
  std::vector<int64_t> start, shape;
  std::string sha256;
};

/// Elements [begin, end) of a row-major tensor.
struct ElementRange {
  int64_t begin = 0, end = 0;
};
/// The slice as one run of the tensor's elements; nothing when it is a box with gaps, or no slice of this shape.
[[nodiscard]] std::optional<ElementRange> range_of(const SavedSlice& slice, const std::vector<int64_t>& tensor_shape);

struct SavedTensor {
  std::string dtype;
  std::vector<int64_t> shape;  // of the whole tensor
  std::vector<SavedSlice> slices;
};

struct SavedFile {
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;  // safetensors: the sum below is of these; else of the whole file
  std::string sha256;
};

/// index.json: everything that a checkpoint holds. Ranks make one each for their own file; rank 0 merges
/// them.
struct CheckpointIndex {
  int64_t step = 0;
  int world_size = 1;
  std::map<std::string, SavedFile> files;
  std::map<std::string, SavedTensor> tensors;

  /// Adds what another rank wrote. Throws Error when both disagree about a tensor.
  void merge(const CheckpointIndex& other);
  /// Throws Error(kCheckpoint) when the slices of a tensor overlap or leave a hole.
  void check_cover() const;
  [[nodiscard]] Json to_json() const;
  /// Throws Error(kCheckpoint) when the text is not an index that this version reads.
  static CheckpointIndex from_json(const Json& json, const std::string& source);
  /// The same for one rank's part of an index, whose slices need not cover their tensors.
  static CheckpointIndex part_from_json(const Json& json, const std::string& source);
};

/// The header of a rank's safetensors file and the place of each tensor in it.
struct RankFileLayout {
  std::string header;  // length word, JSON, padding; a multiple of 64 bytes
  uint64_t bytes = 0;  // of the whole file
  // tensors in the order of the file: wider dtypes first, so that every element is aligned
  std::vector<size_t> order;
  std::vector<uint64_t> offsets;  // by position in `tensors`, from the start of the file
};
/// Checks names, shapes and sizes; throws an internal Error when the caller's slices contradict themselves.
[[nodiscard]] RankFileLayout lay_out_rank_file(std::span<const TensorSlice> tensors, bool data_comes_later = false);

/// How a run's state was laid over processes when it was saved; what it is read for, not what it needs: any layout reads any other.
struct SavedLayout {
  std::string sharding;   // "fsdp2"; empty: the checkpoint does not say (rule A8)
  int64_t ranks = 0;
  /// What one optimizer step takes, as the algorithm pools it: "12 samples", "2 micro-steps of 6 samples"; equal texts are the same training.
  std::string window;
};

struct PluginStamp {
  std::string name, version, sha256;
};

/// state.json: what a run needs beside its tensors to go on exactly.
struct RunState {
  std::string run_id;
  int64_t step = 0;      // optimizer steps done
  int64_t position = 0;  // entries of the sample stream used so far (order of samples: epoch after epoch,
                         // whatever the number of ranks)
  int64_t epoch = 0;
  uint64_t seed = 0;
  int64_t total_steps = 0;   // what the schedule was laid out for
  std::string schedule;      // "cosine"
  std::string recipe;        // the resolved recipe, TOML
  std::string draft_config;  // the resolved draft configuration, JSON
  std::string target_fingerprint, features_fingerprint;
  std::map<std::string, std::string> versions;  // "sf", "torch", "compiler" ...
  std::vector<PluginStamp> plugins;
  SavedLayout layout;
  // what a run that goes on must share: "training.batch_size" -> "4"
  std::map<std::string, std::string> fixed;
  Json progress = Json::object();  // the trainer's own: best score, sums since the last log line ...

  [[nodiscard]] Json to_json() const;
  static RunState from_json(const Json& json, const std::string& source);
};

/// Why the run `now` is not the continuation of `saved`, one sentence each, ready to print.
struct Continuation {
  std::vector<std::string> errors;    // going on would not be the same run
  std::vector<std::string> warnings;  // worth knowing: another build of a plugin, another version
};
[[nodiscard]] Continuation compare_runs(const RunState& saved, const RunState& now);

}  // namespace sf
