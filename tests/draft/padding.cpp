#include "tests/draft/padding.hpp"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <algorithm>

#include "core/train/loader.hpp"

namespace sf::testing {
namespace {

constexpr int64_t kTokens[] = {20, 13, 9};

}  // namespace

Sample sample_for_padding(const Description& description, int64_t index, int64_t vocab) {
  at::manual_seed(100 + static_cast<uint64_t>(index));
  Sample sample;
  sample.index = index;
  sample.tokens = kTokens[index];
  sample.tensors["input_ids"] = at::randint(vocab, {sample.tokens}, at::kLong);
  sample.tensors["loss_mask"] = at::ones({sample.tokens}, at::kLong);
  if (index == 2) {
    sample.tensors["loss_mask"].narrow(0, 0, sample.tokens - 2).zero_();
  }
  for (const FeatureRead& read : description.reads) {
    if (read.columns > 0) {
      sample.tensors[read.name] = at::randn({sample.tokens, read.columns});
    }
  }
  return sample;
}

Batch batch_of_samples(Algorithm& algorithm, const Description& description, const std::vector<std::optional<int64_t>>& indices,
                       const BatchShape& shape, int64_t vocab) {
  const auto prepared = [&](int64_t index) {
    Sample sample = sample_for_padding(description, index, vocab);
    REQUIRE(algorithm.prepare(sample, sample_context(3, 1, index, false)).empty());
    return sample;
  };
  std::vector<std::optional<Sample>> rows;
  for (const auto& index : indices) {
    rows.push_back(index ? std::optional<Sample>(prepared(*index)) : std::nullopt);
  }
  Batch batch = BatchFields(description, prepared(0)).stack(rows, shape);
  algorithm.finish(batch);
  return batch;
}

Batch poisoned(Algorithm& algorithm, const Description& description, Batch batch) {
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t index = batch.sample_indices[static_cast<size_t>(row)];
    const int64_t live = index < 0 ? 0 : kTokens[index];
    for (const FeatureRead& read : description.reads) {
      if (read.columns > 0) {
        batch.tensors[read.name][row].narrow(0, live, batch.tokens - live).fill_(1e4);
      }
    }
    batch.tensors["input_ids"][row].narrow(0, live, batch.tokens - live).fill_(11);
  }
  if (batch.tensors.count("keep") != 0) {
    batch.tensors["anchors"].masked_fill_(batch.at("keep").logical_not(), 5);
  }
  algorithm.finish(batch);
  return batch;
}

void check_same_step(const StepOutcome& found, const StepOutcome& expected, double tolerance) {
  CHECK(found.denominator == doctest::Approx(expected.denominator).epsilon(1e-12));
  CHECK(found.loss == doctest::Approx(expected.loss).epsilon(tolerance));
  REQUIRE(found.gradients.size() == expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    CAPTURE(name);
    const double scale = std::max(1e-6, gradient.norm().item<double>());
    CHECK((found.gradients.at(name) - gradient).norm().item<double>() / scale <= 10 * tolerance);
  }
}

void check_same_bits(const StepOutcome& found, const StepOutcome& expected) {
  CHECK(found.loss == expected.loss);
  REQUIRE(found.gradients.size() == expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    CAPTURE(name);
    CHECK(at::equal(found.gradients.at(name), gradient));
  }
}

}  // namespace sf::testing
