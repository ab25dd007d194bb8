// sf-host from outside: what it prints where, its exit codes, and how long it takes to refuse.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "sf/json.hpp"
#include "tests/host_program.hpp"

#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;
using test::Answer;
using test::run_host;
using test::run_shell;

namespace {

const std::string kPlugins = std::string(" --plugin-path ") + SF_BUILD_DIR + "/tests/plugins/good ";
const std::string kRecipes = std::string(SF_TEST_DATA) + "/golden/recipes/";

}  // namespace

TEST_CASE("sf-host: every verb has help with its flags, and recipes' verbs list the keys") {
  for (const char* verb : {"train", "plan", "capture", "eval", "export", "plugins", "schema", "doctor"}) {
    Answer answer = run_host(std::string(verb) + " --help");
    CHECK_MESSAGE(answer.code == 0, verb);
    CHECK_MESSAGE(answer.out.find(std::string("usage: sf-host ") + verb) == 0, verb);
    CHECK(answer.out.find("--json") != std::string::npos);
  }
  CHECK(run_host("train --help").out.find("training.batch_size") != std::string::npos);
  CHECK(run_host("train " + kRecipes + "good.toml --help" + kPlugins).out.find("training.num_anchors") !=
        std::string::npos);
  CHECK(run_host("--help").out.find("doctor [RECIPE]") != std::string::npos);
  CHECK(run_host("--version").out.find("sf-host 0.") == 0);
}

TEST_CASE("sf-host: mistakes on the command line end with code 2 and a suggestion") {
  CHECK(run_host("").code == 2);
  Answer verb = run_host("trian x.toml");
  CHECK(verb.code == 2);
  CHECK(verb.out == "error: unknown verb \"trian\"\n  fix:  did you mean train?\n");
  Answer flag = run_host("plan --jsn x.toml");
  CHECK(flag.code == 2);
  CHECK(flag.out.find("did you mean --json?") != std::string::npos);
  CHECK(run_host("plan").code == 2);
  CHECK(run_host("plan a.toml b.toml").code == 2);
  CHECK(run_host("plan a.toml --set").code == 2);
  CHECK(run_host("export " + kRecipes + "good.toml").out.find("--output") != std::string::npos);
  CHECK(run_host("capture " + kRecipes + "good.toml --split half").code == 2);
  Answer missing = run_host("plan /nonexistent.toml");
  CHECK(missing.code == 2);
  CHECK(missing.out.find("error[recipe/not-readable]") == 0);
}

TEST_CASE("sf-host: a flag that is empty, as from an unset variable, is refused and not passed over") {
  const std::string recipe = kRecipes + "good.toml ";
  for (const std::string& arguments :
       {"train " + recipe + "--resume \"\"", "train " + recipe + "--init-from \"\"", "plan " + recipe + "--backend \"\"",
        "eval " + recipe + "--checkpoint \"\"", "eval " + recipe + "--features \"\"", "export " + recipe + "--output \"\"",
        "capture " + recipe + "--split \"\"", "eval " + recipe + "--speculative --draft \"\"", "eval " + recipe + "--speculative --draft a --draft \"\"",
        "plan " + recipe + "--set \"\"", "plan " + recipe + "--plugin-path \"\"", std::string("plan \"\""), "bench matrix " + recipe + "--variant \"\""}) {
    Answer answer = run_host(arguments + kPlugins);
    CHECK_MESSAGE(answer.code == 2, arguments);
    CHECK_MESSAGE(answer.out.find(" is empty\n") != std::string::npos, answer.out);
  }
}

TEST_CASE("sf-host: a place for a bench's result that is none is told before the work") {
  const Answer answer = run_host("bench " + kRecipes + "good.toml --output /nowhere/at/all.json" + kPlugins);
  CHECK(answer.code == 2);
  CHECK_MESSAGE(answer.out.find("--output /nowhere/at/all.json: its folder does not exist") != std::string::npos, answer.out);
}

TEST_CASE("sf-host: with --json a mistake on the command line is JSON on stdout, too") {
  for (const char* arguments : {"train r.toml --foo --json", "trian r.toml --json", "plan --json", "plan --json a.toml --set"}) {
    Answer answer = run_host(std::string(arguments) + " 2>/dev/null");
    CHECK(answer.code == 2);
    REQUIRE_MESSAGE(answer.out.starts_with("{"), arguments);
    Json parsed = Json::parse(answer.out);
    CHECK(parsed.at("exit_code").as_int() == 2);
    CHECK(parsed.at("problems").size() == 1);
  }
}

