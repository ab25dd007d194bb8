// The CUDA kernels against their CPU twins in float64: outputs and gradients on small, odd shapes, and the same bits from run to run. Without a GPU each test says so and passes.
#include <doctest/doctest.h>

#include "core/base/error.hpp"
#include "core/kernels/block_attention.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/distill_head.hpp"
#include "core/kernels/head_objective.hpp"
#include "core/kernels/lookup.hpp"
#include "core/kernels/ops.hpp"
#include "core/kernels/unroll_attention.hpp"
#include "core/kernels/vocabulary_teacher.hpp"
#include "core/train/linear.hpp"
#include "core/train/optimizer.hpp"
#include "tests/kernels/finite_difference.hpp"
#include "tests/kernels/gpu.hpp"

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

using sf::cpu_ops;
using sf::test::has_gpu;
using sf::test::random;
using sf::test::relative_distance;

namespace {

using Tensors = std::vector<at::Tensor>;
using Operation = std::function<Tensors(const Tensors&, at::Device)>;  // inputs in one type on one device -> outputs there

const at::Device kCpu(at::kCPU);
const at::Device kGpu(at::kCUDA, 0);

Tensors run(const Operation& operation, const Tensors& inputs, const Tensors& seeds, at::ScalarType type, at::Device device) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.to(device, type).detach().clone().requires_grad_());
  }
  at::AutoGradMode record(true);
  Tensors outputs = operation(leaves, device), gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    gradients.push_back(seeds[i].to(device, type));
  }
  Tensors all = torch::autograd::grad(outputs, leaves, gradients, {}, false, /*allow_unused=*/true);
  for (const at::Tensor& output : outputs) {
    all.push_back(output.detach());
  }
  return all;
}

// Inputs and the outputs' gradients are rounded to the type first, so that both sides compute from the same numbers.
void compare(const std::string& name, const Operation& operation, Tensors inputs, at::ScalarType type, double tolerance) {
  CAPTURE(name);
  for (at::Tensor& input : inputs) {
    input = input.to(type).to(at::kDouble);
  }
  Tensors seeds;
  {
    at::NoGradGuard no_grad;
    for (const at::Tensor& output : operation(inputs, kCpu)) {
      seeds.push_back(random(output.sizes()).to(type).to(at::kDouble));
    }
  }
  const Tensors expected = run(operation, inputs, seeds, at::kDouble, kCpu);
  const Tensors found = run(operation, inputs, seeds, type, kGpu);
  const Tensors again = run(operation, inputs, seeds, type, kGpu);
  for (size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    REQUIRE(found[i].defined() == expected[i].defined());
    if (!found[i].defined()) {
      continue;
    }
    CHECK((found[i].scalar_type() == type));
    CHECK(at::equal(found[i], again[i]));
    if (expected[i].norm().item<double>() == 0) {
      CHECK(found[i].abs().max().item<double>() == 0);
    } else {
      CHECK(relative_distance(found[i].cpu().to(at::kDouble), expected[i]) < tolerance);
    }
  }
}

void compare_both(const std::string& name, const Operation& operation, const Tensors& inputs) {
  compare(name + ", float32", operation, inputs, at::kFloat, 2e-6);
  compare(name + ", bfloat16", operation, inputs, at::kBFloat16, 4e-3);  // rounding alone gives about 1.7e-3
}

}  // namespace

TEST_CASE("cuda: rms_norm and residual_rms_norm") {
  if (!has_gpu()) return;
  at::manual_seed(31);
  struct Shape {
    int64_t r, h;
  };
  for (const Shape& shape : {Shape{5, 8}, Shape{3, 7}, Shape{1, 8}, Shape{300, 4096}, Shape{7, 2056}, Shape{700, 5120}, Shape{3, 8192}, Shape{2, 12296}}) {
    const std::string name = std::to_string(shape.r) + " x " + std::to_string(shape.h);
    const at::Tensor x = random({1, shape.r, shape.h}), weight = random({shape.h}), residual = random({1, shape.r, shape.h});
    compare_both("rms_norm " + name, [](const Tensors& in, at::Device) { return Tensors{cpu_ops().rms_norm(in[0], in[1], 1e-6)}; }, {x, weight});
    compare_both("residual " + name, [](const Tensors& in, at::Device) { return cpu_ops().residual_rms_norm(in[0], in[1], in[2], 1e-6); },
                 {x, residual, weight});
    compare_both("norm alone " + name, [](const Tensors& in, at::Device) { return Tensors{cpu_ops().residual_rms_norm(in[0], in[1], in[2], 1e-6)[1]}; },
                 {x, residual, weight});
  }
}

