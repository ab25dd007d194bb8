#include "core/plan/facts.hpp"
#include "core/plan/plan.hpp"
#include "core/plan/print.hpp"
#include "core/plan/resolve.hpp"
#include "core/plan/window_note.hpp"
#include "tests/plugin/fake_files.hpp"

using namespace sf;

namespace {

// A recipe in a folder of its own with a target beside it, resolved against the fake plugins.
struct Case {
  TemporaryFolder folder;
  Diagnostics catalog_problems;
  Catalog catalog{{.flag_folders = {good_plugins()}, .environment = "", .built_in = {}, .allowed_unsafe = {}},
                  {},
                  torch_host(),
                  catalog_problems};
  std::string config =
      "{\"hidden_size\": 64, \"vocab_size\": 100, \"num_hidden_layers\": 2, \"model_type\": \"llama\"}";
  std::string recipe =
      "[model]\ntarget_model_path = \"target\"\n[algorithm]\nname = \"fake_algorithm\"\n[backend]\nsharding "
      "= \"fake_sharding\"\n[training]\nnum_anchors = 64\n";

  Resolution run(ResolveRequest request = {}) {
    fs::create_directories(folder.path / "target");
    if (!config.empty()) {
      atomic_write(folder.path / "target" / "config.json", config);
    }
    atomic_write(folder.path / "r.toml", recipe);
    request.recipe = folder.path / "r.toml";
    if (!request.machine) {
      request.machine = Machine{.gpus = 0, .processors = 2};
    }
    return resolve(request, catalog, catalog_problems);
  }
};

}  // namespace

TEST_CASE("plan: a good recipe becomes a plan with stack, values, origins and facts") {
  Case c;
  Resolution out = c.run({.recipe = {}, .overrides = {"training.batch_size=4"}});
  REQUIRE_MESSAGE(out.plan, out.problems.text());
  const Plan& plan = *out.plan;
  CHECK(plan.get<std::int64_t>("training.batch_size") == 4);
  CHECK(plan.get<std::int64_t>("training.num_anchors") == 64);
  CHECK(plan.get<double>("training.max_grad_norm") == 0.5);
  CHECK(plan.get<bool>("training.static_shapes") == false);
  CHECK(plan.get<std::vector<std::int64_t>>("model.target_layer_ids").empty());
  CHECK(plan.get<fs::path>("model.target_model_path") == c.folder.path / "target");
  CHECK(plan.get<fs::path>("data.train_data_path").empty());
  CHECK(plan.get<std::int64_t>("data.shard_bytes") == 536870912);
  CHECK(plan.at("training.num_anchors").origin == "r.toml:8");
  CHECK(plan.at("training.batch_size").origin == "--set");
  CHECK(plan.get<std::string>("device") == "cpu");
  CHECK(plan.at("device").origin == "auto: no GPU on this machine");
  REQUIRE(plan.stack.size() == 3);
  CHECK(plan.stack[0].slot == "algorithm");
  CHECK(plan.stack[1].sha256 == sha256_file(good_plugins() / "fake_sharding.so"));
  CHECK(plan.stack[2].name == "sync");
  CHECK(plan.stack[2].path.empty());
  CHECK(std::get<std::int64_t>(plan.facts.at("model.hidden_size")) == 64);
  CHECK_THROWS_AS((void)plan.get<std::string>("training.batch_size"), Error);
  CHECK_THROWS_AS((void)plan.get<bool>("training.nothing"), Error);
  CHECK(tokens_per_step(plan) == 4 * 2048);
}

TEST_CASE("plan: the resolved recipe alone gives the same plan again") {
  Case c;
  Resolution first = c.run({.recipe = {},
                            .overrides = {"training.learning_rate=6e-4", "training.static_shapes=true",
                                          "training.static_shape_buckets=[128, 256]"},
                            .backend = "fake_sharding+fake_transform+fake_ok"});
  REQUIRE_MESSAGE(first.plan, first.problems.text());
  c.recipe = first.plan->recipe_text();
  Resolution second = c.run();
  REQUIRE_MESSAGE(second.plan, second.problems.text());
  CHECK(first.plan->values.size() == second.plan->values.size());
  for (const auto& [key, value] : first.plan->values) {
    CHECK_MESSAGE(second.plan->at(key).value == value.value, key);
  }
  CHECK(second.plan->stack.size() == first.plan->stack.size());
}

