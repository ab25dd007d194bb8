// The plugin's manifest, without its library: every option reads, and each rule speaks where it should.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/recipe/rules.hpp"

using namespace sf;

namespace {

std::string judged(const std::vector<std::string>& sets) {
  Diagnostics problems;
  const std::string path = std::string(SF_TEST_DATA) + "/../plugins/algorithm/dspark/plugin.toml";
  const auto manifest = parse_manifest(read_file(path), path, problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(*manifest, problems);
  RawValues raw;
  std::vector<std::string> all = {"model.target_model_path=\"target\"", "algorithm.name=\"dspark\""};
  all.insert(all.end(), sets.begin(), sets.end());
  apply_overrides(all, raw, problems);
  const PlanValues values = schema.resolve(raw, {}, false, problems);
  std::vector<std::string> undecided;
  const std::set<std::string> names = {"dspark"};
  if (!problems.has_errors()) {  // rules are asked about values that are ones
    check_rules(manifest->rules, {values, {}, {}, names}, problems, undecided);
  }
  CHECK(undecided.empty());
  std::string found;
  for (const Diagnostic& one : problems.all()) {
    found += (found.empty() ? "" : " ") + one.id;
  }
  return found;
}

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
