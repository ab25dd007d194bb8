// tests/draft/plain_context.hpp: a unit's context over tensors in hand, without tape or buffers: gradients by autograd in any type.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>

#include "core/kernels/ops.hpp"
#include "sf/unit.hpp"

namespace sf::testing {

class PlainContext final : public UnitContext {
 public:
  explicit PlainContext(std::map<std::string, at::Tensor> parameters) : parameters_(std::move(parameters)) {}
  const at::Tensor& parameter(std::string_view name) override { return parameters_.at(std::string(name)); }
  at::Tensor linear(std::string_view name, const at::Tensor& x) override {
    const std::string base(name);
    const at::Tensor y = at::matmul(x, parameters_.at(base + ".weight").t());
    return has(base + ".bias") ? y + parameters_.at(base + ".bias") : y;
  }
  at::Tensor gradient_buffer(std::string_view) override { return {}; }
  bool has(std::string_view name) const override { return parameters_.count(std::string(name)) > 0; }
  Ops& ops() override { return cpu_ops(); }
  Phase phase() const override { return Phase::forward; }

 private:
  std::map<std::string, at::Tensor> parameters_;
};

}  // namespace sf::testing