TEST_CASE(
    "plan: problems of recipe, plugins, rules and target come together, with the exit code of the first "
    "kind") {
  Case c;
  c.config = "";
  c.recipe += "sed = 1\n";
  Resolution all = c.run({.recipe = {}, .overrides = {"backend.transforms=[\"fake_transfrom\"]"}});
  CHECK_FALSE(all.plan);
  CHECK(all.problems.contains("plugin/not-found"));
  CHECK(all.problems.contains("recipe/unknown-key"));
  CHECK(all.problems.contains("model/no-config"));
  CHECK(all.code == ExitCode::kUsage);

  Case plugin;
  CHECK(plugin.run({.recipe = {}, .overrides = {"backend.sharding=fsdp9"}}).code == ExitCode::kPlugin);
  Case target;
  target.config = "{\"hidden_size\": \"many\"}";
  Resolution bad = target.run();
  CHECK(bad.code == ExitCode::kData);
  CHECK(bad.problems.contains("model/bad-config"));
}

TEST_CASE("plan: a target whose config.json contradicts itself is a data error that names the file") {
  const std::pair<std::string, std::string> rows[] = {
      {"[]", "holds an array, expected an object"},
      {R"({"num_hidden_layers": 2})", "hidden_size is missing"},
      {R"({"hidden_size": 64})", "num_hidden_layers is missing"},
      {R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 3})",
       "num_attention_heads is 4, expected a multiple of num_key_value_heads, 3"},
      {R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 5})", "hidden_size is 64, expected a multiple of num_attention_heads, 5"},
      {R"({"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 15})", "head_dim is 15, expected an even number"},
      {R"({"hidden_size": 64, "num_hidden_layers": 2, "rms_norm_eps": -1e-6})", "rms_norm_eps is -1e-06, expected a positive number"},
      {R"({"hidden_size": 64, "num_hidden_layers": 2, "rms_norm_eps": "small"})", "rms_norm_eps is \"small\", expected a positive number"},
  };
  for (const auto& [config, text] : rows) {
    CAPTURE(config);
    Case c;
    c.config = config;
    Resolution out = c.run();
    CHECK(out.code == ExitCode::kData);
    REQUIRE(out.problems.error_count() == 1);
    CHECK(out.problems.all()[0].id == "model/bad-config");
    CHECK_MESSAGE(out.problems.text().find(text) != std::string::npos, out.problems.text());
    CHECK(out.problems.text().find("the target's ") != std::string::npos);
    CHECK(out.problems.text().find("r.toml:2") != std::string::npos);
  }
}

TEST_CASE("plan: a draft configuration that is missing or no JSON object is told with the line that names it") {
  for (const char* text : {"", "[]", "{"}) {
    CAPTURE(text);
    Case c;
    c.recipe = "[model]\ndraft_model_config = \"draft.json\"\n" + c.recipe.substr(c.recipe.find("target_model_path"));
    if (*text != 0) {
      atomic_write(c.folder.path / "draft.json", text);
    }
    Resolution out = c.run();
    CHECK(out.code == ExitCode::kUsage);
    REQUIRE(out.problems.error_count() == 1);
    CHECK(out.problems.all()[0].id == "recipe/bad-draft-config");
    CHECK_MESSAGE(out.problems.text().find("r.toml:2") != std::string::npos, out.problems.text());
    CHECK(out.problems.text().find("draft.json") != std::string::npos);
  }
}

TEST_CASE("plan: output_dir may not be empty") {
  Case c;
  Resolution out = c.run({.recipe = {}, .overrides = {"output_dir=\"\""}});
  CHECK(out.code == ExitCode::kUsage);
  CHECK(out.problems.contains("host/output-dir"));
}

TEST_CASE("plan: rules of plugins see the target's numbers, also nested ones, and the stack's capabilities") {
  Case c;
  c.config = "{\"model_type\": \"vlm\", \"text_config\": {\"hidden_size\": 40, \"num_hidden_layers\": 2, \"model_type\": \"qwen3\"}}";
  Resolution out = c.run();
  CHECK(out.problems.contains("fake_algorithm/heads"));
  CHECK(out.code == ExitCode::kUsage);

  Case gather;
  Resolution refused = gather.run(
      {.recipe = {},
       .overrides = {"backend.transforms=[\"fake_transform\"]", "plugin.fake_transform.gather=true"}});
  CHECK(refused.problems.contains("fake_transform/needs-gather-codec"));
  Case fine;
  Resolution good = fine.run({.recipe = {}, .overrides = {"backend.transforms=[\"fake_transform\"]"}});
  CHECK_MESSAGE(good.plan, good.problems.text());
}

