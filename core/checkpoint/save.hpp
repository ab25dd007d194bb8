// core/checkpoint/save.hpp: from slices in memory to a committed step folder.
//
// Everything is written to `.partial-step-N` beside the step folders. When the writers of all ranks are done,
// rank 0 adds state and index, then the marker, and gives the folder its name: until then the step does not
// exist, after that it is whole.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/format.hpp"
#include "core/checkpoint/writer_sync.hpp"
#include "sf/error.hpp"

namespace sf {

/// One rank's tensors on their way to its file. Hands all pieces to the writer at once; checksums are taken
/// as the writer gives them back.
class RankSave {
 public:
  struct Arguments {
    CheckpointWriter writer;
    std::filesystem::path folder;  // exists, empty but for the files of other ranks
    int64_t step = 0;
    int rank = 0;
    int world_size = 1;
    std::vector<TensorSlice> tensors = {};        // their data is borrowed until is_done()
    std::shared_ptr<const void> keep_alive = {};  // dropped with this object
  };
  /// begin, put, finish. Throws Error(kCheckpoint) when the writer refuses; nothing is borrowed any more
  /// then.
  explicit RankSave(Arguments arguments);
  ~RankSave();
  RankSave(const RankSave&) = delete;
  RankSave& operator=(const RankSave&) = delete;

  [[nodiscard]] int64_t step() const { return arguments_.step; }
  /// Asks the writer; throws its failure.
  [[nodiscard]] bool is_done();
  /// Returns when everything is synced; throws the writer's failure.
  void wait();
  /// This rank's part of the index; only when done.
  [[nodiscard]] CheckpointIndex index() const;

  struct Lease;

 private:
  Arguments arguments_;
  RankFileLayout layout_;
  std::deque<Lease> leases_;  // the header's, then one for each tensor; addresses stay
  bool done_ = false;
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

/// Saves of a run, one at a time. Each rank writes its own file; when all files are on disk rank 0 commits. All errors are
/// Error(kCheckpoint) that name the step; what fails on one rank is thrown on all of them, and the step does not exist.
class CheckpointSaver {
 public:
  /// The writer outlives this object. Rank 0 deletes left-over partial and removed folders of killed runs.
  CheckpointSaver(std::filesystem::path run_folder, CheckpointWriter writer, SavePeers peers = {});

  struct Request {
    RunState state;  // its step names the folder; rank 0's is saved
    std::vector<TensorSlice> tensors = {};
    std::vector<TextFile> texts = {};  // likewise
    std::shared_ptr<const void> keep_alive = {};  // owns what the tensors borrow
  };
  /// Waits for a save in flight, checks the free space, hands everything to the writer and returns. With one rank and the
  /// built-in writer all is on disk then and the step is committed; several ranks commit in wait().
  void start(Request request);
  /// Commits what is done. The folder of a step that was committed by this call. With several ranks nothing: they finish at
  /// different times, and asking each other after every window would cost more than a later commit.
  std::optional<std::filesystem::path> poll();
  /// Returns when nothing is in flight and everything is committed.
  void wait();
  [[nodiscard]] std::optional<std::filesystem::path> last_committed() const { return last_committed_; }

 private:
  void prepare(int64_t step, uint64_t bytes);
  void prepare_together(int64_t step, uint64_t bytes);
  void commit(CheckpointIndex index);
  void wait_together();
  void abandon();

  std::filesystem::path run_folder_;
  CheckpointWriter writer_;
  SavePeers peers_;
  std::optional<Error> failed_;  // of this rank's file, until all ranks have heard of it
  std::unique_ptr<RankSave> save_;
  std::filesystem::path partial_;
  RunState state_;
  std::vector<TextFile> texts_;
  std::optional<std::filesystem::path> last_committed_;
};

}  // namespace sf
