// Shapes: r rows · h hidden · w draft vocabulary
//
// One chunk: logits = hidden @ head^T, p = softmax(logits), P = softmax of the teacher's kept logits, Q = P * (the kept columns' share of the
// teacher's mass). With A = sum min(Q, p):
//   cross-entropy  c = log sum exp(z) - <P, z>      dc/dz = p - P
//   acceptance     dA/dz = p ([p < Q] - sum p [p < Q])
// The gradient is written over the logits and multiplied at once: by the head for the rows, by the rows into the head's gradient buffer. The
// lambda mix needs mean(A) before the first row can be weighted: a pass over the logits without gradient comes first.
#include "core/kernels/distill_head.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/products.hpp"
#include "core/kernels/row_statistics.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kSmallestMask = 1e-8;  // of the mean's denominator, as the reference has it

at::Tensor one_minus(const at::Tensor& x) { return at::neg(x).add_(1); }

// What a pass leaves of its rows, without graph.
struct Rows {
  at::Tensor cross_entropy_r, acceptance_r, argmax_r;
};

class Pass {
 public:
  explicit Pass(const DistillHead& distill) : in_(distill) {
    rows_ = in_.hidden_rh.size(0);
    step_ = std::min(in_.chunk_rows, rows_);
    type_ = wide_type(in_.hidden_rh.scalar_type());
    const auto options = in_.hidden_rh.options().requires_grad(false);
    logits_ = at::empty({step_, in_.head_wh.size(0)}, options);
    found_ = {at::empty({rows_}, options.dtype(type_)), at::empty({rows_}, options.dtype(type_)), at::empty({rows_}, options.dtype(at::kLong))};
  }

  // Factors of each row's gradient of cross-entropy and acceptance; undefined: that part has none.
  struct Factors {
    at::Tensor cross_entropy_r;
    std::function<at::Tensor(const at::Tensor& acceptance_r, int64_t begin)> acceptance;  // d loss / d A of a chunk's rows
  };

  void run(const Factors* factors, at::Tensor* grad_hidden_rh) {
    for (int64_t begin = 0; begin < rows_; begin += step_) {
      chunk(begin, std::min(rows_, begin + step_) - begin, factors, grad_hidden_rh);
    }
  }

  [[nodiscard]] const Rows& found() const { return found_; }