TEST_CASE("plan: a rule whose fact this machine does not know is listed as undecided") {
  Case c;
  c.recipe += "[plugin.fake_transform]\ngather = false\n";
  Resolution out = c.run({.recipe = {}, .overrides = {"backend.transforms=[\"fake_transform\"]"}});
  REQUIRE_MESSAGE(out.plan, out.problems.text());
  CHECK(out.plan->undecided.empty());
  Case unknown;
  unknown.config = "{\"hidden_size\": 64, \"num_hidden_layers\": 2, \"model_type\": \"mystery\"}";
  Resolution open = unknown.run();
  REQUIRE_MESSAGE(open.plan, open.problems.text());
  CHECK(open.plan->undecided == std::vector<std::string>{"fake_algorithm/positions: needs model.max_position_embeddings"});
}

TEST_CASE(
    "plan: a GPU that is not there is a warning for plan and an error for a run; auto takes what there is") {
  Case c;
  Resolution plan = c.run({.recipe = {}, .overrides = {"device=cuda"}});
  REQUIRE(plan.plan);
  CHECK(plan.plan->warnings.contains("device/no-gpu"));
  Resolution run = c.run({.recipe = {}, .overrides = {"device=cuda"}, .will_run = true});
  CHECK_FALSE(run.plan);
  CHECK(run.code == ExitCode::kDevice);
  Resolution two = c.run({.recipe = {}, .will_run = true, .machine = Machine{.gpus = 2, .processors = 8}});
  REQUIRE(two.plan);
  CHECK(two.plan->get<std::string>("device") == "cuda");
  CHECK(two.plan->at("device").origin == "auto: this machine has 2 GPUs");
}

TEST_CASE("plan: each rank of a machine wants a GPU of its own, and the plan tells ranks, launcher and collectives") {
  Case c;
  const PlanRanks four{.count = 4, .on_this_machine = 4, .origin = "sf-host --nproc 4"};
  const Machine machine{.gpus = 2, .processors = 8};
  Resolution few = c.run({.recipe = {}, .will_run = true, .machine = machine, .ranks = four});
  CHECK_FALSE(few.plan);
  CHECK(few.problems.contains("device/too-few-gpus"));
  CHECK(few.code == ExitCode::kDevice);
  Resolution plan = c.run({.recipe = {}, .overrides = {"device=cpu"}, .will_run = true, .machine = machine, .ranks = four});
  REQUIRE_MESSAGE(plan.plan, plan.problems.text());
  CHECK(std::get<std::int64_t>(plan.plan->facts.at("fact.world_size")) == 4);
  for (const std::string& text : {plan_text(*plan.plan, {}), plan_summary(*plan.plan)}) {
    CHECK(text.find("4 ranks, 4 of them on this machine  sf-host --nproc 4") != std::string::npos);
    CHECK(text.find("gloo") != std::string::npos);
  }
  CHECK(plan_json(*plan.plan, {}).at("ranks").at("count").as_int() == 4);
}

TEST_CASE("plan: copies between GPUs are taken where they can be, and where they can't the plan says why") {
  Case c;
  const Machine machine{.gpus = 32, .processors = 8};
  const auto planned = [&](const char* device, std::int64_t ranks, std::int64_t here, const char* copies) {
    Resolution out = c.run({.recipe = {}, .overrides = {std::string("device=") + device, std::string("training.peer_copies=") + copies}, .machine = machine,
                            .ranks = {.count = ranks, .on_this_machine = here, .origin = "by hand"}});
    REQUIRE_MESSAGE(out.plan, out.problems.text());
    return std::move(*out.plan);
  };
  struct Row {
    const char* device;
    std::int64_t ranks, here;
    const char *value, *origin, *told;
  };
  for (const Row& row : {Row{"cuda", 2, 2, "on", "auto: 2 GPUs of one machine", "gathers and reductions by the GPUs' copy engines, unless they can't reach each other's memory"},
                         Row{"cuda", 4, 2, "off", "auto: 2 of 4 ranks are on this machine, and they take all of them", "training.peer_copies is auto: 2 of 4 ranks"},
                         Row{"cuda", 17, 17, "off", "auto: there are 17 ranks, and they take at most 16", "training.peer_copies is auto: there are 17 ranks"},
                         Row{"cuda", 1, 1, "off", "auto: there is one rank", "1 rank"}, Row{"cpu", 2, 2, "off", "auto: ranks on the CPU", "gloo"}}) {
    CAPTURE(std::string(row.origin));
    const Plan plan = planned(row.device, row.ranks, row.here, "auto");
    CHECK(plan.get<std::string>("training.peer_copies") == row.value);
    CHECK(plan.at("training.peer_copies").origin == row.origin);
    CHECK_MESSAGE(plan_text(plan, {}).find(row.told) != std::string::npos, plan_text(plan, {}));
  }
  CHECK(plan_text(planned("cuda", 2, 2, "on"), {}).find("by the GPUs' copy engines\n") != std::string::npos);
  CHECK(plan_text(planned("cuda", 2, 2, "off"), {}).find("NCCL (libsf_engine_cuda.so), gathers and reductions, too: training.peer_copies is --set") != std::string::npos);
}

