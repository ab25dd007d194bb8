// Attention along an unroll, the streamed teacher and the distilled head, each against a dense composition and central differences.
#include <doctest/doctest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/kernels/ops.hpp"
#include "tests/kernels/finite_difference.hpp"

using namespace sf;
using sf::test::distance;
using sf::test::random;
using sf::test::relative_distance;

namespace {

struct Shape {
  int64_t b, s, n, m, e, uses;
};

UnrollAttention attention_of(const std::vector<at::Tensor>& in, int64_t uses) {
  UnrollAttention attention;
  attention.query_bsne = in[0];
  attention.key_bsme = in[1];
  attention.value_bsme = in[2];
  for (int64_t k = 1; k < uses; ++k) {
    attention.extra_keys_bsme.push_back(in[1 + 2 * k]);
    attention.extra_values_bsme.push_back(in[2 + 2 * k]);
  }
  attention.scale = 1 / std::sqrt(static_cast<double>(in[0].size(3)));
  return attention;
}

std::vector<at::Tensor> inputs_of(const Shape& shape, at::ScalarType type = at::kDouble) {
  std::vector<at::Tensor> in = {random({shape.b, shape.s, shape.n, shape.e}, type)};
  for (int64_t i = 0; i < 2 * shape.uses; ++i) {
    in.push_back(random({shape.b, shape.s, shape.m, shape.e}, type));
  }
  return in;
}

// All keys side by side with the mask of the spec: first use causal, later uses on the diagonal.
at::Tensor dense(const std::vector<at::Tensor>& in, int64_t uses) {
  const int64_t s = in[0].size(1), groups = in[0].size(2) / in[1].size(2);
  std::vector<at::Tensor> keys, values;
  for (int64_t k = 0; k < uses; ++k) {
    keys.push_back(in[1 + 2 * k].repeat_interleave(groups, 2));
    values.push_back(in[2 + 2 * k].repeat_interleave(groups, 2));
  }
  at::Tensor allowed = at::zeros({s, uses * s}, at::TensorOptions().dtype(at::kBool));
  for (int64_t i = 0; i < s; ++i) {
    for (int64_t c = 0; c < uses * s; ++c) {
      if (c < s ? c <= i : c % s == i) {
        allowed[i][c] = true;
      }
    }
  }
  const at::Tensor q = in[0].transpose(1, 2), k = at::cat(keys, 1).transpose(1, 2), v = at::cat(values, 1).transpose(1, 2);
  const at::Tensor scores = at::matmul(q, k.transpose(2, 3)).div(std::sqrt(static_cast<double>(in[0].size(3))));
  const at::Tensor weights = scores.masked_fill(allowed.logical_not(), -std::numeric_limits<double>::infinity()).softmax(-1);
  return at::matmul(weights, v).transpose(1, 2);
}

}  // namespace

TEST_CASE("unroll attention: output and gradients equal the dense mask, whatever heads share keys and how many uses came before") {
  at::manual_seed(1);
  for (const Shape& shape : {Shape{2, 7, 4, 2, 6, 1}, Shape{1, 5, 3, 3, 4, 2}, Shape{2, 6, 4, 1, 4, 4}}) {
    CAPTURE(shape.uses);
    std::vector<at::Tensor> in = inputs_of(shape);
    for (at::Tensor& one : in) {
      one.requires_grad_();
    }
    const at::Tensor weight = random(in[0].sizes());
    at::AutoGradMode record(true);
    const at::Tensor found = cpu_ops().unroll_attention(attention_of(in, shape.uses)), expected = dense(in, shape.uses);
    CHECK(distance(found, expected) < 1e-12);
    const auto found_gradients = torch::autograd::grad({at::mul(found, weight).sum()}, in);
    const auto expected_gradients = torch::autograd::grad({at::mul(expected, weight).sum()}, in);
    for (size_t i = 0; i < in.size(); ++i) {
      CHECK(distance(found_gradients[i], expected_gradients[i]) < 1e-11);
    }
  }
}

TEST_CASE("unroll attention: central differences agree with the gradient") {
  at::manual_seed(2);
  const Shape shape{1, 4, 2, 1, 3, 3};
  const at::Tensor weight = random({shape.b, shape.s, shape.n, shape.e});
  CHECK(test::gradient_error([&](const std::vector<at::Tensor>& in) { return at::mul(cpu_ops().unroll_attention(attention_of(in, shape.uses)), weight).sum(); },
                             inputs_of(shape)) < 1e-7);
}

