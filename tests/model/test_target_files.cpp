// Target folders that are wrong in one way each: what the message says.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>

#include "core/data/weight_folder.hpp"
#include "core/model/capture.hpp"
#include "core/model/target.hpp"
#include "core/model/target_tables.hpp"
#include "core/model/tensor_view.hpp"
#include "tests/data/scratch.hpp"

using namespace sf;
using sf::test::error_of;
using sf::test::Scratch;

namespace {

const std::filesystem::path kTargets = std::filesystem::path(SF_TEST_DATA) / "parity" / "golden";

// A copy of a golden target whose tensors and configuration went through `change`.
void write_changed(const Scratch& scratch, const char* target,
                   const std::function<void(Json&, std::vector<TensorView>&)>& change) {
  Json config = read_model_config(kTargets / target);
  const WeightFolder weights = WeightFolder::open(kTargets / target);
  std::vector<TensorView> tensors;
  for (const std::string& name : weights.names()) tensors.push_back(*weights.find(name));
  change(config, tensors);
  scratch.write("config.json", config.dump(2));
  write_safetensors(scratch.path() / "model.safetensors", tensors);
}

void drop(std::vector<TensorView>& tensors, const std::string& name) {
  std::erase_if(tensors, [&](const TensorView& tensor) { return tensor.name == name; });
}

std::string tables_error(const Scratch& scratch) {
  return error_of([&] { (void)load_target_tables({.folder = scratch.path()}); });
}

}  // namespace

TEST_CASE("target tables: a missing head or embedding is named, with the option that names it") {
  const Scratch scratch;
  write_changed(scratch, "target_qwen3", [](Json&, auto& tensors) { drop(tensors, "lm_head.weight"); });
  CHECK(tables_error(scratch).ends_with(": the target has no head 'lm_head.weight'"));
  CHECK_NOTHROW((void)load_target_tables({.folder = scratch.path(), .head = false}));
  write_changed(scratch, "target_qwen3",
                [](Json&, auto& tensors) { drop(tensors, "model.embed_tokens.weight"); });
  CHECK(tables_error(scratch).ends_with(": the target has no embedding 'model.embed_tokens.weight'"));
  write_changed(scratch, "target_qwen3", [](Json&, auto& tensors) {
    for (TensorView& tensor : tensors) {
      if (tensor.name == "lm_head.weight") tensor.name = "output_head.weight";
    }
  });
  CHECK_NOTHROW((void)load_target_tables({.folder = scratch.path(), .lm_head_key = "output_head.weight"}));
}

TEST_CASE("target tables: shapes that the configuration does not have are refused") {
  const Scratch scratch;
  write_changed(scratch, "target_qwen3", [](Json& config, auto&) { config.set("vocab_size", 321); });
  CHECK(
      tables_error(scratch).ends_with("'model.embed_tokens.weight' has shape [320, 64], but config.json says "
                                      "[321, 64] (vocab_size, hidden_size)"));
  write_changed(scratch, "target_qwen3",
                [](Json& config, auto&) { config.set("vocab_size", 300).set("padded_vocab_size", 320); });
  CHECK(load_target_tables({.folder = scratch.path()}).head_vh.size(0) == 320);
}

TEST_CASE(
    "target tables: the head of a tied target is its embedding, and a width multiplier divides the head "
    "once") {
  const TargetTables tied =
      load_target_tables({.folder = kTargets / "target_llama_tied", .embedding = false});
  CHECK_FALSE(tied.embedding_vh.defined());
  CHECK((tied.head_vh.scalar_type() == at::kBFloat16));
  const TargetTables both = load_target_tables({.folder = kTargets / "target_llama_tied"});
  CHECK(both.head_vh.is_same(both.embedding_vh));

  const Scratch scratch;
  write_changed(scratch, "target_qwen3",
                [](Json& config, auto&) { config.set("logits_mup_width_multiplier", 4.0); });
  const at::Tensor plain =
      load_target_tables({.folder = kTargets / "target_qwen3", .dtype = at::kFloat}).head_vh;
  CHECK(at::equal(load_target_tables({.folder = scratch.path(), .dtype = at::kFloat}).head_vh, plain / 4));
}

