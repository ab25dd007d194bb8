// The rules of the plugins that we ship, judged without building the plugins.
#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/recipe/rules.hpp"

using namespace sf;
namespace fs = std::filesystem;

namespace {

fs::path repository() {
  return fs::path(SF_TEST_DATA).parent_path();
}

// Ids of what the host's and the plugin's rules say when a recipe sets these keys, joined.
std::string ids_of(const char* plugin, const std::vector<std::string>& sets, const std::map<std::string, Value>& facts = {}) {
  Diagnostics problems;
  auto manifest =
      parse_manifest(read_file(repository() / "plugins" / plugin / "plugin.toml"), plugin, problems);
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
  check_rules(manifest->rules, {values, facts, provided, names}, problems, undecided);
  std::string out;
  for (const Diagnostic& diagnostic : problems.all()) {
    out += (out.empty() ? "" : " ") + diagnostic.id;
  }
  return out;
}

}  // namespace

TEST_CASE(
    "recipes: every recipe that we ship has known keys and good values, breaks no rule and says what it is") {
  int count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(repository() / "recipes")) {
    if (entry.path().extension() != ".toml" || entry.path().stem().string().ends_with("-base")) {  // a base is no recipe of its own
      continue;
    }
    ++count;
    Diagnostics problems;
    RawValues raw = read_recipe(entry.path(), problems);
    Schema schema;
    schema.add(host_manifest(), problems);
    std::vector<Rule> rules = host_manifest().rules;
    std::set<std::string> names;
    std::set<std::string> provided;
    const auto named = [&](const char* key, const char* otherwise) {
      const auto found = raw.find(key);
      return found == raw.end() ? std::string(otherwise) : found->second.node.string;
    };
    for (const std::string& plugin : {"algorithm/" + named("algorithm.name", "dflash2"), "sharding/" + named("backend.sharding", "single")}) {
      auto manifest =
          parse_manifest(read_file(repository() / "plugins" / plugin / "plugin.toml"), plugin, problems);
      REQUIRE_MESSAGE(manifest, problems.text());
      schema.add(*manifest, problems);
      rules.insert(rules.end(), manifest->rules.begin(), manifest->rules.end());
      names.insert(manifest->name);
      provided.insert(manifest->provides.begin(), manifest->provides.end());
    }
    PlanValues values = schema.resolve(raw, {}, false, problems);
    REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
    std::vector<std::string> undecided;
    check_rules(rules, {values, {}, provided, names}, problems, undecided);
    CHECK_MESSAGE(problems.all().empty(), problems.text());
    CHECK_MESSAGE(read_file(entry.path()).starts_with("# "),
                  entry.path() << " starts with what it is, on which hardware, and what was measured");
  }
  CHECK(count >= 3);
}

TEST_CASE("rules: [A1] a writer that works beside training goes with every sharding backend that we ship") {
  for (const std::string backend : {"single", "fsdp1", "fsdp2"}) {
    Diagnostics problems;
    std::vector<Manifest> stack;
    Schema schema;
    schema.add(host_manifest(), problems);
    for (const std::string& plugin : {"sharding/" + backend, std::string("checkpoint/async_ckpt")}) {
      auto manifest = parse_manifest(read_file(repository() / "plugins" / plugin / "plugin.toml"), plugin, problems);
      REQUIRE_MESSAGE(manifest, problems.text());
      schema.add(*manifest, problems);
      stack.push_back(std::move(*manifest));
    }
    CHECK(stack[1].provides == std::vector<std::string>{"async-commit"});
    RawValues raw;
    apply_overrides({"model.target_model_path=/target", "algorithm.name=x", "backend.sharding=" + backend, "backend.checkpoint=async_ckpt",
                     "plugin.async_ckpt.threads=4", "plugin.async_ckpt.bandwidth=1GB", "checkpoint.staging_bytes=1GiB"},
                    raw, problems);
    PlanValues values = schema.resolve(raw, {}, false, problems);
    std::set<std::string> provided = {"async-commit"};
    provided.insert(stack[0].provides.begin(), stack[0].provides.end());
    const std::set<std::string> names = {backend, "async_ckpt"};
    std::vector<std::string> undecided;
    stack.push_back(host_manifest());
    for (const Manifest& manifest : stack) {
      check_rules(manifest.rules, {values, {{"fact.world_size", int64_t{1}}}, provided, names}, problems, undecided);
    }
    check_capabilities(stack, problems);
    CHECK_MESSAGE(problems.all().empty(), problems.text());
    CHECK(value_as<int64_t>(values.at("plugin.async_ckpt.bandwidth").value, "bandwidth") == 1000000000);
  }
}

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