TEST_CASE("sf-host: output that can't be written is an error, on a full disk and over the limit of ulimit") {
  Answer full = run_host("schema 2>&1 >/dev/full");
  CHECK(full.code == 2);
  CHECK(full.out.find("error: the output on stdout could not be written whole") == 0);
  const std::string host = std::string(SF_BUILD_DIR) + "/bin/sf-host";
  const fs::path file = fs::temp_directory_path() / ("sf-limit-" + std::to_string(getpid()));
  Answer limited = run_shell("ulimit -f 1; " + host + " schema 2>&1 >" + file.string());
  CHECK(limited.code == 2);  // 153 would be death by SIGXFSZ
  CHECK(limited.out.find("could not be written whole") != std::string::npos);
  fs::remove(file);
}

TEST_CASE("sf-host: a closed terminal stops it as SIGTERM does") {
  // The recipe is a pipe, so the host is certainly at work when the signal comes; then the pipe ends, and an empty recipe is refused.
  const std::string host = std::string(SF_BUILD_DIR) + "/bin/sf-host";
  const fs::path pipe = fs::temp_directory_path() / ("sf-hangup-" + std::to_string(getpid()));
  const std::string script = "mkfifo " + pipe.string() + "; " + host + " plan " + pipe.string() +
                             " >/dev/null 2>&1 & pid=$!; while [ ! -p " + pipe.string() + " ]; do sleep 0.01; done; exec 3>" +
                             pipe.string() + "; kill -HUP $pid; kill -HUP $pid; sleep 0.1; exec 3>&-; wait $pid";
  CHECK(run_shell("( " + script + " )").code == 2);  // 129 would be death by the signal
  fs::remove(pipe);
}

TEST_CASE("sf-host: a refused plan says why on stderr, as JSON on stdout with --json, and opens nothing") {
  Answer text = run_host("train " + kRecipes + "keys.toml" + kPlugins + " 2>/dev/null");
  CHECK(text.code == 2);
  CHECK(text.out.empty());
  Answer json = run_host("plan " + kRecipes + "keys.toml --json" + kPlugins + " 2>/dev/null");
  CHECK(json.code == 2);
  Json parsed = Json::parse(json.out);
  CHECK(parsed.at("exit_code").as_int() == 2);
  CHECK(parsed.at("problems").size() > 3);
  CHECK(run_host("plan " + kRecipes + "good.toml --set backend.sharding=fsdp9" + kPlugins).code == 3);
  CHECK(
      run_host("plan " + kRecipes + "good.toml --set model.target_model_path=/nonexistent" + kPlugins).code ==
      4);
  CHECK(run_host("plan " + kRecipes + "good.toml --plugin-path relative").code == 3);
}

TEST_CASE("sf-host: plugins lists what fits and what does not, and all about one") {
  Answer table = run_host("plugins" + kPlugins + "--plugin-path " + SF_BUILD_DIR + "/tests/plugins/bad");
  CHECK(table.code == 0);
  CHECK(table.out.find("fake_sharding        sharding") != std::string::npos);
  CHECK(table.out.find("use the host's sf.comm/1") != std::string::npos);
  Answer one = run_host("plugins fake_transform" + kPlugins);
  CHECK(one.code == 0);
  CHECK(one.out.find("plugin.fake_transform.gather  bool, default false") != std::string::npos);
  CHECK(one.out.find("fake_transform/needs-gather-codec  error") != std::string::npos);
  CHECK(run_host("plugins fake_transfrom" + kPlugins).code == 3);
  Json json = Json::parse(run_host("plugins --json" + kPlugins + "2>/dev/null").out);
  bool found = false;
  for (const Json& plugin : json.items()) {
    found = found || (plugin.at("name").as_string() == "fake_ok" && plugin.at("fits").as_bool());
  }
  CHECK(found);
}

TEST_CASE("sf-host: the schema is JSON, or Markdown when asked") {
  Json schema = Json::parse(run_host("schema" + kPlugins + "2>/dev/null").out);
  CHECK(schema.at("properties").at("plugin").at("properties").contains("fake_ok"));
  CHECK(run_host("schema --markdown" + kPlugins).out.find("### [training]") != std::string::npos);
}

