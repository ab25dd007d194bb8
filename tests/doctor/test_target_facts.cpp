// What a draft inherits, and where it was found.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/doctor/target_facts.hpp"

#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

InheritedFact fact(const std::vector<InheritedFact>& facts, const std::string& name) {
  const auto found = std::find_if(facts.begin(), facts.end(), [&](const InheritedFact& one) { return one.name == name; });
  REQUIRE_MESSAGE(found != facts.end(), name);
  return *found;
}

struct Target {
  explicit Target(const std::string& config) : path(fs::temp_directory_path() / ("sf-facts-" + std::to_string(::getpid()))), table(40 * 8, 0.5F), norm(8, 1.0F) {
    fs::create_directories(path);
    std::ofstream(path / "config.json") << config;
    write({{"model.embed_tokens.weight", {40, 8}}, {"model.norm.weight", {8}}});
  }
  ~Target() { fs::remove_all(path); }
  void write(const std::vector<std::pair<std::string, std::vector<int64_t>>>& names) {
    std::vector<TensorView> tensors;
    for (const auto& [name, shape] : names) {
      tensors.push_back({.name = name, .dtype = Dtype::kF32, .shape = shape, .bytes = std::as_bytes(shape.size() == 1 ? std::span(norm) : std::span(table)), .owner = {}});
    }
    write_safetensors(path / "model.safetensors", tensors);
  }
  fs::path path;
  std::vector<float> table, norm;
};

constexpr const char* kNested = R"({"text_config":{"model_type":"qwen3","hidden_size":8,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
  "head_dim":4,"intermediate_size":16,"vocab_size":40,"rms_norm_eps":1e-6,"max_position_embeddings":64,"rope_parameters":{"rope_theta":5000,"rope_type":"default"}},
  "tie_word_embeddings":true})";

}  // namespace

TEST_CASE("target: values that are nested or not hidden/heads say where they come from") {
  const Target target(kNested);
  const std::vector<InheritedFact> facts = inherited_facts({.folder = target.path});
  CHECK(fact(facts, "rope theta").value == "5000");
  CHECK(fact(facts, "rope theta").origin == "config.json: text_config.rope_parameters.rope_theta");
  CHECK(fact(facts, "head_dim").value == "4 (not hidden_size / heads = 2)");
  CHECK(fact(facts, "head_dim").origin == "config.json: text_config.head_dim");
  CHECK(fact(facts, "tied embeddings").value == "yes");
  CHECK(fact(facts, "tied embeddings").origin == "config.json: tie_word_embeddings");
  CHECK(fact(facts, "output head").origin == "weights: model.embed_tokens.weight");
  CHECK(fact(facts, "query and key norms").value == "yes");
  CHECK(fact(facts, "vocabulary padding").origin == "no tokenizer.json");
  CHECK(facts_table(facts).find("rope theta") != std::string::npos);
}

TEST_CASE("target: padding, mask token and what is doubtful are told") {
  const Target target(kNested);
  std::ofstream(target.path / "tokenizer.json") << R"({"model":{"vocab":{"a":0,"b":36,"<mask>":35}},"added_tokens":[]})";
  std::vector<InheritedFact> facts = inherited_facts({.folder = target.path});
  CHECK(fact(facts, "vocabulary padding").value == "3 rows beyond the tokenizer's 37 tokens");
  CHECK(fact(facts, "mask token").value == "37 (a padding row)");
  CHECK(fact(facts, "mask token").origin == "nobody names one: the first id after the tokenizer's");
  CHECK(fact(facts, "mask token").doubt == "");
  std::ofstream(target.path / "tokenizer_config.json") << R"({"mask_token":{"content":"<mask>"}})";
  facts = inherited_facts({.folder = target.path});
  CHECK(fact(facts, "mask token").value == "35");
  CHECK(fact(facts, "mask token").origin == "tokenizer_config.json: mask_token");
  facts = inherited_facts({.folder = target.path, .mask_token_id = 38, .layer_ids = {0, 2}});
  CHECK(fact(facts, "mask token").value == "38 (a padding row)");
  CHECK(fact(facts, "mask token").origin == "recipe: model.mask_token_id");
  CHECK(fact(facts, "captured layers").doubt == "the target has the layers 0 to 1");
  std::ofstream(target.path / "tokenizer.json") << R"({"model":{"vocab":{"a":0,"b":99}},"added_tokens":[]})";
  CHECK(fact(inherited_facts({.folder = target.path}), "vocabulary padding").doubt.find("another model's") != std::string::npos);
}

TEST_CASE("target: the mask token is the one that a draft gets when nobody names one") {
  const auto mask_of = [](const std::string& more) {
    const Target target(R"({"model_type":"llama","hidden_size":8,"num_hidden_layers":2,"num_attention_heads":2,"intermediate_size":16,"vocab_size":40,"tie_word_embeddings":true)" + more + "}");
    return fact(inherited_facts({.folder = target.path}), "mask token");
  };
  CHECK(mask_of("").value == "none");
  CHECK(mask_of("").doubt.find("need one") != std::string::npos);
  CHECK(mask_of(R"(,"eos_token_id":[2,3])").value == "2");
  CHECK(mask_of(R"(,"eos_token_id":[2,3])").origin == "nobody names one: config.json: eos_token_id");
  CHECK(mask_of(R"(,"eos_token_id":[2,3])").doubt.find("conversations may contain it") != std::string::npos);
  CHECK(mask_of(R"(,"eos_token_id":2,"pad_token_id":7)").value == "7");
  CHECK(mask_of(R"(,"eos_token_id":2,"pad_token_id":null)").value == "2");
}

TEST_CASE("target: a head of its own beside tied embeddings, and a missing theta, are doubts") {
  Target target(R"({"model_type":"llama","hidden_size":8,"num_hidden_layers":2,"num_attention_heads":2,"intermediate_size":16,"vocab_size":40,"tie_word_embeddings":true})");
  CHECK(fact(inherited_facts({.folder = target.path}), "rope theta").doubt.find("leaves theta out") != std::string::npos);
  CHECK(fact(inherited_facts({.folder = target.path}), "tied embeddings").doubt == "");
  std::vector<float> other(40 * 8, 0.25F);
  const std::vector<TensorView> tensors = {
      {.name = "model.embed_tokens.weight", .dtype = Dtype::kF32, .shape = {40, 8}, .bytes = std::as_bytes(std::span(target.table)), .owner = {}},
      {.name = "model.norm.weight", .dtype = Dtype::kF32, .shape = {8}, .bytes = std::as_bytes(std::span(target.norm)), .owner = {}},
      {.name = "lm_head.weight", .dtype = Dtype::kF32, .shape = {40, 8}, .bytes = std::as_bytes(std::span(other)), .owner = {}}};
  write_safetensors(target.path / "model.safetensors", tensors);
  CHECK(fact(inherited_facts({.folder = target.path}), "tied embeddings").doubt.find("differs from the embedding") != std::string::npos);
}
