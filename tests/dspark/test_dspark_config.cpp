#include <algorithm>
#include <doctest/doctest.h>

#include <set>

#include "plugins/algorithm/dspark/dspark.hpp"
#include "plugins/algorithm/dspark/engines.hpp"
#include "sf/error.hpp"
#include "sf/json.hpp"
#include "tests/dspark/naive_dspark.hpp"

using sf::DsparkConfig;
using sf::DsparkOptions;
using sf::Json;
using sf::ModelFacts;
using sf::testing::tiny_dspark_config;

namespace {

const char* const kTarget = R"({
  "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
  "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192,
  "hidden_act": "silu", "pad_token_id": 2, "eos_token_id": [2, 0]
})";

std::string refusal(const std::map<std::string, std::string>& edits, ModelFacts facts = {}) {
  facts.draft_config_json = tiny_dspark_config(edits);
  try {
    (void)sf::resolve_dspark_config(facts, {});
    return "";
  } catch (const sf::Error& error) {
    CHECK(error.code() == sf::ExitCode::kUsage);
    // One problem has a hint, several have an advice each.
    const std::vector<sf::Problem>& problems = error.problems();
    const bool has_advice = std::all_of(problems.begin(), problems.end(), [](const sf::Problem& one) { return !one.fix.empty(); });
    CHECK((!error.hint().empty() || (!problems.empty() && has_advice)));
    return error.what();
  }
}

}  // namespace

TEST_CASE("dspark configuration: one is made in the target's shape when none is given, and read again as the same") {
  ModelFacts facts;
  facts.target_config_json = kTarget;
  facts.draft_num_hidden_layers = 2;
  DsparkOptions options;
  options.markov_rank = 16;
  options.markov_head = sf::MarkovHead::kGated;
  const DsparkConfig config = sf::resolve_dspark_config(facts, options);
  CHECK(config.block_size == 7);
  CHECK(config.markov_rank == 16);
  CHECK(config.markov_head == sf::MarkovHead::kGated);
  CHECK(config.confidence_head);
  CHECK(config.confidence_with_markov);
  CHECK(config.target_layer_ids == std::vector<int64_t>{1, 27});
  const Json written = Json::parse(config.json);
  CHECK(written.at("architectures").at(size_t{0}).as_string() == "DSparkDraftModel");
  CHECK(written.at("dflash_config").at("attention_mode").as_string() == "gqa");
  CHECK(written.at("dflash_config").at("projector_type").as_string() == "dspark");
  CHECK(written.at("markov_head_type").as_string() == "gated");
  ModelFacts again;
  again.draft_config_json = config.json;
  CHECK(sf::resolve_dspark_config(again, {}).json == config.json);

  options.confidence_head = false;
  const DsparkConfig bare = sf::resolve_dspark_config(facts, options);
  CHECK(!bare.confidence_head);
  CHECK(!bare.confidence_with_markov);
}

TEST_CASE("dspark configuration: the head's keys are read from either place; without the key a confidence head follows its old weight") {
  ModelFacts facts;
  facts.draft_config_json = tiny_dspark_config({{"dflash_config.markov_rank", ""}, {"markov_rank", "5"}, {"dflash_config.markov_head_type", ""}, {"markov_head_type", "\"rnn\""}});
  DsparkConfig config = sf::resolve_dspark_config(facts, {});
  CHECK(config.markov_rank == 5);
  CHECK(config.markov_head == sf::MarkovHead::kRnn);
  facts.draft_config_json = tiny_dspark_config({{"dflash_config.enable_confidence_head", ""}, {"dflash_config.confidence_head_with_markov", ""}});
  CHECK(!sf::resolve_dspark_config(facts, {}).confidence_head);
  facts.draft_config_json = tiny_dspark_config({{"dflash_config.enable_confidence_head", ""}, {"dflash_config.confidence_head_alpha", "0.5"}});
  CHECK(sf::resolve_dspark_config(facts, {}).confidence_head);
}