TEST_CASE("sf-host: doctor reads target, conversations and features whole, and says what is wrong with them") {
  const std::string data = std::string(SF_TEST_DATA) + "/";
  struct Answered {
    const char* check;  // the line that answers
    bool is_fine;
    const char* text;   // part of it
  };
  struct Row {
    const char* name;
    std::string set;  // what replaces good data
    std::vector<Answered> findings;
  };
  const fs::path scratch = fs::temp_directory_path() / ("sf-doctor-" + std::to_string(getpid()));
  fs::create_directories(scratch / "empty");
  atomic_write(scratch / "good.jsonl", "{\"input_ids\": [1, 2, 3], \"loss_mask\": [0, 1, 1]}\n");
  atomic_write(scratch / "bad.jsonl", "{\"input_ids\": [1, 2, 999], \"loss_mask\": [0, 1, 1]}\n{\"input_ids\": [1]}\n");
  atomic_write(scratch / "unsupervised.jsonl", "{\"input_ids\": [1, 2, 3], \"loss_mask\": [1, 0, 1]}\n");
  fs::create_directories(scratch / "no_weights");
  fs::copy(data + "parity/golden/target_qwen3/config.json", scratch / "no_weights" / "config.json");
  fs::create_directories(scratch / "cut");
  atomic_write(scratch / "cut" / "data_0.ckpt", read_file(data + "data/features_eagle3/data_0.ckpt").substr(0, 20000));
  const std::string target = " --set model.target_model_path=", tokens = " --set data.train_data_path=",
                    features = " --set data.hidden_states_path=";
  // A doctor opens the engine, which takes its time, so one run answers as many rows as fit into it.
  const Row rows[] = {
      {"all is good", "",
       {{"target", true, "qwen3, 6 layers, hidden size 64, 320 tokens"},
        {"data.train_data_path", true, "1 samples, 3 tokens, 2 supervised (66 %), longest 3"},
        {"data.hidden_states_path", true, "6 records, 234 tokens, hidden_state 64 (BF16)"}}},
      {"no weights, nothing supervised, a truncated file",
       target + (scratch / "no_weights").string() + tokens + (scratch / "unsupervised.jsonl").string() + features +
           (scratch / "cut").string(),
       {{"target", false, "there is no model.safetensors and no model.safetensors.index.json"},
        {"data.train_data_path", false, "none of its 1 samples has two neighbouring supervised tokens"},
        {"data.hidden_states_path", false, "data_0.ckpt: truncated: the zip archive has no directory at its end"}}},
      {"broken lines, an empty folder",
       tokens + (scratch / "bad.jsonl").string() + features + (scratch / "empty").string(),
       {{"data.train_data_path", false, "2 of 2 lines can't be used"},
        {"data.hidden_states_path", false, "there are no features in this folder"}}},
      {"not captured yet", features + (scratch / "none").string(),
       {{"data.hidden_states_path", true, "is not there yet; sf-host capture makes it"}}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name);
    Answer answer = run_host("doctor " + kRecipes + "good.toml --json" + kPlugins + target + data +
                             "parity/golden/target_qwen3" + tokens + (scratch / "good.jsonl").string() + features +
                             data + "data/features_eagle3" + row.set + " 2>/dev/null");
    CAPTURE(answer.out);
    const Json findings = Json::parse(answer.out);
    bool is_all_fine = true;
    for (const Answered& expected : row.findings) {
      CAPTURE(expected.check);
      is_all_fine = is_all_fine && expected.is_fine;
      bool found = false;
      for (const Json& finding : findings.items()) {
        if (finding.at("check").as_string() != expected.check) continue;
        found = true;
        CHECK(finding.at("fine").as_bool() == expected.is_fine);
        CHECK(finding.at("text").as_string().find(expected.text) != std::string::npos);
      }
      CHECK(found);
    }
    if (!is_all_fine) CHECK(answer.code != 0);
  }
  fs::remove_all(scratch);
}

TEST_CASE("sf-host: what needs no tensors answers in a moment") {
  // 200 ms is the promise; the best of five, as other work may run on this machine.
  for (const std::string& arguments :
       {std::string("--help"), std::string("plugins") + kPlugins, std::string("schema") + kPlugins,
        "plan " + kRecipes + "keys.toml" + kPlugins}) {
    double best = 10;
    for (int i = 0; i < 5; ++i) {
      best = std::min(best, run_host(arguments).seconds);
    }
    CHECK_MESSAGE(best < 0.2, arguments << " took " << best << " s");
  }
}