TEST_CASE("rules: what each sharding backend that we ship does not offer is refused by name, and its defaults are not") {
  const auto ids = [](const std::string& backend, const std::string& set) {
    Diagnostics problems;
    auto manifest = parse_manifest(read_file(repository() / "plugins/sharding" / backend / "plugin.toml"), backend, problems);
    REQUIRE_MESSAGE(manifest, problems.text());
    Schema schema;
    schema.add(host_manifest(), problems);
    schema.add(*manifest, problems);
    RawValues raw;
    apply_overrides({"model.target_model_path=/target", "algorithm.name=x", "backend.sharding=" + backend, set}, raw, problems);
    PlanValues values = schema.resolve(raw, {}, false, problems);
    std::set<std::string> provided(manifest->provides.begin(), manifest->provides.end());
    provided.insert("recordable-blocks");
    std::vector<std::string> undecided;
    const std::set<std::string> names = {backend};
    check_rules(host_manifest().rules, {values, {{"fact.device.kind", std::string("cuda")}}, provided, names}, problems, undecided);
    check_claims({*manifest}, {}, values, problems);
    std::string out;
    for (const Diagnostic& one : problems.all()) {
      out += (out.empty() ? "" : " ") + one.id;
      CHECK_MESSAGE((one.id == "K1" || one.id == "recipe/not-offered" || one.message.starts_with(backend + " does not offer")),
                    one.message);
    }
    return out;
  };
  struct Row {
    const char* set;
    const char* single;
    const char* fsdp1;
    const char* fsdp2;
  };
  for (const Row& row : {
           Row{"training.shard_frozen_tables=true", "B3", "B3", ""},
           Row{"training.shard_frozen_tables=false", "", "", ""},
           Row{"training.reduce_scatter_max_input_buffers=2", "B5/buffers", "B5/buffers", ""},
           Row{"training.reduce_scatter_max_input_buffers=1", "", "", ""},
           Row{"training.separate_reduce_scatter_group=true", "B5/group", "B5/group", ""},
           Row{"training.reduce_dtype=float32", "B5/dtype", "B5/dtype", ""},
           Row{"training.fsdp_sharding=FULL_SHARD", "B5/sharding", "", ""},
           Row{"training.fsdp_sharding=NO_SHARD", "B5/sharding", "", ""},
           Row{"training.fsdp_sharding=SHARD_GRAD_OP", "", "", ""},
           Row{"training.compile_blocks=true", "K1", "B1 K1", "K1"},
       }) {
    CAPTURE(row.set);
    for (const auto& [backend, expected] : {std::pair("single", row.single), std::pair("fsdp1", row.fsdp1), std::pair("fsdp2", row.fsdp2)}) {
      std::string found = ids(backend, row.set);
      if (const std::size_t at = found.find(" recipe/not-offered"); at != std::string::npos) {
        found = found.substr(0, at);  // the second line of defence, which a plan does not reach behind a rule
        CHECK(*expected != 0);
      }
      CHECK_MESSAGE(found == expected, backend << ": " << found);
    }
  }
}

