#include <doctest/doctest.h>

#include "core/kernels/magnitudes.hpp"
#include "core/kernels/ops.hpp"
#include "core/kernels/slow_paths.hpp"
#include "sf/error.hpp"
#include "tests/kernels/finite_difference.hpp"

#include <cmath>

using sf::cpu_ops;
using sf::test::distance;
using sf::test::gradient_error;
using sf::test::random;

namespace {

// A fixed random weighting makes a scalar of an output, so that every element has its own share in the gradient.
at::Tensor weighted(const at::Tensor& out) {
  const at::Tensor weights = at::cos(at::arange(out.numel(), out.options().requires_grad(false)).mul(0.7).add(0.3)).view(out.sizes());
  return at::mul(out, weights).sum();
}

}  // namespace

TEST_CASE("kernels: rms_norm is weight * x / root mean square, gradients agree with finite differences") {
  at::manual_seed(1);
  const at::Tensor x = random({3, 4, 6}), weight = random({6});
  const at::Tensor expected = x * weight / at::sqrt(at::mean(x * x, {-1}, true) + 1e-5);
  CHECK(distance(cpu_ops().rms_norm(x, weight, 1e-5), expected) < 1e-14);
  CHECK(gradient_error([](const auto& in) { return weighted(cpu_ops().rms_norm(in[0], in[1], 1e-2)); }, {x, weight}) < 1e-8);
}

TEST_CASE("kernels: rms_norm in bfloat16 rounds once") {
  at::manual_seed(2);
  const at::Tensor x = random({64, 96}, at::kFloat).to(at::kBFloat16), weight = random({96}, at::kFloat).to(at::kBFloat16);
  const at::Tensor exact = cpu_ops().rms_norm(x.to(at::kDouble), weight.to(at::kDouble), 1e-6);
  const at::Tensor found = cpu_ops().rms_norm(x, weight, 1e-6);
  REQUIRE((found.scalar_type() == at::kBFloat16));
  // Half a unit in the last place of bfloat16 (8 significant bits): 2^-8 relative, and a hair for float32 before the rounding.
  CHECK(((found.to(at::kDouble) - exact).abs() / exact.abs().clamp_min(1e-6)).max().item<double>() < 0.00391);
}

TEST_CASE("kernels: residual_rms_norm returns the sum and its norm, either output may stay unused") {
  at::manual_seed(3);
  const at::Tensor x = random({2, 3, 5}), residual = random({2, 3, 5}), weight = random({5});
  const auto both = cpu_ops().residual_rms_norm(x, residual, weight, 1e-6);
  CHECK(distance(both[0], x + residual) == 0);
  CHECK(distance(both[1], cpu_ops().rms_norm(x + residual, weight, 1e-6)) < 1e-15);
  const auto run = [](const auto& in) { return cpu_ops().residual_rms_norm(in[0], in[1], in[2], 1e-2); };
  CHECK(gradient_error([&](const auto& in) { return weighted(run(in)[0]) + 2 * weighted(run(in)[1]); }, {x, residual, weight}) < 1e-8);
  CHECK(gradient_error([&](const auto& in) { return weighted(run(in)[1]); }, {x, residual, weight}) < 1e-8);
}

TEST_CASE("kernels: residual_rms_norm without a residual passes x on, and its norm has two readers") {
  at::manual_seed(5);
  const at::Tensor x = random({2, 3, 5}), weight = random({5});
  const auto alone = cpu_ops().residual_rms_norm(x, at::Tensor(), weight, 1e-6);
  CHECK(distance(alone[0], x) == 0);
  CHECK(distance(alone[1], cpu_ops().rms_norm(x, weight, 1e-6)) == 0);
  CHECK(distance(alone[2], alone[1]) == 0);
  const auto run = [](const auto& in) { return cpu_ops().residual_rms_norm(in[0], at::Tensor(), in[1], 1e-2); };
  CHECK(gradient_error([&](const auto& in) { return weighted(run(in)[0]) + 2 * weighted(run(in)[1]) + 3 * weighted(run(in)[2] * run(in)[2]); }, {x, weight}) < 1e-8);
  CHECK(gradient_error([&](const auto& in) {
          const auto made = run(in);
          return weighted(made[0]) + 2 * weighted(made[1]) + 3 * weighted(made[2] * made[2]);
        }, {x, weight}) < 1e-8);
  CHECK(gradient_error([&](const auto& in) { return weighted(run(in)[2]); }, {x, weight}) < 1e-8);
}

