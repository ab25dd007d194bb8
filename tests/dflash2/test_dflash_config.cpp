#include <doctest/doctest.h>

#include "plugins/algorithm/dflash2/dflash.hpp"
#include "plugins/algorithm/dflash2/dflash_config.hpp"
#include "sf/error.hpp"
#include "sf/json.hpp"
#include "tests/dflash2/draft_run.hpp"

using sf::DflashConfig;
using sf::DflashOptions;
using sf::Json;
using sf::ModelFacts;
using sf::testing::tiny_config;
namespace draft = sf::draft;

namespace {

const char* const kTarget = R"({
  "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
  "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192,
  "hidden_act": "silu", "pad_token_id": 2, "eos_token_id": [2, 0]
})";

std::string refusal(const std::map<std::string, std::string>& edits, ModelFacts facts = {}) {
  facts.draft_config_json = tiny_config(edits);
  try {
    (void)sf::resolve_dflash_config(facts, {});
    return "";
  } catch (const sf::Error& error) {
    CHECK(error.code() == sf::ExitCode::kUsage);
    CHECK((!error.hint().empty() || !error.problems().empty()));
    for (const sf::Problem& problem : error.problems()) {
      CHECK(problem.id == "draft/bad-config");
      CHECK(!problem.fix.empty());
    }
    return error.what();
  }
}

}  // namespace

TEST_CASE("draft configuration: target layers are spread evenly, halves rounded to even") {
  CHECK(draft::default_target_layers(36, 5) == std::vector<int64_t>{1, 9, 17, 25, 33});
  CHECK(draft::default_target_layers(30, 1) == std::vector<int64_t>{15});
  CHECK(draft::default_target_layers(13, 3) == std::vector<int64_t>{1, 6, 10});   // 5.5 goes to 6
  CHECK(draft::default_target_layers(11, 3) == std::vector<int64_t>{1, 4, 8});    // 4.5 goes to 4
}

TEST_CASE("draft configuration: the mask token is the first that is named, and lies inside the embedding") {
  draft::MaskTokenFacts facts{.pad_id = 2, .eos_id = 3, .unk_id = 4, .vocab_size = 100};
  CHECK(draft::resolve_mask_token(facts) == 2);
  facts.tokenizer_tokens = 100;
  CHECK(draft::resolve_mask_token(facts) == 2);  // no free row behind the tokenizer's
  facts.tokenizer_tokens = 90;
  CHECK(draft::resolve_mask_token(facts) == 90);
  facts.tokenizer_mask_id = 7;
  CHECK(draft::resolve_mask_token(facts) == 7);
  facts.config_id = 8;
  CHECK(draft::resolve_mask_token(facts) == 8);
  facts.explicit_id = 9;
  CHECK(draft::resolve_mask_token(facts) == 9);
  facts.explicit_id = 100;
  CHECK_THROWS_AS((void)draft::resolve_mask_token(facts), sf::Error);
  CHECK_THROWS_AS((void)draft::resolve_mask_token({.vocab_size = 100}), sf::Error);
}

TEST_CASE("draft configuration: one is made in the target's shape when none is given") {
  ModelFacts facts;
  facts.target_config_json = kTarget;
  facts.draft_num_hidden_layers = 2;
  facts.draft_block_size = 8;
  const DflashConfig config = sf::resolve_dflash_config(facts, {});
  CHECK(config.dflash2);
  CHECK(config.block_size == 8);
  CHECK(config.layers.layers == 2);
  CHECK(config.layers.head_dim == 64);
  CHECK(config.layers.rope.theta == 100000.0);
  CHECK(config.target_layer_ids == std::vector<int64_t>{1, 27});
  CHECK(config.mask_token_id == 2);
  const Json written = Json::parse(config.json);
  CHECK(written.at("architectures").at(size_t{0}).as_string() == "DFlash2DraftModel");
  CHECK(written.at("dflash_config").at("selector_rank").as_int() == 256);
  CHECK(written.at("dflash_config").at("block_size").as_int() == 8);
  CHECK(written.at("block_size").as_int() == 8);
  CHECK(written.at("num_target_layers").as_int() == 30);
  CHECK(written.at("dtype").as_string() == "bfloat16");

  // What was written is read as the same.
  ModelFacts again;
  again.draft_config_json = config.json;
  CHECK(sf::resolve_dflash_config(again, {}).json == config.json);

  DflashOptions plain;
  plain.dflash2 = false;
  facts.draft_num_hidden_layers = 0;
  const DflashConfig small = sf::resolve_dflash_config(facts, plain);
  CHECK(!small.dflash2);
  CHECK(small.layers.layers == 1);
  CHECK(small.target_layer_ids == std::vector<int64_t>{15});
}

