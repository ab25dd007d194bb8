#include "core/kernels/float8_head.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/kernels/float8.hpp"

namespace sf {
namespace {

constexpr int64_t kMultiple = 16;
constexpr int64_t kComparedRows = 128;   // of a call, so that an evaluation costs little more

class Heads final : public Float8Heads {
 public:
  void use(bool emulate) override {
    is_used = true;
    is_emulated = emulate;
    head.reset();
  }
  int64_t products() const override { return made; }

  bool is_used = false, is_emulated = false;
  int64_t made = 0;
  std::optional<Float8Head> head;
  const void* storage = nullptr;   // of the table that `head` was made of
  at::Tensor report;
};

Heads& heads() {
  static auto* one = new Heads();  // never destroyed: CUDA may be gone by then
  return *one;
}

Float8Matrix encoded(const at::Tensor& x_rc, Float8Format format) {
  return float8_encode({.x_rc = x_rc, .format = format, .scaling = Float8Scaling::row, .amax = {}, .rows = true, .columns = false, .alarm = {}, .into = {}});
}

}  // namespace

Float8Heads& float8_heads() { return heads(); }

int64_t float8_head_bytes(int64_t v, int64_t h) { return heads().is_used ? 2 * v * h + (v + h) * static_cast<int64_t>(sizeof(float)) : 0; }

const Float8Head* float8_head(const at::Tensor& head_vh) {
  Heads& all = heads();
  if (!all.is_used) {
    return nullptr;
  }
  if (all.head && all.storage == head_vh.storage().unsafeGetStorageImpl()) {
    return &*all.head;
  }
  if (head_vh.size(0) % kMultiple != 0 || head_vh.size(1) % kMultiple != 0) {
    throw Error(ExitCode::kUsage, format("plugin.fp8.head: the head is {} x {}, expected multiples of {}", head_vh.size(0), head_vh.size(1), kMultiple),
                "plugin.fp8.head = false");
  }
  all.head = Float8Head{.matrix = float8_encode({.x_rc = head_vh.detach(), .format = Float8Format::e4m3, .scaling = Float8Scaling::row, .amax = {}, .rows = true,
                                                 .columns = true, .alarm = {}, .into = {}}),
                        .emulate = all.is_emulated};
  all.storage = head_vh.storage().unsafeGetStorageImpl();
  return &*all.head;
}

at::Tensor float8_logits(const Float8Head& head, const at::Tensor& hidden_rh) {
  ++heads().made;
  return float8_product({.a_rk = encoded(hidden_rh.detach(), Float8Format::e4m3).rows(), .b_ck = head.matrix.rows(), .type = hidden_rh.scalar_type(), .add_to_rc = {},
                         .fast_accumulation = true, .emulate = head.emulate});
}

at::Tensor float8_head_gradient(const Float8Head& head, const at::Tensor& grad_logits_rv) {
  ++heads().made;
  return float8_product({.a_rk = encoded(grad_logits_rv, Float8Format::e5m2).rows(), .b_ck = head.matrix.columns(), .type = grad_logits_rv.scalar_type(), .add_to_rc = {},
                         .fast_accumulation = false, .emulate = head.emulate});
}

void compare_float8_head(const Float8Head& head, const at::Tensor& hidden_rh, const at::Tensor& logits_rv, const at::Tensor& labels_r) {
  at::NoGradGuard no_grad;
  const int64_t rows = std::min(kComparedRows, hidden_rh.size(0));
  const at::Tensor there = logits_rv.narrow(0, 0, rows).to(at::kFloat), here = float8_logits(head, hidden_rh.narrow(0, 0, rows).contiguous()).to(at::kFloat);
  const at::Tensor label = labels_r.narrow(0, 0, rows).unsqueeze(1);
  const auto nll = [&](const at::Tensor& logits) { return at::sub(at::logsumexp(logits, 1), logits.gather(1, label).squeeze(1)); };
  const at::Tensor found = at::stack({at::full({}, static_cast<double>(rows), there.options().dtype(at::kDouble)), at::eq(there.argmax(1), here.argmax(1)).sum().to(at::kDouble),
                                      at::sub(nll(there), nll(here)).abs().sum().to(at::kDouble)});
  Heads& all = heads();
  all.report = all.report.defined() ? at::add(all.report, found) : found;
}

at::Tensor take_float8_head_report() { return std::exchange(heads().report, at::Tensor()); }

}  // namespace sf