TEST_CASE("kernels: head_norm_rope normalises each head, turns pairs (i, i + f) and leaves the rest of a head alone") {
  at::manual_seed(4);
  const at::Tensor x = random({2, 3, 2, 7}), weight = random({7});
  const at::Tensor angle = random({2, 3, 3});
  const at::Tensor c = angle.cos(), s = angle.sin();
  const at::Tensor y = cpu_ops().head_norm_rope(x, weight, c, s, 1e-6);
  const at::Tensor normed = x * weight / at::sqrt(at::mean(x * x, {-1}, true) + 1e-6);
  for (int64_t i = 0; i < 3; ++i) {
    const at::Tensor first = normed.select(-1, i), second = normed.select(-1, i + 3);
    const at::Tensor ci = c.select(-1, i).unsqueeze(-1), si = s.select(-1, i).unsqueeze(-1);
    CHECK(distance(y.select(-1, i), first * ci - second * si) < 1e-14);
    CHECK(distance(y.select(-1, i + 3), second * ci + first * si) < 1e-14);
  }
  CHECK(distance(y.select(-1, 6), normed.select(-1, 6)) < 1e-14);
  CHECK(gradient_error([&](const auto& in) { return weighted(cpu_ops().head_norm_rope(in[0], in[1], c, s, 1e-2)); }, {x, weight}) < 1e-8);
  // One set of angles for the whole batch, no norm (as in Llama).
  const at::Tensor c1 = c.narrow(0, 0, 1), s1 = s.narrow(0, 0, 1);
  CHECK(gradient_error([&](const auto& in) { return weighted(cpu_ops().head_norm_rope(in[0], {}, c1, s1, 1e-2)); }, {x}) < 1e-8);
}

TEST_CASE("kernels: swiglu is silu(gate) * up, gradients agree with finite differences") {
  at::manual_seed(5);
  const at::Tensor gate = random({4, 9}), up = random({4, 9});
  CHECK(distance(cpu_ops().swiglu(gate, up), gate * at::sigmoid(gate) * up) < 1e-14);
  CHECK(gradient_error([](const auto& in) { return weighted(cpu_ops().swiglu(in[0], in[1])); }, {gate, up}) < 1e-8);
}

TEST_CASE("kernels: grouped_convolution follows its formula element by element and never crosses a block's border") {
  at::manual_seed(6);
  struct Case {
    const char* name;
    int64_t block, taps, groups;
  };
  for (const Case& one : {Case{"two taps", 4, 2, 3}, Case{"three taps", 4, 3, 2}, Case{"as many taps as rows", 3, 3, 6}, Case{"one tap", 2, 1, 1}}) {
    CAPTURE(one.name);
    const int64_t blocks = 3, h = 6;
    const at::Tensor x = random({2, blocks * one.block, h}), delta = random({2, blocks * one.block, one.taps, one.groups});
    const at::Tensor base = random({one.taps, h});
    const at::Tensor y = cpu_ops().grouped_convolution(x, delta, base, one.block);
    double worst = 0;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t row = 0; row < blocks * one.block; ++row) {
        for (int64_t c = 0; c < h; ++c) {
          double sum = 0;
          for (int64_t t = 0; t <= std::min(one.taps - 1, row % one.block); ++t) {
            const int64_t group = c / (h / one.groups);
            sum += (base[t][c] + delta[b][row][t][group]).item<double>() * x[b][row - t][c].item<double>();
          }
          worst = std::max(worst, std::abs(sum - y[b][row][c].item<double>()));
        }
      }
    }
    CHECK(worst < 1e-13);
    CHECK(gradient_error([&](const auto& in) { return weighted(cpu_ops().grouped_convolution(in[0], in[1], in[2], one.block)); },
                         {x, delta, base}) < 1e-8);
  }
}