TEST_CASE("unroll attention: what each row sees, for four rows and three uses") {
  at::manual_seed(3);
  const Shape shape{1, 4, 1, 1, 2, 3};
  std::vector<at::Tensor> in = inputs_of(shape);
  for (at::Tensor& one : in) {
    one.requires_grad_();
  }
  at::AutoGradMode record(true);
  const at::Tensor out = cpu_ops().unroll_attention(attention_of(in, shape.uses));
  const std::vector<std::vector<int64_t>> sees = {{0, 4, 8}, {0, 1, 5, 9}, {0, 1, 2, 6, 10}, {0, 1, 2, 3, 7, 11}};
  for (int64_t i = 0; i < shape.s; ++i) {
    const auto gradients = torch::autograd::grad({out[0][i].sum()}, {in[2], in[4], in[6]}, {}, /*retain_graph=*/true);
    std::vector<int64_t> seen;
    for (int64_t c = 0; c < shape.uses * shape.s; ++c) {
      if (gradients[static_cast<size_t>(c / shape.s)][0][c % shape.s].abs().max().item<double>() > 0) {
        seen.push_back(c);
      }
    }
    CHECK(seen == sees[static_cast<size_t>(i)]);
  }
}

TEST_CASE("unroll attention: several row chunks give what one gives, in float32 and bfloat16") {
  at::manual_seed(4);
  const Shape shape{1, 400, 8, 4, 8, 2};  // 8 x 401 scores a row: the CPU's chunk holds fewer rows than there are
  std::vector<at::Tensor> in = inputs_of(shape, at::kFloat);
  std::vector<at::Tensor> half;
  for (at::Tensor& one : in) {
    half.push_back(one.to(at::kBFloat16));
    one.requires_grad_();
  }
  const at::Tensor expected = dense(in, shape.uses);
  CHECK(relative_distance(cpu_ops().unroll_attention(attention_of(half, shape.uses)).to(at::kFloat), expected) < 1e-2);
  at::AutoGradMode record(true);
  const at::Tensor found = cpu_ops().unroll_attention(attention_of(in, shape.uses));
  CHECK(relative_distance(found, expected) < 1e-6);
  const at::Tensor weight = random(in[0].sizes(), at::kFloat);
  const auto found_gradients = torch::autograd::grad({at::mul(found, weight).sum()}, in);
  const auto expected_gradients = torch::autograd::grad({at::mul(dense(in, shape.uses), weight).sum()}, in);
  for (size_t i = 0; i < in.size(); ++i) {
    CHECK(relative_distance(found_gradients[i], expected_gradients[i]) < 1e-5);
  }
}

namespace {

struct TeacherCase {
  at::Tensor hidden, head, kept;
};

TeacherCase teacher_case(at::ScalarType type = at::kFloat) {
  at::manual_seed(5);
  TeacherCase one{random({9, 6}, type), random({23, 6}, type), at::tensor({0, 3, 4, 9, 10, 11, 17, 22}, at::kLong)};
  one.head.select(0, 12).copy_(one.head.select(0, 5));  // equal logits for every row
  return one;
}

}  // namespace

TEST_CASE("vocabulary teacher: arg-max, both log-sum-exps and the kept logits, whatever the chunk of the vocabulary") {
  const TeacherCase one = teacher_case();
  const at::Tensor z = at::mm(one.hidden, one.head.t());
  for (const int64_t columns : {0, 1, 4, 7, 23, 100}) {
    CAPTURE(columns);
    const VocabularyTeaching found = cpu_ops().vocabulary_teacher(
        {.hidden_rh = one.hidden, .head_vh = one.head, .kept_w = one.kept, .kept_host_w = one.kept, .chunk_columns = columns});
    CHECK(distance(found.kept_logits_rw, z.index_select(1, one.kept)) < 1e-5);
    CHECK(distance(found.log_sum_exp_r, z.logsumexp(1)) < 1e-5);
    CHECK(distance(found.kept_log_sum_exp_r, z.index_select(1, one.kept).logsumexp(1)) < 1e-5);
    CHECK(at::equal(found.argmax_r, z.argmax(1)));
  }
  const VocabularyTeaching all = cpu_ops().vocabulary_teacher({.hidden_rh = one.hidden, .head_vh = one.head, .chunk_columns = 5});
  CHECK(distance(all.kept_logits_rw, z) < 1e-5);
  CHECK(at::equal(all.kept_log_sum_exp_r, all.log_sum_exp_r));
}

TEST_CASE("vocabulary teacher: of equal logits the lowest token wins, inside a chunk and across chunks") {
  TeacherCase one = teacher_case();
  for (const int64_t token : {5, 12}) {
    one.head.select(0, token).mul_(10);  // two tokens share the largest logit
  }
  one.hidden = one.head.select(0, 5).unsqueeze(0).clone();
  for (const int64_t columns : {1, 6, 10, 23}) {
    const VocabularyTeaching found =
        cpu_ops().vocabulary_teacher({.hidden_rh = one.hidden, .head_vh = one.head, .kept_w = one.kept, .kept_host_w = one.kept, .chunk_columns = columns});
    CHECK(found.argmax_r.item<int64_t>() == 5);
  }
}

