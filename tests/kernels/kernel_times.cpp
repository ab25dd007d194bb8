// Times of the fused operations at the shapes of a DFlash2 draft for Qwen3-8B: batch 2, 2048 tokens, 512 blocks of 16, 15 rows of 16 at the head. One line for each: milliseconds
// (median of 7 times 8 calls in a row, so that the host is not seen), and what they come to in TB/s of memory that has to move, or TFLOP/s of products.
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/lookup.hpp"
#include "core/kernels/ops.hpp"
#include "core/train/linear.hpp"
#include "core/train/optimizer.hpp"
#include "tests/kernels/gpu.hpp"
#include "tests/kernels/times.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr int64_t kB = 2, kS = 2048, kW = 512, kJ = 16, kQ = kW * kJ, kHeads = 32, kKeyHeads = 8, kE = 128, kH = 4096, kI = 12288, kV = 151936;
const at::TensorOptions kHalf = at::TensorOptions(at::Device(at::kCUDA, 0)).dtype(at::kBFloat16);

using sf::test::milliseconds;
using Tensors = std::vector<at::Tensor>;

// Forward and backward of one operation; bytes that each has to move.
void both(const std::string& name, const Tensors& inputs, const std::function<at::Tensor(const Tensors&)>& operation, double forward_bytes,
          double backward_bytes, double forward_flop = 0, double backward_flop = 0) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.detach().requires_grad_());
  }
  at::Tensor out;
  sf::test::time_line(name, milliseconds([&] {
         at::NoGradGuard no_grad;
         out = operation(leaves);
       }),
       forward_bytes, forward_flop);
  at::AutoGradMode record(true);
  out = operation(leaves);
  const at::Tensor seed = at::randn_like(out.detach());
  sf::test::time_line(name + ", backward", milliseconds([&] { (void)torch::autograd::grad({out}, leaves, {seed}, /*retain_graph=*/true); }), backward_bytes, backward_flop);
}

at::Tensor normal(at::IntArrayRef shape) { return at::randn(shape, kHalf); }

}  // namespace

