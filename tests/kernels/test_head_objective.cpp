#include <doctest/doctest.h>

#include "core/kernels/head_objective.hpp"
#include "core/kernels/row_statistics.hpp"
#include "tests/kernels/finite_difference.hpp"

#include <cmath>

using sf::HeadObjective;
using sf::HeadRows;
using sf::test::distance;
using sf::test::gradient_error;
using sf::test::random;
using sf::test::relative_distance;

namespace {

HeadObjective example(int64_t r, int64_t h, int64_t v, at::ScalarType type = at::kDouble) {
  HeadObjective objective;
  objective.hidden_rh = random({r, h}, type);
  objective.head_vh = random({v, h}, type);
  objective.labels_r = at::randint(v, {r}, at::kLong);
  return objective;
}

at::Tensor logits_of(const HeadObjective& objective, const at::Tensor& hidden) {
  const at::Tensor u = at::mm(hidden, objective.head_vh.t()) * objective.logit_multiplier;
  return objective.softcap > 0 ? at::tanh(u / objective.softcap) * objective.softcap : u;
}

}  // namespace

TEST_CASE("head objective: weighted cross-entropy over chunks equals log_softmax over everything, gradients too") {
  at::manual_seed(21);
  struct Case {
    const char* name;
    int64_t v;
    double multiplier, softcap;
  };
  for (const Case& one : {Case{"small vocabulary", 24, 1, 0}, Case{"groups and a rest", 64 * 40 + 17, 1, 0},
                          Case{"multiplier", 200, 0.3, 0}, Case{"softcap", 200, 1, 2.5}, Case{"both", 64 * 40, 0.7, 4}}) {
    CAPTURE(one.name);
    HeadObjective objective = example(13, 6, one.v);
    objective.logit_multiplier = one.multiplier;
    objective.softcap = one.softcap;
    objective.chunk_rows = 5;
    const at::Tensor weights = at::rand({13}, at::kDouble);
    const auto loss = [&](const HeadRows& rows) {
      return at::mul(rows.nll_r, weights.narrow(0, rows.row_begin, rows.row_end - rows.row_begin)).sum();
    };
    const at::Tensor hidden = objective.hidden_rh.clone().requires_grad_();
    const at::Tensor log_p = at::log_softmax(logits_of(objective, hidden), 1);
    const at::Tensor expected = -(log_p.gather(1, objective.labels_r.unsqueeze(1)).squeeze(1) * weights).sum();
    const at::Tensor expected_gradient = torch::autograd::grad({expected}, {hidden})[0];

    objective.hidden_rh = objective.hidden_rh.clone().requires_grad_();
    const at::Tensor found = sf::head_objective(objective, loss);
    CHECK(std::abs(found.item<double>() - expected.item<double>()) < 1e-11);
    CHECK(distance(torch::autograd::grad({found}, {objective.hidden_rh})[0], expected_gradient) < 1e-12);
    {
      at::NoGradGuard evaluating;
      CHECK(std::abs(sf::head_objective(objective, loss).item<double>() - expected.item<double>()) < 1e-11);
    }
  }
}

TEST_CASE("head objective: candidates, arg-max and log-sum-exp are the row's own") {
  at::manual_seed(22);
  HeadObjective objective = example(7, 8, 64 * 50 + 3, at::kFloat);
  objective.top_k = 9;
  objective.chunk_rows = 4;
  at::NoGradGuard no_grad;
  const at::Tensor u = logits_of(objective, objective.hidden_rh);
  sf::head_objective(objective, [&](const HeadRows& rows) {
    const at::Tensor mine = u.narrow(0, rows.row_begin, rows.row_end - rows.row_begin);
    const auto [values, ids] = mine.topk(9, 1);
    CHECK(at::allclose(rows.top_values_rk, values));
    CHECK(at::equal(rows.top_ids_rk, ids));
    CHECK(at::equal(rows.argmax_r, mine.argmax(1)));
    CHECK(at::equal(rows.last_id_r, ids.select(1, 8)));
    CHECK(at::allclose(rows.log_sum_exp_r, mine.logsumexp(1)));
    return rows.nll_r.sum();
  });
}

