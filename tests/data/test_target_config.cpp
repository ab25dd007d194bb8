#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <string>

#include "core/data/target_config.hpp"
#include "core/data/weight_folder.hpp"
#include "scratch.hpp"
#include "sdk/draft/rope.hpp"

using namespace sf;
using sf::draft::Rope;
using sf::draft::rope_from_config;
using sf::draft::RopeRounding;
using sf::test::error_of;
using sf::test::Scratch;

namespace {

const std::filesystem::path kTargets = std::filesystem::path(SF_TEST_DATA) / "parity" / "golden";

Rope rope_of(const char* text, int64_t head_dim = 64, RopeRounding rounding = RopeRounding::kExact) {
  return rope_from_config(Json::parse(text), head_dim, rounding);
}

std::string rope_error(const char* text) {
  return error_of([&] { (void)rope_of(text); });
}

// A target folder with the named tensors, each [rows, 2] float32.
void write_weights(const std::filesystem::path& path, const std::vector<std::string>& names) {
  static const float kZeros[2] = {0, 0};
  std::vector<TensorView> tensors;
  for (const std::string& name : names)
    tensors.push_back({name, Dtype::kF32, {1, 2}, std::as_bytes(std::span(kZeros)), nullptr});
  write_safetensors(path, tensors);
}

}  // namespace

TEST_CASE("rope: theta is found wherever configurations put it") {
  struct Row {
    const char* text;
    double theta;
  };
  const Row rows[] = {
      {R"({})", 10000},
      {R"({"rope_theta": 1000000})", 1e6},
      {R"({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}})", 5e5},
      {R"({"rope_scaling": {"rope_theta": 7.5e4, "type": "linear", "factor": 2}})", 7.5e4},
      {R"({"text_config": {"rope_theta": 200000}})", 2e5},
      {R"({"text_config": {"rope_parameters": {"rope_theta": 200000}}})", 2e5},
      {R"({"rope_theta": 500000, "rope_scaling": {"rope_theta": 500000.0, "rope_type": "default"}})", 5e5},
      {R"({"rope_theta": null, "rope_scaling": null})", 10000},
  };
  for (const Row& row : rows) {
    CAPTURE(row.text);
    const Rope rope = rope_of(row.text);
    CHECK(rope.theta == row.theta);
    CHECK(rope.inverse_frequencies[0] == doctest::Approx(rope.type == "linear" ? 0.5 : 1.0));
  }
  CHECK(rope_of(R"({"rope_theta": 10000})", 4).inverse_frequencies[1] == doctest::Approx(0.01));
}

TEST_CASE("rope: a configuration that says two things, or nothing that is known, is refused") {
  CHECK(rope_error(R"({"rope_theta": 10000, "rope_parameters": {"rope_theta": 500000}})") ==
        "rope: the configuration gives two values for \"rope_theta\", 500000 and 10000");
  for (const char* two : {R"({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2}})",
                          R"({"rope_parameters": {"rope_type": "default", "type": "linear", "factor": 4}})",
                          R"({"rope_parameters": {"type": "default"}, "rope_scaling": {"type": "linear", "factor": 2}})",
                          R"({"rope_parameters": {"type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2}})",
                          R"({"text_config": {"rope_scaling": {"rope_type": "default"}}, "rope_scaling": {"type": "linear", "factor": 2}})"}) {
    CAPTURE(two);
    CHECK(rope_error(two).starts_with("rope: the configuration gives two types, "));
  }
  CHECK(rope_of(R"({"rope_scaling": {"type": "mrope", "rope_type": "default"}})").type == "default");
  CHECK(rope_of(R"({"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": {"type": "linear", "factor": 2}})").type == "linear");
  CHECK(rope_error(R"({"rope_scaling": {"rope_type": "longrope", "factor": 2}})") ==
        "rope: type \"longrope\" is not known");
  CHECK(rope_error(R"({"rope_scaling": {"rope_type": "dynamic", "factor": 2}})")
            .starts_with("rope: type \"dynamic\" follows the length of each text in Hugging Face's code, and is a fixed table"));
  CHECK(rope_error(R"({"rope_scaling": {"factor": 2}})") ==
        "rope: the configuration gives a factor, but no \"rope_type\"");
  CHECK(rope_error(R"({"rope_scaling": {"rope_type": "llama3", "factor": 8}})") ==
        "rope: type \"llama3\" needs \"low_freq_factor\", which the configuration does not have");
  CHECK(rope_error(R"({"rope_theta": "1e6"})") == "rope: \"rope_theta\" is a string, a number expected");
  CHECK(rope_error(R"({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}})")
            .starts_with("rope: \"rope_parameters\" has a rope of its own for \"full_attention\""));
  CHECK(rope_error(R"({"partial_rotary_factor": 1.5})").starts_with("rope: partial_rotary_factor is 1.5"));
}