TEST_CASE("dspark configuration: what can't be trained is refused with what was found and what to do") {
  struct Row {
    std::map<std::string, std::string> edits;
    const char* says;
  };
  for (const Row& row : {
           Row{{{"block_size", "1"}}, "block_size is 1"},
           Row{{{"dflash_config.block_size", "6"}}, "block_size = 4, but dflash_config.block_size = 6"},
           Row{{{"architectures", "[\"DFlash2DraftModel\"]"}}, "architecture is \"DFlash2DraftModel\"; this plugin trains DSparkDraftModel"},
           Row{{{"dflash_config.mask_token_id", "20"}}, "outside the target's embedding"},
           Row{{{"mask_token_id", "3"}}, "mask_token_id = 3, but dflash_config.mask_token_id = 19"},
           Row{{{"dflash_config.target_layer_ids", "[2, 12]"}}, "target layer 12"},
           Row{{{"dflash_config.target_layer_ids", "[7, 2]"}}, "7,2 are not in ascending order"},
           Row{{{"dflash_config.target_layer_ids", "[]"}}, "target_layer_ids is empty"},
           Row{{{"target_layer_ids", "[2, 8]"}}, "target_layer_ids = [2, 8], but dflash_config.target_layer_ids = [2, 7]"},
           Row{{{"dflash_config.attention_mode", "\"mha\""}}, "attention_mode is \"mha\", but there are 2 query heads and 1 key/value heads"},
           Row{{{"num_key_value_heads", "2"}}, "attention_mode is \"gqa\", but there are 2 query heads and 2 key/value heads"},
           Row{{{"dflash_config.attention_mode", "\"mla\""}}, "attention_mode is \"mla\""},
           Row{{{"dflash_config.projector_type", "\"dflash\""}}, "projector_type is \"dflash\""},
           Row{{{"dflash_config.markov_rank", "-1"}}, "markov_rank is -1"},
           Row{{{"dflash_config.markov_rank", "0"}}, "confidence_head_with_markov is true, but markov_rank is 0"},
           Row{{{"dflash_config.markov_rank", "true"}}, "an integer expected"},
           Row{{{"dflash_config.markov_head_type", "\"lstm\""}}, "markov_head_type is \"lstm\""},
           Row{{{"markov_head_type", "\"rnn\""}}, "markov_head_type = \"rnn\", but dflash_config.markov_head_type = \"vanilla\""},
           Row{{{"dflash_config.enable_confidence_head", "false"}}, "there is no confidence head"},
           Row{{{"dflash_config.selector_rank", "4"}}, "unknown key dflash_config.selector_rank"},
       }) {
    CAPTURE(row.says);
    const std::string text = refusal(row.edits);
    CAPTURE(text);
    CHECK(text.find(row.says) != std::string::npos);
  }
  ModelFacts other;
  other.target_config_json = kTarget;
  CHECK(refusal({}, other).find("hidden_size is 16, the target's 576") != std::string::npos);
}

TEST_CASE("dspark description: the last state is read only when a loss compares with it; pooling is by micro-step") {
  const auto reads_last_state = [](const DsparkOptions& options, const std::map<std::string, std::string>& edits) {
    sf::Dspark algorithm(options);
    ModelFacts facts;
    facts.draft_config_json = tiny_dspark_config(edits);
    const sf::Description description = algorithm.describe(facts);
    CHECK(description.pooling == sf::Pooling::micro);
    CHECK(description.drafted_tokens == 4);
    bool found = false;
    for (const sf::FeatureRead& read : description.reads) {
      found = found || read.last_state;
    }
    return found;
  };
  DsparkOptions options;
  CHECK(reads_last_state(options, {}));
  options.l1_loss_alpha = 0;
  CHECK(reads_last_state(options, {}));  // for the confidence
  CHECK(!reads_last_state(options, {{"dflash_config.enable_confidence_head", "false"}, {"dflash_config.confidence_head_with_markov", "false"}}));
  options.confidence_head_alpha = 0;
  CHECK(!reads_last_state(options, {}));
}

TEST_CASE("dspark export: each engine finds the keys and tensors that it reads, and is named only where it can serve the head") {
  const auto exported = [](const std::map<std::string, std::string>& edits) {
    sf::Dspark algorithm(DsparkOptions{});
    ModelFacts facts;
    facts.draft_config_json = tiny_dspark_config(edits);
    (void)algorithm.describe(facts);
    return algorithm.export_spec();
  };
  const sf::ExportSpec spec = exported({});
  const Json config = Json::parse(spec.config_json);
  std::set<std::string> names;
  for (const sf::ParameterSpec& tensor : spec.tensors) {
    names.insert(tensor.name);
    for (const char* skipped : {"embed_tokens.", "lm_head.", "rotary_emb."}) {  // engines pass over these
      CHECK(!tensor.name.starts_with(skipped));
    }
  }
  for (const sf::EngineContract& engine : sf::kDsparkEngines) {
    CAPTURE(engine.engine);
    for (const char* key : engine.config_keys) {
      CAPTURE(key);
      const std::string text = key;
      const size_t dot = text.find('.');
      const Json& place = dot == std::string::npos ? config : config.at(text.substr(0, dot));
      const Json* value = place.find(dot == std::string::npos ? text : text.substr(dot + 1));
      REQUIRE(value != nullptr);
      CHECK(!value->is_null());
    }
    CHECK(spec.engine_note.find(engine.start) != std::string::npos);
  }
  CHECK(config.at("architectures").at(size_t{0}).as_string() == "DSparkDraftModel");
  CHECK(config.at("model_type").as_string() == "qwen3");
  CHECK(config.at("markov_rank").as_int() == 3);
  CHECK(config.at("enable_confidence_head").as_bool());
  for (const char* name : {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_norm.weight",
                           "layers.1.mlp.down_proj.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
                           "confidence_head.proj.weight", "confidence_head.proj.bias"}) {
    CAPTURE(name);
    CHECK(names.count(name) == 1);
  }
  const std::string gated = exported({{"dflash_config.markov_head_type", "\"gated\""}}).engine_note;
  CHECK(gated.find("vLLM: does not serve this Markov head") != std::string::npos);
  CHECK(gated.find("SGLang: --speculative-algorithm DSPARK") != std::string::npos);
  const std::string none = exported({{"dflash_config.markov_rank", "0"}, {"dflash_config.confidence_head_with_markov", "false"}}).engine_note;
  CHECK(none.find("SGLang: does not serve a draft without a Markov head") != std::string::npos);
}