TEST_CASE("cuda: swiglu") {
  if (!has_gpu()) return;
  at::manual_seed(32);
  for (const int64_t count : {1, 13, 64, 5000}) {
    compare_both("swiglu of " + std::to_string(count), [](const Tensors& in, at::Device) { return Tensors{cpu_ops().swiglu(in[0], in[1])}; },
                 {random({3, count}), random({3, count})});
  }
}

TEST_CASE("cuda: head_norm_rope") {
  if (!has_gpu()) return;
  at::manual_seed(33);
  struct Shape {
    int64_t b, q, heads, e, f, angle_rows;
    bool has_weight;
  };
  for (const Shape& shape : {Shape{2, 5, 3, 8, 4, 2, true}, Shape{2, 3, 32, 128, 64, 1, true}, Shape{1, 9, 2, 80, 20, 1, true}, Shape{2, 4, 9, 64, 32, 2, false},
                             Shape{1, 2, 1, 256, 128, 1, true}, Shape{2, 700, 2, 128, 64, 2, true}, Shape{1, 3, 2, 96, 16, 1, true}, Shape{2, 9, 11, 64, 32, 1, true}, Shape{1, 300, 33, 128, 64, 1, true}}) {
    const at::Tensor angle = random({shape.angle_rows, shape.q, shape.f}, at::kFloat).mul(3);
    const Operation operation = [=](const Tensors& in, at::Device device) {
      const auto type = device.is_cpu() ? at::kDouble : at::kFloat;
      return Tensors{cpu_ops().head_norm_rope(in[0], shape.has_weight ? in[1] : at::Tensor(), angle.cos().to(device, type), angle.sin().to(device, type), 1e-6)};
    };
    Tensors inputs{random({shape.b, shape.q, shape.heads, shape.e})};
    if (shape.has_weight) {
      inputs.push_back(random({shape.e}));
    }
    compare_both("head size " + std::to_string(shape.e) + ", pairs " + std::to_string(shape.f), operation, inputs);
  }
}

TEST_CASE("cuda: grouped_convolution") {
  if (!has_gpu()) return;
  at::manual_seed(34);
  struct Shape {
    int64_t b, blocks, block, taps, h, groups;
  };
  for (const Shape& shape : {Shape{2, 3, 4, 2, 64, 4}, Shape{1, 5, 3, 3, 24, 3}, Shape{1, 2, 2, 4, 8, 8}, Shape{2, 40, 16, 2, 4096, 256}, Shape{1, 3, 7, 1, 96, 6},
                             Shape{1, 300, 5, 2, 40, 5}, Shape{1, 3, 2, 3, 512, 2},
                             Shape{1, 9, 7, 2, 512, 128}, Shape{2, 5, 3, 2, 1024, 8}, Shape{1, 600, 1, 2, 512, 16}, Shape{1, 300, 5, 2, 2048, 128}, Shape{1, 520, 4, 2, 512, 64}}) {
    const int64_t q = shape.blocks * shape.block;
    const at::Tensor deltas = random({shape.b, q, 2, shape.taps, shape.groups}), bases = random({2, shape.taps, shape.h});
    // One side of a projection: rows of coefficients lie apart.
    const Operation operation = [=](const Tensors& in, at::Device) {
      return Tensors{cpu_ops().grouped_convolution(in[0], in[1].select(2, 1), in[2].select(0, 1), shape.block)};
    };
    compare_both("block " + std::to_string(shape.block) + ", taps " + std::to_string(shape.taps), operation, {random({shape.b, q, shape.h}), deltas, bases});
  }
}

