// Static shapes and buckets: the same blocks, the same loss and gradients, whatever is padded.
#include <doctest/doctest.h>

#include <optional>

#include <ATen/ATen.h>

#include "core/train/loader.hpp"
#include "tests/dflash2/draft_run.hpp"
#include "tests/draft/padding.hpp"

namespace sf::testing {
namespace {

constexpr int64_t kAnchors = 6, kVocab = 39;

ModelFacts facts_of(const std::string& config, bool is_static) {
  ModelFacts facts;
  facts.draft_config_json = config;
  facts.static_shapes = is_static;
  return facts;
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

    const Batch dynamic = batch_of_samples(dynamic_draft.algorithm(), dynamic_draft.description(), rows, {.max_tokens = 64}, kVocab);
    CHECK(dynamic.tokens == 13);
    const StepOutcome expected = dynamic_draft.train({dynamic});
    for (const auto& [buckets, tokens] : {std::pair(std::vector<int64_t>{}, int64_t{64}), std::pair(std::vector<int64_t>{16, 32}, int64_t{16}),
                                          std::pair(std::vector<int64_t>{8, 13}, int64_t{13})}) {
      CAPTURE(tokens);
      const Batch padded = batch_of_samples(static_draft.algorithm(), static_draft.description(), rows,
                                            {.max_tokens = 64, .is_static = true, .buckets = buckets}, kVocab);
      CHECK(padded.tokens == tokens);
      CHECK(padded.slots == kAnchors);
      CHECK(padded.at("keep").sum().item<int64_t>() == dynamic.at("keep").sum().item<int64_t>());
      CHECK(at::equal(padded.at("anchors").masked_select(padded.at("keep")), dynamic.at("anchors").masked_select(dynamic.at("keep"))));
      check_same_step(static_draft.train({padded}), expected, 1e-6);
    }
  }
}

TEST_CASE("dflash2: what stands in padding, in dead slots and in dead rows changes no bit of loss and gradients") {
  DflashOptions options;
  options.num_anchors = kAnchors;
  const std::string config = tiny_config();
  const TinyProblem problem = tiny_problem(options, config);
  DraftRun draft(options, facts_of(config, true), problem.tables, problem.weights);
  const Batch batch = batch_of_samples(draft.algorithm(), draft.description(), {2, std::nullopt, 1}, {.max_tokens = 32, .is_static = true}, kVocab);
  check_same_bits(draft.train({poisoned(draft.algorithm(), draft.description(), batch)}), draft.train({batch}));
}

TEST_CASE("dflash2: an evaluation sees every position that may start a block, more than the static slots hold") {
  DflashOptions options;
  options.num_anchors = kAnchors;
  const std::string config = tiny_config();
  const TinyProblem problem = tiny_problem(options, config);
  DraftRun draft(options, facts_of(config, true), problem.tables, problem.weights);
  Sample sample = sample_for_padding(draft.description(), 0, kVocab);
  REQUIRE(draft.algorithm().prepare(sample, sample_context(3, 0, 0, true)).empty());
  CHECK(sample.tensors.at("anchors").numel() == 19);
  const BatchFields fields(draft.description(), sample);
  Batch batch = fields.stack({sample}, {.max_tokens = 64});  // as evaluate() stacks them
  draft.algorithm().finish(batch);
  CHECK(draft.evaluate({batch}).metrics.at("dflash/hard_label/block_count").numerator.item<double>() == 19);
  CHECK_THROWS(fields.stack({sample}, {.max_tokens = 64, .is_static = true}));
}

}  // namespace sf::testing
