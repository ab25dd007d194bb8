// A draft that guesses K tokens after a known one. From the target's last state at token t and the embedding of token t+1 a small network makes a state
// for each of the tokens t+2 .. t+1+K; the target's own head turns it into a token. In the order in which the host calls it.
//
// Shapes: b rows of the batch · s tokens · h hidden · v vocabulary · r = b*s
#include <ATen/ATen.h>

#include "sdk/draft/acceptance.hpp"
#include "sf/algorithm.hpp"
#include "sf/json.hpp"
#include "sf/plugin.hpp"

namespace {

using at::Tensor;

// One network with its loss. Inputs: states_bsh, embeddings_bsh, head_vh, labels_bs, weights_bs, seed. Outputs: seed * loss, hits_bs.
struct Guess final : sf::Unit {
  std::vector<Tensor> forward(sf::UnitContext& unit, const std::vector<Tensor>& in) override {
    const Tensor inner = at::silu(unit.linear("up", at::cat({in[0], in[1]}, -1)));
    const Tensor states_rh = at::add(in[0], unit.linear("down", inner)).flatten(0, 1);
    const Tensor logits_rv = at::matmul(states_rh, in[2].t()).to(at::kFloat);
    const Tensor labels_r = in[3].flatten();
    const Tensor loss_r = at::cross_entropy_loss(logits_rv, labels_r, {}, at::Reduction::None);
    const Tensor hits_bs = at::eq(logits_rv.detach().argmax(-1), labels_r).view_as(in[3]);
    return {at::mul(at::sum(at::mul(loss_r, in[4].flatten())), in[5]), hits_bs};
  }
};

class MyDraft final : public sf::Algorithm {
 public:
  MyDraft(const sf::Host& host, const sf::Options& options)
      : host_(host), tokens_(options.get<int64_t>("tokens")), width_(options.get<int64_t>("width")), units_(tokens_) {}

  // Shapes are written here and nowhere else: the host makes, shards, saves and exports parameters from it.
  sf::Description describe(const sf::ModelFacts& facts) override {
    const sf::Json target = sf::Json::parse(facts.target_config_json, "the target's config.json");
    const int64_t h = target.at("hidden_size").as_int(), v = target.at("vocab_size").as_int();
    description_ = {};
    for (int64_t k = 0; k < tokens_; ++k) {
      const std::string name = "guess." + std::to_string(k);
      description_.units.push_back({.name = name, .prefix = name + ".", .shard_group = name,
                                    .parameters = {{.name = "up.weight", .shape = {width_, 2 * h}},
                                                   {.name = "down.weight", .shape = {h, width_}, .init = sf::Init::zeros}}});
    }
    description_.reads = {{.name = "input_ids"}, {.name = "loss_mask"}, {.name = "last_state", .columns = h, .last_state = true}};
    description_.drafted_tokens = description_.rows_per_token = tokens_;   // for the bigram baseline and for size estimates
    description_.fixed = {{"my_draft_tokens", std::to_string(tokens_)}};
    description_.draft_config_json = sf::Json::object({{"architectures", sf::Json::array_of(std::vector<std::string>{"MyDraft"})},
                                                       {"hidden_size", h}, {"vocab_size", v}, {"draft_tokens", tokens_}}).dump(2);
    return description_;
  }
  sf::Unit& unit(int64_t index) override { return units_.at(static_cast<size_t>(index)); }
  void bind(const sf::TargetTables& tables, sf::Ops&) override { tables_ = tables; }

  // In the data thread, on the CPU.
  std::string prepare(sf::Sample& sample, const sf::SampleContext&) override {
    return sample.tokens < 3 || masks(sample.tensors.at("loss_mask").unsqueeze(0))[0].sum().item<double>() == 0 ? "no two supervised tokens in a row" : "";
  }
  void finish(sf::Batch&) override {}
  double weigh(const sf::Batch& batch) const override { return at::stack(masks(batch.at("loss_mask"))).sum().item<double>(); }

  void micro_step(sf::Runner& runner, const sf::Batch& batch) override {
    const Tensor &ids = batch.at("input_ids"), next_ids = shifted(ids, 1);
    const std::vector<Tensor> masks_bs = masks(batch.at("loss_mask"));
    const sf::TapeValue states = runner.constant(batch.at("last_state").to(tables_.head_vh.scalar_type()));
    const sf::TapeValue embeddings = runner.constant(at::embedding(tables_.embedding_vh, next_ids));
    std::vector<Tensor> hits_bs;
    for (int64_t k = 0; k < tokens_; ++k) {
      const Tensor& mask = masks_bs[static_cast<size_t>(k)];
      const auto out = runner.run(k, {states, embeddings, runner.constant(tables_.head_vh), runner.constant(shifted(ids, k + 2)), runner.constant(mask),
                                      runner.constant(runner.seed())});
      runner.add_loss(out[0]);
      hits_bs.push_back(out[1].tensor().to(at::kFloat));
      runner.add_metric("accuracy/token_" + std::to_string(k + 1), at::sum(at::mul(hits_bs.back(), mask)), at::sum(mask));
    }
    // 1 + the number of guesses that are right before the first that is not: what `eval` prints and `best` compares.
    const Tensor accepted_r = sf::draft::follow_chain(at::stack(hits_bs, -1).flatten(0, 1), at::stack(masks_bs, -1).flatten(0, 1)).length_c;
    const Tensor starts = at::sum(masks_bs[0]);
    runner.add_metric("acceptance_length", at::add(at::sum(accepted_r), starts), starts);
  }

  sf::ExportSpec export_spec() const override {
    sf::ExportSpec spec;
    spec.config_json = description_.draft_config_json;
    spec.required_config_keys = {"hidden_size", "vocab_size", "draft_tokens"};
    for (const sf::UnitSpec& unit : description_.units) {
      for (sf::ParameterSpec parameter : unit.parameters) {
        parameter.name = unit.prefix + parameter.name;
        spec.tensors.push_back(parameter);
      }
    }
    spec.engine_note = "no engine serves this draft yet: it is a template";
    return spec;
  }

  const void* get_interface(std::string_view id) { return id == sf::kAlgorithmInterface ? static_cast<sf::Algorithm*>(this) : nullptr; }

 private:
  // What stands n tokens later; zeros behind the end.
  static Tensor shifted(const Tensor& x_bs, int64_t n) { return at::constant_pad_nd(x_bs, {0, n}).narrow(1, n, x_bs.size(1)); }

  // For each guess, float32 [b, s]: is its label supervised, and all tokens between the known one and it?
  std::vector<Tensor> masks(const Tensor& loss_mask_bs) const {
    const Tensor supervised = at::gt(loss_mask_bs, 0).to(at::kFloat);
    std::vector<Tensor> out;
    Tensor mask = shifted(supervised, 1);
    for (int64_t k = 0; k < tokens_; ++k) {
      mask = at::mul(mask, shifted(supervised, k + 2));
      out.push_back(mask);
    }
    return out;
  }

  sf::Host host_;
  int64_t tokens_, width_;
  std::vector<Guess> units_;
  sf::Description description_;
  sf::TargetTables tables_;
};

}  // namespace

SF_PLUGIN(MyDraft, SF_KIND_ALGORITHM, SF_TIER_TORCH_CXX)
