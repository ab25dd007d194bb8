// head_objective with a bias of low rank and a teacher.
#include <doctest/doctest.h>

#include "core/kernels/head_objective.hpp"
#include "core/kernels/head_teacher.hpp"
#include "core/kernels/row_statistics.hpp"
#include "tests/kernels/finite_difference.hpp"

#include <cmath>

using sf::HeadObjective;
using sf::HeadRows;
using sf::test::distance;
using sf::test::gradient_error;
using sf::test::random;

namespace {

// Seven rows in chunks of three; their states stand in ascending order, some wanted by several rows.
HeadObjective example(int64_t h, int64_t v, at::ScalarType type) {
  HeadObjective objective;
  objective.hidden_rh = random({7, h}, type);
  objective.head_vh = random({v, h}, type);
  objective.labels_r = at::randint(v, {7}, at::kLong);
  objective.chunk_rows = 3;
  objective.bias_rx = random({7, 2}, type);
  objective.bias_table_vx = random({v, 2}, type);
  objective.teacher_states_nh = random({10, h}, type);
  objective.teacher_places_mt = at::tensor({1, 2, 2, /**/ 2, 4, 5, /**/ 9, 9, 9}, at::kLong).view({3, 3});
  objective.teacher_index_r = at::tensor({0, 0, 1, /**/ 0, 1, 2, /**/ 0}, at::kLong);
  return objective;
}

const at::Tensor& state_of_row() {
  static const at::Tensor states = at::tensor({1, 1, 2, 2, 4, 5, 9}, at::kLong);
  return states;
}

// Distance and everything else by whole softmaxes.
struct Expected {
  at::Tensor nll, distance, argmax, top, teacher_argmax, teacher_top;
};

Expected expected_of(const HeadObjective& objective) {
  const at::Tensor logits = at::mm(objective.hidden_rh, objective.head_vh.t()) + at::mm(objective.bias_rx, objective.bias_table_vx.t());
  const at::Tensor p = at::softmax(logits, 1);
  const at::Tensor q = at::softmax(at::mm(objective.teacher_states_nh.index_select(0, state_of_row()), objective.head_vh.t()), 1);
  return {-at::log_softmax(logits, 1).gather(1, objective.labels_r.unsqueeze(1)).squeeze(1), (p - q).abs().sum(1), p.argmax(1), p.amax(1), q.argmax(1),
          q.amax(1)};
}

}  // namespace

TEST_CASE("head objective: bias and teacher give each row what whole softmaxes give, in loops and in ATen calls") {
  at::manual_seed(31);
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    for (const int64_t v : {24, 16 * 9 + 5, 4096 + 3}) {
      CAPTURE(v);
      const HeadObjective objective = example(6, v, type);
      const Expected expected = expected_of(objective);
      const double error = type == at::kDouble ? 1e-11 : 2e-5;
      at::NoGradGuard no_grad;
      sf::head_objective(objective, [&](const HeadRows& rows) {
        const auto part = [&](const at::Tensor& all) { return all.narrow(0, rows.row_begin, rows.row_end - rows.row_begin); };
        CHECK(distance(rows.nll_r, part(expected.nll)) < error);
        CHECK(distance(rows.distance_r, part(expected.distance)) < error);
        CHECK(distance(rows.max_probability_r, part(expected.top)) < 1e-5);
        CHECK(distance(rows.teacher_probability_r, part(expected.teacher_top)) < 1e-5);
        CHECK(at::equal(rows.argmax_r, part(expected.argmax)));
        CHECK(at::equal(rows.teacher_argmax_r, part(expected.teacher_argmax)));
        return rows.nll_r.sum();
      });
    }
  }
}