TEST_CASE("plan: as JSON every value has its origin, as text the sizes stand in columns") {
  Case c;
  Resolution out = c.run();
  REQUIRE(out.plan);
  Json json = plan_json(*out.plan, {{"weights", 1048576, "0.5 M parameters"}});
  CHECK(json.at("values").at("training.num_anchors").at("origin").as_string() == "r.toml:8");
  CHECK(json.at("sizes").at(0).at("bytes").as_int() == 1048576);
  CHECK(json.at("stack").size() == 3);
  std::string text =
      plan_text(*out.plan, {{"weights", 1048576, "0.5 M parameters"}, {"total", 4194304, "on each rank"}});
  CHECK(text.find("  weights  1.0 MiB     0.5 M parameters\n  total    4.0 MiB     on each rank\n") !=
        std::string::npos);
  CHECK(plan_summary(*out.plan).find("training.seed") == std::string::npos);
  CHECK(plan_summary(*out.plan).find("training.num_anchors") != std::string::npos);
}

TEST_CASE("plan: a window that takes more samples than there are is said, from features or from the conversations") {
  Case c;
  atomic_write(c.folder.path / "train.jsonl", "{}\n{}\n\n{}\n");
  const auto note_with = [&](int64_t ranks, const char* more = "training.log_interval=1") {
    ResolveRequest request{.recipe = {}, .overrides = {"training.batch_size=2", "training.accumulation_steps=1", "data.train_data_path=\"" + (c.folder.path / "train.jsonl").string() + "\"", more}};
    request.ranks.count = ranks;
    Resolution out = c.run(request);
    REQUIRE_MESSAGE(out.plan, out.problems.text());
    return window_note(*out.plan);
  };
  CHECK(note_with(1) == "");
  CHECK(note_with(2) == "a window takes 4 samples (2 ranks x 1 micro-steps x 2), and there are 3: it goes through the data more than once");
  fs::create_directories(c.folder.path / "features");
  atomic_write(c.folder.path / "features" / "manifest.json", "{\"records\": 1}");
  const std::string features = "data.hidden_states_path=\"" + (c.folder.path / "features").string() + "\"";
  CHECK(note_with(1, features.c_str()).find("and there are 1") != std::string::npos);
}

TEST_CASE("plan: two names of one features folder are the same folder") {
  Case c;
  fs::create_directories(c.folder.path / "features");
  fs::create_directory_symlink("features", c.folder.path / "held_out");
  const Resolution out = c.run({.recipe = {}, .overrides = {"data.hidden_states_path=\"" + (c.folder.path / "features").string() + "\"",
                                                            "data.eval_hidden_states_path=\"" + (c.folder.path / "held_out").string() + "\""}});
  CHECK(out.problems.contains("host/same-features"));
}

TEST_CASE("plan: a target whose token ids are no ids is refused with its file") {
  Case c;
  c.config = "{\"hidden_size\": 64, \"vocab_size\": 100, \"num_hidden_layers\": 2, \"model_type\": \"llama\", \"pad_token_id\": \"7\", \"eos_token_id\": [1, 2]}";
  const Resolution out = c.run();
  CHECK(out.code == ExitCode::kData);
  CHECK(out.problems.text().find("pad_token_id is \"7\", expected the id of a token") != std::string::npos);
  CHECK(out.problems.text().find("eos_token_id") == std::string::npos);
}