int main(int argc, char**) {
  if (argc > 1) {
    sf::test::time_repeats = sf::test::time_calls = 1;  // "once", for a profiler
  }
  if (!sf::test::has_gpu()) {
    return 0;
  }
  sf::Ops& ops = sf::cpu_ops();
  const double rows = static_cast<double>(kB * kQ);
  {
    const at::Tensor x = normal({int64_t{1} << 30});
    at::Tensor y = at::empty_like(x);
    sf::test::time_line("copy", milliseconds([&] { y.copy_(x); }), 4e0 * (int64_t{1} << 30));
  }
  both("rms_norm", {normal({kB, kQ, kH}), normal({kH})}, [&](const Tensors& in) { return ops.rms_norm(in[0], in[1], 1e-6); }, rows * kH * 4, rows * kH * 6);
  both("residual_rms_norm", {normal({kB, kQ, kH}), normal({kB, kQ, kH}), normal({kH})},
       [&](const Tensors& in) { return ops.residual_rms_norm(in[0], in[1], in[2], 1e-6)[1]; }, rows * kH * 8, rows * kH * 6);
  both("swiglu", {normal({kB, kQ, kI}), normal({kB, kQ, kI})}, [&](const Tensors& in) { return ops.swiglu(in[0], in[1]); }, rows * kI * 6, rows * kI * 10);
  both("grouped_convolution", {normal({kB, kQ, kH}), normal({kB, kQ, 2, kH / 16}), normal({2, kH})},
       [&](const Tensors& in) { return ops.grouped_convolution(in[0], in[1], in[2], kJ); }, rows * kH * (4 + 0.25), rows * kH * (6 + 0.5));
  const at::Tensor angle = at::rand({kB, kQ, kE / 2}, kHalf.dtype(at::kFloat));
  both("head_norm_rope, queries", {normal({kB, kQ, kHeads, kE}), normal({kE})},
       [&](const Tensors& in) { return ops.head_norm_rope(in[0], in[1], angle, angle, 1e-6); }, rows * kH * 4, rows * kH * 6);
  both("head_norm_rope, keys", {normal({kB, kQ, kKeyHeads, kE}), normal({kE})},
       [&](const Tensors& in) { return ops.head_norm_rope(in[0], in[1], angle, angle, 1e-6); }, rows * kH, rows * kH * 1.5);

  at::manual_seed(1);
  const at::Tensor anchors = std::get<0>(at::stack({at::randperm(kS - 1, kHalf.dtype(at::kLong)).narrow(0, 0, kW), at::randperm(kS - 1, kHalf.dtype(at::kLong)).narrow(0, 0, kW)}).sort(1));
  const at::Tensor keep = at::ones({kB, kW}, kHalf.dtype(at::kBool));
  const double pairs = (anchors.sum().item<double>() + kB * kW * kJ) * kJ * kHeads;  // (row, head, key) that see each other
  for (const bool causal : {false, true}) {
    both(causal ? "block_attention, causal" : "block_attention",
         {normal({kB, kQ, kHeads, kE}), normal({kB, kS, kKeyHeads, kE}), normal({kB, kS, kKeyHeads, kE}), normal({kB, kQ, kKeyHeads, kE}), normal({kB, kQ, kKeyHeads, kE})},
         [&](const Tensors& in) {
           return ops.block_attention({.query_bqne = in[0], .context_key_bsme = in[1], .context_value_bsme = in[2], .block_key_bqme = in[3], .block_value_bqme = in[4],
                                       .anchors_bw = anchors, .keep_bw = keep, .block_size = kJ, .causal = causal, .scale = 1 / std::sqrt(128.0)});
         },
         rows * kH * 2 * 2.6, rows * kH * 2 * 4.6, pairs * kE * 4, pairs * kE * 10);
  }
  {
    const int64_t r = 1920;
    const at::Tensor hidden = normal({r, kH}).mul(0.5), head = normal({kV, kH}).mul(0.02);
    const at::Tensor labels = at::randint(kV, {r}, kHalf.dtype(at::kLong));
    at::Tensor logits = at::mm(hidden, head.t());
    const auto floats = kHalf.dtype(at::kFloat);
    at::Tensor lse = at::empty({r}, floats), most = at::empty({r}, floats), nll = at::empty({r}, floats), argmax = at::empty({r}, labels.options()), values = at::empty({r, 16}, floats), ids = at::empty({r, 16}, labels.options());
    const double bytes = 2.0 * r * kV, flop = 2.0 * r * kV * kH;
    sf::test::time_line("head: logits of 1920 rows", milliseconds([&] { at::mm_out(logits, hidden, head.t()); }), bytes + 2.0 * kV * kH, flop);
    for (const int64_t k : {0, 16}) {
      sf::test::time_line("head: statistics, " + std::to_string(k) + " candidates", milliseconds([&] {
             sf::check_launch("rows", sf::cuda_launchers()->head_rows_forward(
                                          {.type = sf::cuda::Type::bfloat16, .r = r, .v = kV, .k = k, .multiplier = 1, .softcap = 0, .logits_rv = logits.const_data_ptr(), .labels_r = labels.data_ptr<int64_t>(),
                                           .wanted_r = nullptr, .log_sum_exp_r = lse.data_ptr<float>(), .nll_r = nll.data_ptr<float>(), .argmax_r = argmax.data_ptr<int64_t>(), .max_probability_r = most.data_ptr<float>(),
                                           .top_values_rk = values.data_ptr<float>(), .top_ids_rk = ids.data_ptr<int64_t>(), .wanted_values_r = nullptr}, sf::stream_of(logits)));
           }),
           bytes);
    }
    sf::test::time_line("head: gradient over the logits", milliseconds([&] {
           sf::check_launch("rows", sf::cuda_launchers()->head_rows_backward(
                                        {.type = sf::cuda::Type::bfloat16, .r = r, .v = kV, .k = 16, .multiplier = 1, .softcap = 0, .logits_rv = logits.mutable_data_ptr(), .labels_r = labels.data_ptr<int64_t>(),
                                         .log_sum_exp_r = lse.data_ptr<float>(), .grad_nll_r = nll.data_ptr<float>(), .ids_rk = ids.data_ptr<int64_t>(), .grad_values_rk = values.data_ptr<float>()}, sf::stream_of(logits)));
         }),
         2 * bytes);
    logits = at::mm(hidden, head.t());
    sf::test::time_line("head: gradient of hidden rows", milliseconds([&] { (void)at::mm(logits, head); }), bytes + 2.0 * kV * kH, flop);
  }
  {
    const int64_t count = 1920 * 16;
    const at::Tensor values = normal({count, 256});
    at::Tensor table = at::zeros({kV, 256}, kHalf.dtype(at::kFloat));
    const at::Tensor spread = at::randint(kV, {count}, kHalf.dtype(at::kLong)), few = at::randint(20, {count}, kHalf.dtype(at::kLong));
    sf::test::time_line("rows by token, spread", milliseconds([&] { sf::add_by_token(table, spread, values); }), count * 256.0 * 2);
    sf::test::time_line("rows by token, 20 tokens", milliseconds([&] { sf::add_by_token(table, few, values); }), count * 256.0 * 2);
  }
  for (const auto& [o, i] : {std::pair<int64_t, int64_t>{kI, kH}, {kH, kI}, {kH, kH}, {1024, kH}}) {
    const at::Tensor grad = normal({kB * kQ, o}), x = normal({kB * kQ, i});
    sf::GradientSink sink{.buffer = at::zeros({o, i}, kHalf.dtype(at::kFloat))};
    const std::string shape = std::to_string(o) + " x " + std::to_string(i);
    const double flop = 2 * rows * static_cast<double>(o * i);
    sf::test::time_line("weight gradient " + shape + ", bf16 product", milliseconds([&] { (void)at::mm(grad.t(), x); }), 2 * rows * static_cast<double>(o + i) + 2.0 * o * i, flop);
    const at::Tensor workspace = at::empty({int64_t{32} << 20}, kHalf.dtype(at::kByte));
    sf::test::time_line("weight gradient " + shape + ", into float32", milliseconds([&] {
           sf::check_launch("product", sf::cuda_launchers()->accumulate_product({.m = o, .n = i, .k = kB * kQ, .a_km = grad.const_data_ptr(), .b_kn = x.const_data_ptr(), .c_mn = sink.buffer.data_ptr<float>(),
                                                                                 .workspace = workspace.mutable_data_ptr(), .workspace_bytes = int64_t{32} << 20}, sf::stream_of(grad)));
         }),
         2 * rows * static_cast<double>(o + i) + 8.0 * o * i, flop);
  }
  {
    std::vector<sf::Shard> shards;
    double count = 0;
    for (const int64_t size : {kI * kH, kI * kH, kI * kH, kH * kH, kH * kH, kV * 256}) {
      sf::Shard shard;
      shard.local = normal({size});
      shard.trainable = true;
      shards.push_back(std::move(shard));
      count += static_cast<double>(size);
    }
    sf::AdamW optimizer(shards, {});
    std::vector<at::Tensor> gradients;
    for (const sf::Shard& shard : shards) {
      gradients.push_back(at::randn(shard.local.sizes(), kHalf.dtype(at::kFloat)));
    }
    const at::Tensor one = at::ones({}, kHalf.dtype(at::kFloat));
    sf::test::time_line("optimizer, 224 M parameters", milliseconds([&] { (void)optimizer.step(gradients, one, one, 1e-4); }), count * 30);
  }
  return 0;
}
