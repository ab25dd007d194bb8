// plugins/sharding/single: one process holds everything. The simplest backend, and the one that others are compared with.
#pragma once

#include "sf/backend.hpp"

namespace sf {

class SingleSharding final : public Sharding {
 public:
  void build(const std::vector<UnitSpec>& units, const Placement& placement) override;
  std::vector<Shard>& shards() override { return shards_; }
  void take_tables(const std::vector<at::Tensor>&) override {}
  ShardingMemory memory(const std::vector<UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const override;
  at::Tensor whole(int64_t unit, int64_t parameter) override;
  void plan(Phase, const std::vector<int64_t>&) override {}
  void begin_window() override;
  void begin_evaluation() override {}
  void end_evaluation() override {}
  void before_use(int64_t, Phase, int64_t) override {}
  void after_use(int64_t, Phase, int64_t) override {}
  void reduce(int64_t unit, const std::vector<at::Tensor>& gradients) override;
  std::vector<at::Tensor> end_window() override;
  at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) override;
  void abandon() override;

 private:
  std::vector<Shard> shards_;
  std::vector<at::Tensor> gradients_;      // of shards_
  std::vector<int64_t> first_of_unit_;     // index into shards_
};

}  // namespace sf
