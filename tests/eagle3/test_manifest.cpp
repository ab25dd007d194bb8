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
  const std::string path = std::string(SF_TEST_DATA) + "/../plugins/algorithm/eagle3/plugin.toml";
  const auto manifest = parse_manifest(read_file(path), path, problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(*manifest, problems);
  RawValues raw;
  std::vector<std::string> all = {"model.target_model_path=\"target\"", "algorithm.name=\"eagle3\""};
  all.insert(all.end(), sets.begin(), sets.end());
  apply_overrides(all, raw, problems);
  const PlanValues values = schema.resolve(raw, {}, false, problems);
  std::vector<std::string> undecided;
  const std::set<std::string> names = {"eagle3"};
  check_rules(manifest->rules, {values, {}, {}, names}, problems, undecided);
  CHECK(undecided.empty());
  std::string found;
  for (const Diagnostic& one : problems.all()) {
    found += (found.empty() ? "" : " ") + one.id;
  }
  return found;
}

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
