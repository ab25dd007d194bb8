// Static shapes and buckets: the same blocks, the same loss and gradients, whatever is padded.
#include <doctest/doctest.h>

#include <optional>

#include <ATen/ATen.h>

#include "core/train/batch.hpp"
#include "core/train/loader.hpp"
#include "tests/dflash2/draft_run.hpp"

namespace sf::testing {
namespace {

constexpr int64_t kAnchors = 6;

// Samples of 9 to 20 tokens; the third has one place only where a block may start.
Sample sample_of(int64_t index) {
  at::manual_seed(100 + index);
  Sample sample;
  sample.index = index;
  sample.tokens = std::vector<int64_t>{20, 13, 9}.at(static_cast<size_t>(index));
  sample.tensors["input_ids"] = at::randint(39, {sample.tokens}, at::kLong);
  sample.tensors["loss_mask"] = at::ones({sample.tokens}, at::kLong);
  if (index == 2) {
    sample.tensors["loss_mask"].narrow(0, 0, 7).zero_();
  }
  sample.tensors["hidden_states"] = at::randn({sample.tokens, 32});
  return sample;
}

ModelFacts facts_of(const std::string& config, bool is_static) {
  ModelFacts facts;
  facts.draft_config_json = config;
  facts.static_shapes = is_static;
  return facts;
}

// What loader and training do with these samples, in one micro-batch.
Batch batch_of(DraftRun& draft, const std::vector<std::optional<int64_t>>& indices, const BatchShape& shape) {
  std::vector<std::optional<Sample>> rows;
  for (const auto& index : indices) {
    std::optional<Sample> row;
    if (index) {
      row = sample_of(*index);
      REQUIRE(draft.algorithm().prepare(*row, sample_context(3, 1, *index, false)).empty());
    }
    rows.push_back(std::move(row));
  }
  Sample prototype = sample_of(0);
  REQUIRE(draft.algorithm().prepare(prototype, sample_context(3, 0, 0, false)).empty());
  Batch batch = BatchFields(draft.description(), prototype).stack(rows, shape);
  draft.algorithm().finish(batch);
  return batch;
}

void check_same(const StepOutcome& found, const StepOutcome& expected, double tolerance) {
  CHECK(found.denominator == doctest::Approx(expected.denominator).epsilon(1e-12));
  CHECK(found.loss == doctest::Approx(expected.loss).epsilon(tolerance));
  REQUIRE(found.gradients.size() == expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    CAPTURE(name);
    const double scale = std::max(1e-6, gradient.norm().item<double>());
    CHECK((found.gradients.at(name) - gradient).norm().item<double>() / scale <= 10 * tolerance);
  }
}

struct Setting {
  const char* name;
  std::map<std::string, std::string> config;
  LossType loss;
};

}  // namespace

TEST_CASE("dflash2: static shapes and buckets give the loss and gradients of dynamic ones, and the same anchors") {
  for (const Setting& setting : {Setting{"DFlash2", {}, LossType::kDflash}, Setting{"DFlash2 with D-PACE", {}, LossType::kDpace},
                                 Setting{"DFlash", {{"architectures", "[\"DFlashDraftModel\"]"}}, LossType::kDflash}}) {
    CAPTURE(setting.name);
    DflashOptions options;
    options.num_anchors = kAnchors;
    options.loss_type = setting.loss;
    const std::string config = tiny_config(setting.config);
    const TinyProblem problem = tiny_problem(options, config);
    DraftRun dynamic_draft(options, facts_of(config, false), problem.tables, problem.weights);
    DraftRun static_draft(options, facts_of(config, true), problem.tables, problem.weights);
    const std::vector<std::optional<int64_t>> rows = {1, 2, std::nullopt};

    const Batch dynamic = batch_of(dynamic_draft, rows, {.max_tokens = 64});
    CHECK(dynamic.tokens == 13);
    const StepOutcome expected = dynamic_draft.train({dynamic});
    for (const auto& [buckets, tokens] : {std::pair(std::vector<int64_t>{}, int64_t{64}), std::pair(std::vector<int64_t>{16, 32}, int64_t{16}),
                                          std::pair(std::vector<int64_t>{8, 13}, int64_t{13})}) {
      CAPTURE(tokens);
      const Batch padded = batch_of(static_draft, rows, {.max_tokens = 64, .is_static = true, .buckets = buckets});
      CHECK(padded.tokens == tokens);
      CHECK(padded.slots == kAnchors);
      CHECK(padded.at("keep").sum().item<int64_t>() == dynamic.at("keep").sum().item<int64_t>());
      CHECK(at::equal(padded.at("anchors").masked_select(padded.at("keep")), dynamic.at("anchors").masked_select(dynamic.at("keep"))));
      check_same(static_draft.train({padded}), expected, 1e-6);
    }
  }
}

TEST_CASE("dflash2: what stands in padding, in dead slots and in dead rows changes no bit of loss and gradients") {
  DflashOptions options;
  options.num_anchors = kAnchors;
  const std::string config = tiny_config();
  const TinyProblem problem = tiny_problem(options, config);
  DraftRun draft(options, facts_of(config, true), problem.tables, problem.weights);
  const BatchShape shape{.max_tokens = 32, .is_static = true};
  const std::vector<std::optional<int64_t>> rows = {2, std::nullopt, 1};
  const StepOutcome expected = draft.train({batch_of(draft, rows, shape)});

  Batch poisoned = batch_of(draft, rows, shape);
  const std::vector<int64_t> live = {9, 0, 13};
  for (int64_t row = 0; row < 3; ++row) {
    const int64_t begin = live[static_cast<size_t>(row)];
    poisoned.tensors["hidden_states"][row].narrow(0, begin, 32 - begin).fill_(1e4);
    poisoned.tensors["input_ids"][row].narrow(0, begin, 32 - begin).fill_(11);
  }
  poisoned.tensors["anchors"].masked_fill_(poisoned.at("keep").logical_not(), 5);
  draft.algorithm().finish(poisoned);
  const StepOutcome found = draft.train({poisoned});
  CHECK(found.loss == expected.loss);
  for (const auto& [name, gradient] : expected.gradients) {
    CAPTURE(name);
    CHECK(at::equal(found.gradients.at(name), gradient));
  }
}

TEST_CASE("dflash2: an evaluation sees every position that may start a block, more than the static slots hold") {
  DflashOptions options;
  options.num_anchors = kAnchors;
  const std::string config = tiny_config();
  const TinyProblem problem = tiny_problem(options, config);
  DraftRun draft(options, facts_of(config, true), problem.tables, problem.weights);
  Sample sample = sample_of(0);
  REQUIRE(draft.algorithm().prepare(sample, sample_context(3, 0, 0, true)).empty());
  CHECK(sample.tensors.at("anchors").numel() == 19);
  const BatchFields fields(draft.description(), sample);
  Batch batch = fields.stack({sample}, {.max_tokens = 64});  // as evaluate() stacks them
  draft.algorithm().finish(batch);
  CHECK(draft.evaluate({batch}).metrics.at("dflash/hard_label/block_count").numerator.item<double>() == 19);
  CHECK_THROWS(fields.stack({sample}, {.max_tokens = 64, .is_static = true}));
}

}  // namespace sf::testing