namespace {

struct DistillCase {
  at::Tensor hidden, head, teacher_logits, full_log_sum_exp, mask;
  double factor = 0.7, divisor = 12;
};

DistillCase distill_case(at::ScalarType type = at::kDouble) {
  at::manual_seed(6);
  DistillCase one{random({7, 5}, type), random({6, 5}, type), random({7, 6}, type), {}, at::tensor({1, 1, 0, 1, 1, 1, 0}, at::kFloat)};
  one.full_log_sum_exp = at::add(one.teacher_logits.logsumexp(1), 0.3);  // some mass lies outside the draft's tokens
  return one;
}

DistillResult distilled(const DistillCase& one, const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& buffer, DistillLoss loss, double kl_decay,
                        int64_t chunk_rows = 3) {
  DistillHead distill;
  distill.hidden_rh = hidden;
  distill.head_wh = head.detach();
  distill.head_gradient_wh = buffer;
  distill.teacher_logits_rw = one.teacher_logits;
  distill.teacher_kept_log_sum_exp_r = one.teacher_logits.logsumexp(1);
  distill.teacher_log_sum_exp_r = one.full_log_sum_exp;
  distill.mask_r = one.mask;
  distill.divisor = at::full({}, one.divisor, at::TensorOptions().dtype(at::kFloat));
  distill.factor = at::full({}, one.factor, at::TensorOptions().dtype(at::kDouble));
  distill.loss = loss;
  distill.kl_scale = 0.8;
  distill.kl_decay = kl_decay;
  distill.chunk_rows = chunk_rows;
  return cpu_ops().distill_head(distill);
}

// The formulas of the spec as they stand there.
at::Tensor dense_loss(const DistillCase& one, const at::Tensor& hidden, const at::Tensor& head, DistillLoss loss, double kl_decay) {
  const at::Tensor z = at::mm(hidden, head.t()), mask = one.mask.to(z.scalar_type());
  const at::Tensor teacher = one.teacher_logits.softmax(1), truth = at::sub(one.teacher_logits, one.full_log_sum_exp.unsqueeze(1)).exp();
  const at::Tensor kl = at::mul(at::mul(teacher, z.log_softmax(1)).sum(1).neg(), mask).sum().div(one.divisor);
  const at::Tensor accepted = at::minimum(truth, z.softmax(1)).sum(1);
  const auto mean = [&](const at::Tensor& x) { return at::mul(x, mask).sum().div(mask.sum()); };
  if (loss == DistillLoss::kl) {
    return kl.mul(one.factor);
  }
  if (loss == DistillLoss::alpha) {
    return mean(accepted.log()).neg().mul(one.factor);
  }
  const at::Tensor weight = mean(accepted).detach().mul(-kl_decay).exp().mul(0.8);
  return at::add(at::mul(weight, kl), at::mul(at::rsub(weight, 1), at::rsub(mean(accepted), 1))).mul(one.factor);
}

constexpr DistillLoss kLosses[] = {DistillLoss::kl, DistillLoss::alpha, DistillLoss::lambda};

}  // namespace

TEST_CASE("distilled head: loss and both gradients equal autograd's over the dense formulas, in any row chunks") {
  const DistillCase one = distill_case();
  for (const DistillLoss loss : kLosses) {
    for (const int64_t chunk : {1, 3, 7, 100}) {
      CAPTURE(static_cast<int>(loss));
      CAPTURE(chunk);
      at::AutoGradMode record(true);
      const at::Tensor hidden = one.hidden.detach().clone().requires_grad_(), head = one.head.detach().clone().requires_grad_();
      const at::Tensor expected = dense_loss(one, hidden, head, loss, 2.0);
      const auto gradients = torch::autograd::grad({expected}, {hidden, head});
      at::Tensor buffer = at::ones(head.sizes(), at::TensorOptions().dtype(at::kDouble));
      const DistillResult found = distilled(one, hidden, head, buffer, loss, 2.0, chunk);
      CHECK(distance(found.loss, expected) < 1e-12);
      CHECK(distance(found.step_loss.mul(one.factor), expected) < 1e-12);
      CHECK(distance(torch::autograd::grad({found.loss}, {hidden})[0], gradients[0]) < 1e-12);
      CHECK(distance(buffer.sub(1), gradients[1]) < 1e-12);  // added to what was there
      CHECK(at::equal(found.argmax_r, at::mm(one.hidden, one.head.t()).argmax(1)));
    }
  }
}

