#include "tests/dflash2/draft_run.hpp"

#include "sf/json.hpp"

#include <ATen/ATen.h>

namespace sf::testing {

std::string tiny_config(const std::map<std::string, std::string>& edits) {
  Json config = Json::parse(R"({
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "block_size": 4,
    "num_target_layers": 12,
    "dflash_config": {"target_layer_ids": [2, 7], "mask_token_id": 39, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3,
                      "selector_top_k": 5}
  })");
  for (const auto& [key, value] : edits) {
    const size_t dot = key.find('.');
    Json& place = dot == std::string::npos ? config : *config.find(key.substr(0, dot));
    const std::string name = dot == std::string::npos ? key : key.substr(dot + 1);
    if (value.empty()) {
      place.remove(name);
    } else {
      place.set(name, Json::parse(value));
    }
  }
  return config.dump();
}

TinyProblem tiny_problem(const DflashOptions& options, const std::string& config, at::ScalarType dtype) {
  at::manual_seed(7);
  Dflash algorithm(options);
  ModelFacts facts;
  facts.draft_config_json = config;
  const Description description = algorithm.describe(facts);
  const int64_t h = algorithm.config().layers.hidden_size, v = algorithm.config().layers.vocab_size;
  TinyProblem problem;
  problem.tables = {at::randn({v, h}).to(dtype), at::randn({v, h}).to(dtype)};
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const at::Tensor noise = at::randn(parameter.shape).mul(0.3);
      const bool is_norm = parameter.init == Init::ones;
      problem.weights[unit.prefix + parameter.name] = is_norm ? noise.add(1) : noise;
    }
  }
  const int64_t s = 12;
  problem.batch["input_ids"] = at::randint(v - 1, {2, s}, at::kLong);
  problem.batch["loss_mask"] = at::tensor({0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, /**/ 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, at::kLong).view({2, s});
  problem.batch["hidden_states"] = at::randn({2, s, static_cast<int64_t>(algorithm.config().target_layer_ids.size()) * h}).to(dtype);
  problem.batch["anchors"] = at::tensor({1, 2, 5, 10, 0, 0, 0, 0}, at::kLong).view({2, 4});
  problem.batch["keep"] = at::tensor({1, 1, 1, 1, 1, 0, 0, 0}, at::kLong).view({2, 4}).to(at::kBool);
  return problem;
}

}  // namespace sf::testing
