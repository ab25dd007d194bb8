// core/checkpoint/save.hpp: from tensors to a committed step folder.
//
// Everything is written to `.partial-step-N` beside the step folders. When the writers of all ranks are done,
// rank 0 adds state and index, then the marker, and gives the folder its name: until then the step does not
// exist, after that it is whole.
//
// A save has stages, and training may go on between them: the bytes come (copying), the writer writes them
// (writing), rank 0 names the step (committing). Which stage is over is asked without any collective; the step
// from one stage to the next is made by all ranks together.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/format.hpp"
#include "core/checkpoint/writer_sync.hpp"
#include "sf/error.hpp"

namespace sf {

/// Some bytes of one of a save's tensors, in host memory.
struct TensorPiece {
  size_t tensor = 0;                           // index into the save's tensors
  uint64_t offset = 0;                         // of the piece in the tensor's own bytes
  const void* data = nullptr;                  // stays as it is until `given_back`
  uint64_t bytes = 0;
  std::function<void()> given_back = {};       // from any thread, once; may be empty
};

/// Where the bytes of a save come from. Pieces cover every tensor, begin at whole elements and never overlap.
class SnapshotSource {
 public:
  virtual ~SnapshotSource() = default;
  /// False while hand_over would have to wait for a device that is still copying.
  virtual bool is_ready() = 0;
  /// Calls `put` with every piece; may wait for the device, and for pieces to be given back.
  virtual void hand_over(const std::function<void(TensorPiece)>& put) = 0;
};

/// One rank's tensors on their way to its file. Checksums are taken as the writer gives pieces back, each by
/// the writer's thread.
class RankSave {
 public:
  struct Arguments {
    CheckpointWriter writer;
    std::filesystem::path folder;  // exists, empty but for the files of other ranks
    int64_t step = 0;
    int rank = 0;
    int world_size = 1;
    std::vector<TensorSlice> tensors = {};          // their data is borrowed until is_done(); null with a source
    std::shared_ptr<SnapshotSource> source = {};    // null: the tensors have their data
    std::shared_ptr<const void> keep_alive = {};    // dropped with this object
  };
  /// begin, and with bytes that are ready put and finish. Throws Error(kCheckpoint) when the writer refuses; nothing is
  /// borrowed any more then.
  explicit RankSave(Arguments arguments);
  ~RankSave();
  RankSave(const RankSave&) = delete;
  RankSave& operator=(const RankSave&) = delete;

  [[nodiscard]] int64_t step() const { return arguments_.step; }
  /// Hands over what has become ready, then asks the writer; throws its failure.
  [[nodiscard]] bool is_done();
  /// Returns when everything is synced; throws the writer's failure.
  void wait();
  /// This rank's part of the index; only when done.
  [[nodiscard]] CheckpointIndex index() const;

  struct Lease;

 private:
  void hand_over();
  void put(size_t tensor, uint64_t offset, const void* data, uint64_t bytes, std::function<void()> given_back);

