// core/data/order.hpp
//
// Which sample goes where. The stream of a run is epoch after epoch, each a permutation of all samples that
// depends on (seed, epoch) alone. A window (one optimizer step) takes the next ranks x accumulation_steps x
// batch_size entries of the stream; micro-step m, rank r, row j gets entry (m * batch_size + j) * ranks + r
// of them. Nothing is repeated or dropped: the last window of a run may be short, and its empty places are
// dead rows. So a position in the stream is one number that means the same for every number of ranks, and
// ranks negotiate nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace sf {

/// How one window is spread over ranks, micro-steps and rows.
struct WindowShape {
  int64_t ranks = 1;
  int64_t accumulation_steps = 1;
  int64_t batch_size = 1;

  [[nodiscard]] int64_t entries() const { return ranks * accumulation_steps * batch_size; }
};

/// One place in the stream. `epoch` and `sample` also name every draw made for it (core/data/philox.hpp).
struct StreamEntry {
  int64_t epoch = 0;
  int64_t sample = 0;

  friend bool operator==(const StreamEntry&, const StreamEntry&) = default;
};

/// The samples 0..count-1 ordered by their draws of stream "order" in this epoch.
[[nodiscard]] std::vector<int64_t> epoch_permutation(uint64_t seed, int64_t epoch, int64_t count);

/// The stream of a run. Not thread-safe: it keeps the permutation of the epoch it was last asked for.
class SampleOrder {
 public:
  /// `samples` > 0; `epochs` > 0 ends the stream after that many, 0 means it never ends.
  SampleOrder(uint64_t seed, int64_t samples, int64_t epochs);

  [[nodiscard]] int64_t samples() const { return samples_; }
  /// Number of entries of the whole stream; nothing when it never ends.
  [[nodiscard]] std::optional<int64_t> entries_total() const;
  /// Windows from `position` to the end of the stream, the last one perhaps short; nothing when it never
  /// ends.
  [[nodiscard]] std::optional<int64_t> windows_left(int64_t position, const WindowShape& shape) const;

  /// The entry at a position, or nothing past the end.
  [[nodiscard]] std::optional<StreamEntry> at(int64_t position);

  /// Rows of one micro-step of one rank, in the window that starts at `window_position`. A row without an
  /// entry is dead.
  [[nodiscard]] std::vector<std::optional<StreamEntry>> rows(int64_t window_position,
                                                             const WindowShape& shape, int64_t micro_step,
                                                             int64_t rank);

  /// Where the window after the one at `window_position` starts: past what it took, which is less at the
  /// stream's end.
  [[nodiscard]] int64_t next_position(int64_t window_position, const WindowShape& shape) const;

 private:
  uint64_t seed_;
  int64_t samples_;
  int64_t epochs_;
  int64_t cached_epoch_ = -1;
  std::vector<int64_t> permutation_;
};

}  // namespace sf
