// The pieces of float8 products on the CPU: what a number becomes, and how far a product is from the one without rounding.
#include "core/kernels/float8.hpp"

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <limits>

#include "core/kernels/float8_head.hpp"
#include "core/kernels/ops.hpp"
#include "sf/error.hpp"

using namespace sf;

namespace {

at::Tensor numbers(const Float8Operand& operand) { return operand.values_rk.to(at::kFloat) * operand.inverse_scale; }

at::Tensor random(int64_t r, int64_t c, int64_t seed) {
  at::manual_seed(static_cast<uint64_t>(seed));
  return at::randn({r, c});
}

double most(const at::Tensor& difference) { return difference.numel() == 0 ? 0.0 : difference.abs().max().item<double>(); }

// Half a unit in the last place of a normal number.
double half_place(Float8Format format) { return format == Float8Format::e4m3 ? 1.0 / 16 : 1.0 / 8; }

}  // namespace

TEST_CASE("float8: the largest magnitude of a matrix keeps NaN and infinity, and is 0 for an empty one") {
  CHECK(float8_amax(at::tensor({1.0f, -3.0f, 2.0f})).item<float>() == 3.0f);
  CHECK(std::isnan(float8_amax(at::tensor({1.0f, std::nanf("")})).item<float>()));
  CHECK(std::isinf(float8_amax(at::tensor({1.0f, -INFINITY})).item<float>()));
  CHECK(float8_amax(at::empty({0, 16})).item<float>() == 0.0f);
}

TEST_CASE("float8: an encoded number is within half a place of itself, or within half the smallest step of zero") {
  for (const Float8Format format : {Float8Format::e4m3, Float8Format::e5m2}) {
    for (const Float8Scaling scaling : {Float8Scaling::tensor, Float8Scaling::row}) {
      at::Tensor x = random(37, 48, 1);
      x.mul_(at::exp2(at::arange(37, at::kFloat).sub_(18).mul_(0.5)).unsqueeze(1));
      const Float8Matrix made = float8_encode({.x_rc = x, .format = format, .scaling = scaling, .amax = {}, .rows = true, .columns = true, .alarm = {}, .into = {}});
      CHECK(made.values_rc.sizes() == x.sizes());
      CHECK(made.values_cr.sizes() == at::IntArrayRef({48, 48}));
      const double smallest = format == Float8Format::e4m3 ? std::exp2(-10) : std::exp2(-17);   // half a step of the numbers next to zero
      const auto check = [&](const at::Tensor& found, const at::Tensor& expected, const at::Tensor& inverse) {
        const at::Tensor bound = at::maximum(expected.abs() * half_place(format), inverse * smallest) * 1.0001;
        CHECK(((found - expected).abs() <= bound).all().item<bool>());
      };
      check(numbers(made.rows()), x, made.inverse_scale);
      check(numbers(made.columns()).narrow(1, 0, 37), x.t(), made.inverse_scale_c);
      CHECK(most(made.values_cr.to(at::kFloat).narrow(1, 37, 11)) == 0);   // zero behind the rows
    }
  }
}

TEST_CASE("float8: the largest number becomes the largest of the format, and a matrix of zeros stays zeros") {
  const at::Tensor x = random(16, 16, 2);
  const Float8Matrix made = float8_encode({.x_rc = x, .format = Float8Format::e4m3, .amax = {}, .alarm = {}, .into = {}});
  CHECK(made.values_rc.to(at::kFloat).abs().max().item<float>() == 448.0f);
  CHECK(made.inverse_scale.item<float>() == doctest::Approx(x.abs().max().item<double>() / 448.0));
  for (const Float8Scaling scaling : {Float8Scaling::tensor, Float8Scaling::row}) {
    const Float8Matrix zeros = float8_encode({.x_rc = at::zeros({16, 32}), .scaling = scaling, .amax = {}, .rows = true, .columns = true, .alarm = {}, .into = {}});
    CHECK(most(numbers(zeros.rows())) == 0);
    CHECK(most(numbers(zeros.columns())) == 0);
  }
}