TEST_CASE("head objective: must_include takes the last candidate's place only where it is missing, with its own logit") {
  at::manual_seed(23);
  HeadObjective objective = example(6, 5, 40);
  objective.top_k = 4;
  at::NoGradGuard no_grad;
  const at::Tensor u = logits_of(objective, objective.hidden_rh);
  const auto [values, ids] = u.topk(40, 1);
  // Rows 0..2 want a token that is a candidate anyway, rows 3..5 one far below.
  objective.must_include_r = at::cat({ids.narrow(0, 0, 3).select(1, 1), ids.narrow(0, 3, 3).select(1, 30)});
  sf::head_objective(objective, [&, all_ids = ids, all_values = values](const HeadRows& rows) {
    CHECK(at::equal(rows.top_ids_rk.narrow(0, 0, 3), all_ids.narrow(0, 0, 3).narrow(1, 0, 4)));
    CHECK(at::equal(rows.top_ids_rk.narrow(0, 3, 3).narrow(1, 0, 3), all_ids.narrow(0, 3, 3).narrow(1, 0, 3)));
    CHECK(at::equal(rows.top_ids_rk.narrow(0, 3, 3).select(1, 3), all_ids.narrow(0, 3, 3).select(1, 30)));
    CHECK(distance(rows.top_values_rk.narrow(0, 3, 3).select(1, 3), all_values.narrow(0, 3, 3).select(1, 30)) < 1e-14);
    CHECK(at::equal(rows.last_id_r, all_ids.select(1, 3)));
    return rows.nll_r.sum();
  });
}

TEST_CASE("head objective: a loss over candidates, a candidate table, hidden rows and outside parameters has the gradient of finite differences") {
  at::manual_seed(24);
  for (const bool include : {false, true}) {
    for (const double softcap : {0.0, 3.0}) {
      CAPTURE(include);
      CAPTURE(softcap);
      HeadObjective objective = example(5, 4, 12);
      objective.top_k = 3;
      objective.chunk_rows = 2;
      objective.softcap = softcap;
      objective.logit_multiplier = 0.8;
      if (include) {
        objective.must_include_r = objective.labels_r;
      }
      const auto run = [&](const std::vector<at::Tensor>& in) {
        HeadObjective mine = objective;
        mine.hidden_rh = in[0];
        mine.parameters = {in[1], in[2]};
        mine.candidate_table_vx = in[3];
        return sf::head_objective(mine, [&](const HeadRows& rows) {
          const int64_t count = rows.row_end - rows.row_begin;
          const at::Tensor extra = in[1].index_select(0, rows.top_ids_rk.reshape({-1})).view({count, 3});
          const at::Tensor scores = rows.top_values_rk + rows.candidate_rows_rkx.square().sum(-1) + extra * in[2].narrow(0, rows.row_begin, count).unsqueeze(1);
          return at::mul(at::logsumexp(scores, 1), rows.nll_r).sum() + rows.hidden_rh.square().sum();
        });
      };
      CHECK(gradient_error(run, {objective.hidden_rh, random({12}), random({5}), random({12, 2})}) < 1e-7);
    }
  }
}

TEST_CASE("head objective: bfloat16 logits lose about what bfloat16 loses") {
  at::manual_seed(25);
  HeadObjective objective = example(32, 64, 500, at::kBFloat16);
  const at::Tensor hidden = objective.hidden_rh.to(at::kDouble).requires_grad_();
  const at::Tensor log_p = at::log_softmax(at::mm(hidden, objective.head_vh.to(at::kDouble).t()), 1);
  const at::Tensor expected = -log_p.gather(1, objective.labels_r.unsqueeze(1)).sum();
  const at::Tensor expected_gradient = torch::autograd::grad({expected}, {hidden})[0];
  objective.hidden_rh = objective.hidden_rh.clone().requires_grad_();
  const at::Tensor found = sf::head_objective(objective, [](const HeadRows& rows) { return rows.nll_r.sum(); });
  CHECK(std::abs(found.item<double>() / expected.item<double>() - 1) < 2e-3);
  CHECK(relative_distance(torch::autograd::grad({found}, {objective.hidden_rh})[0].to(at::kDouble), expected_gradient) < 0.02);
}