TEST_CASE("head objective: gradients through bias, its table and the distance are those of finite differences, each alone and together") {
  at::manual_seed(32);
  for (const double token : {0.0, 0.7}) {
    for (const double far : {0.0, 1.3}) {
      for (const double softcap : {0.0, 3.0}) {
        if (token == 0 && far == 0) {
          continue;
        }
        CAPTURE(token);
        CAPTURE(far);
        CAPTURE(softcap);
        const HeadObjective base = example(4, 9, at::kDouble);
        const at::Tensor weight = at::rand({7}, at::kDouble);
        const auto run = [&](const std::vector<at::Tensor>& in) {
          HeadObjective mine = base;
          mine.hidden_rh = in[0];
          mine.bias_rx = in[1];
          mine.bias_table_vx = in[2];
          mine.softcap = softcap;
          return sf::head_objective(mine, [&](const HeadRows& rows) {
            const at::Tensor w = weight.narrow(0, rows.row_begin, rows.row_end - rows.row_begin);
            at::Tensor sum = at::zeros({}, at::kDouble);
            if (token > 0) {
              sum = sum + (rows.nll_r * w).sum() * token;
            }
            if (far > 0) {
              sum = sum + (rows.distance_r * w).sum() * far;
            }
            return sum;
          });
        };
        CHECK(gradient_error(run, {base.hidden_rh, base.bias_rx, base.bias_table_vx}) < 1e-7);
      }
    }
  }
}

TEST_CASE("head teacher: loops and ATen calls agree on distance, tilt and gradient; a draft equal to its teacher is at distance 0") {
  at::manual_seed(33);
  for (const int64_t v : {5, 16 * 9 + 5, 4096 + 3}) {
    CAPTURE(v);
    at::Tensor exponentials = at::rand({6, v}).add_(1e-3);
    const at::Tensor sum = exponentials.sum(1);
    sf::TeacherChunk teacher;
    teacher.probability_tv = at::softmax(at::randn({4, v}), 1);
    teacher.probability_tv[3].copy_(exponentials[2] / sum[2]);
    teacher.index_r = at::tensor({0, 1, 3, 2, 0, 1}, at::kLong);
    const sf::TeacherDistance loops = sf::distance_to_teacher(exponentials, sum, teacher), calls = sf::distance_to_teacher_aten(exponentials, sum, teacher);
    CHECK(distance(loops.distance_r, calls.distance_r) < 2e-5);
    CHECK(loops.distance_r[2].item<double>() < 1e-5);
    // Near a tie the sign is a matter of rounding, so the row that equals its teacher is left out.
    const at::Tensor others = at::tensor({0, 1, 3, 4, 5}, at::kLong);
    CHECK(distance(loops.tilt_r.index_select(0, others), calls.tilt_r.index_select(0, others)) < 2e-5);
    const at::Tensor factor = at::randn({6}), step = at::randn({6});
    at::Tensor first = exponentials.clone(), second = exponentials.clone();
    sf::teacher_gradient(first, sum, teacher, calls.tilt_r, factor, step);
    sf::teacher_gradient_aten(second, sum, teacher, calls.tilt_r, factor, step);
    CHECK(distance(first.index_select(0, others), second.index_select(0, others)) < 1e-5);
  }
}

TEST_CASE("head objective: a bias alone changes nothing but the logits; without gradient wanted none is formed") {
  at::manual_seed(34);
  HeadObjective objective = example(5, 40, at::kFloat);
  objective.teacher_states_nh = objective.teacher_places_mt = objective.teacher_index_r = at::Tensor();
  objective.bias_rx = objective.bias_rx.requires_grad_();
  const at::Tensor loss = sf::head_objective(objective, [](const HeadRows& rows) {
    CHECK(!rows.distance_r.defined());
    return rows.nll_r.sum();
  });
  const auto gradients = torch::autograd::grad({loss}, {objective.bias_rx});
  const at::Tensor logits = at::mm(objective.hidden_rh, objective.head_vh.t()) + at::mm(objective.bias_rx, objective.bias_table_vx.t());
  const at::Tensor expected = -at::log_softmax(logits, 1).gather(1, objective.labels_r.unsqueeze(1)).sum();
  CHECK(std::abs(loss.item<double>() - expected.item<double>()) < 1e-3);
  CHECK(distance(gradients[0], torch::autograd::grad({expected}, {objective.bias_rx})[0]) < 1e-5);
}