TEST_CASE("float8: what is not finite makes all of it NaN and raises the alarm; what is finite leaves the alarm as it was") {
  for (const float bad : {INFINITY, -INFINITY, std::nanf("")}) {
    at::Tensor x = random(16, 16, 3);
    x[3][4] = bad;
    at::Tensor alarm = at::zeros({});
    const Float8Matrix made = float8_encode({.x_rc = x, .amax = {}, .alarm = alarm, .into = {}});
    CHECK(alarm.item<float>() == 1.0f);
    CHECK(numbers(made.rows()).isnan().all().item<bool>());
    (void)float8_encode({.x_rc = random(16, 16, 4), .amax = {}, .alarm = alarm, .into = {}});
    CHECK(alarm.item<float>() == 1.0f);
    at::Tensor quiet = at::zeros({});
    (void)float8_encode({.x_rc = random(16, 16, 4), .amax = {}, .alarm = quiet, .into = {}});
    CHECK(quiet.item<float>() == 0.0f);
  }
}

TEST_CASE("float8: encoding into given tensors writes them where they lie") {
  const at::Tensor x = random(32, 16, 5);
  const Float8Matrix fresh = float8_encode({.x_rc = x, .amax = {}, .rows = true, .columns = true, .alarm = {}, .into = {}});
  Float8Matrix given{.values_rc = at::empty_like(fresh.values_rc), .values_cr = at::empty_like(fresh.values_cr), .inverse_scale = at::ones({}), .inverse_scale_c = {}};
  const void* place = given.values_rc.const_data_ptr();
  (void)float8_encode({.x_rc = x, .amax = {}, .rows = true, .columns = true, .alarm = {}, .into = given});
  CHECK(given.values_rc.const_data_ptr() == place);
  CHECK(at::equal(given.values_rc.view(at::kByte), fresh.values_rc.view(at::kByte)));
  CHECK(at::equal(given.values_cr.view(at::kByte), fresh.values_cr.view(at::kByte)));
  CHECK(given.inverse_scale.item<float>() == fresh.inverse_scale.item<float>());
}

// |sum of a_k b_k - sum of rounded ones| <= (2 e + e^2) sum |a_k b_k| for relative errors e, plus what numbers near zero lose.
TEST_CASE("float8: a product is within the format's bound: outliers, zeros, a dead row, one huge value") {
  struct Case {
    const char* name;
    std::function<void(at::Tensor& a, at::Tensor& b)> change;
  };
  const std::vector<Case> cases = {{"plain", [](at::Tensor&, at::Tensor&) {}},
                                   {"outliers", [](at::Tensor& a, at::Tensor&) { a.select(1, 5).mul_(100.0); }},
                                   {"zeros", [](at::Tensor& a, at::Tensor& b) { a.zero_(); b.select(0, 2).zero_(); }},
                                   {"a dead row", [](at::Tensor& a, at::Tensor&) { a.select(0, 7).zero_(); }},
                                   {"one huge value", [](at::Tensor& a, at::Tensor&) { a[3][3] = 1e4; }}};
  for (const Case& one : cases) {
    CAPTURE(one.name);
    for (const Float8Scaling scaling : {Float8Scaling::tensor, Float8Scaling::row}) {
      for (const Float8Format format : {Float8Format::e4m3, Float8Format::e5m2}) {
        at::Tensor a = random(29, 64, 6), b = random(48, 64, 7);
        one.change(a, b);
        const Float8Matrix a8 = float8_encode({.x_rc = a, .format = format, .scaling = scaling, .amax = {}, .alarm = {}, .into = {}});
        const Float8Matrix b8 = float8_encode({.x_rc = b, .scaling = scaling, .amax = {}, .alarm = {}, .into = {}});
        const at::Tensor found = float8_product({.a_rk = a8.rows(), .b_ck = b8.rows(), .type = at::kFloat, .add_to_rc = {}});
        const double ea = half_place(format), eb = half_place(Float8Format::e4m3);
        const double floor_a = format == Float8Format::e4m3 ? std::exp2(-10) : std::exp2(-17), floor_b = std::exp2(-10);
        const at::Tensor wide_a = a.abs() * (1 + ea) + a8.inverse_scale * floor_a, wide_b = b.abs() * (1 + eb) + b8.inverse_scale * floor_b;
        const at::Tensor bound = (at::mm(wide_a, wide_b.t()) - at::mm(a.abs(), b.abs().t())) * 1.001 + 1e-5;
        CHECK(((found - at::mm(a, b.t())).abs() <= bound).all().item<bool>());
        if (one.name == std::string("a dead row")) {
          CHECK(most(found[7]) == 0);
        }
        if (one.name == std::string("plain")) {   // and far better on average: errors are as often up as down
          const double relative = (found - at::mm(a, b.t())).norm().item<double>() / at::mm(a, b.t()).norm().item<double>();
          CHECK(relative < (format == Float8Format::e4m3 ? 0.045 : 0.075));
          CHECK(relative > 0.01);   // it does round
        }
      }
    }
  }
}