TEST_CASE("kernels: lookup's gradient sums what repeats, with the same bits every time") {
  at::manual_seed(7);
  const at::Tensor table = random({11, 4});
  const at::Tensor ids = at::randint(11, {5, 6}, at::kLong);
  CHECK(distance(cpu_ops().lookup(table, ids), table.index({ids})) == 0);
  CHECK(gradient_error([&](const auto& in) { return weighted(cpu_ops().lookup(in[0], ids)); }, {table}) < 1e-9);

  const at::Tensor many = at::randint(11, {4000}, at::kLong);
  const at::Tensor seed = random({4000, 4}, at::kFloat);
  const auto gradient = [&] {
    const at::Tensor leaf = table.to(at::kFloat).requires_grad_();
    return torch::autograd::grad({at::mul(cpu_ops().lookup(leaf, many), seed).sum()}, {leaf})[0];
  };
  CHECK(at::equal(gradient(), gradient()));
}

TEST_CASE("kernels: a wrong shape is an internal error that names both shapes") {
  const at::Tensor x = at::zeros({2, 3});
  try {
    cpu_ops().rms_norm(x, at::zeros({4}), 1e-6);
    FAIL("nothing was thrown");
  } catch (const std::exception& error) {
    const std::string text = error.what();
    CHECK(text.find("weight_h has shape [4]") != std::string::npos);
    CHECK(text.find("[3]") != std::string::npos);
  }
}

TEST_CASE("kernels: what a plan for a GPU says of shapes: heads of 80, 96 and 256 and float32 have no attention kernel, any group of heads and any block have") {
  for (const int64_t size : {80, 96, 256, 32}) {
    REQUIRE(sf::slow_attention(/*is_bfloat16=*/true, size) != nullptr);
    CHECK(std::string(sf::slow_attention(true, size)) == "its kernel takes bfloat16 and head sizes of 64 and 128");
  }
  CHECK(sf::slow_attention(false, 128) != nullptr);
  CHECK(sf::slow_attention(true, 64) == nullptr);
  CHECK(sf::slow_attention(true, 128) == nullptr);
  CHECK(sf::slow_head_norm_rope(80, 40) == nullptr);
  CHECK(sf::slow_head_norm_rope(264, 132) != nullptr);
  CHECK(sf::slow_grouped_convolution(2, 16) == nullptr);
  CHECK(sf::slow_grouped_convolution(5, 16) != nullptr);
  CHECK(sf::slow_grouped_convolution(2, 24) != nullptr);
  CHECK(sf::slow_head_objective(32) == nullptr);
  CHECK(sf::slow_head_objective(33) != nullptr);
}

TEST_CASE("magnitudes: what is known of a tensor holds for its memory, size and version, and is forgotten on demand") {
  at::Tensor x = at::ones({4, 6});
  CHECK(!sf::known_magnitude(x).defined());  // from here on they are asked for
  const at::Tensor zero = sf::open_magnitude(x);
  REQUIRE(zero.defined());
  CHECK(zero.item<float>() == 0);
  CHECK(sf::magnitude_pointer(zero) != sf::magnitude_pointer(sf::open_magnitude(x)));
  *sf::magnitude_pointer(zero) = 1;
  sf::note_magnitude(x, zero);
  CHECK(sf::known_magnitude(x).item<float>() == 1);
  CHECK(sf::known_magnitude(x.view({24})).item<float>() == 1);
  CHECK(!sf::known_magnitude(x.narrow(0, 0, 2)).defined());
  CHECK(!sf::known_magnitude(x.clone()).defined());
  x.add_(1);
  CHECK(!sf::known_magnitude(x).defined());
  sf::note_magnitude(x, zero);
  CHECK(sf::known_magnitude(x).defined());
  sf::forget_magnitudes();
  CHECK(!sf::known_magnitude(x).defined());
  CHECK(sf::open_magnitude(x).item<float>() == 0);
  for (int i = 0; i < 200; ++i) {  // more than are made at once
    const at::Tensor next = sf::open_magnitude(x);
    CHECK(next.item<float>() == 0);
    *sf::magnitude_pointer(next) = 5;
  }
  sf::forget_magnitudes();
}
