#include "core/data/order.hpp"

#include "core/base/error.hpp"
#include "core/data/philox.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace sf {

std::vector<int64_t> epoch_permutation(uint64_t seed, int64_t epoch, int64_t count) {
  const PhiloxStream stream(seed, "order");
  std::vector<std::pair<uint64_t, int64_t>> drawn(static_cast<size_t>(count));
  for (int64_t sample = 0; sample < count; ++sample) {
    drawn[static_cast<size_t>(sample)] = {
        stream.bits(static_cast<uint64_t>(epoch), static_cast<uint64_t>(sample), 0), sample};
  }
  std::sort(drawn.begin(),
            drawn.end());  // equal draws (1 in 2^64) are ordered by sample, so the result is still defined
  std::vector<int64_t> permutation(drawn.size());
  std::transform(drawn.begin(), drawn.end(), permutation.begin(),
                 [](const auto& pair) { return pair.second; });
  return permutation;
}

SampleOrder::SampleOrder(uint64_t seed, int64_t samples, int64_t epochs)
    : seed_(seed), samples_(samples), epochs_(epochs) {
  SF_CHECK(samples > 0, "an order needs samples, got {}", samples);
  SF_CHECK(epochs >= 0, "number of epochs is {}", epochs);
}

std::optional<int64_t> SampleOrder::entries_total() const {
  if (epochs_ == 0) return std::nullopt;
  return epochs_ * samples_;
}

std::optional<int64_t> SampleOrder::windows_left(int64_t position, const WindowShape& shape) const {
  if (epochs_ == 0) return std::nullopt;
  const int64_t left = std::max<int64_t>(epochs_ * samples_ - position, 0);
  return (left + shape.entries() - 1) / shape.entries();
}

std::optional<StreamEntry> SampleOrder::at(int64_t position) {
  SF_CHECK(position >= 0, "position {} is negative", position);
  const int64_t epoch = position / samples_;
  if (epochs_ > 0 && epoch >= epochs_) return std::nullopt;
  if (epoch != cached_epoch_) {
    permutation_ = epoch_permutation(seed_, epoch, samples_);
    cached_epoch_ = epoch;
  }
  return StreamEntry{epoch, permutation_[static_cast<size_t>(position % samples_)]};
}

std::vector<std::optional<StreamEntry>> SampleOrder::rows(int64_t window_position, const WindowShape& shape,
                                                          int64_t micro_step, int64_t rank) {
  SF_CHECK(micro_step >= 0 && micro_step < shape.accumulation_steps, "micro-step {} of {}", micro_step,
           shape.accumulation_steps);
  SF_CHECK(rank >= 0 && rank < shape.ranks, "rank {} of {}", rank, shape.ranks);
  std::vector<std::optional<StreamEntry>> result;
  for (int64_t row = 0; row < shape.batch_size; ++row) {
    result.push_back(at(window_position + (micro_step * shape.batch_size + row) * shape.ranks + rank));
  }
  return result;
}

int64_t SampleOrder::next_position(int64_t window_position, const WindowShape& shape) const {
  const int64_t next = window_position + shape.entries();
  return epochs_ == 0 ? next : std::min(next, epochs_ * samples_);
}

}  // namespace sf
