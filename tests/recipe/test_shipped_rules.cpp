// The rules of the plugins that we ship, judged without building the plugins.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/recipe/rules.hpp"

using namespace sf;

namespace {

// Ids of what the host's and the plugin's rules say when a recipe sets these keys, joined.
std::string ids_of(const char* plugin, const std::vector<std::string>& sets) {
  Diagnostics problems;
  auto manifest = parse_manifest(
      read_file(std::string(SF_TEST_DATA) + "/../plugins/" + plugin + "/plugin.toml"), plugin, problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(*manifest, problems);
  RawValues raw;
  std::vector<std::string> all = {"model.target_model_path=/target", "algorithm.name=" + manifest->name};
  all.insert(all.end(), sets.begin(), sets.end());
  apply_overrides(all, raw, problems);
  PlanValues values = schema.resolve(raw, {}, false, problems);
  std::set<std::string> names = {manifest->name};
  std::set<std::string> provided(manifest->provides.begin(), manifest->provides.end());
  std::vector<std::string> undecided;
  check_rules(manifest->rules, {values, {}, provided, names}, problems, undecided);
  std::string out;
  for (const Diagnostic& diagnostic : problems.all()) {
    out += (out.empty() ? "" : " ") + diagnostic.id;
  }
  return out;
}

}  // namespace

TEST_CASE("rules: dflash2 warns about options that its objective does not use") {
  const char* kDflash = "algorithm/dflash2";
  CHECK(ids_of(kDflash, {}).empty());
  CHECK(ids_of(kDflash, {"training.loss_decay_gamma=7.0", "training.num_anchors=64"}).empty());
  CHECK(ids_of(kDflash, {"training.loss_type=dpace", "training.loss_decay_gamma=7.0"}) ==
        "dflash2/decay-with-dpace");
  CHECK(ids_of(kDflash, {"training.loss_type=dpace"}).empty());
  CHECK(ids_of(kDflash, {"training.kl_decay=0.5"}) == "dflash2/kl-without-lambda");
  CHECK(ids_of(kDflash, {"training.kl_decay=0.5", "training.lk_loss_type=lambda"}).empty());
}
