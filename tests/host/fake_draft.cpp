// The smallest draft that trains, with services of the host in use: tests/sdk/calls.py runs sf-host with it.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "sf/algorithm.hpp"
#include "sf/comm.hpp"
#include "sf/json.hpp"
#include "sf/plugin.hpp"
#include "sf/services.h"

namespace {

using at::Tensor;

struct Private : std::runtime_error {   // a type that nobody else knows
  using std::runtime_error::runtime_error;
};

struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) { throw Private("told to throw"); }
};

class FakeDraft final : public sf::Algorithm, public sf::Unit {
 public:
  FakeDraft(const sf::Host& host, const sf::Options& options) : host_(host), width_(options.get<int64_t>("width")), throw_in_(options.get<std::string>("throw_in")), fault_(options.get<std::string>("fault")), reads_states_(options.get<bool>("reads_states")) {
    fail("create");
    uint64_t bits = 0;
    const auto& random = host_.get_service<const sf_random>(SF_RANDOM);
    random.draw(random.ctx, "check", 1, 2, 1, &bits);
    host_.log(sf::Level::kInfo, "random " + std::to_string(bits) + ", collectives " + (host_.find_service<sf::Comm>(sf::kCommService) == nullptr ? "none yet" : "too early"));
  }
  void start() { fail("start"); }
  void stop() { fail("stop"); }
  const void* get_interface(std::string_view id) { return id == sf::kAlgorithmInterface ? static_cast<sf::Algorithm*>(this) : nullptr; }

  sf::Description describe(const sf::ModelFacts& facts) override {
    fail("describe");
    const int64_t h = fault_ == "any_config" ? 64 : sf::Json::parse(facts.target_config_json, "config.json").at("hidden_size").as_int();
    sf::Description out;
    out.units.push_back({.name = "guess", .prefix = "guess.", .shard_group = "guess",
                         .parameters = {{.name = "up.weight", .shape = {width_, h}}, {.name = "down.weight", .shape = {h, width_}}}});
    out.reads = {{.name = "input_ids"}, {.name = "loss_mask"}};
    if (reads_states_) {
      out.reads.push_back({.name = "last_state", .columns = h, .last_state = true});
    }
    out.drafted_tokens = out.rows_per_token = 1;
    out.draft_config_json = sf::Json::object({{"hidden_size", h}}).dump();
    return out;
  }
  sf::Unit& unit(int64_t) override {
    fail("unit");
    return *this;
  }
  void bind(const sf::TargetTables& tables, sf::Ops& ops) override {
    fail("bind");
    tables_ = tables;
    if (&host_.get_service<sf::Ops>(sf::kOpsService) != &ops) {
      throw std::logic_error("two sets of operations");
    }
    if (auto* comm = host_.find_service<sf::Comm>(sf::kCommService)) {
      const Tensor sum = at::full({}, static_cast<double>(comm->rank() + 1));
      comm->all_reduce(sum, sf::Reduction::sum, "fake_draft")->wait();
      host_.log(sf::Level::kInfo, std::to_string(comm->size()) + " ranks, their sum is " + std::to_string(sum.item<int64_t>()));
    } else {
      std::string why;
      try {
        (void)host_.get_service<sf::Comm>(sf::kCommService);
      } catch (const sf::Error& error) {
        why = error.what();
      }
      host_.log(sf::Level::kInfo, why);
    }
  }
  std::string prepare(sf::Sample& sample, const sf::SampleContext&) override {
    fail("prepare");
    return sample.tokens < 3 ? "too short" : "";
  }
  void finish(sf::Batch&) override { fail("finish"); }
  double weigh(const sf::Batch& batch) const override {
    fail("weigh");
    return batch.at("loss_mask").sum().item<double>();
  }
  void micro_step(sf::Runner& runner, const sf::Batch& batch) override {
    fail("micro_step");
    if (fault_ == "missing_field" && batch.tensors.count("loss_mask") == 0) {
      abort();
    }
    const Tensor mask = batch.at("loss_mask").to(at::kFloat), count = at::sum(mask);
    const Tensor states = reads_states_ ? batch.at("last_state").to(tables_.head_vh.scalar_type()) : at::embedding(tables_.embedding_vh, batch.at("input_ids"));
    const auto out = runner.run(0, {runner.constant(states), runner.constant(mask), runner.constant(runner.seed())});
    runner.add_loss(out[0]);
    runner.add_metric("acceptance_length", count, count);
  }
  std::vector<Tensor> forward(sf::UnitContext& unit, const std::vector<Tensor>& in) override {
    fail("forward");
    const Tensor states = fault_ == "any_width" ? in[0].narrow(-1, 0, unit.parameter("up.weight").size(1)) : in[0];
    Tensor out = unit.linear("down", at::tanh(unit.linear("up", states)));
    if (throw_in_ == "backward") {
      out = ThrowInBackward::apply(out);
    }
    return {at::mul(at::sum(at::mul(at::mean(at::pow(at::sub(out, states).to(at::kFloat), 2), -1), in[1])), in[2])};
  }
  void derive_metrics(std::map<std::string, double>&) const override { fail("derive_metrics"); }
  sf::ExportSpec export_spec() const override {
    fail("export_spec");
    return {};
  }

 private:
  void fail(const std::string& call) const {
    if (throw_in_ == call) {
      throw Private("told to throw");
    }
  }

  sf::Host host_;
  int64_t width_;
  std::string throw_in_, fault_;
  bool reads_states_;
  sf::TargetTables tables_;
};

}  // namespace

SF_PLUGIN(FakeDraft, SF_KIND_ALGORITHM, SF_TIER_TORCH_CXX)