 private:
  void chunk(int64_t begin, int64_t rows, const Factors* factors, at::Tensor* grad_hidden_rh) {
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, rows); };
    const at::Tensor hidden = part(in_.hidden_rh.detach()), head = in_.head_wh.detach();
    at::Tensor logits = logits_.narrow(0, 0, rows);
    at::mm_out(logits, hidden, head.t());
    if (has_kernels({logits, in_.teacher_logits_rw}) && in_.teacher_log_sum_exp_r.scalar_type() == at::kFloat) {
      chunk_on_kernels(logits, begin, factors, grad_hidden_rh);
      return;
    }
    at::Tensor z = wide(logits);
    const RowMaxima maxima = find_maxima(z, 0);
    part(found_.argmax_r).copy_(maxima.column_r);
    z.sub_(maxima.value_r.unsqueeze(1));
    const at::Tensor teacher = at::sub(wide(part(in_.teacher_logits_rw)), part(in_.teacher_kept_log_sum_exp_r).unsqueeze(1)).exp_();
    const at::Tensor expected = at::bmm(teacher.unsqueeze(1), z.unsqueeze(2)).view({rows});  // <P, z>
    at::Tensor& p = z.exp_();
    const at::Tensor sum = p.sum(1, /*keepdim=*/true);
    p.div_(sum);
    part(found_.cross_entropy_r).copy_(at::sub(sum.squeeze(1).log(), expected));
    const at::Tensor share = at::sub(part(in_.teacher_kept_log_sum_exp_r), part(in_.teacher_log_sum_exp_r)).exp_().unsqueeze(1);
    const bool wants_acceptance_gradient = factors != nullptr && factors->acceptance;
    const at::Tensor true_probability = at::mul(teacher, share);
    const at::Tensor accepted = at::minimum(p, true_probability);
    const at::Tensor acceptance = accepted.sum(1);
    part(found_.acceptance_r).copy_(acceptance);
    if (factors == nullptr) {
      return;
    }

    at::Tensor gradient;
    if (wants_acceptance_gradient) {
      at::Tensor below = at::mul(p, at::lt(p, true_probability));
      below.sub_(at::mul(p, below.sum(1, /*keepdim=*/true)));
      gradient = below.mul_(factors->acceptance(acceptance, begin).unsqueeze(1));
    }
    if (factors->cross_entropy_r.defined()) {
      at::Tensor part_gradient = p.sub_(teacher).mul_(part(factors->cross_entropy_r).unsqueeze(1));
      gradient = gradient.defined() ? gradient.add_(part_gradient) : part_gradient;
    }
    multiply(gradient.to(head.scalar_type()), begin, grad_hidden_rh);
  }

  // The gradient of the logits by the head for the rows, by the rows into the head's buffer.
  void multiply(const at::Tensor& gradient, int64_t begin, at::Tensor* grad_hidden_rh) {
    at::Tensor target = grad_hidden_rh->narrow(0, begin, gradient.size(0));
    at::mm_out(target, gradient, in_.head_wh.detach());
    if (in_.head_gradient_wh.defined()) {
      at::Tensor buffer = in_.head_gradient_wh;
      add_weight_gradient(buffer, gradient, in_.hidden_rh.detach().narrow(0, begin, gradient.size(0)));
    }
  }

  // One read of both rows for the sums, one for the gradient, which is written over the logits.
  void chunk_on_kernels(at::Tensor& logits, int64_t begin, const Factors* factors, at::Tensor* grad_hidden_rh) {
    const int64_t rows = logits.size(0), w = logits.size(1);
    const auto part = [&](const at::Tensor& x) { return whole(x.narrow(0, begin, rows)); };
    const auto floats = logits.options().dtype(at::kFloat), integers = logits.options().dtype(at::kLong);
    const at::Tensor unused_label = at::zeros({rows}, integers), unused = at::empty({2, rows}, floats), log_sum_exp = at::empty({rows}, floats),
                     argmax = at::empty({rows}, integers), cross_entropy = at::empty({rows}, floats), acceptance = at::empty({rows}, floats),
                     below = at::empty({rows}, floats);
    check_launch("distill_head", cuda_launchers()->head_rows_forward({.type = kernel_type(logits), .r = rows, .v = w, .k = 0, .multiplier = 1, .softcap = 0,
                                                                      .logits_rv = pointer(logits), .labels_r = unused_label.const_data_ptr<int64_t>(),
                                                                      .wanted_r = nullptr, .log_sum_exp_r = log_sum_exp.data_ptr<float>(),
                                                                      .nll_r = unused[0].data_ptr<float>(), .argmax_r = argmax.data_ptr<int64_t>(),
                                                                      .max_probability_r = unused[1].data_ptr<float>(), .top_values_rk = nullptr,
                                                                      .top_ids_rk = nullptr, .wanted_values_r = nullptr}, stream_of(logits)));
    const at::Tensor teacher = part(in_.teacher_logits_rw), kept_log_sum_exp = part(in_.teacher_kept_log_sum_exp_r),
                     full_log_sum_exp = part(in_.teacher_log_sum_exp_r);
    cuda::DistillRows arguments{.type = kernel_type(logits), .r = rows, .w = w, .logits_rw = pointer_to_write(logits), .teacher_rw = pointer(teacher),
                                .log_sum_exp_r = log_sum_exp.const_data_ptr<float>(),
                                .teacher_kept_log_sum_exp_r = kept_log_sum_exp.const_data_ptr<float>(),
                                .teacher_log_sum_exp_r = full_log_sum_exp.const_data_ptr<float>(), .cross_entropy_r = cross_entropy.data_ptr<float>(),
                                .acceptance_r = acceptance.data_ptr<float>(), .below_r = below.data_ptr<float>(), .grad_cross_entropy_r = nullptr,
                                .grad_acceptance_r = nullptr};
    check_launch("distill_head", cuda_launchers()->distill_rows_forward(arguments, stream_of(logits)));
    found_.argmax_r.narrow(0, begin, rows).copy_(argmax);
    found_.cross_entropy_r.narrow(0, begin, rows).copy_(cross_entropy);
    found_.acceptance_r.narrow(0, begin, rows).copy_(acceptance);
    if (factors == nullptr) {
      return;
    }
    at::Tensor of_entropy, of_acceptance;
    if (factors->cross_entropy_r.defined()) {
      of_entropy = part(factors->cross_entropy_r.to(at::kFloat));
    }
    if (factors->acceptance) {
      of_acceptance = whole(factors->acceptance(acceptance, begin).to(at::kFloat));
    }
    arguments.grad_cross_entropy_r = static_cast<const float*>(pointer(of_entropy));
    arguments.grad_acceptance_r = static_cast<const float*>(pointer(of_acceptance));
    check_launch("distill_head backward", cuda_launchers()->distill_rows_backward(arguments, stream_of(logits)));
    multiply(logits, begin, grad_hidden_rh);
  }

  const DistillHead& in_;
  int64_t rows_, step_;
  at::ScalarType type_;
  at::Tensor logits_;
  Rows found_;
};

