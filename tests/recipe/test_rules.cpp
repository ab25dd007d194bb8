#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "core/recipe/rules.hpp"

using namespace sf;

namespace {

Manifest manifest_of(const std::string& text) {
  Diagnostics problems;
  auto manifest = parse_manifest(
      "[plugin]\nname = \"fp8\"\nversion = \"1\"\nkind = \"transform\"\nsummary = \"s\"\n" + text, "m",
      problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  return *manifest;
}

const char* const kOptions =
    "[options.gather]\ntype = \"bool\"\ndefault = false\nhelp = \"x\"\n[options.size]\ntype = "
    "\"int\"\ndefault = 5120\nhelp = \"x\"\n"
    "[options.mode]\ntype = \"choice\"\nchoices = [\"a\", \"b\", \"c\"]\ndefault = \"a\"\nhelp = "
    "\"x\"\n[options.lengths]\ntype = \"ints\"\ndefault = []\nhelp = \"x\"\n";

struct Outcome {
  Diagnostics problems;
  std::vector<std::string> undecided;
  [[nodiscard]] bool is_broken() const { return problems.contains("r"); }
};

// Judges one rule "r" over options that are set as `sets` says.
Outcome judge(const std::string& rule, const std::vector<std::string>& sets = {},
              const std::map<std::string, Value>& facts = {}, const std::set<std::string>& provided = {}) {
  Manifest manifest =
      manifest_of(std::string(kOptions) + "[[rules]]\nid = \"r\"\nmessage = \"m\"\nfix = \"f\"\n" + rule);
  Outcome out;
  Schema schema;
  schema.add(manifest, out.problems);
  RawValues raw;
  apply_overrides(sets, raw, out.problems);
  PlanValues values = schema.resolve(raw, {}, false, out.problems);
  std::set<std::string> names = {"fp8"};
  check_rules(manifest.rules, {values, facts, provided, names}, out.problems, out.undecided);
  return out;
}

}  // namespace

TEST_CASE("rules: every test holds and fails where it should") {
  struct Row {
    const char* condition;
    const char* set;
    bool holds;
  };
  const Row kRows[] = {
      {"option = \"gather\", is = true", "plugin.fp8.gather=true", true},
      {"option = \"gather\", is = true", "plugin.fp8.gather=false", false},
      {"option = \"mode\", is_not = \"a\"", "plugin.fp8.mode=b", true},
      {"option = \"mode\", is_not = \"a\"", "plugin.fp8.mode=a", false},
      {"option = \"mode\", one_of = [\"b\", \"c\"]", "plugin.fp8.mode=c", true},
      {"option = \"mode\", one_of = [\"b\", \"c\"]", "plugin.fp8.mode=a", false},
      {"option = \"mode\", none_of = [\"b\"]", "plugin.fp8.mode=c", true},
      {"option = \"mode\", none_of = [\"b\"]", "plugin.fp8.mode=b", false},
      {"option = \"size\", at_least = 10", "plugin.fp8.size=10", true},
      {"option = \"size\", at_least = 10", "plugin.fp8.size=9", false},
      {"option = \"size\", at_most = 10", "plugin.fp8.size=10", true},
      {"option = \"size\", at_most = 10", "plugin.fp8.size=11", false},
      {"option = \"size\", more_than = 10", "plugin.fp8.size=11", true},
      {"option = \"size\", more_than = 10", "plugin.fp8.size=10", false},
      {"option = \"size\", less_than = 10", "plugin.fp8.size=9", true},
      {"option = \"size\", less_than = 10", "plugin.fp8.size=10", false},
      {"option = \"size\", multiple_of = 16", "plugin.fp8.size=32", true},
      {"option = \"size\", multiple_of = 16", "plugin.fp8.size=33", false},
      {"option = \"size\", set = true", "plugin.fp8.size=5120", true},
      {"option = \"size\", set = true", "plugin.fp8.mode=a", false},
      {"option = \"lengths\", empty = true", "plugin.fp8.lengths=[]", true},
      {"option = \"lengths\", empty = true", "plugin.fp8.lengths=[1]", false},
      {"option = \"lengths\", increasing = true", "plugin.fp8.lengths=[1, 2, 9]", true},
      {"option = \"lengths\", increasing = true", "plugin.fp8.lengths=[1, 2, 2]", false},
      {"option = \"lengths\", multiple_of = 2", "plugin.fp8.lengths=[2, 4]", true},
      {"option = \"lengths\", multiple_of = 2", "plugin.fp8.lengths=[2, 5]", false},
      {"option = \"lengths\", at_most = \"@plugin.fp8.size\"", "plugin.fp8.lengths=[5120]", true},
      {"option = \"lengths\", at_most = \"@plugin.fp8.size\"", "plugin.fp8.lengths=[1, 5121]", false},
      {"provided = \"gather-codec\"", "plugin.fp8.size=1", true},
      {"absent = \"gather-codec\"", "plugin.fp8.size=1", false},
      {"provided = \"other\"", "plugin.fp8.size=1", false},
      {"absent = \"other\"", "plugin.fp8.size=1", true},
  };
  for (const Row& row : kRows) {
    std::string what = std::string(row.condition) + " with " + row.set;
    CHECK_MESSAGE(judge(std::string("when = [{ ") + row.condition + " }]\nreject = true\n", {row.set}, {},
                        {"gather-codec"})
                          .is_broken() == row.holds,
                  what);
    CHECK_MESSAGE(
        judge(std::string("require = [{ ") + row.condition + " }]\n", {row.set}, {}, {"gather-codec"})
                .is_broken() == !row.holds,
        what);
  }
}

TEST_CASE("rules: all conditions of when must hold, and a warning does not refuse") {
  std::string rule =
      "when = [{ option = \"gather\", is = true }, { option = \"size\", at_least = 10 }]\nwarn = true\n";
  Outcome out = judge(rule, {"plugin.fp8.gather=true"});
  CHECK(out.is_broken());
  CHECK_FALSE(out.problems.has_errors());
  CHECK_FALSE(judge(rule, {"plugin.fp8.gather=true", "plugin.fp8.size=1"}).is_broken());
}

TEST_CASE("rules: a broken rule shows the values it spoke about and the place of the one that was set") {
  Outcome out = judge(
      "when = [{ option = \"gather\", is = true }]\nrequire = [{ option = \"size\", less_than = 10 }]\n",
      {"plugin.fp8.gather=true"});
  REQUIRE(out.is_broken());
  const Diagnostic& shown = out.problems.all()[0];
  CHECK(shown.note == "plugin.fp8.gather = true (--set), plugin.fp8.size = 5120 (default (fp8 1))");
  CHECK(shown.place.source == "--set plugin.fp8.gather=true");
  CHECK(shown.fix == "f");
}

TEST_CASE("rules: an unknown fact leaves a rule undecided, unless another condition decides it") {
  std::string rule =
      "when = [{ option = \"gather\", is = true }]\nrequire = [{ key = \"fact.device.sm\", at_least = 89 "
      "}]\n";
  Outcome out = judge(rule, {"plugin.fp8.gather=true"});
  CHECK_FALSE(out.problems.has_errors());
  CHECK(out.undecided == std::vector<std::string>{"r: needs fact.device.sm"});
  CHECK(judge(rule).undecided.empty());
  CHECK(judge(rule, {"plugin.fp8.gather=true"}, {{"fact.device.sm", std::int64_t{80}}}).is_broken());
  CHECK_FALSE(judge(rule, {"plugin.fp8.gather=true"}, {{"fact.device.sm", std::int64_t{90}}}).is_broken());
}

TEST_CASE(
    "rules: an option of a plugin outside the stack makes a condition false, a misspelt one is an error") {
  CHECK_FALSE(judge("when = [{ key = \"plugin.other.x\", is = true }]\nreject = true\n").is_broken());
  Outcome out = judge("when = [{ key = \"plugin.fp8.gahter\", is = true }]\nreject = true\n");
  CHECK(out.problems.contains("plugin/bad-manifest"));
  CHECK(judge("when = [{ key = \"plugin.fp8.mode\", at_least = 3 }]\nreject = true\n")
            .problems.contains("plugin/bad-manifest"));
}

TEST_CASE("rules: the host's bucket rules refuse what the reference's matrix refuses") {
  struct Row {
    const char* id;
    std::vector<std::string> sets;
    std::int64_t ranks = 1;
  };
  const Row kRows[] = {
      {"", {"training.static_shapes=true", "training.static_shape_buckets=[128, 512]"}},
      {"", {"training.static_shapes=true"}},
      {"L1", {"training.static_shape_buckets=[128]"}},
      {"L2", {"training.static_shapes=true", "training.static_shape_buckets=[]"}},
      {"L3", {"training.static_shapes=true", "training.static_shape_buckets=[100]"}},
      {"L3", {"training.static_shapes=true", "training.static_shape_buckets=[0]"}},
      {"L4", {"training.static_shapes=true", "training.static_shape_buckets=[256, 128]"}},
      {"L4", {"training.static_shapes=true", "training.static_shape_buckets=[128, 128]"}},
      {"L5", {"training.static_shapes=true", "training.static_shape_buckets=[128, 2176]"}},
      {"host/eval-needs-features", {"training.eval_interval=10"}},
      {"", {}, 1},
      {"", {"backend.sharding=fsdp2"}, 2},
      {"host/single-is-one-rank", {}, 2},
      {"host/same-features", {"data.hidden_states_path=/f", "data.eval_hidden_states_path=/f"}},
  };
  for (const Row& row : kRows) {
    Diagnostics problems;
    Schema schema;
    schema.add(host_manifest(), problems);
    RawValues raw;
    std::vector<std::string> sets = {"model.target_model_path=/t", "algorithm.name=a"};
    sets.insert(sets.end(), row.sets.begin(), row.sets.end());
    apply_overrides(sets, raw, problems);
    PlanValues values = schema.resolve(raw, {}, false, problems);
    std::vector<std::string> undecided;
    check_rules(host_manifest().rules, {values, {{"fact.world_size", row.ranks}}, {}, {}}, problems, undecided);
    if (std::string(row.id).empty()) {
      CHECK_MESSAGE(problems.all().empty(), problems.text());
    } else {
      REQUIRE_MESSAGE(problems.all().size() == 1, row.id << ": " << problems.text());
      CHECK(problems.all()[0].id == row.id);
      CHECK_FALSE(problems.all()[0].fix.empty());
    }
  }
}

TEST_CASE("rules: wanted capabilities must be there and refused ones must not") {
  auto with = [](const std::string& name, const std::string& lists) {
    Diagnostics problems;
    auto manifest = parse_manifest(
        "[plugin]\nname = \"" + name + "\"\nversion = \"1\"\nkind = \"transform\"\nsummary = \"s\"\n" + lists,
        name, problems);
    REQUIRE_MESSAGE(manifest, problems.text());
    return *manifest;
  };
  Manifest fp8 = with("fp8", "wants = [\"gather-codec\"]\nconflicts = [\"quantized-linear\"]\n");
  Manifest fsdp2 = with("fsdp2", "provides = [\"gather-codec\"]\n");
  Manifest int4 = with("int4", "provides = [\"quantized-linear\"]\n");
  Diagnostics fine;
  check_capabilities({fp8, fsdp2}, fine);
  CHECK(fine.all().empty());
  Diagnostics unmet;
  check_capabilities({fp8}, unmet);
  CHECK(unmet.contains("plugin/unmet-want"));
  Diagnostics conflict;
  check_capabilities({fp8, fsdp2, int4}, conflict);
  CHECK(conflict.contains("plugin/conflict"));
}

TEST_CASE("rules: a message says the values of the options that it names in braces") {
  Outcome out = judge("when = [{ option = \"gather\", is = true }]\nreject = true\n", {"plugin.fp8.gather=true"});
  CHECK(out.problems.all()[0].message == "m");
  Manifest manifest = manifest_of(std::string(kOptions) +
                                  "[[rules]]\nid = \"r\"\nfix = \"f\"\nreject = true\nmessage = \"{plugin.fp8.mode} of {plugin.fp8.lengths}, {not.known}\"\n");
  Diagnostics problems;
  Schema schema;
  schema.add(manifest, problems);
  RawValues raw;
  apply_overrides({"plugin.fp8.lengths=[1, 2]"}, raw, problems);
  PlanValues values = schema.resolve(raw, {}, false, problems);
  std::vector<std::string> undecided;
  check_rules(manifest.rules, {values, {}, {}, {"fp8"}}, problems, undecided);
  REQUIRE(problems.error_count() == 1);
  CHECK(problems.all()[0].message == "a of [1, 2], {not.known}");
}

TEST_CASE("claims: an option for a plugin of the stack that none of them acts on is refused, with who would; its default is not") {
  const auto said = [](const std::string& set, const std::vector<std::string>& stack_claims) {
    Diagnostics problems;
    Schema schema;
    schema.add(host_manifest(), problems);
    RawValues raw;
    apply_overrides({"model.target_model_path=/target", "algorithm.name=x", set}, raw, problems);
    PlanValues values = schema.resolve(raw, {}, false, problems);
    Manifest chosen = manifest_of("");
    chosen.claims = stack_claims;
    Manifest other = manifest_of("");
    other.name = "other";
    other.claims = {"training.shard_frozen_tables"};
    check_claims({chosen}, {chosen, other}, values, problems);
    return problems.text();
  };
  CHECK(said("training.shard_frozen_tables=false", {}).empty());
  CHECK(said("training.shard_frozen_tables=true", {"training.shard_frozen_tables"}).empty());
  CHECK(said("training.seed=1", {}).empty());  // the host acts on it itself
  CHECK(said("training.shard_frozen_tables=true", {}) ==
        "error[recipe/not-offered] --set training.shard_frozen_tables=true: training.shard_frozen_tables = true, but no plugin of this run "
        "offers it\n  why:  an option that nobody acts on would be lost in silence\n  fix:  use other, or leave the key out\n");
  CHECK(said("training.reduce_dtype=float32", {}).find("fix:  leave the key out") != std::string::npos);
  CHECK(said("training.seed=1", {"training.seed"}).find("plugin/bad-manifest") != std::string::npos);
}

TEST_CASE("rules: what is met while a run goes on reads so") {
  struct Row {
    const char* id;
    std::map<std::string, std::string> values;
    const char* message;
    const char* fix;
  };
  const Row rows[] = {
      {"A2", {{"step", "20"}, {"pending", "10"}, {"seconds", "3 s"}},
       "step 20 is to be saved while step 10 is still being written: that one was finished first, which took 3 s",
       "a longer training.save_interval, a faster disk, or more threads or bandwidth for the writer"},
      {"A3", {{"step", "20"}, {"rank", "1"}, {"reason", "writing {x}: No space left on device"}},
       "saving step 20: rank 1: writing {x}: No space left on device",
       "see to that rank's disk; the last complete checkpoint is untouched, and a run goes on from there"},
      {"A5", {{"step", "20"}, {"metric", "acceptance length"}, {"score", "3.110"}}, "best so far: step 20 with acceptance length 3.110",
       "nothing to do; sf-host export takes it"},
      {"A8", {{"folder", "runs/a/step-00000020"}},
       "runs/a/step-00000020 does not say which sharding backend and how many ranks wrote it; it is read by its slices, like any other",
       "nothing to do; the next checkpoint has it"},
  };
  for (const Row& row : rows) {
    const RunRule rule = run_rule(row.id, row.values);
    CHECK(rule.message == row.message);
    CHECK(rule.fix == row.fix);
    CHECK(!rule.why.empty());
  }
}
