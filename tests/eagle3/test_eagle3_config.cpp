// What an EAGLE3 draft's configuration may say, and what is said about the rest.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "plugins/algorithm/eagle3/eagle3_config.hpp"
#include "sf/error.hpp"
#include "sf/json.hpp"

using namespace sf;

namespace {

constexpr const char* kTarget = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
  "num_hidden_layers": 36, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2})";

Json draft_config() {
  return Json::parse(R"({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "draft_vocab_size": 10,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64})");
}

ModelFacts facts_with(const char* key = nullptr, const char* value = nullptr) {
  ModelFacts facts;
  facts.target_config_json = kTarget;
  Json config = draft_config();
  if (key != nullptr) {
    config.set(key, Json::parse(value));
  }
  facts.draft_config_json = config.dump();
  return facts;
}

std::string refusal(const ModelFacts& facts, const Eagle3Options& options = {}) {
  try {
    (void)resolve_eagle3_config(facts, options);
  } catch (const Error& error) {
    CHECK((error.code() == ExitCode::kUsage || std::string(error.what()).find("rope: ") == 0));
    // One problem has a hint, several have an advice each.
    const std::vector<Problem>& problems = error.problems();
    const bool has_advice = std::all_of(problems.begin(), problems.end(), [](const Problem& one) { return !one.fix.empty(); });
    CHECK((!error.hint().empty() || (!problems.empty() && has_advice)));
    return std::string(error.what()) + " | " + error.hint();
  }
  return "";
}

