// Samples, row lists, the draft's vocabulary and the export of EAGLE3.
#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "core/kernels/ops.hpp"
#include "plugins/algorithm/eagle3/eagle3.hpp"
#include "plugins/algorithm/eagle3/metrics.hpp"
#include "plugins/algorithm/eagle3/unroll_rows.hpp"
#include "sdk/draft/draft_vocabulary.hpp"
#include "sf/error.hpp"
#include "sf/json.hpp"

using namespace sf;

namespace {

at::Tensor integers(const std::vector<int64_t>& values) { return at::tensor(at::ArrayRef<int64_t>(values), at::TensorOptions().dtype(at::kLong)); }

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::string(error.what()) + " | " + error.hint();
  }
  return "";
}

ModelFacts facts_of(int64_t draft_vocab) {
  ModelFacts facts;
  facts.draft_config_json = R"({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 12, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "hidden_act": "silu", "draft_vocab_size": )" + std::to_string(draft_vocab) + "}";
  facts.target_layer_ids = {1, 2, 3};
  return facts;
}

TargetTables tables() { return {at::ones({12, 16}), at::ones({12, 16})}; }

}  // namespace

TEST_CASE("draft vocabulary: the most frequent tokens, of equals the one seen first, ascending") {
  const std::vector<TokenCount> counts = {{7, 2}, {3, 5}, {9, 2}, {1, 2}, {4, 9}};
  CHECK(draft::choose_draft_tokens(counts, 3) == std::vector<int64_t>{3, 4, 7});
  CHECK(draft::choose_draft_tokens(counts, 4) == std::vector<int64_t>{3, 4, 7, 9});
  CHECK(draft::offsets_of({3, 4, 7, 9}) == std::vector<int64_t>{3, 3, 5, 6});
}

TEST_CASE("draft vocabulary: too few different tokens are filled up with the lowest that are missing") {
  CHECK(draft::choose_draft_tokens({{2, 4}, {9, 1}}, 4) == std::vector<int64_t>{0, 1, 2, 9});
  CHECK(draft::choose_draft_tokens({}, 3) == std::vector<int64_t>{0, 1, 2});
  CHECK(draft::choose_draft_tokens({{0, 1}, {1, 1}, {2, 1}}, 3) == std::vector<int64_t>{0, 1, 2});
}

TEST_CASE("draft vocabulary: a mapping that contradicts itself or the sizes is refused") {
  const auto tokens = [](std::vector<int64_t> offsets, std::vector<uint8_t> kept, int64_t size) {
    return message_of([&] { (void)draft::tokens_of(offsets, kept, 5, size, "map"); });
  };
  CHECK(tokens({1, 2}, {0, 1, 0, 1, 0}, 2) == "");
  CHECK(tokens({1, 1}, {0, 1, 0, 1, 0}, 2).find("draft token 1 is 2 by d2t and 3 by t2d") != std::string::npos);
  CHECK(tokens({1, 2}, {0, 1, 0, 1}, 2).find("t2d has 4 entries") != std::string::npos);
  CHECK(tokens({1, 2, 0}, {0, 1, 0, 1, 0}, 2).find("d2t has 3 entries") != std::string::npos);
  CHECK(tokens({1, 2}, {0, 1, 1, 1, 0}, 2).find("names 3 tokens") != std::string::npos);
}

TEST_CASE("eagle3: the vocabulary is made from counts, said in a line, and comes back from its buffers") {
  Eagle3 algorithm{Eagle3Options{}};
  const Description description = algorithm.describe(facts_of(3));
  CHECK(description.wants_token_counts);
  CHECK(algorithm.buffers().empty());
  algorithm.bind(tables(), cpu_ops());
  const Remark remark = algorithm.set_token_counts({{8, 3}, {2, 1}, {5, 6}, {11, 1}});
  CHECK_FALSE(remark.is_warning);
  CHECK(remark.text.find("3 of 12 tokens, 90.91 % of the 11 supervised tokens") != std::string::npos);
  const auto buffers = algorithm.buffers();
  CHECK((buffers.at("t2d").scalar_type() == at::kBool));
  CHECK(at::equal(buffers.at("t2d").nonzero().view({-1}), integers({2, 5, 8})));
  CHECK(at::equal(buffers.at("d2t"), integers({2, 4, 6})));

  Eagle3 other{Eagle3Options{}};
  (void)other.describe(facts_of(3));
  other.bind(tables(), cpu_ops());
  other.set_buffers(buffers, "checkpoint");
  CHECK(at::equal(other.buffers().at("d2t"), buffers.at("d2t")));
  CHECK(message_of([&] { other.set_buffers({{"t2d", buffers.at("t2d")}}, "file"); }).find("file: there is no \"d2t\"") != std::string::npos);

  const Remark few = other.set_token_counts({{8, 3}});
  CHECK(few.is_warning);
  CHECK(few.text.find("only 1 different ones occur, so 2 that never do fill it up") != std::string::npos);
}

