#include "core/kernels/ops.hpp"

#include "core/kernels/block_attention.hpp"
#include "core/kernels/distill_head.hpp"
#include "core/kernels/float8.hpp"
#include "core/kernels/grouped_convolution.hpp"
#include "core/kernels/head_norm_rope.hpp"
#include "core/kernels/head_objective.hpp"
#include "core/kernels/lookup.hpp"
#include "core/kernels/products.hpp"
#include "core/kernels/rms_norm.hpp"
#include "core/kernels/swiglu.hpp"
#include "core/kernels/unroll_attention.hpp"
#include "core/kernels/vocabulary_teacher.hpp"

namespace sf {
namespace {

class AtenOps final : public Ops {
 public:
  at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_h, double eps) override { return sf::rms_norm(x, weight_h, eps); }

  std::vector<at::Tensor> residual_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h,
                                            double eps) override {
    return sf::residual_rms_norm(x, residual, weight_h, eps);
  }

  at::Tensor head_norm_rope(const at::Tensor& x_bqne, const at::Tensor& weight_e, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf,
                            double eps) override {
    return sf::head_norm_rope(x_bqne, weight_e, cos_bqf, sin_bqf, eps);
  }

  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) override { return sf::swiglu(gate, up); }

  at::Tensor grouped_convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th,
                                 int64_t block_size) override {
    return sf::grouped_convolution(x_bqh, delta_bqtg, base_th, block_size);
  }

  at::Tensor block_attention(const BlockAttention& attention) override { return sf::block_attention(attention); }

  at::Tensor head_objective(const HeadObjective& objective, const RowLoss& loss) override {
    return sf::head_objective(objective, loss);
  }

  at::Tensor unroll_attention(const UnrollAttention& attention) override { return sf::unroll_attention(attention); }

  VocabularyTeaching vocabulary_teacher(const VocabularyTeacher& teacher) override { return sf::vocabulary_teacher(teacher); }

  DistillResult distill_head(const DistillHead& distill) override { return sf::distill_head(distill); }

  at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids) override { return sf::lookup(table_vx, ids); }

  at::Tensor float8_amax(const at::Tensor& x) override { return sf::float8_amax(x); }
  Float8Matrix float8_encode(const Float8Encode& encode) override { return sf::float8_encode(encode); }
  void float8_transpose(const at::Tensor& values_rc, const at::Tensor& into_cr) override { sf::float8_transpose(values_rc, into_cr); }
  at::Tensor float8_product(const Float8Product& product) override { return sf::float8_product(product); }
  void add_weight_gradient(const at::Tensor& sum_oi, const at::Tensor& a_ro, const at::Tensor& b_ri) override { sf::add_weight_gradient(sum_oi, a_ro, b_ri); }
};

}  // namespace

Ops& cpu_ops() {
  static AtenOps ops;
  return ops;
}

}  // namespace sf
