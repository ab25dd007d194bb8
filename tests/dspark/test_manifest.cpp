// The plugin's manifest, without its library: every option reads, and each rule speaks where it should.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/draft/manifest_judgement.hpp"

namespace {

std::string judged(const std::vector<std::string>& sets) { return sf::testing::judged_by("dspark", sets); }

}  // namespace

TEST_CASE("dspark manifest: defaults are silent, numbers out of their range and unknown names are refused") {
  CHECK(judged({}) == "");
  CHECK(judged({"training.dspark_l1_loss_alpha=-0.1"}) == "recipe/out-of-range");
  CHECK(judged({"training.dspark_ce_loss_alpha=-1.0"}) == "recipe/out-of-range");
  CHECK(judged({"training.dspark_confidence_head_alpha=-1.0"}) == "recipe/out-of-range");
  CHECK(judged({"plugin.dspark.schedule_threshold=1.5"}) == "recipe/out-of-range");
  CHECK(judged({"plugin.dspark.markov_rank=-1"}) == "recipe/out-of-range");
  CHECK(judged({"plugin.dspark.markov_head_type=\"lstm\""}) != "");
  CHECK(judged({"training.num_anchors=0"}) == "recipe/out-of-range");
  CHECK(judged({"training.loss_decay_gamma=4.0"}) == "");
}

TEST_CASE("dspark manifest: a draft without a loss for its tokens is refused") {
  CHECK(judged({"training.dspark_ce_loss_alpha=0.0"}) == "");
  CHECK(judged({"training.dspark_l1_loss_alpha=0.0"}) == "");
  CHECK(judged({"training.dspark_ce_loss_alpha=0.0", "training.dspark_l1_loss_alpha=0.0"}) == "dspark/no-draft-loss");
}

TEST_CASE("dspark manifest: heads that are not there and settings for them") {
  CHECK(judged({"plugin.dspark.markov_rank=0"}) == "dspark/confidence-needs-markov");
  CHECK(judged({"plugin.dspark.markov_rank=0", "plugin.dspark.confidence_head_with_markov=false"}) == "");
  CHECK(judged({"plugin.dspark.markov_rank=0", "plugin.dspark.enable_confidence_head=false"}) == "");
  CHECK(judged({"plugin.dspark.markov_rank=0", "plugin.dspark.confidence_head_with_markov=false", "plugin.dspark.markov_head_type=\"rnn\""}) ==
        "dspark/head-type-without-markov");
  CHECK(judged({"plugin.dspark.enable_confidence_head=false"}) == "");
  CHECK(judged({"plugin.dspark.enable_confidence_head=false", "training.dspark_confidence_head_alpha=0.5"}) == "dspark/alpha-without-confidence");
  CHECK(judged({"plugin.dspark.enable_confidence_head=false", "plugin.dspark.schedule_threshold=0.3"}) == "dspark/threshold-without-confidence");
  CHECK(judged({"training.dspark_confidence_head_alpha=0.0"}) == "dspark/untrained-confidence");
}

TEST_CASE("dspark manifest: an option for a configuration made here is refused next to one that is named") {
  struct Row {
    const char* set;
    const char* id;
  };
  for (const Row& row : {Row{"plugin.dspark.markov_rank=8", "dspark/rank-and-config"},
                         Row{"plugin.dspark.markov_head_type=\"rnn\"", "dspark/head-type-and-config"},
                         Row{"plugin.dspark.enable_confidence_head=false", "dspark/confidence-and-config"},
                         Row{"plugin.dspark.confidence_head_with_markov=false", "dspark/with-markov-and-config"}}) {
    CHECK(judged({row.set}) == "");
    CHECK(judged({row.set, "model.draft_model_config=\"draft.json\""}) == row.id);
  }
  CHECK(judged({"model.draft_model_config=\"draft.json\"", "plugin.dspark.markov_rank=256"}) == "");  // as the saved recipe of a run says
}

TEST_CASE("dspark manifest: a block is no longer than a sample may be") {
  CHECK(judged({"model.draft_block_size=64", "data.max_length=48"}) == "dspark/block-longer-than-samples");
  CHECK(judged({"model.draft_block_size=48", "data.max_length=48"}) == "");
}
