// core/train/batch.hpp: samples become batches: every field padded to one length and stacked. Host tensors only.
//
// Shapes: b rows · s padded tokens · w padded block slots
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sf/algorithm.hpp"

namespace c10 {
struct Event;
}

namespace sf {

/// How long a batch becomes.
struct BatchShape {
  int64_t max_tokens = 2048;             // samples have been cut to this
  bool is_static = false;                // pad to max_tokens, or to the smallest bucket that holds the longest sample; all slots always
  std::vector<int64_t> buckets;          // strictly increasing, at most max_tokens; only with is_static
  bool is_pinned = false;                // stack into page-locked memory, from which a GPU copies by itself

  /// Padded length for a longest sample of `tokens`; throws Error(kData) when none holds it.
  int64_t padded_tokens(int64_t tokens) const;
  /// All lengths that a batch can have, ascending: the buckets and max_tokens. Empty unless static.
  std::vector<int64_t> lengths() const;
};

/// Type and trailing shape of each field, taken from one prepared sample: what a dead row is made of.
class BatchFields {
 public:
  BatchFields(const Description& description, const Sample& prototype);

  /// Rows without a sample are dead: every field at its pad value. An all-dead batch gets the shape of the prototype. Throws Error(kData) when a
  /// sample has an optional feature that the prototype lacks, or the other way round.
  Batch stack(const std::vector<std::optional<Sample>>& rows, const BatchShape& shape) const;

 private:
  struct Field {
    BatchField what;
    at::ScalarType dtype;
    std::vector<int64_t> trailing;       // sizes after the padded axis
  };
  std::vector<Field> fields_;
  std::vector<std::string> optional_;    // optional features that the prototype has ...
  std::vector<std::string> missing_;     // ... and those that it lacks
  int64_t static_slots_ = 0, prototype_tokens_ = 0, prototype_slots_ = 0, prototype_index_ = 0;
};

/// Fields on the training device; floating features get the model's type.
Batch to_device(const Batch& batch, const Description& description, at::Device device, at::ScalarType dtype);

/// Batches on their way to the training device, first in, first out. On a GPU `send` only enqueues copies, on a stream of their own, so that they run beside a step;
/// `take` makes the current stream wait for them, not the host. On the CPU nothing is copied.
class DeviceFeed {
 public:
  DeviceFeed(const Description& description, at::Device device, at::ScalarType dtype);

  void send(const Batch& batch);
  Batch take();
  bool empty() const { return sent_.empty(); }

 private:
  struct Sent {
    Batch batch;
    std::shared_ptr<c10::Event> arrived;   // null on the CPU
  };
  const Description& description_;
  at::Device device_;
  at::ScalarType dtype_;
  std::optional<c10::Stream> copies_;
  std::deque<Sent> sent_;
};

}  // namespace sf
