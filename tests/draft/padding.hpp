// tests/draft/padding.hpp: the same samples in batches of different shapes, for tests that padding changes nothing.
#pragma once

#include <optional>
#include <vector>

#include "core/train/batch.hpp"
#include "tests/draft/algorithm_run.hpp"

namespace sf::testing {

/// Samples 0, 1, 2 with 20, 13 and 9 tokens below `vocab` and every feature that the description reads, optional ones too; sample 2 is supervised in
/// its last two tokens alone.
[[nodiscard]] Sample sample_for_padding(const Description& description, int64_t index, int64_t vocab);

/// What loader and training make of these samples (nothing: a dead row): prepared with seed 3 and epoch 1, stacked, finished.
[[nodiscard]] Batch batch_of_samples(Algorithm& algorithm, const Description& description, const std::vector<std::optional<int64_t>>& indices,
                                     const BatchShape& shape, int64_t vocab);

/// The same batch with large features, other tokens and other anchors wherever nothing is live; finished again.
[[nodiscard]] Batch poisoned(Algorithm& algorithm, const Description& description, Batch batch);

/// Loss, denominator and every gradient agree: the loss to `tolerance`, gradients to ten times that in norm.
void check_same_step(const StepOutcome& found, const StepOutcome& expected, double tolerance);
/// They are the same bits.
void check_same_bits(const StepOutcome& found, const StepOutcome& expected);

}  // namespace sf::testing