namespace {

struct Setting {
  const char* name;
  int64_t b, s, w, j, n, m, e;
  int64_t window = 0;
  bool causal = false;
  bool sorted = true;
};

Operation attention_of(const Setting& set, const at::Tensor& anchors, const at::Tensor& keep) {
  return [=](const Tensors& in, at::Device device) {
    sf::BlockAttention a;
    a.query_bqne = in[0];
    a.context_key_bsme = in[1];
    a.context_value_bsme = in[2];
    a.block_key_bqme = in[3];
    a.block_value_bqme = in[4];
    a.anchors_bw = anchors.to(device);
    a.keep_bw = keep.to(device);
    a.block_size = set.j;
    a.window_tokens = set.window;
    a.causal = set.causal;
    a.scale = 1 / std::sqrt(static_cast<double>(set.e));
    return Tensors{sf::block_attention(a)};
  };
}

Tensors attention_inputs(const Setting& set) {
  const int64_t q = set.w * set.j;
  return {random({set.b, q, set.n, set.e}), random({set.b, set.s, set.m, set.e}), random({set.b, set.s, set.m, set.e}), random({set.b, q, set.m, set.e}),
          random({set.b, q, set.m, set.e})};
}

}  // namespace

TEST_CASE("cuda: block attention") {
  if (!has_gpu()) return;
  at::manual_seed(35);
  const std::vector<Setting> settings = {
      {"small", 1, 9, 4, 3, 4, 2, 64},
      {"block of 16, four heads a group", 2, 200, 24, 16, 8, 2, 128},
      {"causal", 1, 150, 20, 16, 4, 1, 128, 0, true},
      {"sliding", 2, 300, 24, 8, 4, 2, 64, 50, false},
      {"sliding and causal", 1, 300, 24, 8, 4, 4, 128, 33, true},
      {"window shorter than a block", 1, 100, 9, 7, 6, 2, 64, 3, true},
      {"groups of three, block of 5", 2, 130, 31, 5, 9, 3, 128},
      {"anchors in any order", 2, 260, 37, 7, 8, 2, 64, 0, false, false},
      {"one context token", 1, 1, 3, 16, 2, 2, 128},
      {"groups of 16", 1, 70, 5, 16, 16, 1, 64},
      {"many tiles", 1, 700, 96, 16, 4, 1, 128},
      {"many heads, ragged", 1, 150, 37, 14, 64, 8, 64},
      {"many heads, causal, anchors in any order", 1, 200, 37, 14, 64, 16, 128, 0, true, false},
      {"many heads, sliding", 2, 330, 37, 14, 64, 16, 128, 90},
  };
  for (const Setting& set : settings) {
    at::Tensor anchors = at::randint(set.s, {set.b, set.w}, at::kLong);
    anchors[0][0] = 0;  // no context
    if (set.sorted) {
      anchors = std::get<0>(anchors.sort(1));
    }
    at::Tensor keep = at::ones({set.b, set.w}, at::kBool);
    keep.narrow(1, set.w - std::max<int64_t>(1, set.w / 4), std::max<int64_t>(1, set.w / 4)).zero_();
    keep[set.b - 1][set.w / 2] = false;
    anchors = at::where(keep, anchors, at::zeros_like(anchors));
    compare(set.name, attention_of(set, anchors, keep), attention_inputs(set), at::kBFloat16, 8e-3);
  }
}

TEST_CASE("cuda: attention of an unrolled draft, with none, one and several later uses") {
  if (!has_gpu()) return;
  at::manual_seed(45);
  struct Shape {
    int64_t b, s, n, m, e, x;
  };
  for (const Shape& shape : {Shape{2, 70, 4, 2, 64, 0}, Shape{1, 150, 8, 2, 128, 1}, Shape{2, 133, 4, 4, 64, 6}, Shape{1, 40, 6, 2, 128, 3}, Shape{1, 300, 8, 1, 128, 2}, Shape{1, 520, 64, 8, 64, 2}}) {
    Tensors inputs = {random({shape.b, shape.s, shape.n, shape.e}), random({shape.b, shape.s, shape.m, shape.e}), random({shape.b, shape.s, shape.m, shape.e})};
    for (int64_t i = 0; i < 2 * shape.x; ++i) {
      inputs.push_back(random({shape.b, shape.s, shape.m, shape.e}));
    }
    const Operation operation = [=](const Tensors& in, at::Device) {
      sf::UnrollAttention a;
      a.query_bsne = in[0];
      a.key_bsme = in[1];
      a.value_bsme = in[2];
      for (int64_t i = 0; i < shape.x; ++i) {
        a.extra_keys_bsme.push_back(in[static_cast<size_t>(3 + i)]);
        a.extra_values_bsme.push_back(in[static_cast<size_t>(3 + shape.x + i)]);
      }
      a.scale = 1 / std::sqrt(static_cast<double>(shape.e));
      return Tensors{sf::unroll_attention(a)};
    };
    compare("later uses: " + std::to_string(shape.x), operation, inputs, at::kBFloat16, 8e-3);
  }
}