TEST_CASE("eagle3: a draft with the whole vocabulary needs no counts") {
  Eagle3 algorithm{Eagle3Options{}};
  CHECK_FALSE(algorithm.describe(facts_of(12)).wants_token_counts);
  algorithm.bind(tables(), cpu_ops());
  CHECK(algorithm.buffers().at("t2d").all().item<bool>());
  CHECK(algorithm.buffers().at("d2t").abs().max().item<int64_t>() == 0);
}

TEST_CASE("eagle3: the last token of a sample never counts, and a sample without another supervised one is refused by name") {
  Eagle3 algorithm{Eagle3Options{}};
  (void)algorithm.describe(facts_of(3));
  Sample sample;
  sample.tokens = 4;
  sample.tensors["loss_mask"] = integers({0, 1, 1, 1});
  CHECK(algorithm.prepare(sample, {}).empty());
  CHECK(at::equal(sample.tensors.at("counted"), integers({0, 1, 1, 0})));
  CHECK(at::equal(sample.tensors.at("loss_mask"), integers({0, 1, 1, 1})));
  sample.tensors["loss_mask"] = integers({0, 0, 0, 1});
  CHECK(algorithm.prepare(sample, {}) == "no supervised token before the last of its 4 tokens");
}

TEST_CASE("unroll rows: positions with their teacher's place, label and weight, and the chains that decoding would follow") {
  const at::Tensor ids = integers({10, 11, 12, 13, 14, 15, 16}).unsqueeze(0);
  const at::Tensor mask = integers({0, 0, 1, 1, 1, 0, 1}).unsqueeze(0);
  const UnrollRows rows = collect_unroll_rows(ids, mask, mask, 3, 1);
  // Position 1 counts nothing, but from it the token behind the first supervised one is guessed.
  CHECK(at::equal(rows.position_r, integers({1, 2, 3, 4})));
  CHECK(at::equal(rows.base_r, rows.position_r));
  CHECK(at::equal(rows.teacher_r, integers({2, 3, 4, 5})));
  CHECK(at::equal(rows.label_r, integers({13, 14, 15, 16})));
  CHECK(at::equal(rows.weight_r, at::tensor({0, 1, 1, 1}, at::kFloat)));
  // Chains start at tokens 2 and 3; token 5 is not supervised, so nothing goes past 4.
  CHECK(at::equal(rows.chain_mask_cp, at::tensor({1, 1, 0, 1, 0, 0}, at::kFloat).view({2, 3})));
  CHECK(at::equal(rows.chain_row_cp, integers({0, 1, 0, 1, 0, 0}).view({2, 3})));

  const UnrollRows filled = collect_unroll_rows(ids, mask, mask, 3, 8);
  CHECK(filled.base_r.size(0) == 8);
  CHECK(filled.weight_r.sum().item<float>() == 3);
  const UnrollRows dead = collect_unroll_rows(ids, at::zeros_like(mask), at::zeros_like(mask), 3, 4);
  CHECK(dead.base_r.size(0) == 4);
  CHECK(dead.weight_r.sum().item<float>() == 0);
  CHECK(dead.chain_mask_cp.sum().item<float>() == 0);
}

TEST_CASE("eagle3: the reference's estimate of accepted tokens multiplies the accuracies of the uses") {
  std::map<std::string, double> metrics = {{"acc_0", 0.5}, {"acc_1", 0.4}, {"acc_2", 0.5}};
  derive_unroll_metrics(metrics, 3);
  CHECK(metrics.at("simulated_acc_len") == doctest::Approx(0.5 + 0.2 + 0.1));
}