TEST_CASE("row statistics: loops and ATen calls find what a full sort finds, the lowest column among equals") {
  at::manual_seed(26);
  for (const int64_t v : {64 * 30 + 5, 4096, 130, 40}) {
    CAPTURE(v);
    const at::Tensor rows = at::randn({20, v}, at::kFloat);
    REQUIRE(sf::has_row_loops(rows));
    for (const int64_t k : {0, 1, 5, 14}) {
      CAPTURE(k);
      for (const auto& found : {sf::find_maxima(rows, k), sf::find_maxima_aten(rows, k)}) {
        CHECK(at::equal(found.column_r, rows.argmax(1)));
        CHECK(at::equal(found.value_r, rows.amax(1)));
        if (k > 0) {
          const auto [expected, columns] = rows.topk(k, 1);
          CHECK(at::equal(found.top_values_rk, expected));
          CHECK(at::equal(found.top_columns_rk, columns));
        }
      }
    }
  }
  at::Tensor rows = at::zeros({3, 64 * 30 + 5});
  rows[0][700] = rows[0][701] = rows[0][1900] = 2;  // equals in one group and in another
  rows[1][64 * 30 + 2] = 3;                         // in the rest
  for (const auto& found : {sf::find_maxima(rows, 3), sf::find_maxima_aten(rows, 3)}) {
    CHECK(found.column_r[0].item<int64_t>() == 700);
    CHECK(found.column_r[1].item<int64_t>() == 64 * 30 + 2);
    CHECK(found.column_r[2].item<int64_t>() == 0);
    CHECK(at::equal(found.top_values_rk[0], at::full({3}, 2.0f)));
  }
}

TEST_CASE("row statistics: exponentials and their sums are those of float64, far below the largest too") {
  at::manual_seed(27);
  for (const int64_t v : {1000, 4096 + 7, 5}) {
    CAPTURE(v);
    at::Tensor rows = at::randn({6, v}, at::kFloat).mul(20);
    rows[1].fill_(3);
    rows[2][0] = 500;  // everything else underflows
    const at::Tensor largest = rows.amax(1);
    const at::Tensor expected = at::exp(at::sub(rows, largest.unsqueeze(1)).to(at::kDouble));
    const at::Tensor sums = sf::exponentiate_rows(rows, largest);
    const at::Tensor error = (rows.to(at::kDouble) - expected).abs() / expected.clamp_min(1e-37);
    CHECK(at::where(at::gt(expected, 2e-38), error, at::zeros_like(error)).max().item<double>() < 3e-7);
    CHECK(at::where(at::gt(expected, 2e-38), at::zeros_like(rows), rows).max().item<double>() < 2e-38);
    CHECK(((sums.to(at::kDouble) - expected.sum(1)).abs() / expected.sum(1)).max().item<double>() < 5e-7);
  }
}

TEST_CASE("head objective: NaN in a row's hidden state makes the loss NaN and ends nothing early") {
  at::manual_seed(28);
  HeadObjective objective = example(4, 8, 64 * 5, at::kFloat);
  objective.top_k = 3;
  objective.hidden_rh[2][1] = std::nan("");
  objective.hidden_rh = objective.hidden_rh.requires_grad_();
  const at::Tensor loss = sf::head_objective(objective, [](const HeadRows& rows) { return rows.nll_r.sum(); });
  CHECK(std::isnan(loss.item<double>()));
}
