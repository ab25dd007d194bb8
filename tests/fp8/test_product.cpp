// The plugin's node: gradients are those of the same products without rounding, within the formats' errors, whatever its options.
#include "plugins/transform/fp8/product.hpp"

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "core/kernels/ops.hpp"
#include "plugins/transform/fp8/skip.hpp"
#include "sf/error.hpp"

using namespace sf;
using fp8::Fp8;
using fp8::Fp8Options;

namespace {

LinearSpec spec(const std::string& name, int64_t inputs, int64_t outputs, int64_t parameter = 0) {
  return {.unit = "block.0", .shard_group = "block.0", .name = name, .unit_index = 1, .parameter = parameter, .inputs = inputs, .outputs = outputs};
}

struct Two {
  Fp8 transform;
  std::vector<at::Tensor> weights, biases;
  std::vector<GradientSink> sinks;
  std::vector<LinearProduct> products;
  at::Tensor x, wanted_a, wanted_b;

  explicit Two(Fp8Options options, at::ScalarType dtype = at::kFloat) : transform(std::move(options)) {
    (void)transform.take_over({spec("a", 32, 16), spec("b", 32, 48, 1)});
    transform.build(at::kCPU, dtype, cpu_ops());
    at::manual_seed(11);
    weights = {at::randn({16, 32}).to(dtype).requires_grad_(), at::randn({48, 32}).to(dtype).requires_grad_()};
    biases = {at::randn({16}).to(dtype).requires_grad_(), at::Tensor()};
    x = at::randn({3, 7, 32}).to(dtype).requires_grad_();   // 21 rows: no multiple of 16
    wanted_a = at::randn({3, 7, 16}).to(dtype);
    wanted_b = at::randn({3, 7, 48}).to(dtype);
    sinks = {{.buffer = at::zeros({16, 32})}, {.buffer = at::zeros({48, 32})}, {.buffer = at::zeros({16})}};
    products = {{.linear = 0, .weight_oi = weights[0], .bias_o = biases[0], .weight_sink = &sinks[0], .bias_sink = &sinks[2]},
                {.linear = 1, .weight_oi = weights[1], .bias_o = {}, .weight_sink = &sinks[1], .bias_sink = nullptr}};
    transform.begin_window();
    transform.encode_weights(1, {weights[0], weights[1]});
  }
};

double relative(const at::Tensor& found, const at::Tensor& expected) {
  return (found.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>() / expected.to(at::kDouble).norm().item<double>();
}

}  // namespace

TEST_CASE("fp8 products: outputs and all gradients are within the formats' errors for every choice of options") {
  for (const Float8Scaling scaling : {Float8Scaling::tensor, Float8Scaling::row}) {
    for (const Float8Format gradients : {Float8Format::e5m2, Float8Format::e4m3}) {
      for (const bool input_fp8 : {true, false}) {
        for (const bool weight_fp8 : {true, false}) {
          CAPTURE(input_fp8);
          CAPTURE(weight_fp8);
          Two two({.scaling = scaling, .gradients = gradients, .grad_input_fp8 = input_fp8, .grad_weight_fp8 = weight_fp8, .skip = {}, .emulate = true});
          const auto y = two.transform.linears(two.products, two.x);
          const auto grad_x = torch::autograd::grad({y[0], y[1]}, {two.x}, {two.wanted_a, two.wanted_b})[0];

          const at::Tensor ya = at::linear(two.x, two.weights[0], two.biases[0]), yb = at::linear(two.x, two.weights[1]);
          const auto expected = torch::autograd::grad({ya, yb}, {two.x, two.weights[0], two.weights[1], two.biases[0]}, {two.wanted_a, two.wanted_b});
          CHECK(relative(y[0], ya) < 0.05);
          CHECK(relative(y[1], yb) < 0.05);
          CHECK(relative(y[1], yb) > 0.01);
          const double gradient = gradients == Float8Format::e4m3 ? 0.05 : 0.075;
          CHECK(relative(grad_x, expected[0]) < (input_fp8 ? gradient : 1e-6));
          CHECK(relative(two.sinks[0].buffer, expected[1]) < (weight_fp8 ? gradient : 1e-6));
          CHECK(relative(two.sinks[1].buffer, expected[2]) < (weight_fp8 ? gradient : 1e-6));
          CHECK(relative(two.sinks[2].buffer, expected[3]) < 1e-6);
          CHECK(two.sinks[0].touched);
          CHECK(two.sinks[1].touched);
          CHECK(two.sinks[2].touched);
          CHECK(two.transform.alarms().sum().item<float>() == 0);
        }
      }
    }
  }
}

TEST_CASE("fp8 products: weight gradients add up, an unused product has none, and nothing is kept without recording") {
  Two two({.skip = {}, .emulate = true}, at::kBFloat16);
  const auto once = [&] {
    const auto y = two.transform.linears(two.products, two.x);
    CHECK((y[0].scalar_type() == at::kBFloat16));
    (void)torch::autograd::grad({y[0]}, {two.x}, {two.wanted_a});
  };
  once();
  const at::Tensor first = two.sinks[0].buffer.clone();
  once();
  CHECK(at::allclose(two.sinks[0].buffer, 2 * first));
  CHECK_FALSE(two.sinks[1].touched);
  {
    at::NoGradGuard no_grad;
    CHECK_FALSE(two.transform.linears(two.products, two.x)[0].requires_grad());
  }
  const auto constant = two.transform.linears(two.products, two.x.detach());   // as a draft's first unit has it
  CHECK(constant[1].requires_grad());
  constant[1].backward(two.wanted_b);
  CHECK(two.sinks[1].touched);
}

TEST_CASE("fp8 products: the same call twice gives the same bits") {
  Two two({.skip = {}, .emulate = true}, at::kBFloat16);
  at::NoGradGuard no_grad;
  const auto a = two.transform.linears(two.products, two.x), b = two.transform.linears(two.products, two.x);
  CHECK(at::equal(a[0], b[0]));
  CHECK(at::equal(a[1], b[1]));
}

TEST_CASE("fp8 alarms: what is not finite is named with its unit and linear, the one that came first") {
  const auto flags = [](Fp8& transform) {
    const at::Tensor all = transform.alarms().to(at::kDouble).contiguous().view({-1});
    return std::vector<double>(all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel());
  };
  Two two({.skip = {}, .emulate = true});
  at::Tensor bad = two.x.detach().clone();
  bad[1][2][3] = INFINITY;
  (void)two.transform.linears({two.products[1]}, bad);
  CHECK(two.transform.alarm_text(flags(two.transform)) == "the input of linear 'b' in unit 'block.0' is not finite");
  two.transform.begin_window();
  CHECK(two.transform.alarms().sum().item<float>() == 0);

  const auto y = two.transform.linears(two.products, two.x);
  at::Tensor bad_gradient = two.wanted_a.clone();
  bad_gradient[0][0][0] = std::nanf("");
  (void)torch::autograd::grad({y[0], y[1]}, {two.x}, {bad_gradient, two.wanted_b});
  CHECK(two.transform.alarm_text(flags(two.transform)) == "the output's gradient of linear 'a' in unit 'block.0' is not finite");
  two.transform.begin_window();
  at::Tensor weight = two.weights[0].detach().clone();
  weight[0][0] = INFINITY;
  two.transform.encode_weights(1, {weight, two.weights[1]});
  CHECK(two.transform.alarm_text(flags(two.transform)) == "the weight of linear 'a' in unit 'block.0' is not finite");
}

TEST_CASE("fp8 takes over trainable linears of blocks whose dimensions are multiples of 16 and that no pattern skips") {
  const auto frozen = [](LinearSpec one) { one.trainable = false; return one; };
  const auto in_root = [](LinearSpec one) { one.shard_group = "root"; return one; };
  const std::vector<LinearSpec> all = {in_root(spec("fc", 32, 32)), spec("self_attn.q_proj", 32, 32), frozen(spec("self_attn.v_proj", 32, 32)), spec("mlp.up_proj", 32, 40),
                                       spec("mlp.gate_proj", 24, 32), spec("mlp.down_proj", 48, 32), spec("attention_conv.kernel_projection", 32, 16)};
  CHECK(Fp8({.skip = {"kernel_projection"}}).take_over(all) == std::vector<bool>{false, true, false, false, false, true, false});
  CHECK(Fp8({.skip = {}}).take_over(all) == std::vector<bool>{false, true, false, false, false, true, true});
  CHECK(Fp8({.skip = {"mlp.*", "block.*.*_conv.*"}}).take_over(all) == std::vector<bool>{false, true, false, false, false, false, false});
  Fp8 twice({.skip = {}});
  CHECK(twice.take_over(all) == twice.take_over(all));
  CHECK_THROWS_WITH_AS(Fp8({.skip = {"nothing"}}).take_over(all), "plugin.fp8.skip: \"nothing\" names no linear of the draft's blocks", Error);
  try {
    (void)Fp8({.skip = {"nothing"}}).take_over(all);
  } catch (const Error& error) {
    CHECK(error.hint() == "write the last parts of a name, like \"down_proj\", without .weight; the blocks have attention_conv.kernel_projection, mlp.down_proj, mlp.gate_proj, "
                          "mlp.up_proj, self_attn.q_proj");
  }
  CHECK_THROWS_WITH_AS(Fp8({.skip = {}}).take_over({spec("mlp.up_proj", 32, 40), in_root(spec("fc", 32, 32))}),
                       "[F5] fp8 has nothing to do: no trainable linear of the draft's blocks has two dimensions that are multiples of 16 (block.0.mlp.up_proj is 40 x 32)",
                       Error);
  CHECK_THROWS_WITH_AS(Fp8({.skip = {"*"}}).take_over({spec("mlp.up_proj", 32, 32)}),
                       "[F5] fp8 has nothing to do: no trainable linear of the draft's blocks has two dimensions that are multiples of 16, or plugin.fp8.skip names them all", Error);
}

TEST_CASE("fp8 skip patterns name the last parts of a name") {
  CHECK(fp8::names_linear("down_proj", "block.3.mlp.down_proj"));
  CHECK(fp8::names_linear("mlp.*", "block.3.mlp.down_proj"));
  CHECK(fp8::names_linear("block.3.*.*", "block.3.mlp.down_proj"));
  CHECK(fp8::names_linear("*_proj", "block.3.mlp.down_proj"));
  CHECK_FALSE(fp8::names_linear("block.3.*", "block.3.mlp.down_proj"));
  CHECK_FALSE(fp8::names_linear("proj", "block.3.mlp.down_proj"));
  CHECK_FALSE(fp8::names_linear("", "block.3.mlp.down_proj"));
  for (const char* pattern : {".down_proj", "down_proj.", "mlp..down_proj", ".", "block.3.mlp.down_proj.weight"}) {
    CAPTURE(pattern);
    CHECK_FALSE(fp8::names_linear(pattern, "block.3.mlp.down_proj"));
  }
  CHECK_FALSE(fp8::names_linear("a.block.3.mlp.down_proj", "block.3.mlp.down_proj"));
}