namespace {

struct Contract {
  const char* engine;
  std::vector<std::string> tensors, config_keys;
};

// What each engine's loader looks up, as data. SGLang: models/llama_eagle3.py and model_config.py; vLLM: models/llama_eagle3.py and gpu_model_runner.py.
// Both stack q, k, v and gate, up; both take the embedding from the target when the draft brings none.
const std::vector<std::string> kWeights = {
    "fc.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight", "midlayer.post_attention_layernorm.weight", "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight", "norm.weight", "lm_head.weight"};
const Contract kContracts[] = {
    {"sglang", {"d2t"}, {"hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "rms_norm_eps", "vocab_size", "draft_vocab_size",
                          "tie_word_embeddings", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "max_position_embeddings",
                          "target_hidden_size", "eagle_config.eagle_aux_hidden_state_layer_ids"}},
    {"vllm", {"d2t", "t2d"}, {"hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "rms_norm_eps", "vocab_size", "draft_vocab_size",
                               "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters.rope_theta", "max_position_embeddings",
                               "target_hidden_size", "eagle_config.use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids"}},
};

}  // namespace

TEST_CASE("eagle3 export: each engine finds its tensors and configuration keys") {
  for (const bool is_31 : {false, true}) {
    Eagle3 algorithm{Eagle3Options{.eagle31 = is_31}};
    ModelFacts facts;
    facts.target_config_json = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
      "num_hidden_layers": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
      "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2})";
    (void)algorithm.describe(facts);
    const ExportSpec spec = algorithm.export_spec();
    std::set<std::string> names;
    for (const ParameterSpec& tensor : spec.tensors) {
      names.insert(tensor.name);
    }
    CHECK(names.size() == kWeights.size() + (is_31 ? 3 : 0));
    for (const std::string& name : kWeights) {
      CAPTURE(name);
      CHECK(names.count(name) == 1);
    }
    for (const std::string& name : names) {
      CHECK(name.find("embed") == std::string::npos);
      CHECK(name.find("draft_model.") == std::string::npos);
    }
    const Json config = Json::parse(spec.config_json);
    for (const Contract& contract : kContracts) {
      CAPTURE(contract.engine);
      for (const std::string& name : contract.tensors) {
        const auto found = std::find_if(spec.buffers.begin(), spec.buffers.end(), [&](const BufferSpec& buffer) { return buffer.name == name; });
        REQUIRE(found != spec.buffers.end());
        CHECK((found->dtype == (name == "t2d" ? at::kBool : at::kLong)));
        CHECK((found->shape == std::vector<int64_t>{40}));
      }
      for (const std::string& key : contract.config_keys) {
        CAPTURE(key);
        CHECK(std::find(spec.required_config_keys.begin(), spec.required_config_keys.end(), key) != spec.required_config_keys.end());
        const size_t dot = key.find('.');
        const Json* value = dot == std::string::npos ? config.find(key) : config.at(key.substr(0, dot)).find(key.substr(dot + 1));
        REQUIRE(value != nullptr);
        CHECK_FALSE(value->is_null());
      }
    }
    CHECK(config.at("architectures") == Json::parse(R"(["LlamaForCausalLMEagle3"])"));
    CHECK(config.at("eagle_config").at("eagle_aux_hidden_state_layer_ids") == Json::parse("[1, 5, 8]"));  // by output
    CHECK(config.at("eagle_aux_hidden_state_layer_ids") == Json::parse("[2, 6, 9]"));                     // the same states by input
    CHECK(config.at("tie_word_embeddings") == Json(false));
    CHECK(config.at("num_hidden_layers") == Json(int64_t{1}));
  }
}

TEST_CASE("eagle3 export: a trained embedding goes along, and the note says which engine takes it") {
  Eagle3 algorithm{Eagle3Options{.train_embedding = true}};
  (void)algorithm.describe(facts_of(3));
  const ExportSpec spec = algorithm.export_spec();
  CHECK(std::any_of(spec.tensors.begin(), spec.tensors.end(), [](const ParameterSpec& tensor) { return tensor.name == "embed_tokens.weight"; }));
  CHECK(spec.engine_note.find("vLLM") == 0);
}
