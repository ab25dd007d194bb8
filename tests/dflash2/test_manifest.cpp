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
  const std::string path = std::string(SF_TEST_DATA) + "/../plugins/algorithm/dflash2/plugin.toml";
  const auto manifest = parse_manifest(read_file(path), path, problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  Schema schema;
  schema.add(*manifest, problems);
  RawValues raw;
  apply_overrides(sets, raw, problems);
  const PlanValues values = schema.resolve(raw, {}, false, problems);
  std::vector<std::string> undecided;
  const std::set<std::string> names = {"dflash2"};
  check_rules(manifest->rules, {values, {}, {}, names}, problems, undecided);
  CHECK(undecided.empty());
  std::string found;
  for (const Diagnostic& one : problems.all()) {
    found += (found.empty() ? "" : " ") + one.id;
  }
  return found;
}

}  // namespace

TEST_CASE("dflash2 manifest: defaults are silent, a setting without effect is warned about, a wrong one is refused") {
  CHECK(judged({}) == "");
  CHECK(judged({"training.kl_decay=2.0"}) == "dflash2/kl-without-lambda");
  CHECK(judged({"training.kl_decay=2.0", "training.lk_loss_type=\"lambda\""}) == "");
  CHECK(judged({"training.loss_type=\"dpace\"", "training.loss_decay_gamma=7.0"}) == "dflash2/decay-with-dpace");
  CHECK(judged({"training.loss_decay_gamma=7.0"}) == "");
  CHECK(judged({"training.dpace_alpha=1.5"}) == "recipe/out-of-range");
  CHECK(judged({"training.num_anchors=0"}) == "recipe/out-of-range");
  CHECK(judged({"training.loss_type=\"dspace\""}) != "");
  CHECK(judged({"algorithm.selector_policy=\"gold\""}) != "");
  CHECK(judged({"plugin.dflash2.selector_rank=\"wide\""}) != "");
}