void check_refused(const std::string& found, const std::vector<std::string>& parts) {
  CAPTURE(found);
  REQUIRE_FALSE(found.empty());
  for (const std::string& part : parts) {
    CAPTURE(part);
    CHECK(found.find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("eagle3 config: without a configuration one is made in the target's shape") {
  ModelFacts facts;
  facts.target_config_json = kTarget;
  const Eagle3Config made = resolve_eagle3_config(facts, {});
  CHECK(made.target_layer_ids == std::vector<int64_t>{1, 17, 32});
  CHECK(made.draft_vocabulary == 40);  // 32000, or all when there are fewer
  CHECK_FALSE(made.fc_norm);
  CHECK(made.norm_output);
  const Json config = Json::parse(made.json);
  CHECK(config.at("model_type") == Json("llama"));
  CHECK_FALSE(config.contains("layer_types"));
  CHECK(config.at("bos_token_id") == Json(int64_t{1}));

  const Eagle3Config newer = resolve_eagle3_config(facts, {.draft_vocab_size = 7, .eagle31 = true});
  CHECK(newer.fc_norm);
  CHECK_FALSE(newer.norm_output);
  CHECK(newer.draft_vocabulary == 7);
}

TEST_CASE("eagle3 config: what it resolves to reads as itself") {
  for (const char* rope : {"null", R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                       "original_max_position_embeddings": 64})"}) {
    ModelFacts facts = facts_with("rope_scaling", rope);
    const Eagle3Config first = resolve_eagle3_config(facts, {});
    facts.draft_config_json = first.json;
    const Eagle3Config again = resolve_eagle3_config(facts, {});
    CHECK(again.json == first.json);
    CHECK(again.layers.rope.inverse_frequencies == first.layers.rope.inverse_frequencies);
    const Json config = Json::parse(first.json);
    CHECK(config.at("rope_scaling").is_null() == (std::string(rope) == "null"));
    CHECK(config.at("rope_parameters").at("rope_theta").as_double() == 10000);
  }
}

TEST_CASE("eagle3 config: sizes of the draft's vocabulary outside 1 to the target's are refused") {
  check_refused(refusal(facts_with("draft_vocab_size", "0")), {"draft_vocab_size", "is 0", "at least 1"});
  check_refused(refusal(facts_with("draft_vocab_size", "-1")), {"draft_vocab_size", "is -1", "at least 1"});
  check_refused(refusal(facts_with("draft_vocab_size", "41")), {"draft_vocab_size", "is 41", "the target has 40 tokens"});
  check_refused(refusal(facts_with("draft_vocab_size", "\"many\"")), {"draft_vocab_size", "an integer expected"});
  check_refused(refusal(facts_with(), {.draft_vocab_size = 50}), {"plugin.eagle3.draft_vocab_size is 50"});
  CHECK(refusal(facts_with("draft_vocab_size", "40")) == "");
  CHECK(resolve_eagle3_config(facts_with("draft_vocab_size", "null"), {}).has_whole_vocabulary());
}

TEST_CASE("eagle3 config: layers that are not three, do not ascend or are not there are refused") {
  const auto layers = [](std::vector<int64_t> ids) {
    ModelFacts facts = facts_with();
    facts.target_layer_ids = std::move(ids);
    return refusal(facts);
  };
  CHECK(layers({1, 17, 35}) == "");
  check_refused(layers({1, 17}), {"[1,17]", "exactly three"});
  check_refused(layers({1, 17, 36}), {"target layer 36", "layers 0 to 35"});
  check_refused(layers({-1, 17, 32}), {"target layer -1"});
  check_refused(layers({17, 1, 32}), {"[17,1,32]", "do not ascend"});
  check_refused(layers({1, 1, 32}), {"do not ascend"});
  check_refused(refusal(facts_with("eagle_config", R"({"eagle_aux_hidden_state_layer_ids": [1, 2]})")), {"exactly three"});
  check_refused(refusal(facts_with("eagle_config", R"({"eagle_aux_hidden_state_layer_ids": "all"})")), {"a list of layers expected"});
  ModelFacts tiny = facts_with();
  Json target = Json::parse(kTarget);
  tiny.target_config_json = target.set("num_hidden_layers", int64_t{6}).dump();
  check_refused(refusal(tiny), {"[1,2,2]", "do not ascend"});
}

TEST_CASE("eagle3 config: heads, layers, biases and sizes that do not fit are refused") {
  check_refused(refusal(facts_with("num_key_value_heads", "3")), {"num_attention_heads", "2", "no multiple", "3"});
  check_refused(refusal(facts_with("num_hidden_layers", "2")), {"num_hidden_layers = 2", "exactly one layer"});
  check_refused(refusal(facts_with("attention_bias", "true")), {"attention_bias"});
  check_refused(refusal(facts_with("tie_word_embeddings", "true")), {"tie_word_embeddings"});
  check_refused(refusal(facts_with("architectures", R"(["DFlashDraftModel"])")), {"DFlashDraftModel", "LlamaForCausalLMEagle3"});
  check_refused(refusal(facts_with("vocab_size", "41")), {"vocab_size is 41", "40"});
  check_refused(refusal(facts_with("hidden_size", "24")), {"hidden_size is 24", "target_hidden_size"});
  check_refused(refusal(facts_with("target_hidden_size", "24")), {"target_hidden_size = 24", "16"});
  check_refused(refusal(facts_with("fc_norm", "1")), {"fc_norm", "true or false"});
  check_refused(refusal(facts_with("rope_scaling", R"({"rope_type": "spiral", "factor": 2.0})")), {"spiral"});
  ModelFacts blocks = facts_with();
  blocks.draft_block_size = 8;
  check_refused(refusal(blocks), {"model.draft_block_size", "ttt_length"});
  ModelFacts deep = facts_with();
  deep.draft_num_hidden_layers = 3;
  check_refused(refusal(deep), {"num_hidden_layers = 3", "model.draft_num_hidden_layers"});
}

TEST_CASE("eagle3 config: all mistakes of a configuration are told at once, each with its advice") {
  ModelFacts facts = facts_with("num_hidden_layers", "2");
  Json config = Json::parse(facts.draft_config_json);
  config.set("attention_bias", true).set("tie_word_embeddings", true).set("vocab_size", int64_t{41});
  config.set("eagle_config", Json::parse(R"({"eagle_aux_hidden_state_layer_ids": [17, 1, 32]})")).set("fc_norm", "yes").set("hidden_act", "gelu");
  facts.draft_config_json = config.dump();
  facts.draft_config_path = "drafts/config.json";
  try {
    (void)resolve_eagle3_config(facts, {});
    FAIL("accepted");
  } catch (const Error& error) {
    std::vector<std::string> parts = {"num_hidden_layers = 2", "attention_bias", "tie_word_embeddings", "vocab_size is 41", "do not ascend", "fc_norm", "gelu"};
    CAPTURE(error.what());
    CHECK(error.problems().size() == parts.size());
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(std::any_of(error.problems().begin(), error.problems().end(), [&](const Problem& one) {
        return one.message.find(part) != std::string::npos && one.place == "drafts/config.json" && !one.fix.empty();
      }));
    }
  }
}

TEST_CASE("eagle3 config: a draft with another hidden size needs an embedding of its own") {
  ModelFacts facts = facts_with("hidden_size", "24");
  Json config = Json::parse(facts.draft_config_json);
  facts.draft_config_json = config.set("target_hidden_size", int64_t{16}).dump();
  check_refused(refusal(facts), {"hidden_size is 24", "plugin.eagle3.train_embedding"});
  const Eagle3Config found = resolve_eagle3_config(facts, {.train_embedding = true});
  CHECK(found.target_hidden == 16);
  CHECK(found.layers.hidden_size == 24);
}

TEST_CASE("eagle3 configuration: what is compared with a value that is wrong itself is left alone") {
  std::string told = refusal(facts_with("num_attention_heads", "\"4\""));
  check_refused(told, {"\"num_attention_heads\" is \"4\""});
  CHECK(told.find("no multiple") == std::string::npos);
  told = refusal(facts_with("vocab_size", "\"5\""));
  check_refused(told, {"\"vocab_size\" is \"5\""});
  CHECK(told.find("but the target has") == std::string::npos);
  told = refusal(facts_with("num_key_value_heads", "3"));
  check_refused(told, {"num_key_value_heads"});
  told = refusal(facts_with("num_hidden_layers", "10000000"));
  check_refused(told, {"exactly one layer"});
  check_refused(refusal(facts_with("max_position_embeddings", "\"a\"")), {"a positive integer expected"});
}