TEST_CASE("distilled head: central differences agree with both gradients for every loss") {
  const DistillCase one = distill_case();
  for (const DistillLoss loss : kLosses) {
    CAPTURE(static_cast<int>(loss));
    const double decay = 0;  // the mix's weight carries no gradient, so it must not move: e^0 does not
    CHECK(test::gradient_error(
              [&](const std::vector<at::Tensor>& in) { return distilled(one, in[0], one.head, at::Tensor(), loss, decay).loss; }, {one.hidden}) < 1e-7);
    at::Tensor buffer = at::zeros(one.head.sizes(), at::TensorOptions().dtype(at::kDouble));
    {
      at::AutoGradMode record(true);
      (void)distilled(one, one.hidden.detach().clone().requires_grad_(), one.head, buffer, loss, decay);
    }
    at::NoGradGuard no_grad;
    for (int64_t i = 0; i < one.head.numel(); ++i) {
      at::Tensor above = one.head.clone(), below = one.head.clone();
      above.view({-1})[i] += 1e-5;
      below.view({-1})[i] -= 1e-5;
      const double expected = (distilled(one, one.hidden, above, at::Tensor(), loss, decay).loss.item<double>() -
                               distilled(one, one.hidden, below, at::Tensor(), loss, decay).loss.item<double>()) /
                              2e-5;
      CHECK(std::abs(buffer.view({-1})[i].item<double>() - expected) < 1e-8);
    }
  }
}

TEST_CASE("distilled head: a token that nothing is accepted of gives no loss and no gradient under alpha") {
  DistillCase one = distill_case(at::kFloat);
  one.hidden = at::tensor({1.0F, 0.0F, 0.0F, 1.0F}, at::kFloat).view({2, 2});
  one.head = at::tensor({300.0F, 0.0F, 0.0F, 1.0F}, at::kFloat).view({2, 2});  // row 0 is sure of token 0, row 1 is not
  one.teacher_logits = at::tensor({-300.0F, 0.0F, 0.0F, 0.0F}, at::kFloat).view({2, 2});
  one.full_log_sum_exp = one.teacher_logits.logsumexp(1);
  one.mask = at::ones({2}, at::TensorOptions().dtype(at::kFloat));
  at::AutoGradMode record(true);
  const at::Tensor hidden = one.hidden.clone().requires_grad_();
  at::Tensor buffer = at::zeros({2, 2});
  const DistillResult found = distilled(one, hidden, one.head, buffer, DistillLoss::alpha, 1);
  CHECK(found.acceptance_r[0].item<float>() == 0.0F);
  CHECK(std::isfinite(found.loss.item<float>()));
  const at::Tensor gradient = torch::autograd::grad({found.loss}, {hidden})[0];
  CHECK(gradient[0].abs().max().item<float>() == 0.0F);
  CHECK(gradient[1].abs().max().item<float>() > 0.0F);
  CHECK(buffer.isfinite().all().item<bool>());
  CHECK(buffer.select(1, 0).abs().max().item<float>() == 0.0F);
}

TEST_CASE("distilled head: without an active row loss and gradients are exactly zero, but for lambda's constant") {
  DistillCase one = distill_case(at::kFloat);
  one.mask.zero_();
  for (const DistillLoss loss : kLosses) {
    at::AutoGradMode record(true);
    const at::Tensor hidden = one.hidden.clone().requires_grad_();
    at::Tensor buffer = at::zeros(one.head.sizes());
    const DistillResult found = distilled(one, hidden, one.head, buffer, loss, 1);
    CHECK(found.step_loss.item<float>() == doctest::Approx(loss == DistillLoss::lambda ? 0.2 : 0.0));  // 1 - kl_scale
    CHECK(torch::autograd::grad({found.loss}, {hidden})[0].abs().max().item<float>() == 0.0F);
    CHECK(buffer.abs().max().item<float>() == 0.0F);
  }
}

TEST_CASE("distilled head: bfloat16 stays near float32") {
  const DistillCase one = distill_case(at::kFloat);
  DistillCase half = one;
  half.hidden = one.hidden.to(at::kBFloat16);
  half.head = one.head.to(at::kBFloat16);
  half.teacher_logits = one.teacher_logits.to(at::kBFloat16);
  for (const DistillLoss loss : kLosses) {
    const double expected = distilled(one, one.hidden, one.head, at::Tensor(), loss, 1).loss.item<double>();
    CHECK(distilled(half, half.hidden, half.head, at::Tensor(), loss, 1).loss.item<double>() == doctest::Approx(expected).epsilon(2e-2));
  }
}