TEST_CASE("target tables: a value that is not finite is named by tensor, token and column") {
  const Scratch scratch;
  for (const char* name : {"lm_head.weight", "model.embed_tokens.weight"}) {
    std::vector<float> values;
    write_changed(scratch, "target_qwen3", [&](Json&, auto& tensors) {
      for (TensorView& tensor : tensors) {
        if (tensor.name != name) continue;
        REQUIRE(tensor.dtype == Dtype::kF32);
        values.resize(tensor.bytes.size() / sizeof(float));
        std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
        values[64 * 7 + 3] = std::numeric_limits<float>::quiet_NaN();
        tensor.bytes = std::as_bytes(std::span(values));
      }
    });
    CHECK(tables_error(scratch).ends_with(
        format("'{}' has a value that is not finite (NaN or infinity) at token 7, column 3", name)));
  }
  CHECK_NOTHROW((void)load_target_tables({.folder = scratch.path(), .embedding = false}));
}

TEST_CASE("capture: a configuration with more layers than the weights have is refused before any work") {
  const Scratch scratch;
  write_changed(scratch, "target_qwen3", [](Json& config, auto&) { config.set("num_hidden_layers", 60); });
  scratch.write("tokens.jsonl", "{\"input_ids\": [1, 2, 3], \"loss_mask\": [1, 1, 1]}\n");
  const CaptureOptions options{.target_folder = scratch.path(),
                               .tokens_path = scratch.path() / "tokens.jsonl",
                               .output = scratch.path() / "features",
                               .features = {{.key = "hidden_states", .layer_ids = {1}}}};
  CHECK(error_of([&] { (void)capture_features(options); })
            .find("config.json says 60 layers (num_hidden_layers), but the weights have ") != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(options.output));
}

TEST_CASE("target: weights that do not fit the configuration are all named at once") {
  const Scratch scratch;
  write_changed(scratch, "target_qwen3", [](Json& config, auto& tensors) {
    drop(tensors, "model.layers.2.self_attn.q_norm.weight");
    config.set("intermediate_size", 96);
  });
  const std::string message = error_of([&] { (void)Target::load({.folder = scratch.path()}); });
  CHECK(message.find(": weights and config.json disagree:\n") != std::string::npos);
  CHECK(message.find("\n  'model.layers.0.mlp.gate_proj.weight' has shape [128, 64], [96, 64] expected") !=
        std::string::npos);
  CHECK(message.ends_with("more"));
  write_changed(scratch, "target_qwen3",
                [](Json&, auto& tensors) { drop(tensors, "model.layers.2.self_attn.q_norm.weight"); });
  CHECK(
      error_of([&] { (void)Target::load({.folder = scratch.path()}); })
          .ends_with(
              ": weights and config.json disagree:\n  'model.layers.2.self_attn.q_norm.weight' is missing"));
}

TEST_CASE("target: a wrapped model's prefixes are understood and give the same states") {
  const Scratch scratch;
  write_changed(scratch, "target_qwen2", [](Json& config, auto& tensors) {
    for (TensorView& tensor : tensors) {
      tensor.name =
          tensor.name.starts_with("model.") ? "model.language_model." + tensor.name.substr(6) : tensor.name;
    }
    Json text = config;
    config = Json::object({{"model_type", "wrapped"}, {"text_config", std::move(text)}});
  });
  const TargetRequest request{.input_ids_bt = at::arange(20, at::kLong).view({2, 10}), .layer_ids = {0, 5}};
  const TargetStates wrapped = Target::load({.folder = scratch.path()}).forward(request);
  const TargetStates plain = Target::load({.folder = kTargets / "target_qwen2"}).forward(request);
  CHECK(at::equal(wrapped.layers_bth[0], plain.layers_bth[0]));
  CHECK(at::equal(wrapped.layers_bth[1], plain.layers_bth[1]));
}

TEST_CASE("target: a model that can't be run here and tokens outside the vocabulary are refused") {
  const Scratch scratch;
  write_changed(scratch, "target_qwen3", [](Json& config, auto&) { config.set("model_type", "gpt2"); });
  CHECK(error_of([&] { (void)Target::load({.folder = scratch.path()}); })
            .ends_with("config.json: this target can't be run here: model_type \"gpt2\" is not among llama, "
                       "qwen2, qwen3"));
  const Target target = Target::load({.folder = kTargets / "target_qwen3", .layers_needed = 1});
  CHECK(error_of([&] {
          (void)target.forward({.input_ids_bt = at::full({1, 2}, 320, at::kLong), .layer_ids = {0}});
        }) == "token id 320, but the target has the tokens 0 to 319");
}
