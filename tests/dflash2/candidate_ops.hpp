// tests/dflash2/candidate_ops.hpp: the host's operations, but for the candidates of a head objective: they are noted, or given.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sf/ops.hpp"

namespace sf::testing {

class CandidateOps final : public Ops {
 public:
  /// `given_rk`: int64, the candidates of each row of the one head objective that is run; undefined: the head's own.
  explicit CandidateOps(at::Tensor given_rk = {}) : given_rk_(std::move(given_rk)) {}
  /// Of the last head objective, on the CPU.
  [[nodiscard]] at::Tensor ids() const;

  at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_h, double eps) override;
  std::vector<at::Tensor> residual_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h, double eps) override;
  at::Tensor head_norm_rope(const at::Tensor& x_bqne, const at::Tensor& weight_e, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf, double eps) override;
  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) override;
  at::Tensor grouped_convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th, int64_t block_size) override;
  at::Tensor block_attention(const BlockAttention& attention) override;
  at::Tensor head_objective(const HeadObjective& objective, const RowLoss& loss) override;
  at::Tensor unroll_attention(const UnrollAttention& attention) override;
  VocabularyTeaching vocabulary_teacher(const VocabularyTeacher& teacher) override;
  DistillResult distill_head(const DistillHead& head) override;
  at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids) override;
  at::Tensor float8_amax(const at::Tensor& x) override;
  Float8Matrix float8_encode(const Float8Encode& encode) override;
  void float8_transpose(const at::Tensor& values_rc, const at::Tensor& into_cr) override;
  at::Tensor float8_product(const Float8Product& product) override;
  void add_weight_gradient(const at::Tensor& sum_oi, const at::Tensor& a_ro, const at::Tensor& b_ri) override;

 private:
  at::Tensor given_rk_;
  std::vector<at::Tensor> seen_;
};

/// How many rows have not the same candidates, in whatever order.
[[nodiscard]] double rows_that_differ(const at::Tensor& ids_rk, const at::Tensor& other_rk);

}  // namespace sf::testing
