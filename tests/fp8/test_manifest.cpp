// The plugin's manifest, without its library: every option reads, and each rule speaks where it should, in these words.
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/recipe/rules.hpp"

namespace {

using namespace sf;

struct Where {
  std::string sharding = "fsdp2";
  std::set<std::string> provided = {"stable-parameters", "sharded-parameters", "gather-codec"};
  std::int64_t capability = 90, ranks = 4;
};

// What the shipped plugin.toml says to settings, and the ids of what waits for the device.
Diagnostics judged(const std::vector<std::string>& sets, const Where& where = {}, std::vector<std::string>* waiting = nullptr) {
  Diagnostics problems;
  const std::string path = std::string(SF_TEST_DATA) + "/../plugins/transform/fp8/plugin.toml";
  const auto manifest = parse_manifest(read_file(path), path, problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(*manifest, problems);
  RawValues raw;
  std::vector<std::string> all = {"model.target_model_path=\"target\"", "algorithm.name=\"dflash2\"", "backend.sharding=\"" + where.sharding + "\""};
  all.insert(all.end(), sets.begin(), sets.end());
  apply_overrides(all, raw, problems);
  const PlanValues values = schema.resolve(raw, {}, false, problems);
  std::map<std::string, Value> facts = {{"fact.world_size", where.ranks}};
  if (where.capability >= 0) {
    facts["fact.device.sm"] = where.capability;
  }
  std::vector<std::string> undecided;
  if (!problems.has_errors()) {
    check_rules(manifest->rules, {values, facts, where.provided, {"fp8"}}, problems, undecided);
  }
  if (waiting != nullptr) {
    *waiting = undecided;
  } else {
    CHECK(undecided.empty());
  }
  return problems;
}

std::string ids(const Diagnostics& problems) {
  std::string found;
  for (const Diagnostic& one : problems.all()) {
    found += (found.empty() ? "" : " ") + one.id;
  }
  return found;
}

bool says(const Diagnostics& problems, const std::string& text) { return problems.text().find(text) != std::string::npos; }

const Where kFsdp1 = {.sharding = "fsdp1", .provided = {"sharded-parameters"}};
const Where kSingle = {.sharding = "single", .provided = {"stable-parameters"}, .ranks = 1};

}  // namespace

TEST_CASE("fp8 manifest: defaults are silent under single and fsdp2, unknown names are refused") {
  CHECK(ids(judged({})) == "");
  CHECK(ids(judged({}, kSingle)) == "");
  CHECK(ids(judged({"plugin.fp8.scaling=\"row\"", "plugin.fp8.gradients=\"e4m3\"", "plugin.fp8.grad_input=\"bf16\"", "plugin.fp8.grad_weight=\"bf16\"",
                    "plugin.fp8.skip=[]", "plugin.fp8.emulate=true"})) == "");
  CHECK(ids(judged({"plugin.fp8.scaling=\"column\""})) == "recipe/bad-choice");
  CHECK(ids(judged({"plugin.fp8.recipe=\"tensorwise\""})) == "recipe/unknown-key");
}

TEST_CASE("fp8 manifest: fsdp1 is refused in plain words (B2)") {
  const Diagnostics found = judged({}, kFsdp1);
  CHECK(ids(found) == "B2");
  CHECK(says(found, "fsdp1 does not offer what fp8 needs, parameters that stay where they are; single and fsdp2 do\n"));
  CHECK(says(found, "fix:  backend.sharding = \"fsdp2\", or leave fp8 out of backend.transforms"));
}

TEST_CASE("fp8 manifest: a card below 8.9 and a CPU need emulate, and an unknown device is decided later (F9)") {
  for (const std::int64_t old : {0, 75, 80, 86}) {
    const Diagnostics found = judged({}, {.capability = old});
    CHECK(ids(found) == "F9");
    CHECK(says(found, "float8 products need a GPU of compute capability 8.9 or newer"));
    CHECK(says(found, "plugin.fp8.emulate = true tries the numerics on this device, slowly"));
    CHECK(ids(judged({"plugin.fp8.emulate=true"}, {.capability = old})) == "");
  }
  CHECK(ids(judged({}, {.capability = 89})) == "");
  std::vector<std::string> waiting;
  CHECK(ids(judged({}, {.capability = -1}, &waiting)) == "");
  CHECK(waiting == std::vector<std::string>{"F9: needs fact.device.sm"});
}

TEST_CASE("fp8 manifest: what a gather in float8 goes with (F11, fp8/needs-gather-codec, fp8/gather-own-weights, fp8/gather-no-shard, fp8/gather-on-one-rank)") {
  const std::string gather = "plugin.fp8.gather=true";
  CHECK(ids(judged({gather})) == "");
  const Diagnostics by_row = judged({gather, "plugin.fp8.scaling=\"row\""});
  CHECK(ids(by_row) == "F11");
  CHECK(says(by_row, "plugin.fp8.gather goes with one scale for a whole weight, and plugin.fp8.scaling is \"row\""));
  const Diagnostics no_codec = judged({gather}, {.sharding = "other", .provided = {"stable-parameters"}});
  CHECK(ids(no_codec) == "fp8/needs-gather-codec");
  CHECK(says(no_codec, "other does not offer what plugin.fp8.gather needs, a gather that goes through a codec; fsdp2 does"));
  CHECK(ids(judged({gather}, kFsdp1)) == "B2 fp8/needs-gather-codec");
  CHECK(ids(judged({gather, "plugin.fp8.grad_input=\"bf16\""})) == "fp8/gather-own-weights");
  CHECK(ids(judged({gather, "training.fsdp_sharding=\"NO_SHARD\""})) == "fp8/gather-no-shard");
  CHECK(ids(judged({gather}, {.ranks = 1})) == "fp8/gather-on-one-rank");
  CHECK_FALSE(judged({gather}, {.ranks = 1}).has_errors());
}

TEST_CASE("fp8 manifest: EAGLE3 is told that scales by row keep its acceptance (fp8/unrolled-wants-rows)") {
  const Diagnostics found = judged({"algorithm.name=\"eagle3\""});
  CHECK(ids(found) == "fp8/unrolled-wants-rows");
  CHECK_FALSE(found.has_errors());
  CHECK(says(found, "fix:  plugin.fp8.scaling = \"row\""));
  CHECK(ids(judged({"algorithm.name=\"eagle3\"", "plugin.fp8.scaling=\"row\""})) == "");
  CHECK(ids(judged({"algorithm.name=\"dspark\""})) == "");
}

TEST_CASE("fp8 manifest: a head that EAGLE3 trains is not the target's (fp8/head-is-trained)") {
  const Diagnostics found = judged({"algorithm.name=\"eagle3\"", "plugin.fp8.scaling=\"row\"", "plugin.fp8.head=true"});
  CHECK(ids(found) == "fp8/head-is-trained");
  CHECK(found.has_errors());
  CHECK(ids(judged({"algorithm.name=\"dspark\"", "plugin.fp8.head=true"})) == "");
}

TEST_CASE("fp8 manifest: a format of gradients that are all in bfloat16 has no effect (fp8/gradients-in-bf16)") {
  const std::vector<std::string> both = {"plugin.fp8.gradients=\"e5m2\"", "plugin.fp8.grad_input=\"bf16\"", "plugin.fp8.grad_weight=\"bf16\""};
  const Diagnostics found = judged(both);
  CHECK(ids(found) == "fp8/gradients-in-bf16");
  CHECK_FALSE(found.has_errors());
  CHECK(says(found, "plugin.fp8.gradients has no effect"));
  CHECK(ids(judged({both[0], both[1]})) == "");
  CHECK(ids(judged({both[0], both[2]})) == "");
}