TEST_CASE("rules: recorded blocks want static shapes (K1, K2, K3), blocks that can be recorded (K4), nothing on the host inside them (K5, K6), and a GPU") {
  const auto found = [](const std::vector<std::string>& sets, std::set<std::string> provided, const char* device) {
    Diagnostics problems;
    Schema schema;
    schema.add(host_manifest(), problems);
    RawValues raw;
    std::vector<std::string> all = {"model.target_model_path=/target", "algorithm.name=mydraft", "training.compile_blocks=true"};
    all.insert(all.end(), sets.begin(), sets.end());
    apply_overrides(all, raw, problems);
    PlanValues values = schema.resolve(raw, {}, false, problems);
    provided.insert("stable-parameters");
    std::vector<std::string> undecided;
    const std::set<std::string> names = {"mydraft", "single"};
    check_rules(host_manifest().rules, {values, {{"fact.device.kind", std::string(device)}}, provided, names}, problems, undecided);
    return problems;
  };
  const auto ids = [](const Diagnostics& problems) {
    std::string out;
    for (const Diagnostic& one : problems.all()) {
      out += (out.empty() ? "" : " ") + one.id;
    }
    return out;
  };
  const std::set<std::string> blocks = {"recordable-blocks"};
  CHECK(ids(found({"training.static_shapes=true"}, blocks, "cuda")).empty());                                                       // K2
  CHECK(ids(found({"training.static_shapes=true", "training.static_shape_buckets=[128]"}, blocks, "cuda")).empty());                // K3
  CHECK(ids(found({"training.static_shapes=true", "training.eval_interval=5", "data.eval_hidden_states_path=/held_out"}, blocks, "cuda")).empty());  // K8

  const Diagnostics lengths = found({}, blocks, "cuda");
  CHECK(ids(lengths) == "K1");
  CHECK(lengths.all().front().severity == Severity::warning);
  CHECK(lengths.all().front().message.starts_with("with changing shapes each new length is captured again"));
  CHECK(lengths.all().front().fix.find("training.static_shapes = true") != std::string::npos);

  const Diagnostics no_blocks = found({"training.static_shapes=true"}, {}, "cuda");
  CHECK(ids(no_blocks) == "K4");
  CHECK(no_blocks.all().front().message == "training.compile_blocks = true, but mydraft has no blocks that can be recorded");

  const Diagnostics routed = found({"training.static_shapes=true"}, {"recordable-blocks", "host-work-in-blocks"}, "cuda");
  CHECK(ids(routed) == "K6");
  CHECK(routed.all().front().message.find("work on the host inside a block") != std::string::npos);

  const Diagnostics on_cpu = found({"training.static_shapes=true"}, blocks, "cpu");
  CHECK(ids(on_cpu) == "host/capture-on-cpu");
  CHECK(on_cpu.all().front().message == "training.compile_blocks records CUDA graphs, and this run is on the CPU");

  Diagnostics moved;  // K7
  Schema schema;
  schema.add(host_manifest(), moved);
  RawValues raw;
  apply_overrides({"model.target_model_path=/target", "algorithm.name=mydraft", "training.compile_dynamic=true"}, raw, moved);
  (void)schema.resolve(raw, {}, false, moved);
  REQUIRE(moved.has_errors());
  CHECK(moved.text().find("graphs of changing shapes are not supported") != std::string::npos);
}

TEST_CASE("rules: copies between GPUs are refused on the CPU and have no effect with one rank") {
  const auto found = [](const char* device, std::int64_t ranks) {
    Diagnostics problems;
    Schema schema;
    schema.add(host_manifest(), problems);
    RawValues raw;
    apply_overrides({"model.target_model_path=/target", "algorithm.name=mydraft", "backend.sharding=fsdp2", "training.peer_copies=on"}, raw, problems);
    PlanValues values = schema.resolve(raw, {}, false, problems);
    std::vector<std::string> undecided;
    const std::set<std::string> names = {"mydraft", "fsdp2"};
    check_rules(host_manifest().rules, {values, {{"fact.device.kind", std::string(device)}, {"fact.world_size", ranks}}, {"stable-parameters"}, names}, problems, undecided);
    std::string out;
    for (const Diagnostic& one : problems.all()) {
      out += (out.empty() ? "" : " ") + one.id;
    }
    return out;
  };
  CHECK(found("cuda", 2).empty());
  CHECK(found("cuda", 1) == "host/peer-copies-on-one-rank");
  CHECK(found("cpu", 2) == "host/peer-copies-on-cpu");
}

TEST_CASE("fsdp2 rules: what only several ranks make use of is warned about with one") {
  struct Row {
    const char* set;
    const char* id;
  };
  for (const Row& row : {Row{"training.shard_frozen_tables=true", "fsdp2/tables-on-one-rank"},
                         Row{"training.reduce_scatter_max_input_buffers=2", "fsdp2/reduce-buffers-on-one-rank"},
                         Row{"training.separate_reduce_scatter_group=true", "fsdp2/reduce-group-on-one-rank"}}) {
    CAPTURE(row.set);
    CHECK(ids_of("sharding/fsdp2", {row.set}, {{"fact.world_size", std::int64_t{1}}}) == row.id);
    CHECK(ids_of("sharding/fsdp2", {row.set}, {{"fact.world_size", std::int64_t{2}}}) == "");
  }
  CHECK(ids_of("sharding/fsdp2", {}, {{"fact.world_size", std::int64_t{1}}}) == "");
}