TEST_CASE("cuda: dead blocks of attention give exact zeros and send no gradient") {
  if (!has_gpu()) return;
  at::manual_seed(36);
  const Setting set{"dead", 1, 100, 8, 16, 4, 2, 64};
  const at::Tensor anchors = at::zeros({1, 8}, at::kLong), keep = at::zeros({1, 8}, at::kBool);
  const Operation operation = attention_of(set, anchors, keep);
  const Tensors inputs = attention_inputs(set);
  const Tensors all = run(operation, inputs, {random(inputs[0].sizes())}, at::kBFloat16, kGpu);
  for (const at::Tensor& tensor : all) {
    CHECK(tensor.abs().max().item<double>() == 0);
  }
}

TEST_CASE("cuda: shapes without an attention kernel take LibTorch's operations and agree all the same") {
  if (!has_gpu()) return;
  at::manual_seed(37);
  for (const Setting& set : {Setting{"head size 80", 1, 40, 5, 4, 4, 2, 80}, Setting{"head size 96", 1, 40, 5, 4, 4, 2, 96}, Setting{"head size 256", 1, 40, 5, 5, 3, 1, 256}}) {
    const at::Tensor anchors = std::get<0>(at::randint(set.s, {set.b, set.w}, at::kLong).sort(1)), keep = at::ones({set.b, set.w}, at::kBool);
    compare(set.name, attention_of(set, anchors, keep), attention_inputs(set), at::kBFloat16, 1.2e-2);
  }
  const Setting set{"float32", 1, 40, 5, 4, 4, 2, 64};
  const at::Tensor anchors = std::get<0>(at::randint(set.s, {set.b, set.w}, at::kLong).sort(1)), keep = at::ones({set.b, set.w}, at::kBool);
  compare(set.name, attention_of(set, anchors, keep), attention_inputs(set), at::kFloat, 1e-5);
}

namespace {

// What head_rows_forward and _backward have to give, from the same logits in float64.
struct RowsExpected {
  at::Tensor u, log_sum_exp, nll, argmax, top_values, top_ids;
};

RowsExpected rows_of(const at::Tensor& logits, const at::Tensor& labels, int64_t k, double multiplier, double softcap) {
  RowsExpected e;
  e.u = logits.cpu().to(at::kDouble) * multiplier;
  if (softcap > 0) {
    e.u = at::tanh(e.u / softcap) * softcap;
  }
  e.log_sum_exp = e.u.logsumexp(1);
  e.nll = (e.log_sum_exp - e.u.gather(1, labels.cpu().unsqueeze(1)).squeeze(1)).clamp_min(0);
  const auto [values, ids] = at::sort(e.u, /*stable=*/true, 1, /*descending=*/true);
  e.argmax = ids.select(1, 0);
  e.top_values = values.narrow(1, 0, k);
  e.top_ids = ids.narrow(1, 0, k);
  return e;
}

}  // namespace

