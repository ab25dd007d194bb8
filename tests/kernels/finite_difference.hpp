// tests/kernels/finite_difference.hpp: gradients by central differences in float64, the judge of every hand-written backward.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

namespace sf::test {

using Function = std::function<at::Tensor(const std::vector<at::Tensor>&)>;  // inputs -> scalar, float64

/// Largest difference between autograd's gradient and central differences over all elements of all inputs, relative to the largest gradient.
inline double gradient_error(const Function& function, std::vector<at::Tensor> inputs) {
  for (at::Tensor& input : inputs) {
    input = input.detach().clone().requires_grad_();
  }
  std::vector<at::Tensor> found;
  {
    at::AutoGradMode record(true);
    found = torch::autograd::grad({function(inputs)}, inputs);
  }
  at::NoGradGuard no_grad;
  constexpr double kStep = 1e-5;  // error of a central difference: step^2 and 1e-16 / step, both near 1e-10
  double worst = 0, largest = 1e-30;
  for (size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor flat = inputs[i].detach().view({-1});
    const at::Tensor gradient = found[i].reshape({-1});
    for (int64_t k = 0; k < flat.numel(); ++k) {
      const double x = flat[k].item<double>();
      flat[k] = x + kStep;
      const double above = function(inputs).item<double>();
      flat[k] = x - kStep;
      const double below = function(inputs).item<double>();
      flat[k] = x;
      const double expected = (above - below) / (2 * kStep);
      worst = std::max(worst, std::abs(expected - gradient[k].item<double>()));
      largest = std::max(largest, std::abs(expected));
    }
  }
  return worst / largest;
}

inline double distance(const at::Tensor& a, const at::Tensor& b) { return at::sub(a, b).abs().max().item<double>(); }

/// Relative distance in the norm of the whole tensor.
inline double relative_distance(const at::Tensor& found, const at::Tensor& expected) {
  return (at::sub(found, expected).norm() / at::clamp_min(expected.norm(), 1e-30)).item<double>();
}

inline at::Tensor random(at::IntArrayRef shape, at::ScalarType type = at::kDouble) { return at::randn(shape, at::TensorOptions().dtype(type)); }

}  // namespace sf::test