TEST_CASE("draft configuration: two block sizes that disagree are refused, the recipe's overrides both, and both places say the same afterwards") {
  ModelFacts facts;
  CHECK(refusal({{"dflash_config.block_size", "6"}}).find("block_size = 4, but dflash_config.block_size = 6") != std::string::npos);
  facts.draft_config_json = tiny_config({{"dflash_config.block_size", "6"}});
  facts.draft_block_size = 5;
  DflashConfig config = sf::resolve_dflash_config(facts, {});
  CHECK(config.block_size == 5);
  CHECK(Json::parse(config.json).at("block_size").as_int() == 5);
  CHECK(Json::parse(config.json).at("dflash_config").at("block_size").as_int() == 5);
  facts.draft_block_size = 0;
  facts.draft_config_json = tiny_config({{"dflash_config.block_size", "4"}});
  CHECK(sf::resolve_dflash_config(facts, {}).block_size == 4);
  facts.draft_config_json = tiny_config({{"block_size", ""}, {"dflash_config.block_size", "6"}});
  CHECK(sf::resolve_dflash_config(facts, {}).block_size == 6);
  facts.draft_block_size = 9;
  CHECK(sf::resolve_dflash_config(facts, {}).block_size == 9);
}

TEST_CASE("draft configuration: sliding layers come from layer_types, else from use_sliding_window and max_window_layers") {
  ModelFacts facts;
  facts.draft_config_json = tiny_config({{"use_sliding_window", "false"}});
  DflashConfig config = sf::resolve_dflash_config(facts, {});
  CHECK(config.layers.sliding == std::vector<bool>{false, true});
  CHECK(!config.layers.causal(0));
  CHECK(config.layers.causal(1));
  facts.draft_config_json = tiny_config({{"layer_types", ""}, {"use_sliding_window", "true"}, {"max_window_layers", "1"}});
  CHECK(sf::resolve_dflash_config(facts, {}).layers.sliding == std::vector<bool>{false, true});
  facts.draft_config_json = tiny_config({{"layer_types", ""}, {"use_sliding_window", "false"}});
  CHECK(sf::resolve_dflash_config(facts, {}).layers.sliding == std::vector<bool>{false, false});
  facts.draft_config_json = tiny_config({{"is_causal", "false"}});
  config = sf::resolve_dflash_config(facts, {});
  CHECK(!config.layers.causal(1));
  CHECK(Json::parse(config.json).at("is_causal").as_bool() == false);
}

TEST_CASE("draft configuration: what can't be trained is refused with what was found and what to do") {
  struct Row {
    std::map<std::string, std::string> edits;
    const char* says;
  };
  for (const Row& row : {
           Row{{{"block_size", "1"}}, "block_size is 1"},
           Row{{{"architectures", "[\"LlamaForCausalLM\"]"}}, "architecture is \"LlamaForCausalLM\""},
           Row{{{"dflash_config.conv_kernel_size", "5"}}, "conv_kernel_size is 5"},
           Row{{{"dflash_config.conv_kernel_size", ""}}, "conv_kernel_size is missing"},
           Row{{{"dflash_config.conv_kernel_size", "true"}}, "an integer expected"},
           Row{{{"dflash_config.conv_group_size", "5"}}, "does not divide hidden_size 16"},
           Row{{{"dflash_config.selector_top_k", "41"}}, "selector_top_k is 41"},
           Row{{{"dflash_config.selector_rank", "0"}}, "selector_rank is 0"},
           Row{{{"dflash_config.target_layer_ids", "[2, 12]"}}, "target layer 12"},
           Row{{{"dflash_config.target_layer_ids", "[2, -1]"}}, "target layer -1"},
           Row{{{"dflash_config.target_layer_ids", "[7, 2, 7]"}}, "target layer 7 is named twice"},
           Row{{{"dflash_config", "[]"}}, "dflash_config = [], an object expected"},
           Row{{{"dflash_config.selector_topk", "5"}}, "unknown key dflash_config.selector_topk; known are block_size, target_layer_ids"},
           Row{{{"layer_types", "[\"full_attention\"]"}}, "\"layer_types\" has 1 entries"},
           Row{{{"layer_types", "[\"full_attention\", \"chunked\"]"}}, "\"chunked\""},
           Row{{{"sliding_window", "null"}}, "sliding layer needs a positive number"},
           Row{{{"hidden_act", "\"gelu\""}}, "only \"silu\""},
           Row{{{"num_key_value_heads", "3"}}, "no multiple"},
           Row{{{"dflash_config.mask_token_id", "40"}}, "outside the target's embedding"},
           Row{{{"attention_dropout", "0.1"}}, "without dropout"},
       }) {
    CAPTURE(row.says);
    const std::string text = refusal(row.edits);
    CAPTURE(text);
    CHECK(text.find(row.says) != std::string::npos);
  }
  // All that is wrong with the layers at once.
  const std::string both = refusal({{"hidden_act", "\"gelu\""}, {"attention_dropout", "0.1"}});
  CHECK(both.find("gelu") != std::string::npos);
  CHECK(both.find("dropout") != std::string::npos);

  ModelFacts layers;
  layers.target_layer_ids = {3, 3};
  CHECK(refusal({}, layers).find("target layer 3 is named twice") != std::string::npos);
  layers.target_layer_ids = {3, 12};
  CHECK(refusal({}, layers).find("target layer 12 is asked for, the target has layers 0 to 11") != std::string::npos);

  ModelFacts other;
  other.target_config_json = kTarget;
  CHECK(refusal({}, other).find("hidden_size is 16, the target's 576") != std::string::npos);
}