TEST_CASE("cuda: rows of logits: log-sum-exp, arg-max, candidates, and the gradient over them") {
  if (!has_gpu()) return;
  at::manual_seed(38);
  struct Case {
    const char* name;
    int64_t r, v, k;
    double multiplier, softcap;
    int kind;  // 0: random, 1: few distinct values, 2: all equal
  };
  for (const Case& one : {Case{"small", 3, 24, 5, 1, 0, 0}, Case{"odd vocabulary", 4, 1003, 16, 1, 0, 0}, Case{"k = v", 2, 7, 7, 1, 0, 0}, Case{"large", 5, 151936, 16, 1, 0, 0},
                          Case{"ties", 4, 40000, 16, 1, 0, 1}, Case{"all equal", 3, 33000, 32, 1, 0, 2}, Case{"softcap", 3, 5000, 8, 0.7, 3, 0}, Case{"no candidates", 3, 5000, 0, 1, 0, 0}}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      CAPTURE(one.name);
      CAPTURE(c10::toString(type));
      at::Tensor logits = random({one.r, one.v}, at::kFloat).mul(3);
      logits = one.kind == 1 ? logits.round() : one.kind == 2 ? at::full_like(logits, 1.5) : logits;
      logits = logits.to(type).to(kGpu);
      const at::Tensor labels = at::randint(one.v, {one.r}, at::kLong).to(kGpu), wanted = at::randint(one.v, {one.r}, at::kLong).to(kGpu);
      const auto floats = logits.options().dtype(at::kFloat), integers = labels.options();
      at::Tensor lse = at::empty({one.r}, floats), most = at::empty({one.r}, floats), nll = at::empty({one.r}, floats), argmax = at::empty({one.r}, integers), values = at::empty({one.r, one.k}, floats),
                 ids = at::empty({one.r, one.k}, integers), wanted_values = at::empty({one.r}, floats);
      sf::check_launch("rows", sf::cuda_launchers()->head_rows_forward(
                                   {.type = sf::kernel_type(logits), .r = one.r, .v = one.v, .k = one.k, .multiplier = static_cast<float>(one.multiplier),
                                    .softcap = static_cast<float>(one.softcap), .logits_rv = logits.const_data_ptr(), .labels_r = labels.data_ptr<int64_t>(),
                                    .wanted_r = wanted.data_ptr<int64_t>(), .log_sum_exp_r = lse.data_ptr<float>(), .nll_r = nll.data_ptr<float>(),
                                    .argmax_r = argmax.data_ptr<int64_t>(), .max_probability_r = most.data_ptr<float>(), .top_values_rk = values.data_ptr<float>(), .top_ids_rk = ids.data_ptr<int64_t>(),
                                    .wanted_values_r = wanted_values.data_ptr<float>()}, sf::stream_of(logits)));
      const RowsExpected e = rows_of(logits, labels, one.k, one.multiplier, one.softcap);
      const auto near = [](const at::Tensor& a, const at::Tensor& b) { return (a.cpu().to(at::kDouble) - b).abs().max().item<double>(); };
      CHECK(near(lse, e.log_sum_exp) < 1e-4);
      CHECK(near(nll, e.nll) < 1e-4);
      CHECK(near(most, (e.u.amax(1) - e.log_sum_exp).exp()) < 1e-5);
      CHECK(near(wanted_values, e.u.gather(1, wanted.cpu().unsqueeze(1)).squeeze(1)) < 1e-5);
      if (one.softcap == 0) {  // tanh makes equals of what is not
        CHECK(at::equal(argmax.cpu(), e.argmax));
        CHECK(at::equal(ids.cpu(), e.top_ids));
      }
      if (one.k > 0) {
        CHECK(near(values, e.top_values) < 1e-5);
      }

      const at::Tensor grad_nll = random({one.r}, at::kFloat), grad_values = random({one.r, one.k}, at::kFloat);
      at::Tensor expected = at::mul((e.u - e.log_sum_exp.unsqueeze(1)).exp(), grad_nll.unsqueeze(1).to(at::kDouble));
      expected.scatter_add_(1, labels.cpu().unsqueeze(1), -grad_nll.unsqueeze(1).to(at::kDouble));
      expected.scatter_add_(1, ids.cpu(), grad_values.to(at::kDouble));
      if (one.softcap > 0) {
        expected.mul_(1 - (e.u / one.softcap).square());
      }
      expected.mul_(one.multiplier);
      at::Tensor gradient = logits.clone();
      const at::Tensor grad_nll_there = grad_nll.to(kGpu), grad_values_there = grad_values.to(kGpu);
      sf::check_launch("rows", sf::cuda_launchers()->head_rows_backward(
                                   {.type = sf::kernel_type(logits), .r = one.r, .v = one.v, .k = one.k, .multiplier = static_cast<float>(one.multiplier),
                                    .softcap = static_cast<float>(one.softcap), .logits_rv = gradient.mutable_data_ptr(), .labels_r = labels.data_ptr<int64_t>(),
                                    .log_sum_exp_r = lse.data_ptr<float>(), .grad_nll_r = grad_nll_there.data_ptr<float>(), .ids_rk = ids.data_ptr<int64_t>(),
                                    .grad_values_rk = grad_values_there.data_ptr<float>()}, sf::stream_of(logits)));
      CHECK(relative_distance(gradient.cpu().to(at::kDouble), expected) < (type == at::kFloat ? 1e-5 : 4e-3));
    }
  }
}

