#include "tests/dflash2/candidate_ops.hpp"

#include "core/kernels/ops.hpp"

#include <ATen/ATen.h>

namespace sf::testing {

at::Tensor CandidateOps::ids() const { return at::cat(seen_); }

// Given candidates are read off the hidden rows in the callback: then the head itself looks for none.
at::Tensor CandidateOps::head_objective(const HeadObjective& objective, const RowLoss& loss) {
  seen_.clear();
  if (!given_rk_.defined()) {
    return cpu_ops().head_objective(objective, [&](const HeadRows& rows) {
      seen_.push_back(rows.top_ids_rk.cpu());
      return loss(rows);
    });
  }
  HeadObjective without = objective;
  without.top_k = 0;
  without.must_include_r = at::Tensor();
  without.candidate_table_vx = at::Tensor();
  without.parameters.push_back(objective.candidate_table_vx);
  return cpu_ops().head_objective(without, [&](const HeadRows& rows) {
    const int64_t r = rows.row_end - rows.row_begin, k = objective.top_k;
    HeadRows given = rows;
    given.top_ids_rk = given_rk_.narrow(0, rows.row_begin, r).to(rows.hidden_rh.device());
    const at::Tensor flat = given.top_ids_rk.reshape({-1});
    const at::Tensor columns_rkh = objective.head_vh.index_select(0, flat).view({r, k, -1});
    given.top_values_rk = at::bmm(columns_rkh, rows.hidden_rh.unsqueeze(-1)).squeeze(-1).to(at::kFloat);
    given.candidate_rows_rkx = objective.candidate_table_vx.index_select(0, flat).view({r, k, -1});
    given.last_id_r = given.top_ids_rk.select(1, k - 1);
    given.last_value_r = given.top_values_rk.detach().select(1, k - 1);
    seen_.push_back(given.top_ids_rk.cpu());
    return loss(given);
  });
}

at::Tensor CandidateOps::rms_norm(const at::Tensor& x, const at::Tensor& weight_h, double eps) { return cpu_ops().rms_norm(x, weight_h, eps); }
std::vector<at::Tensor> CandidateOps::residual_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h, double eps) {
  return cpu_ops().residual_rms_norm(x, residual, weight_h, eps);
}
at::Tensor CandidateOps::head_norm_rope(const at::Tensor& x_bqne, const at::Tensor& weight_e, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf, double eps) {
  return cpu_ops().head_norm_rope(x_bqne, weight_e, cos_bqf, sin_bqf, eps);
}
at::Tensor CandidateOps::swiglu(const at::Tensor& gate, const at::Tensor& up) { return cpu_ops().swiglu(gate, up); }
at::Tensor CandidateOps::grouped_convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th, int64_t block_size) {
  return cpu_ops().grouped_convolution(x_bqh, delta_bqtg, base_th, block_size);
}
at::Tensor CandidateOps::block_attention(const BlockAttention& attention) { return cpu_ops().block_attention(attention); }
at::Tensor CandidateOps::unroll_attention(const UnrollAttention& attention) { return cpu_ops().unroll_attention(attention); }
VocabularyTeaching CandidateOps::vocabulary_teacher(const VocabularyTeacher& teacher) { return cpu_ops().vocabulary_teacher(teacher); }
DistillResult CandidateOps::distill_head(const DistillHead& head) { return cpu_ops().distill_head(head); }
at::Tensor CandidateOps::lookup(const at::Tensor& table_vx, const at::Tensor& ids) { return cpu_ops().lookup(table_vx, ids); }
at::Tensor CandidateOps::float8_amax(const at::Tensor& x) { return cpu_ops().float8_amax(x); }
Float8Matrix CandidateOps::float8_encode(const Float8Encode& encode) { return cpu_ops().float8_encode(encode); }
void CandidateOps::float8_transpose(const at::Tensor& values_rc, const at::Tensor& into_cr) { cpu_ops().float8_transpose(values_rc, into_cr); }
at::Tensor CandidateOps::float8_product(const Float8Product& product) { return cpu_ops().float8_product(product); }
void CandidateOps::add_weight_gradient(const at::Tensor& sum_oi, const at::Tensor& a_ro, const at::Tensor& b_ri) { cpu_ops().add_weight_gradient(sum_oi, a_ro, b_ri); }

double rows_that_differ(const at::Tensor& ids_rk, const at::Tensor& other_rk) {
  return at::ne(std::get<0>(ids_rk.sort(1)), std::get<0>(other_rk.sort(1))).any(1).sum().item<double>();
}

}  // namespace sf::testing
