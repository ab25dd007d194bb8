// core/train/staging.hpp: where a save's bytes wait between the device and the checkpoint writer, so that training goes on while they are written.
//
// With room for a rank's whole snapshot a save is: copies are enqueued on a stream of their own behind the step (on the CPU a thread makes them), training goes
// on, and the next optimizer step waits for the copies on the device, not on the host (on the CPU there is no other place). With less room the area is a ring: the save then waits for the writer,
// and training for the save. Host tensors are copied like the others: what a snapshot holds never changes while it is written (rule A4).
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/checkpoint/save.hpp"

namespace c10 {
struct Event;
class Stream;
}  // namespace c10

namespace sf {

struct Plan;

/// How much host memory the saves of a run take.
struct StagingSize {
  int64_t bytes = 0;
  bool is_whole = true;      // room for all of a snapshot: a save does not wait for the disk, if its writer does not
  int64_t block_bytes = 0;   // memory is taken, filled and given back in blocks of this
  std::string detail;        // for the plan
};
/// Whether the plan's checkpoint writer works beside training (capability async-commit).
[[nodiscard]] bool writes_beside_training(const Plan& plan);
/// Of a snapshot of so many bytes, under checkpoint.staging_bytes and the plan's writer.
[[nodiscard]] StagingSize staging_size(const Plan& plan, int64_t snapshot_bytes);

class Staging final : public SnapshotSource {
 public:
  /// For snapshots of tensors of these sizes; takes its memory now, page-locked when the device is a GPU, and touches it.
  Staging(const std::vector<int64_t>& tensor_bytes, const StagingSize& size, at::Device device);
  ~Staging() override;

  /// Begins a snapshot of these tensors, contiguous and of the sizes that were named. The one before has been given back. With room for all of it the copies
  /// are enqueued (begun, on the CPU) when this returns; else they are made in hand_over. Nothing may change the tensors before hold_updates.
  void take(std::vector<at::Tensor> tensors);
  /// The device's current stream (on the CPU: the caller) waits until the copies are made. Before anything changes the tensors; costs nothing when none are
  /// under way.
  void hold_updates();

  bool is_ready() override;
  void hand_over(const std::function<void(TensorPiece)>& put) override;

  [[nodiscard]] int64_t bytes() const { return size_.bytes; }
  [[nodiscard]] bool is_whole() const { return size_.is_whole; }
  /// How long hold_updates has made the device (the caller) wait for the last snapshot. Once the device is past it.
  [[nodiscard]] double held_seconds() const;

 private:
  struct Piece {
    size_t tensor = 0;
    int64_t offset = 0, bytes = 0;        // in the tensor
    int64_t block = 0, block_offset = 0;  // of the snapshot; its slot in the ring is block % slots
  };
  void copy(const Piece& piece);
  char* place_of(const Piece& piece);
  void wait_for_slot(int64_t slot);
  [[nodiscard]] size_t slot_of(int64_t block) const { return static_cast<size_t>(block) % blocks_.size(); }

  StagingSize size_;
  at::Device device_;
  std::vector<Piece> pieces_;          // in the order of their blocks
  std::vector<at::Tensor> blocks_;     // bytes
  std::vector<at::Tensor> tensors_;    // of the snapshot that was taken
  std::unique_ptr<c10::Stream> copies_;                       // null on the CPU
  std::unique_ptr<c10::Event> arrived_, held_from_, held_to_;
  bool is_under_way_ = false, was_held_ = false;

  std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<int64_t> lent_;          // pieces of each slot that a writer has
  double host_held_seconds_ = 0;
  std::future<void> host_copies_;      // last: its thread uses the rest
};

}  // namespace sf