TEST_CASE("cuda: head_objective as a whole, with candidates, a table and a token that must be among them") {
  if (!has_gpu()) return;
  at::manual_seed(39);
  const int64_t r = 70, h = 32, v = 2000, k = 6, x = 8;
  const at::Tensor labels = at::randint(v, {r}, at::kLong), weights = at::rand({r}, at::kDouble), mixing = random({k});
  for (const bool insert : {false, true}) {
    const Operation operation = [=](const Tensors& in, at::Device device) {
      const auto type = in[0].scalar_type();
      sf::HeadObjective objective;
      objective.hidden_rh = in[0];
      objective.head_vh = in[1].detach();
      objective.candidate_table_vx = in[2];
      objective.parameters = {in[3]};
      objective.labels_r = labels.to(device);
      if (insert) {
        objective.must_include_r = objective.labels_r;
      }
      objective.top_k = k;
      objective.chunk_rows = 32;
      return Tensors{sf::head_objective(objective, [&](const sf::HeadRows& rows) {
        const auto wide = rows.nll_r.scalar_type();
        const auto mine = [&](const at::Tensor& t) { return t.to(device, wide); };
        const at::Tensor context = in[3].narrow(0, rows.row_begin, rows.row_end - rows.row_begin);
        const at::Tensor dots = at::mul(rows.candidate_rows_rkx, context.unsqueeze(1)).to(wide).sum(-1);
        const at::Tensor selected = at::mul(at::add(rows.top_values_rk, dots), mine(mixing)).sum(1);
        return at::mul(at::add(rows.nll_r, selected), mine(weights).narrow(0, rows.row_begin, rows.row_end - rows.row_begin)).sum();
      }).to(type)};
    };
    // The gradient of the result is taken to be 1.
    const Tensors inputs = {random({r, h}), random({v, h}), random({v, x}), random({r, x})};
    const Tensors expected = run(operation, inputs, {at::ones({}, at::kDouble)}, at::kDouble, kCpu);
    const Tensors found = run(operation, inputs, {at::ones({}, at::kDouble)}, at::kFloat, kGpu);
    const Tensors again = run(operation, inputs, {at::ones({}, at::kDouble)}, at::kFloat, kGpu);
    for (const size_t i : {0, 2, 3, 4}) {
      CAPTURE(i);
      CHECK(relative_distance(found[i].cpu().to(at::kDouble), expected[i]) < 1e-5);
      CHECK(at::equal(found[i], again[i]));
    }
  }
}

TEST_CASE("cuda: head_objective with a teacher and a bias") {
  if (!has_gpu()) return;
  at::manual_seed(44);
  const int64_t r = 40, h = 24, v = 1500, states = 9, t = 5, x = 8, step = 20;
  const at::Tensor labels = at::randint(v, {r}, at::kLong), weights = at::rand({2, r}, at::kDouble);
  const at::Tensor places = at::randint(states, {2, t}, at::kLong), index = at::randint(t, {r}, at::kLong);
  const Operation operation = [=](const Tensors& in, at::Device device) {
    const auto type = in[0].scalar_type();
    sf::HeadObjective objective;
    objective.hidden_rh = in[0];
    objective.head_vh = in[1].detach();
    objective.teacher_states_nh = in[2].detach();
    objective.bias_rx = in[3];
    objective.bias_table_vx = in[4];
    objective.teacher_places_mt = places.to(device);
    objective.teacher_index_r = index.to(device);
    objective.labels_r = labels.to(device);
    objective.chunk_rows = step;
    return Tensors{sf::head_objective(objective, [&](const sf::HeadRows& rows) {
      const at::Tensor mine = weights.to(device, rows.nll_r.scalar_type()).narrow(1, rows.row_begin, rows.row_end - rows.row_begin);
      return at::add(at::mul(rows.nll_r, mine[0]), at::mul(rows.distance_r, mine[1])).sum();
    }).to(type)};
  };
  const Tensors inputs = {random({r, h}), random({v, h}), random({states, h}), random({r, x}), random({v, x})};
  const Tensors expected = run(operation, inputs, {at::ones({}, at::kDouble)}, at::kDouble, kCpu);
  const Tensors found = run(operation, inputs, {at::ones({}, at::kDouble)}, at::kFloat, kGpu);
  for (const size_t i : {0, 3, 4, 5}) {
    CAPTURE(i);
    CHECK(relative_distance(found[i].cpu().to(at::kDouble), expected[i]) < 1e-4);  // a sign may turn where p and q agree to the last bits
  }
}