TEST_CASE("draft configuration: a fix names the place that the number came from, and the key that was meant") {
  const auto hint = [](const ModelFacts& facts, const DflashOptions& options) -> std::string {
    try {
      (void)sf::resolve_dflash_config(facts, options);
      return "accepted";
    } catch (const sf::Error& error) {
      REQUIRE(error.problems().size() == 1);
      return error.problems()[0].fix;
    }
  };
  ModelFacts made;
  made.target_config_json = kTarget;
  DflashOptions options;
  options.selector_top_k = 60000;
  CHECK(hint(made, options) == "correct plugin.dflash2.selector_top_k");
  options = {};
  options.conv_group_size = 7;
  CHECK(hint(made, options) == "choose a divisor of 576 for plugin.dflash2.conv_group_size");
  options = {};
  options.conv_kernel_size = 17;
  CHECK(hint(made, options) == "correct plugin.dflash2.conv_kernel_size");
  ModelFacts named;
  named.draft_config_path = "/drafts/a.json";
  named.draft_config_json = tiny_config({{"dflash_config.selector_top_k", "60000"}});
  CHECK(hint(named, {}) == "correct \"dflash_config.selector_top_k\" in /drafts/a.json");
  named.draft_config_json = tiny_config({{"dflash_config.selector_topk", "5"}});
  CHECK(hint(named, {}) == "did you mean \"selector_top_k\"?");
  named.draft_config_json = tiny_config({{"dflash_config.colour", "5"}});
  CHECK(hint(named, {}) == "leave it out of model.draft_model_config");
}

TEST_CASE("draft configuration: options of a selector are refused when the named configuration has none") {
  ModelFacts facts;
  facts.draft_config_json = tiny_config({{"architectures", "[\"DFlashDraftModel\"]"}});
  CHECK_NOTHROW((void)sf::resolve_dflash_config(facts, {}));
  DflashOptions options;
  options.selector_ramp_ratio = 0.5;
  CHECK_THROWS_WITH((void)sf::resolve_dflash_config(facts, options),
                    "training.dflash2_selector_ramp_ratio is set, but the draft's configuration is of DFlashDraftModel, which has no selector "
                    "(leave training.dflash2_selector_ramp_ratio out, or name a configuration of DFlash2DraftModel)");
  facts.draft_config_json = tiny_config({});
  CHECK_NOTHROW((void)sf::resolve_dflash_config(facts, options));
}

TEST_CASE("description: a sample has as many slots as anchors at most, with static shapes exactly as many") {
  ModelFacts facts;
  facts.draft_config_json = tiny_config({});
  DflashOptions options;
  options.num_anchors = 24;
  sf::Dflash algorithm(options);
  sf::Description description = algorithm.describe(facts);
  CHECK(description.slots == 0);
  CHECK(description.slots_at_most == 24);
  CHECK(description.head_rows_at_most == 512);   // 128 blocks of 3 guesses, in whole tiles of 256 rows
  facts.static_shapes = true;
  description = algorithm.describe(facts);
  CHECK(description.slots == 24);
}