TEST_CASE("float8: a product adds to what is given, in its type, and rows need not be a multiple of 16") {
  const at::Tensor a = random(5, 32, 8), b = random(7, 32, 9);
  const Float8Matrix a8 = float8_encode({.x_rc = a, .amax = {}, .alarm = {}, .into = {}}), b8 = float8_encode({.x_rc = b, .amax = {}, .alarm = {}, .into = {}});
  const at::Tensor alone = float8_product({.a_rk = a8.rows(), .b_ck = b8.rows(), .type = at::kFloat, .add_to_rc = {}});
  CHECK(alone.sizes() == at::IntArrayRef({5, 7}));
  at::Tensor sum = at::ones({5, 7});
  const at::Tensor found = float8_product({.a_rk = a8.rows(), .b_ck = b8.rows(), .add_to_rc = sum});
  CHECK(found.is_same(sum));
  CHECK(at::allclose(sum, alone + 1));
  CHECK((float8_product({.a_rk = a8.rows(), .b_ck = b8.rows(), .add_to_rc = {}}).scalar_type() == at::kBFloat16));
  CHECK_THROWS(float8_product({.a_rk = float8_encode({.x_rc = a, .format = Float8Format::e5m2, .amax = {}, .alarm = {}, .into = {}}).rows(),
                               .b_ck = float8_encode({.x_rc = b, .format = Float8Format::e5m2, .amax = {}, .alarm = {}, .into = {}}).rows(), .add_to_rc = {}}));
  CHECK_THROWS(float8_encode({.x_rc = random(16, 17, 1), .amax = {}, .alarm = {}, .into = {}}));
}

// Last in this file: from here on the process has the head in float8.
TEST_CASE("float8 head: loss and gradient are about those without it, evaluations are the same and report how far it is") {
  const at::Tensor head = random(64, 32, 12), labels = at::randint(0, 64, {24}, at::kLong);
  const auto run = [&](bool records) {
    at::AutoGradMode mode(records);
    const at::Tensor hidden = random(24, 32, 13).requires_grad_(records);
    const at::Tensor loss = cpu_ops().head_objective({.hidden_rh = hidden, .head_vh = head, .labels_r = labels, .must_include_r = {}, .chunk_rows = 10},
                                                     [](const HeadRows& rows) { return rows.nll_r.sum(); });
    return std::pair(loss.detach(), records ? torch::autograd::grad({loss}, {hidden})[0] : at::Tensor());
  };
  const auto [loss, gradient] = run(true);
  const at::Tensor evaluated = run(false).first;
  CHECK_FALSE(take_float8_head_report().defined());

  float8_heads().use(/*emulate=*/true);
  const auto [loss8, gradient8] = run(true);
  CHECK(float8_heads().products() == 6);   // three chunks, two products each
  CHECK(loss8.item<double>() != loss.item<double>());
  CHECK(loss8.item<double>() == doctest::Approx(loss.item<double>()).epsilon(0.02));
  CHECK((gradient8 - gradient).norm().item<double>() < 0.12 * gradient.norm().item<double>());
  CHECK_FALSE(take_float8_head_report().defined());
  CHECK(at::equal(run(false).first, evaluated));
  const at::Tensor report = take_float8_head_report();
  REQUIRE(report.defined());
  CHECK(report[0].item<double>() == 24);
  CHECK(report[1].item<double>() > 20);
  CHECK(report[2].item<double>() > 0);
  CHECK(report[2].item<double>() / 24 < 0.3);
  CHECK_THROWS_WITH_AS((void)float8_head(random(60, 32, 14)), "plugin.fp8.head: the head is 60 x 32, expected multiples of 16", Error);
}
