#include "core/train/model_flops.hpp"

#include <ATen/ATen.h>

namespace sf {
namespace {

// Of a product of `rows` with a weight [out, in]: forward, gradient of the weight, gradient of the rows.
double product_flops(double rows, const at::Tensor& weight, bool for_weight, bool for_rows) {
  return 2.0 * rows * static_cast<double>(weight.numel()) * (1 + (for_weight ? 1 : 0) + (for_rows ? 1 : 0));
}

double rows_of(const at::Tensor& x) { return static_cast<double>(x.numel() / x.size(-1)); }
bool is_recorded(const at::Tensor& x) { return at::GradMode::is_enabled() && x.requires_grad(); }

// Keys that the rows of all blocks see, as sf/ops.hpp defines it: context strictly before the anchor, then the own block.
at::Tensor pairs_of(const BlockAttention& a) {
  const at::Tensor anchor_bw1 = a.anchors_bw.unsqueeze(2), row_j = at::arange(a.block_size, a.anchors_bw.options());
  const int64_t reach = a.window_tokens > 0 ? a.window_tokens - 1 : (int64_t{1} << 40);   // a row at p sees positions from p - reach on
  const at::Tensor first_bwj = at::add(anchor_bw1, row_j).sub(reach);
  const at::Tensor context_bwj = at::sub(anchor_bw1, first_bwj.clamp_min(0)).clamp_min(0);
  const at::Tensor own_first_bwj = at::sub(first_bwj, anchor_bw1).clamp_min(0);
  const at::Tensor own_last_j = a.causal ? row_j.add(1) : at::full_like(row_j, a.block_size);
  const at::Tensor own_bwj = at::sub(own_last_j, own_first_bwj).clamp_min(0);
  return at::mul(at::add(context_bwj, own_bwj).sum(2), a.keep_bw).sum();
}

}  // namespace

class FlopCount::CountedOps final : public Ops {
 public:
  CountedOps(FlopCount& count, Ops& ops) : count_(count), ops_(ops) {}

  at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_h, double eps) override { return ops_.rms_norm(x, weight_h, eps); }
  std::vector<at::Tensor> residual_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_h, double eps) override {
    return ops_.residual_rms_norm(x, residual, weight_h, eps);
  }
  at::Tensor head_norm_rope(const at::Tensor& x_bqne, const at::Tensor& weight_e, const at::Tensor& cos_bqf, const at::Tensor& sin_bqf, double eps) override {
    return ops_.head_norm_rope(x_bqne, weight_e, cos_bqf, sin_bqf, eps);
  }
  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) override { return ops_.swiglu(gate, up); }
  at::Tensor grouped_convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th, int64_t block_size) override {
    return ops_.grouped_convolution(x_bqh, delta_bqtg, base_th, block_size);
  }
  at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids) override { return ops_.lookup(table_vx, ids); }
  at::Tensor float8_amax(const at::Tensor& x) override { return ops_.float8_amax(x); }
  Float8Matrix float8_encode(const Float8Encode& encode) override { return ops_.float8_encode(encode); }
  void float8_transpose(const at::Tensor& values_rc, const at::Tensor& into_cr) override { ops_.float8_transpose(values_rc, into_cr); }
  at::Tensor float8_product(const Float8Product& product) override { return ops_.float8_product(product); }
  void add_weight_gradient(const at::Tensor& sum_oi, const at::Tensor& a_ro, const at::Tensor& b_ri) override { ops_.add_weight_gradient(sum_oi, a_ro, b_ri); }

  at::Tensor block_attention(const BlockAttention& a) override {
    const at::Tensor& q = a.query_bqne;
    count_.pairs_.emplace_back(pairs_of(a), (is_recorded(q) ? 12.0 : 4.0) * static_cast<double>(q.size(2) * q.size(3)));
    return ops_.block_attention(a);
  }
  at::Tensor unroll_attention(const UnrollAttention& a) override {
    const at::Tensor& q = a.query_bsne;
    const auto b = static_cast<double>(q.size(0)), s = static_cast<double>(q.size(1));
    const double pairs = b * (s * (s + 1) / 2 + s * static_cast<double>(a.extra_keys_bsme.size()));
    count_.sum_.attention += (is_recorded(q) ? 12.0 : 4.0) * pairs * static_cast<double>(q.size(2) * q.size(3));
    return ops_.unroll_attention(a);
  }
  at::Tensor head_objective(const HeadObjective& o, const RowLoss& loss) override {
    const double rows = rows_of(o.hidden_rh);
    count_.sum_.head += product_flops(rows, o.head_vh, false, is_recorded(o.hidden_rh));
    if (o.bias_rx.defined()) {
      count_.sum_.head += product_flops(rows, o.bias_table_vx, is_recorded(o.bias_table_vx), is_recorded(o.bias_rx));
    }
    if (o.teacher_states_nh.defined()) {
      count_.sum_.head += product_flops(rows_of(o.teacher_states_nh), o.head_vh, false, false);
    }
    return ops_.head_objective(o, loss);
  }
  VocabularyTeaching vocabulary_teacher(const VocabularyTeacher& t) override {
    count_.sum_.head += product_flops(rows_of(t.hidden_rh), t.head_vh, false, false);
    return ops_.vocabulary_teacher(t);
  }
  DistillResult distill_head(const DistillHead& d) override {
    count_.sum_.head += product_flops(rows_of(d.hidden_rh), d.head_wh, d.head_gradient_wh.defined(), is_recorded(d.hidden_rh));
    return ops_.distill_head(d);
  }

 private:
  FlopCount& count_;
  Ops& ops_;
};