TEST_CASE("cuda: distill_head in its three losses: gradients of rows and head, acceptance, arg-max") {
  if (!has_gpu()) return;
  at::manual_seed(46);
  const int64_t r = 50, h = 16, w = 1203;
  const at::Tensor hidden = random({r, h}), head = random({w, h}), teacher = random({r, w}).mul(2), mask = at::rand({r}, at::kDouble).gt(0.3).to(at::kDouble);
  const at::Tensor kept = teacher.logsumexp(1), full = kept + 0.4;
  for (const sf::DistillLoss loss : {sf::DistillLoss::kl, sf::DistillLoss::alpha, sf::DistillLoss::lambda}) {
    CAPTURE(static_cast<int>(loss));
    const auto result_on = [&](at::Device device, at::ScalarType type) {
      const auto there = [&](const at::Tensor& x) { return x.to(device, type); };
      sf::DistillHead distill;
      const at::Tensor leaf = there(hidden).requires_grad_();
      distill.hidden_rh = leaf;
      distill.head_wh = there(head);
      distill.head_gradient_wh = at::zeros({w, h}, at::TensorOptions(device).dtype(type));
      distill.teacher_logits_rw = there(teacher);
      distill.teacher_kept_log_sum_exp_r = there(kept);
      distill.teacher_log_sum_exp_r = there(full);
      distill.mask_r = there(mask);
      distill.divisor = there(at::full({}, 40.0, at::kDouble));
      distill.factor = there(at::full({}, 0.7, at::kDouble));
      distill.loss = loss;
      distill.kl_scale = 0.8;
      distill.chunk_rows = 21;
      at::AutoGradMode record(true);
      const sf::DistillResult found = sf::distill_head(distill);
      const at::Tensor gradient = torch::autograd::grad({found.loss}, {leaf})[0];
      return Tensors{found.loss.detach(), gradient, distill.head_gradient_wh, found.acceptance_r, found.argmax_r};
    };
    const Tensors expected = result_on(kCpu, at::kDouble), found = result_on(kGpu, at::kFloat), again = result_on(kGpu, at::kFloat);
    for (size_t i = 0; i < 4; ++i) {
      CAPTURE(i);
      CHECK(relative_distance(found[i].cpu().to(at::kDouble), expected[i]) < 1e-4);  // a comparison may turn where both sides agree to the last bits
      CHECK(at::equal(found[i], again[i]));
    }
    CHECK(at::equal(found[4].cpu(), expected[4]));
  }
}

TEST_CASE("cuda: vocabulary_teacher over all tokens and over those that a draft keeps") {
  if (!has_gpu()) return;
  at::manual_seed(47);
  const at::Tensor hidden = random({2100, 16}), head = random({1501, 16});
  const at::Tensor kept = std::get<0>(at::randperm(1501, at::kLong).narrow(0, 0, 333).sort(0));
  for (const bool keeps_all : {true, false}) {
    const auto taught_on = [&](at::Device device, at::ScalarType type) {
      sf::VocabularyTeacher teacher;
      teacher.hidden_rh = hidden.to(device, type);
      teacher.head_vh = head.to(device, type);
      if (!keeps_all) {
        teacher.kept_w = kept.to(device);
        teacher.kept_host_w = kept.contiguous();
      }
      return sf::vocabulary_teacher(teacher);
    };
    const sf::VocabularyTeaching expected = taught_on(kCpu, at::kDouble), found = taught_on(kGpu, at::kFloat);
    CHECK(at::equal(found.argmax_r.cpu(), expected.argmax_r));
    CHECK(relative_distance(found.log_sum_exp_r.cpu().to(at::kDouble), expected.log_sum_exp_r) < 1e-5);
    CHECK(relative_distance(found.kept_log_sum_exp_r.cpu().to(at::kDouble), expected.kept_log_sum_exp_r) < 1e-5);
    CHECK(relative_distance(found.kept_logits_rw.cpu().to(at::kDouble), expected.kept_logits_rw) < 1e-5);
  }
}