struct DistillHeadFunction : torch::autograd::Function<DistillHeadFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden_rh, int64_t address, bool wants_gradient) {
    const auto& in = *reinterpret_cast<const DistillHead*>(address);
    const at::ScalarType type = wide_type(hidden_rh.scalar_type());
    const at::Tensor mask = in.mask_r.to(type), factor = in.factor.to(type), divisor = in.divisor.to(type);
    const at::Tensor count = mask.sum().clamp_min(kSmallestMask);
    const auto mean = [&](const at::Tensor& x_r) { return at::mul(x_r, mask).sum().div(count); };

    Pass pass(in);
    at::Tensor weight;  // of the cross-entropy in the lambda mix
    if (in.loss == DistillLoss::lambda) {
      pass.run(nullptr, nullptr);
      weight = mean(pass.found().acceptance_r).mul_(-in.kl_decay).exp_().mul_(in.kl_scale);
    }
    at::Tensor grad_hidden;
    if (wants_gradient) {
      grad_hidden = at::empty(hidden_rh.sizes(), hidden_rh.options().requires_grad(false));
      Pass::Factors factors;
      if (in.loss != DistillLoss::alpha) {
        const at::Tensor scale = at::div(factor, divisor);
        factors.cross_entropy_r = at::mul(mask, weight.defined() ? at::mul(scale, weight) : scale);
      }
      if (in.loss != DistillLoss::kl) {
        // d/dA of -mean(log A) and of (1 - w) (1 - mean(A)).
        const at::Tensor each = at::mul(mask, at::div(factor, count)).neg_();
        factors.acceptance = [&in, each, weight](const at::Tensor& acceptance_r, int64_t begin) {
          const at::Tensor mine = each.narrow(0, begin, acceptance_r.size(0));
          if (in.loss == DistillLoss::lambda) {
            return at::mul(mine, one_minus(weight));
          }
          return at::where(at::gt(acceptance_r, 0), at::div(mine, acceptance_r), at::zeros_like(mine));
        };
      }
      pass.run(&factors, &grad_hidden);
    } else if (in.loss != DistillLoss::lambda) {
      pass.run(nullptr, nullptr);
    }

    const Rows& rows = pass.found();
    const at::Tensor cross_entropy = at::mul(rows.cross_entropy_r, mask).sum().div(divisor);
    const at::Tensor acceptance = mean(rows.acceptance_r);
    at::Tensor step_loss = cross_entropy;
    if (in.loss == DistillLoss::alpha) {
      step_loss = mean(at::where(at::gt(rows.acceptance_r, 0), rows.acceptance_r, at::ones_like(rows.acceptance_r)).log_()).neg_();
    } else if (in.loss == DistillLoss::lambda) {
      step_loss = at::add(at::mul(weight, cross_entropy), at::mul(one_minus(weight), one_minus(acceptance)));
    }
    const at::Tensor loss = at::mul(step_loss, factor);
    context->save_for_backward({grad_hidden});
    context->mark_non_differentiable({step_loss, acceptance, rows.acceptance_r, rows.argmax_r});
    return {loss, step_loss, acceptance, rows.acceptance_r, rows.argmax_r};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor grad_hidden = context->get_saved_variables()[0];
    return {at::mul(grad_hidden, gradients[0].to(grad_hidden.scalar_type())), at::Tensor(), at::Tensor()};  // by 1 in training
  }
};

}  // namespace

DistillResult distill_head(const DistillHead& distill) {
  SF_CHECK(distill.hidden_rh.dim() == 2 && distill.head_wh.dim() == 2, "distill_head takes hidden [r, h] and head [w, h], found {} and {}",
           distill.hidden_rh.sizes().vec(), distill.head_wh.sizes().vec());
  const int64_t r = distill.hidden_rh.size(0), h = distill.hidden_rh.size(1), w = distill.head_wh.size(0);
  SF_CHECK(r > 0 && distill.chunk_rows > 0, "distill_head: {} rows in chunks of {}", r, distill.chunk_rows);
  SF_CHECK(distill.hidden_rh.scalar_type() == distill.head_wh.scalar_type(), "distill_head: hidden is {}, the head {}",
           c10::toString(distill.hidden_rh.scalar_type()), c10::toString(distill.head_wh.scalar_type()));
  SF_CHECK_SHAPE(distill.head_wh, {w, h});
  SF_CHECK_SHAPE(distill.teacher_logits_rw, {r, w});
  SF_CHECK_SHAPE(distill.teacher_kept_log_sum_exp_r, {r});
  SF_CHECK_SHAPE(distill.teacher_log_sum_exp_r, {r});
  SF_CHECK_SHAPE(distill.mask_r, {r});
  if (distill.head_gradient_wh.defined()) {
    SF_CHECK_SHAPE(distill.head_gradient_wh, {w, h});
  }
  const variable_list found =
      DistillHeadFunction::apply(distill.hidden_rh, reinterpret_cast<int64_t>(&distill), at::GradMode::is_enabled());
  return {found[0], found[1], found[2], found[3], found[4]};
}

}  // namespace sf
