// core/train/saved_run.hpp: between a session and a checkpoint: which tensors are saved under which names, and what a run that goes on must share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/checkpoint/reader.hpp"
#include "core/checkpoint/save.hpp"
#include "core/train/session.hpp"
#include "core/train/staging.hpp"

namespace sf {

/// Where a run stands between two windows.
struct RunProgress {
  int64_t update = 0;             // optimizer updates (windows) done
  int64_t updates_total = 0;      // of the schedule
  int64_t stream_position = 0;    // entries of the sample stream used so far
  int64_t epoch = 0;
};

/// A rank's part of weights and optimizer, copied to the host: what it holds and no other rank saves, by shard. A part that is not whole rows is flat.
struct SavedTensors {
  std::vector<TensorSlice> slices;
  Json update_counts = Json::object();          // by parameter, the same on all ranks
  std::shared_ptr<const void> keep_alive;       // owns what the slices borrow
};
[[nodiscard]] SavedTensors copy_to_host(const std::vector<Shard>& shards, AdamW& optimizer);
/// The other way, however the run that saved was cut.
void read_tensors(const CheckpointReader& checkpoint, std::vector<Shard>& shards, AdamW& optimizer);

/// What this rank saves: weights, masters and moments (names "weights/N", "master/N", "exp_avg/N", "exp_avg_sq/N"), on rank 0 also what belongs to the draft
/// and is not trained ("buffers/N"). The same names and sizes for all of a run; slices without data, tensors contiguous and where they live.
struct SnapshotTensors {
  std::vector<TensorSlice> slices;
  std::vector<at::Tensor> tensors;
  [[nodiscard]] std::vector<int64_t> bytes() const;
};
[[nodiscard]] SnapshotTensors snapshot_tensors(const Session& session, AdamW& optimizer);

/// A save of the run as it stands, through the staging area, which has given back the save before.
CheckpointSaver::Request snapshot(const Session& session, AdamW& optimizer, const RunProgress& progress, const FeatureStore& features,
                                  const std::shared_ptr<Staging>& staging);

/// Everything back, exactly. Throws Error(kCheckpoint) with both values when the run that was saved is another one.
RunProgress restore(const CheckpointReader& checkpoint, Session& session, AdamW& optimizer, const FeatureStore& features,
                    int64_t updates_total);

/// Only the weights, from a checkpoint of the same draft: every parameter of one is in the other. Throws Error(kCheckpoint).
void restore_weights(const CheckpointReader& checkpoint, Session& session);
/// The same from a step's folder, a run's folder (its newest checkpoint) or an exported draft. Returns the folder that was read.
std::filesystem::path restore_weights_from(const std::filesystem::path& folder, Session& session);
/// Throws Error(kCheckpoint) when the checkpoint was trained with another draft configuration than the session's.
void require_same_draft(const CheckpointReader& checkpoint, const std::string& draft_config_json);

}  // namespace sf
