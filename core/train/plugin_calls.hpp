// core/train/plugin_calls.hpp: the border to a plugin's C++ interfaces: what is thrown there gets the plugin's name and the call put before it. An sf::Error was
// meant for the user and passes as it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "sf/algorithm.hpp"
#include "sf/backend.hpp"
#include "sf/transform.hpp"

namespace sf {

class NamedAlgorithm final : public Algorithm {
 public:
  NamedAlgorithm(Algorithm& plugin, std::string name) : plugin_(plugin), name_(std::move(name)) {}

  Description describe(const ModelFacts& facts) override;
  Unit& unit(int64_t index) override;
  void bind(const TargetTables& tables, Ops& ops) override;
  Remark set_token_counts(const std::vector<TokenCount>& counts) override;
  void set_buffers(const std::map<std::string, at::Tensor>& buffers, const std::string& source) override;
  std::map<std::string, at::Tensor> buffers() const override;
  void derive_metrics(std::map<std::string, double>& metrics) const override;
  std::string prepare(Sample& sample, const SampleContext& context) override;
  void finish(Batch& batch) override;
  double weigh(const Batch& batch) const override;
  void micro_step(Runner& runner, const Batch& batch) override;
  ExportSpec export_spec() const override;

 private:
  Algorithm& plugin_;
  std::string name_;
};

class NamedTransform final : public Transform {
 public:
  NamedTransform(Transform& plugin, std::string name) : plugin_(plugin), name_(std::move(name)) {}

  [[nodiscard]] const std::string& name() const { return name_; }
  std::vector<bool> take_over(const std::vector<LinearSpec>& linears) override;
  TransformMemory memory() const override;
  void build(at::Device device, at::ScalarType dtype, Ops& ops) override;
  GatherCodec* codec() override;
  void begin_window() override;
  void encode_weights(int64_t unit, const std::vector<at::Tensor>& whole) override;
  std::vector<at::Tensor> linears(const std::vector<LinearProduct>& products, const at::Tensor& x) override;
  at::Tensor alarms() override;
  std::string alarm_text(const std::vector<double>& flags) const override;
  bool replaces(int64_t unit, int64_t parameter) const override;

 private:
  Transform& plugin_;
  std::string name_;
};

class NamedSharding final : public Sharding {
 public:
  NamedSharding(Sharding& plugin, std::string name) : plugin_(plugin), name_(std::move(name)) {}

  void take_codec(GatherCodec& codec) override;

  void build(const std::vector<UnitSpec>& units, const Placement& placement) override;
  std::vector<Shard>& shards() override;
  void take_tables(const std::vector<at::Tensor>& tables) override;
  ShardingMemory memory(const std::vector<UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const override;
  at::Tensor whole(int64_t unit, int64_t parameter) override;
  void plan(Phase phase, const std::vector<int64_t>& order) override;
  void begin_window() override;
  void begin_evaluation() override;
  void end_evaluation() override;
  void before_use(int64_t unit, Phase phase, int64_t uses_left) override;
  void after_use(int64_t unit, Phase phase, int64_t uses_left) override;
  void reduce(int64_t unit, const std::vector<at::Tensor>& gradients) override;
  std::vector<at::Tensor> end_window() override;
  at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) override;
  void abandon() override;

 private:
  Sharding& plugin_;
  std::string name_;
};

}  // namespace sf