TEST_CASE("cuda: rows added by token, runs of all lengths, and lookup's gradient") {
  if (!has_gpu()) return;
  at::manual_seed(40);
  for (const int64_t tokens : {1, 3, 50, 5000}) {
    for (const int64_t count : {1, 64, 65, 1000, 4096}) {
      CAPTURE(tokens);
      CAPTURE(count);
      const at::Tensor ids = at::randint(tokens, {count}, at::kLong), rows = random({count, 40}, at::kFloat);
      at::Tensor expected = at::zeros({tokens, 40}, at::kDouble);
      expected.index_add_(0, ids, rows.to(at::kDouble));
      at::Tensor first = at::zeros({tokens, 40}, at::TensorOptions(kGpu).dtype(at::kFloat)), second = at::zeros_like(first);
      sf::add_by_token(first, ids.to(kGpu), rows.to(kGpu));
      sf::add_by_token(second, ids.to(kGpu), rows.to(kGpu));
      CHECK(relative_distance(first.cpu().to(at::kDouble), expected) < 1e-5);
      CHECK(at::equal(first, second));
    }
  }
  const at::Tensor ids = at::randint(30, {7, 11}, at::kLong);
  compare_both("lookup", [&](const Tensors& in, at::Device device) { return Tensors{cpu_ops().lookup(in[0], ids.to(device))}; }, {random({30, 24})});
}

TEST_CASE("cuda: a weight gradient is summed in float32 by one product") {
  if (!has_gpu()) return;
  at::manual_seed(41);
  const at::Tensor x = random({2, 37, 64}, at::kFloat).to(at::kBFloat16), weight = random({24, 64}, at::kFloat).to(at::kBFloat16), seed = random({2, 37, 24}, at::kFloat).to(at::kBFloat16);
  const at::Tensor start = random({24, 64}, at::kFloat);
  sf::GradientSink sink{.buffer = start.to(kGpu)};
  at::AutoGradMode record(true);
  const at::Tensor leaf = x.to(kGpu).requires_grad_();
  const at::Tensor out = sf::linear(leaf, weight.to(kGpu), {}, &sink, nullptr);
  (void)torch::autograd::grad({out}, {leaf}, {seed.to(kGpu)});
  const at::Tensor expected = start.to(at::kDouble) + at::mm(seed.reshape({-1, 24}).t().to(at::kDouble), x.reshape({-1, 64}).to(at::kDouble));
  CHECK(relative_distance(sink.buffer.cpu().to(at::kDouble), expected) < 1e-6);
}

TEST_CASE("cuda: the optimizer's pass equals the CPU's, and a norm that is not finite changes nothing") {
  if (!has_gpu()) return;
  at::manual_seed(42);
  const auto shards_on = [](at::Device device, at::ScalarType type) {
    at::manual_seed(43);
    std::vector<sf::Shard> shards;
    for (const int64_t count : {1, 7, 4096, 0, 100003}) {  // of one this rank holds nothing: its updates count all the same
      sf::Shard shard;
      shard.local = random({count}, at::kFloat).to(type).to(device);
      shard.trainable = true;
      shards.push_back(std::move(shard));
    }
    return shards;
  };
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    auto here = shards_on(kCpu, type), there = shards_on(kGpu, type);
    sf::AdamW cpu(here, {.weight_decay = 0.1}), gpu(there, {.weight_decay = 0.1});
    for (int step = 0; step < 4; ++step) {
      const bool is_bad = step == 2;
      std::vector<at::Tensor> gradients, gradients_there;
      for (size_t i = 0; i < here.size(); ++i) {
        gradients.push_back(i == 1 && step == 1 ? at::Tensor() : random(here[i].local.sizes(), at::kFloat));
        gradients_there.push_back(gradients.back().defined() ? gradients.back().to(kGpu) : at::Tensor());
      }
      const at::Tensor norm = at::full({}, is_bad ? std::numeric_limits<double>::quiet_NaN() : 300.0, at::kFloat), one = at::ones({}, at::kFloat);
      CHECK(cpu.step(gradients, norm, one, 0.01).item<bool>() == !is_bad);
      CHECK(gpu.step(gradients_there, norm.to(kGpu), one.to(kGpu), 0.01).item<bool>() == !is_bad);
    }
    for (size_t i = 0; i < here.size(); ++i) {
      CAPTURE(i);
      if (here[i].local.numel() > 0) {
        CHECK(relative_distance(gpu.states()[i].master.cpu(), cpu.states()[i].master) < 1e-6);
        CHECK(relative_distance(gpu.states()[i].exp_avg_sq.cpu(), cpu.states()[i].exp_avg_sq) < 1e-5);
      }
      CHECK(gpu.states()[i].steps.item<float>() == cpu.states()[i].steps.item<float>());
      CHECK(at::equal(there[i].local, gpu.states()[i].master.to(type)));
    }
  }
}
