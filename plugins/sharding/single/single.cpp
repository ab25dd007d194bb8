#include "single.hpp"

#include <ATen/ATen.h>

namespace sf {

void SingleSharding::build(const std::vector<UnitSpec>& units, const Placement& placement) {
  shards_.clear();
  first_of_unit_.clear();
  for (const UnitSpec& unit : units) {
    first_of_unit_.push_back(static_cast<int64_t>(shards_.size()));
    for (const ParameterSpec& parameter : unit.parameters) {
      Shard shard;
      shard.name = unit.prefix + parameter.name;
      shard.global_shape = parameter.shape;
      shard.end = c10::multiply_integers(parameter.shape);
      shard.trainable = parameter.trainable;
      shard.local = at::zeros(parameter.shape, at::TensorOptions().device(placement.device).dtype(placement.dtype));
      shards_.push_back(std::move(shard));
    }
  }
  gradients_.assign(shards_.size(), at::Tensor());
}

ShardingMemory SingleSharding::memory(const std::vector<UnitSpec>& units, int64_t, at::ScalarType dtype) const {
  ShardingMemory memory;
  for (const UnitSpec& unit : units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const int64_t elements = c10::multiply_integers(parameter.shape);
      memory.weights += elements * static_cast<int64_t>(c10::elementSize(dtype));
      memory.trainable_elements += parameter.trainable ? elements : 0;
    }
  }
  return memory;
}

at::Tensor SingleSharding::whole(int64_t unit, int64_t parameter) { return shards_[first_of_unit_[unit] + parameter].local; }

void SingleSharding::begin_window() { gradients_.assign(shards_.size(), at::Tensor()); }

void SingleSharding::reduce(int64_t unit, const std::vector<at::Tensor>& gradients) {
  for (size_t p = 0; p < gradients.size(); ++p) {
    gradients_[first_of_unit_[unit] + p] = gradients[p];
  }
}

std::vector<at::Tensor> SingleSharding::end_window() { return gradients_; }

void SingleSharding::abandon() { gradients_.assign(shards_.size(), at::Tensor()); }

at::Tensor SingleSharding::gradient_norm(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) {
      norms.push_back(at::linalg_vector_norm(gradient, 2, {}, false, at::kFloat));
    }
  }
  if (norms.empty()) {
    return at::zeros({}, at::TensorOptions().device(shards_.front().local.device()).dtype(at::kFloat));
  }
  return at::linalg_vector_norm(at::stack(norms), 2);
}

}  // namespace sf
