// Shapes: r rows · i input columns · o output columns
#include "core/model/skinny_product.hpp"

#include "core/base/error.hpp"
#include "core/kernels/crew.hpp"
#include "core/kernels/row_tiles.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace sf {

namespace {

constexpr int64_t kGroup = 32;  // outputs of a task

std::vector<int64_t> with_last(const at::Tensor& x, int64_t last) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = last;
  return shape;
}

// work(first output, outputs), in parallel; what it does for an output does not depend on where a thread begins.
template <class Work>
void for_outputs(int64_t outs, const Work& work) {
  in_crew((outs + kGroup - 1) / kGroup, at::get_num_threads(), [&](int64_t task) { work(task * kGroup, std::min(outs - task * kGroup, kGroup)); });
}

}  // namespace

bool is_skinny(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && weight.is_contiguous() && x.numel() > 0 &&
         x.numel() / x.size(-1) <= kSkinnyRows && row_tiles() != nullptr;
}

at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o) {
  if (!is_skinny(x, weight_oi)) {
    return at::linear(x, weight_oi, bias_o.defined() ? std::optional<at::Tensor>(bias_o) : std::nullopt);
  }
  const int64_t columns = weight_oi.size(1), outs = weight_oi.size(0), rows = x.numel() / columns;
  const at::Tensor in = x.contiguous(), out = at::empty(with_last(x, outs), x.options());
  const auto *a = in.const_data_ptr<float>(), *w = weight_oi.const_data_ptr<float>();
  auto* y = out.mutable_data_ptr<float>();
  for_outputs(outs, [&](int64_t first, int64_t count) { row_tiles()->product(a, rows, columns, w + first * columns, count, y + first, outs); });
  return bias_o.defined() ? out.add_(bias_o) : out;
}

at::Tensor skinny_gate(const at::Tensor& x, const at::Tensor& gate_up_2oi, const at::Tensor& bias_2o) {
  SF_CHECK(is_skinny(x, gate_up_2oi), "a gate of {} values", x.numel());
  const int64_t columns = gate_up_2oi.size(1), outs = gate_up_2oi.size(0) / 2, rows = x.numel() / columns;
  const at::Tensor in = x.contiguous(), out = at::empty(with_last(x, outs), x.options());
  const auto *a = in.const_data_ptr<float>(), *gate = gate_up_2oi.const_data_ptr<float>(), *up = gate + outs * columns;
  const float* bias = bias_2o.defined() ? bias_2o.const_data_ptr<float>() : nullptr;
  auto* y = out.mutable_data_ptr<float>();
  for_outputs(outs, [&](int64_t first, int64_t count) {
    row_tiles()->gate(a, rows, columns, gate + first * columns, up + first * columns, bias == nullptr ? nullptr : bias + first, bias == nullptr ? nullptr : bias + outs + first, count,
                      y + first, outs);
  });
  return out;
}

std::pair<at::Tensor, at::Tensor> skinny_add_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight_h, double eps) {
  SF_CHECK(is_skinny(x, weight_h) && x.is_contiguous() && (!delta.defined() || (delta.is_contiguous() && delta.sizes() == x.sizes())) && x.size(-1) == weight_h.size(0),
           "a norm of {} values", x.numel());
  const int64_t h = x.size(-1), rows = x.numel() / h;
  const at::Tensor sum = delta.defined() ? at::empty_like(x) : x, normed = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *more = delta.defined() ? delta.const_data_ptr<float>() : nullptr;
  float *to_sum = delta.defined() ? sum.mutable_data_ptr<float>() : nullptr, *to_normed = normed.mutable_data_ptr<float>();
  in_crew(rows, at::get_num_threads(), [&](int64_t r) {
    row_tiles()->add_norm(from + r * h, more != nullptr ? more + r * h : nullptr, weight_h.const_data_ptr<float>(), h, static_cast<float>(eps),
                          to_sum != nullptr ? to_sum + r * h : nullptr, to_normed + r * h);
  });
  return {sum, normed};
}

}  // namespace sf
