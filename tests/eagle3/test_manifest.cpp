// The plugin's manifest, without its library: every option reads, and each rule speaks where it should.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/draft/manifest_judgement.hpp"

namespace {

std::string judged(const std::vector<std::string>& sets) { return sf::testing::judged_by("eagle3", sets); }

}  // namespace

TEST_CASE("eagle3 manifest: defaults are silent, a setting without effect is warned about, a wrong one is refused") {
  CHECK(judged({}) == "");
  CHECK(judged({"training.kl_decay=2.0"}) == "eagle3/kl-without-lambda");
  CHECK(judged({"training.kl_scale=2.0"}) == "eagle3/kl-scale-without-lambda");
  CHECK(judged({"training.kl_decay=2.0", "training.kl_scale=2.0", "training.lk_loss_type=\"lambda\""}) == "");
  CHECK(judged({"training.compact_teacher_chunk_size=1024"}) == "eagle3/teacher-chunk-without-compact");
  CHECK(judged({"training.compact_teacher_chunk_size=1024", "training.compact_teacher=true"}) == "");
  CHECK(judged({"training.objective_chunk_rows=0"}) == "recipe/out-of-range");
  CHECK(judged({"plugin.eagle3.draft_vocab_size=-1"}) == "recipe/out-of-range");
  CHECK(judged({"training.lk_loss_type=\"tv\""}) != "");
}

TEST_CASE("eagle3 manifest: an unroll as long as the samples is refused, and so is what a named configuration says itself") {
  CHECK(judged({"training.ttt_length=8", "data.max_length=8"}) == "eagle3/unroll-longer-than-samples");
  CHECK(judged({"training.ttt_length=7", "data.max_length=8"}) == "");
  CHECK(judged({"plugin.eagle3.architecture=\"eagle3.1\""}) == "");
  CHECK(judged({"plugin.eagle3.architecture=\"eagle3.1\"", "model.draft_model_config=\"draft.json\""}) == "eagle3/architecture-and-config");
}