  Arguments arguments_;
  RankFileLayout layout_;
  std::deque<Lease> leases_;  // the header's, then one for each piece; addresses stay
  bool is_handed_over_ = false, done_ = false;
};

/// A file of text beside the tensors: {"recipe.toml", "..."}.
struct TextFile {
  std::string name, text;
};

/// Where a step is written before it is committed: makes `.partial-step-N` in `run_folder` (and that), empty.
/// Rank 0 calls it.
[[nodiscard]] std::filesystem::path make_partial_folder(const std::filesystem::path& run_folder,
                                                        int64_t step);

/// Rank 0, when all ranks are done: writes state, texts, index and marker, names the folder, points `latest`
/// to it. A step folder of the same name is replaced in one move. Returns the step's folder.
std::filesystem::path commit_checkpoint(const std::filesystem::path& run_folder, int64_t step,
                                        CheckpointIndex index, const RunState& state,
                                        const std::vector<TextFile>& texts);

/// The ranks that write a checkpoint together. All of them make the same calls to their CheckpointSaver.
struct SavePeers {
  int rank = 0;
  int world_size = 1;
  /// One text of each rank, in rank order, when all have called (Comm::gather_texts). Not called with one rank.
  std::function<std::vector<std::string>(const std::string& text, std::string_view label)> gather = {};
};

/// A step that is on disk.
struct CommittedStep {
  std::filesystem::path folder;
  int64_t step = 0;
  uint64_t bytes = 0;    // of all ranks' tensors
  double seconds = 0;    // from start() until it had its name; on other ranks than 0 until they heard of it
};

/// Saves of a run, one at a time. Each rank writes its own file; when all files are on disk rank 0 commits. All errors are
/// Error(kCheckpoint) that name the step; what fails on one rank is thrown on all of them (rule A3), and the step does not exist.
class CheckpointSaver {
 public:
  /// The writer outlives this object. Rank 0 deletes left-over partial and removed folders of killed runs. `commits_beside`: rank 0
  /// commits on a thread of its own, so that the syncs of many small files hold nobody up.
  CheckpointSaver(std::filesystem::path run_folder, CheckpointWriter writer, SavePeers peers = {}, bool commits_beside = false);

  struct Request {
    RunState state;  // its step names the folder; rank 0's is saved
    std::vector<TensorSlice> tensors = {};
    std::shared_ptr<SnapshotSource> source = {};  // gives the bytes of tensors without data
    std::vector<TextFile> texts = {};             // likewise
    std::shared_ptr<const void> keep_alive = {};  // owns what the tensors borrow
    /// Rank 0, right after the commit, on the committing thread: what must not happen before (best, rotation). What it throws is a warning: the step is saved.
    std::function<void()> after_commit = {};
  };
  /// Waits for a save in flight (rule A2), checks the free space, hands what is ready to the writer and returns. With one rank and the
  /// built-in writer all is on disk then and the step is committed; else is_settled, advance and wait bring it there.
  void start(Request request);
  /// Whether this rank has done its part of the stage: then all ranks may advance(). Never waits; no collective. False when idle.
  [[nodiscard]] bool is_settled();
  /// All ranks, when is_settled() on each: the next stage. The step that was committed by this call.
  std::optional<CommittedStep> advance();
  /// With one rank: advances as far as it goes without waiting. The step that was committed by this call.
  std::optional<CommittedStep> poll();
  /// All ranks: returns when nothing is in flight and everything is committed; the step of that.
  std::optional<CommittedStep> wait();
  [[nodiscard]] bool is_idle() const { return stage_ == Stage::idle; }
  [[nodiscard]] const std::optional<CommittedStep>& last_step() const { return last_; }
  [[nodiscard]] std::optional<std::filesystem::path> last_committed() const { return last_ ? std::optional(last_->folder) : std::nullopt; }

 private:
  enum class Stage { idle, writing, committing };

  void prepare(int64_t step, uint64_t bytes);
  void prepare_together(int64_t step, uint64_t bytes);
  void begin_commit();
  std::optional<CommittedStep> end_commit();
  void commit(CheckpointIndex index);
  void abandon();
  [[nodiscard]] bool is_alone() const { return peers_.world_size == 1; }

  std::filesystem::path run_folder_;
  CheckpointWriter writer_;
  SavePeers peers_;
  bool commits_beside_ = false;
  Stage stage_ = Stage::idle;
  std::optional<Error> failed_;  // of this rank in this stage, until all ranks have heard of it
  std::unique_ptr<RankSave> save_;
  std::filesystem::path partial_;
  RunState state_;
  std::vector<TextFile> texts_;
  std::function<void()> after_commit_;
  uint64_t bytes_ = 0;
  std::chrono::steady_clock::time_point started_, committed_;
  std::optional<CommittedStep> last_;
  std::future<void> commit_task_;  // last: its thread uses the rest
};

}  // namespace sf