TEST_CASE("rope: both spellings of the type give the same frequencies") {
  const Rope old_spelling =
      rope_of(R"({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}})");
  const Rope new_spelling =
      rope_of(R"({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}})");
  CHECK(old_spelling.inverse_frequencies == new_spelling.inverse_frequencies);
  const Rope base = rope_of(R"({"rope_theta": 1e4})");
  for (size_t m = 0; m < base.inverse_frequencies.size(); ++m) {
    CHECK(old_spelling.inverse_frequencies[m] == doctest::Approx(base.inverse_frequencies[m] / 4));
  }
}

TEST_CASE("rope: a partial rotary factor turns the first values only, wherever it stands") {
  for (const char* text :
       {R"({"partial_rotary_factor": 0.25})", R"({"rope_parameters": {"partial_rotary_factor": 0.25}})"}) {
    const Rope rope = rope_of(text, 64);
    CHECK(rope.rotary_dim == 16);
    CHECK(rope.inverse_frequencies.size() == 8);
    CHECK(rope.inverse_frequencies[1] == doctest::Approx(std::pow(10000.0, -2.0 / 16)));
  }
}

TEST_CASE("rope: llama3 keeps short waves, stretches long ones and blends between") {
  const Rope base = rope_of(R"({"rope_theta": 500000})", 128);
  const Rope rope = rope_of(R"({"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
      "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})",
                            128);
  int between = 0;
  for (size_t m = 0; m < 64; ++m) {
    const double wave = 2 * M_PI / base.inverse_frequencies[m];
    const double ratio = rope.inverse_frequencies[m] / base.inverse_frequencies[m];
    if (wave < 8192 / 4.0) {
      CHECK(ratio == doctest::Approx(1));
    } else if (wave > 8192) {
      CHECK(ratio == doctest::Approx(1 / 8.0));
    } else {
      ++between;
      const double blend = (8192 / wave - 1) / 3;
      CHECK(ratio == doctest::Approx((1 - blend) / 8 + blend));
    }
  }
  CHECK(between > 0);
}

TEST_CASE("rope: yarn's attention factor is given, computed, or a ratio of mscales") {
  const std::string start =
      R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096)";
  const auto scaling = [&](const char* rest) {
    return rope_of((start + rest + "}}").c_str()).attention_scaling;
  };
  CHECK(scaling("") == doctest::Approx(0.1 * std::log(4.0) + 1));
  CHECK(scaling(R"(, "attention_factor": 1.25)") == 1.25);
  CHECK(scaling(R"(, "mscale": 2.0, "mscale_all_dim": 0.5)") ==
        doctest::Approx((0.2 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1)));
  CHECK(rope_of(R"({})").attention_scaling == 1);
}

TEST_CASE("rope: the reference's rounding gives bfloat16 frequencies") {
  const Rope exact = rope_of("{}");
  const Rope rounded = rope_of("{}", 64, RopeRounding::kReference);
  int changed = 0;
  for (size_t m = 0; m < exact.inverse_frequencies.size(); ++m) {
    CHECK((std::bit_cast<uint32_t>(rounded.inverse_frequencies[m]) & 0xffff) == 0);
    CHECK(rounded.inverse_frequencies[m] == doctest::Approx(exact.inverse_frequencies[m]).epsilon(1.0 / 256));
    changed += rounded.inverse_frequencies[m] != exact.inverse_frequencies[m];
  }
  CHECK(changed > 20);
}

TEST_CASE("target config: facts of the golden targets and of nested and padded configurations") {
  const TargetConfig qwen3 = target_config(read_model_config(kTargets / "target_qwen3"), "config.json");
  CHECK(qwen3.head_dim == 24);
  CHECK(qwen3.query_key_norm);
  CHECK_FALSE(qwen3.qkv_bias);
  const TargetConfig qwen2 = target_config(read_model_config(kTargets / "target_qwen2"), "config.json");
  CHECK(qwen2.head_dim == 16);  // hidden / heads, as it says none
  CHECK(qwen2.qkv_bias);
  CHECK_FALSE(qwen2.output_bias);
  const Json nested =
      Json::parse(R"({"model_type": "vlm", "tie_word_embeddings": true, "text_config": {"model_type": "llama",
      "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30, "padded_vocab_size": 32}})");
  const TargetConfig text = target_config(nested, "config.json");
  CHECK(text.model_type == "llama");
  CHECK(text.vocab_size == 32);
  CHECK(text.num_key_value_heads == 2);
  CHECK(text.tied_embeddings);
}

