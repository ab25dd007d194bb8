#include "tests/dspark/naive_dspark.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "sf/json.hpp"

namespace sf::testing {
namespace {

using Weights = std::map<std::string, at::Tensor>;

// One row's Markov bias [v] given the state of its block (rnn), which it moves on.
at::Tensor markov(const DsparkConfig& config, const Weights& w, const at::Tensor& out_h, int64_t previous, at::Tensor& state_x) {
  if (config.markov_rank == 0) {
    return at::zeros({config.layers.vocab_size}, out_h.options());
  }
  const at::Tensor e = w.at("markov_head.markov_w1.weight")[previous];
  const at::Tensor& w2 = w.at("markov_head.markov_w2.weight");
  switch (config.markov_head) {
    case MarkovHead::kVanilla: return at::mv(w2, e);
    case MarkovHead::kGated: {
      const at::Tensor gate = at::sigmoid(at::mv(w.at("markov_head.gate_proj.weight"), at::cat({out_h, e})) + w.at("markov_head.gate_proj.bias"));
      return at::mv(w2, gate * e);
    }
    case MarkovHead::kRnn: {
      const auto parts =
          (at::mv(w.at("markov_head.joint_proj.weight"), at::cat({state_x, e, out_h})) + w.at("markov_head.joint_proj.bias")).chunk(3, 0);
      const at::Tensor g = at::sigmoid(parts[0]);
      state_x = g * state_x + (1 - g) * at::tanh(parts[1]);
      return at::mv(w2, at::tanh(parts[2]));
    }
  }
  return {};
}

}  // namespace

NaiveDspark naive_dspark(const DsparkConfig& config, const DsparkOptions& options, const DsparkProblem& problem, const at::Tensor& rows_bqh) {
  Weights w;
  std::vector<std::string> names;
  std::vector<at::Tensor> leaves;
  for (const auto& [name, tensor] : problem.weights) {
    if (name == "norm.weight" || name.starts_with("markov_head.") || name.starts_with("confidence_head.")) {
      w[name] = tensor.to(at::kDouble).detach().clone().requires_grad_();
      names.push_back(name);
      leaves.push_back(w[name]);
    }
  }
  const at::Tensor rows = rows_bqh.to(at::kDouble).detach().clone().requires_grad_();
  leaves.push_back(rows);
  const at::Tensor head = problem.tables.head_vh.to(at::kDouble);
  const at::Tensor& ids = problem.batch.at("input_ids");
  const at::Tensor mask = problem.batch.at("loss_mask").to(at::kDouble);
  const at::Tensor& anchors = problem.batch.at("anchors");
  const at::Tensor& keep = problem.batch.at("keep");
  const at::Tensor last = problem.batch.at("target_last_hidden_states").to(at::kDouble);
  const int64_t b = ids.size(0), s = ids.size(1), blocks = anchors.size(1), j = config.block_size, x = std::max<int64_t>(1, config.markov_rank);
  const at::Tensor out = w.at("norm.weight") * rows / at::sqrt(at::mean(rows * rows, {-1}, true) + config.layers.rms_norm_eps);

  at::Tensor ce = at::zeros({}, at::kDouble), l1 = ce.clone(), conf = ce.clone();
  double weights = 0, supervised = 0, hits = 0, tau = 0, live = 0, accepted = 0, bias = 0, error = 0, schedule = 0, drafted = 0;
  NaiveDspark result;
  result.mask_bwj = at::zeros({b, blocks, j}, at::kDouble);
  for (int64_t r = 0; r < b; ++r) {
    for (int64_t n = 0; n < blocks; ++n) {
      const bool kept = keep[r][n].item<bool>();
      const int64_t a = kept ? anchors[r][n].item<int64_t>() : 0;
      double prefix = 1, chain = 1, survival = 1;
      bool any = false, still_drafting = true, all_hit = true;
      at::Tensor state = at::zeros({x}, at::kDouble), own_state = at::zeros({x}, at::kDouble);
      int64_t own_previous = ids[r][a].item<int64_t>(), length = 0, scheduled = 0;
      bool own_alive = true;
      for (int64_t k = 0; k < j; ++k) {
        const int64_t index = a + 1 + k, safe = kept ? std::min(index, s - 1) : 0;
        prefix *= kept && index < s && mask[r][safe].item<double>() > 0.5 ? 1 : 0;
        result.mask_bwj[r][n][k] = prefix;
        if (prefix == 0) {
          continue;
        }
        any = true;
        const double decay = options.loss_decay_gamma > 0 ? std::exp(-static_cast<double>(k) / options.loss_decay_gamma) : 1;
        const int64_t label = ids[r][safe].item<int64_t>(), previous = ids[r][a + k].item<int64_t>();
        const at::Tensor o = out[r][n * j + k];
        const at::Tensor plain = at::mv(head, o);
        const at::Tensor z = plain + markov(config, w, o, previous, state);
        const at::Tensor teacher = at::softmax(at::mv(head, last[r][a + k]), 0);
        const at::Tensor distance = (at::softmax(z, 0) - teacher).abs().sum();
        const double accept = std::min(1.0, std::max(0.0, 1 - 0.5 * distance.item<double>()));
        const bool hit = z.argmax().item<int64_t>() == label;
        ce = ce - decay * at::log_softmax(z, 0)[label];
        l1 = l1 + decay * distance;
        double confidence = 0;
        if (config.confidence_head) {
          const at::Tensor seen = config.confidence_with_markov ? at::cat({o, w.at("markov_head.markov_w1.weight")[previous]}) : o;
          const at::Tensor c = at::mv(w.at("confidence_head.proj.weight"), seen)[0] + w.at("confidence_head.proj.bias")[0];
          conf = conf - decay * (accept * at::log_sigmoid(c) + (1 - accept) * at::log_sigmoid(-c));
          confidence = at::sigmoid(c).item<double>();
          bias += decay * (confidence - accept);
          error += decay * std::abs(confidence - accept);
        }
        weights += decay;
        supervised += 1;
        hits += hit ? 1 : 0;
        chain *= accept;
        tau += chain;
        survival *= confidence;
        still_drafting = still_drafting && survival >= options.schedule_threshold;
        all_hit = all_hit && hit;
        drafted += still_drafting ? 1 : 0;
        scheduled += still_drafting && all_hit ? 1 : 0;
        // Drafting as decoding does it: what was drafted is the next slot's previous token.
        const int64_t own = (plain.detach() + markov(config, w, o.detach(), own_previous, own_state).detach()).argmax().item<int64_t>();
        own_alive = own_alive && own == label;
        length += own_alive ? 1 : 0;
        own_previous = own;
      }
      live += any ? 1 : 0;
      accepted += static_cast<double>(length);
      schedule += static_cast<double>(scheduled);
    }
  }
  result.ce = ce.item<double>();
  result.l1 = l1.item<double>();
  result.confidence = conf.item<double>();
  result.denominator = weights;
  result.accuracy = hits / supervised;
  result.tau = (live + tau) / live;
  result.bias = bias / weights;
  result.abs_error = error / weights;
  result.acceptance_length = 1 + accepted / live;
  result.schedule_length = 1 + schedule / live;
  result.schedule_drafted = drafted / live;
  at::Tensor loss = options.ce_loss_alpha * ce + options.l1_loss_alpha * l1;
  if (config.confidence_head && options.confidence_head_alpha > 0) {
    loss = loss + options.confidence_head_alpha * conf;
  }
  loss = loss / weights;
  result.loss = loss.item<double>();
  const auto gradients = torch::autograd::grad({loss}, leaves, {}, false, false, /*allow_unused=*/true);
  for (size_t i = 0; i < names.size(); ++i) {
    result.gradients[names[i]] = gradients[i].defined() ? gradients[i] : at::zeros_like(leaves[i]);
  }
  result.rows_gradient = gradients.back();
  return result;
}

std::string tiny_dspark_config(const std::map<std::string, std::string>& edits) {
  Json config = Json::parse(R"({
    "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 20, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "block_size": 4,
    "num_target_layers": 12,
    "dflash_config": {"target_layer_ids": [2, 7], "mask_token_id": 19, "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 3,
                      "markov_head_type": "vanilla", "enable_confidence_head": true, "confidence_head_with_markov": true}
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

DsparkProblem tiny_dspark_problem(const DsparkOptions& options, const std::string& config, at::ScalarType dtype) {
  at::manual_seed(11);
  Dspark algorithm(options);
  ModelFacts facts;
  facts.draft_config_json = config;
  const Description description = algorithm.describe(facts);
  const int64_t h = algorithm.config().layers.hidden_size, v = algorithm.config().layers.vocab_size;
  DsparkProblem problem;
  problem.tables = {at::randn({v, h}).to(dtype), at::randn({v, h}).to(dtype)};
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const at::Tensor noise = at::randn(parameter.shape).mul(0.3);
      problem.weights[unit.prefix + parameter.name] = parameter.init == Init::ones ? noise.add(1) : noise;
    }
  }
  const int64_t s = 12;
  // Few tokens, so that some drafts are right.
  problem.batch["input_ids"] = at::randint(v - 1, {2, s}, at::kLong).remainder(3);
  problem.tables.head_vh.narrow(0, 3, v - 3).mul_(0.3);
  // Block at 1: slots 2, 3, gap at 4, 5 supervised after it. Token 0 of the second sequence is supervised, and its other slots are dead.
  problem.batch["loss_mask"] = at::tensor({0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, /**/ 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, at::kLong).view({2, s});
  problem.batch["hidden_states"] = at::randn({2, s, static_cast<int64_t>(algorithm.config().target_layer_ids.size()) * h}).to(dtype);
  problem.batch["target_last_hidden_states"] = at::randn({2, s, h}).to(dtype);
  problem.batch["anchors"] = at::tensor({1, 2, 5, 10, 0, 0, 0, 0}, at::kLong).view({2, 4});
  problem.batch["keep"] = at::tensor({1, 1, 1, 1, 1, 0, 0, 0}, at::kLong).view({2, 4}).to(at::kBool);
  return problem;
}

}  // namespace sf::testing