class FlopCount::CountedContext final : public UnitContext {
 public:
  CountedContext(FlopCount& count, UnitContext& context) : count_(count), context_(context), ops_(count, context.ops()) {}

  const at::Tensor& parameter(std::string_view name) override { return context_.parameter(name); }
  at::Tensor linear(std::string_view name, const at::Tensor& x) override {
    count(name, x);
    return context_.linear(name, x);
  }
  std::vector<at::Tensor> linears(std::initializer_list<std::string_view> names, const at::Tensor& x) override {
    for (const std::string_view name : names) {
      count(name, x);
    }
    return context_.linears(names, x);
  }
  at::Tensor gradient_buffer(std::string_view name) override { return context_.gradient_buffer(name); }
  bool has(std::string_view name) const override { return context_.has(name); }
  Ops& ops() override { return ops_; }
  Phase phase() const override { return context_.phase(); }

 private:
  void count(std::string_view name, const at::Tensor& x) {
    const at::Tensor& weight = context_.parameter(std::string(name) + ".weight");
    count_.sum_.products += product_flops(rows_of(x), weight, is_recorded(weight), is_recorded(x));
  }

  FlopCount& count_;
  UnitContext& context_;
  CountedOps ops_;
};

class FlopCount::CountedUnit final : public Unit {
 public:
  CountedUnit(FlopCount& count, Unit& unit) : count_(count), unit_(unit) {}
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override {
    if (!count_.is_counting_) {
      return unit_.forward(context, inputs);
    }
    CountedContext counted(count_, context);
    return unit_.forward(counted, inputs);
  }

 private:
  FlopCount& count_;
  Unit& unit_;
};

FlopCount::FlopCount() = default;
FlopCount::~FlopCount() = default;

Unit& FlopCount::counted(Unit& unit) { return *units_.emplace_back(std::make_unique<CountedUnit>(*this, unit)); }

void FlopCount::start() {
  sum_ = ModelFlops();
  pairs_.clear();
  is_counting_ = true;
}

ModelFlops FlopCount::read() const {
  ModelFlops all = sum_;
  for (const auto& [pairs, flops] : pairs_) {
    all.attention += pairs.item<double>() * flops;
  }
  return all;
}

}  // namespace sf