TEST_CASE("draft configuration: everything that is wrong is told at once, and a mistake makes no second one") {
  ModelFacts facts;
  facts.draft_config_path = "/drafts/a.json";
  facts.target_config_json = kTarget;
  facts.draft_config_json = tiny_config({{"hidden_size", "\"wide\""}, {"hidden_act", "\"gelu\""}, {"block_size", "1"},
                                         {"dflash_config.target_layer_ids", "[2, 99]"}, {"dflash_config.conv_kernel_size", "\"two\""},
                                         {"dflash_config.selector_rank", "0"}, {"vocab_size", "49152"}});
  try {
    (void)sf::resolve_dflash_config(facts, {});
    FAIL("accepted");
  } catch (const sf::Error& error) {
    std::string told;
    for (const sf::Problem& problem : error.problems()) {
      CHECK(problem.place == "/drafts/a.json");
      CHECK(!problem.fix.empty());
      told += problem.message + "\n";
    }
    for (const char* part : {"\"hidden_size\" is \"wide\"", "\"hidden_act\" is \"gelu\"", "block_size is 1", "target layer 99",
                             "dflash_config.conv_kernel_size = \"two\"", "selector_rank is 0"}) {
      CHECK_MESSAGE(told.find(part) != std::string::npos, part << " in\n" << told);
    }
    CHECK_MESSAGE(error.problems().size() == 6, told);  // hidden_size is not compared with the target's, nor divided by heads or groups
  }
}

TEST_CASE("draft configuration: a mask token that is no id is refused with its value, wherever it stands, and never replaced by another token") {
  ModelFacts facts;
  facts.target_config_json = R"({"hidden_size": 16, "vocab_size": 40, "num_hidden_layers": 6, "pad_token_id": 7})";
  for (const char* place : {"dflash_config.mask_token_id", "mask_token_id"}) {
    for (const char* value : {"\"x\"", "-5", "3.7", "1e20", "true", "[3]", "{}"}) {
      const std::string told = refusal({{place, value}}, facts);
      CAPTURE(told);
      CHECK(told.find(std::string(place) + " = ") != std::string::npos);
      CHECK(told.find("the id of a token expected") != std::string::npos);
    }
  }
}

TEST_CASE("draft configuration: a target's token id of another type is refused and not passed over") {
  CHECK(draft::token_id(Json::parse(R"({"pad_token_id": 7})"), "pad_token_id") == 7);
  CHECK(draft::token_id(Json::parse(R"({"eos_token_id": [5, 6]})"), "eos_token_id") == 5);
  for (const char* none : {"{}", R"({"pad_token_id": null})", R"({"pad_token_id": -1})", R"({"pad_token_id": []})"}) {
    CHECK(draft::token_id(Json::parse(none), "pad_token_id") == -1);
  }
  for (const char* wrong : {R"({"pad_token_id": "7"})", R"({"pad_token_id": 7.5})", R"({"pad_token_id": true})", R"({"pad_token_id": ["a"]})", R"({"pad_token_id": -2})"}) {
    CAPTURE(wrong);
    CHECK_THROWS_WITH_AS((void)draft::token_id(Json::parse(wrong), "pad_token_id"), doctest::Contains("the target's config.json has pad_token_id = "), sf::Error);
  }
}

TEST_CASE("draft configuration: sizes beyond all reason, lengths that are no number and a norm without epsilon are refused") {
  struct Row {
    const char* key;
    const char* value;
    const char* told;
  };
  for (const Row& row : {Row{"num_hidden_layers", "10000000", "at most 1000 expected"}, Row{"hidden_size", "1000000000000", "at most 1048576 expected"},
                         Row{"vocab_size", "1000000000000", "at most 16777216 expected"}, Row{"block_size", "5000", "at most 1024 expected"},
                         Row{"dflash_config.selector_rank", "1000000000000", "at most 65536 expected"}, Row{"dflash_config.selector_top_k", "2000", "at most 1024 expected"},
                         Row{"max_position_embeddings", "\"a\"", "a positive integer expected"}, Row{"max_position_embeddings", "-3", "a positive integer expected"},
                         Row{"rms_norm_eps", "0", "a number above 0 expected"}, Row{"rms_norm_eps", "\"small\"", "is \"small\", a number above 0 expected"}}) {
    CAPTURE(row.key);
    const std::string told = refusal({{row.key, row.value}});
    CAPTURE(told);
    CHECK(told.find(row.told) != std::string::npos);
  }
}