TEST_CASE("target config: what is missing or contradictory is named with the file") {
  const auto error = [](const char* text) {
    return error_of([&] { (void)target_config(Json::parse(text), "t/config.json"); });
  };
  CHECK(error(R"({"num_hidden_layers": 2})") == "t/config.json: there is no \"hidden_size\"");
  CHECK(error(R"({"hidden_size": "8"})") ==
        "t/config.json: \"hidden_size\": expected an integer, found a string");
  CHECK(error(R"({"hidden_size": 0})") == "t/config.json: \"hidden_size\" is 0, a positive number expected");
  CHECK(error(R"({"hidden_size": 4611686018427387904})") == "t/config.json: \"hidden_size\" is 4611686018427387904, at most 2147483647 expected");
  const std::string base =
      R"({"hidden_size": 9, "num_hidden_layers": 2, "vocab_size": 4, "num_attention_heads": )";
  CHECK(error((base + "2}").c_str()) ==
        "t/config.json: there is no \"head_dim\", and 2 heads do not divide hidden_size 9");
  CHECK(error((base + R"(3, "num_key_value_heads": 2})").c_str()) ==
        "t/config.json: 3 attention heads can't share 2 key-value heads");
  CHECK(error((base + R"(3, "tie_word_embeddings": true, "logits_mup_width_multiplier": 2})").c_str()) ==
        "t/config.json: logits_mup_width_multiplier with tied embeddings is not defined");
  const Scratch scratch;
  CHECK(error_of([&] { (void)read_model_config(scratch.path()); }).ends_with(": there is no config.json"));
}

TEST_CASE("target config: a decoder that our forward pass does not know is refused with the reason") {
  const auto why = [](const char* extra) {
    const std::string text =
        std::string(R"({"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 4,
        "num_attention_heads": 2, "intermediate_size": 16)") +
        extra + "}";
    const Json config = Json::parse(text);
    return why_not_runnable(config, target_config(config, "config.json"));
  };
  CHECK(why("") == "");
  CHECK(why(R"(, "hidden_act": "gelu")") == "hidden_act \"gelu\" is not silu");
  CHECK(why(R"(, "use_sliding_window": true)") == "it has sliding-window layers (use_sliding_window)");
  CHECK(why(R"(, "layer_types": ["full_attention", "sliding_attention"])") ==
        "it has layers of type \"sliding_attention\"");
  CHECK(why(R"(, "quantization_config": {})") == "its weights are quantized (quantization_config)");
}

TEST_CASE("weight folder: shards and single files are read, and what is missing is named") {
  CHECK(
      WeightFolder::open(kTargets / "target_qwen3_tied_sharded").find("model.layers.5.mlp.up_proj.weight") !=
      nullptr);
  const Scratch scratch;
  CHECK(error_of([&] { (void)WeightFolder::open(scratch.path() / "none"); }, &scratch) ==
        "none: there is no such folder");
  CHECK(error_of([&] { (void)WeightFolder::open(scratch.path()); })
            .ends_with("there is no model.safetensors and no model.safetensors.index.json, but 0 other "
                       "*.safetensors files"));
  scratch.write(
      "model.safetensors.index.json",
      R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}})");
  CHECK(error_of([&] {
          (void)WeightFolder::open(scratch.path());
        }).ends_with("shards of model.safetensors.index.json are missing: one.safetensors, two.safetensors"));
  write_weights(scratch.path() / "one.safetensors", {"a"});
  write_weights(scratch.path() / "two.safetensors", {"b"});
  CHECK(error_of([&] {
          (void)WeightFolder::open(scratch.path());
        }).ends_with("'c' should be in two.safetensors as model.safetensors.index.json says, but is not"));
  write_weights(scratch.path() / "two.safetensors", {"b", "c"});
  CHECK(WeightFolder::open(scratch.path()).names() == std::vector<std::string>{"a", "b", "c"});
}

TEST_CASE("weight folder: decoder tensors are found under the prefixes of wrapped models") {
  for (const char* prefix : {"model.", "model.language_model.", "language_model.model.", ""}) {
    CAPTURE(prefix);
    const Scratch scratch;
    const std::string name = std::string(prefix) + "embed_tokens.weight";
    write_weights(scratch.path() / "model.safetensors", {name, "language_model.lm_head.weight"});
    const WeightFolder weights = WeightFolder::open(scratch.path());
    REQUIRE(weights.find_in_decoder("model.embed_tokens.weight") != nullptr);
    CHECK(weights.find_in_decoder("model.embed_tokens.weight")->name == name);
    CHECK(weights.find_in_decoder("lm_head.weight") != nullptr);
    CHECK(weights.find_in_decoder("model.norm.weight") == nullptr);
  }
}

TEST_CASE("target fingerprint: follows weights and configuration, not who wrote them") {
  const Scratch scratch;
  write_weights(scratch.path() / "model.safetensors", {"a", "b"});
  const auto print = [&](const char* config) {
    return target_fingerprint(Json::parse(config), WeightFolder::open(scratch.path()));
  };
  const std::string base = print(R"({"hidden_size": 8, "vocab_size": 4})");
  CHECK(print(R"({"vocab_size": 4, "hidden_size": 8, "transformers_version": "5"})") == base);
  CHECK(print(R"({"vocab_size": 5, "hidden_size": 8})") != base);
  std::string bytes = read_file(scratch.path() / "model.safetensors");
  bytes.back() = 1;
  scratch.write("model.safetensors", bytes);
  CHECK(print(R"({"hidden_size": 8, "vocab_size": 4})") != base);
}
