// Shapes: r rows · h hidden · v vocabulary · w draft vocabulary
//
// The head is frozen and nothing is differentiated, so the vocabulary streams by in chunks with a running maximum m and sum s:
//   s := s exp(m - m') + sum exp(z - m'),   m' = max(m, max z).
// Kept columns ascend, so each chunk fills a run of the result.
#include "core/kernels/vocabulary_teacher.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/row_statistics.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace sf {
namespace {

constexpr int64_t kRowsCpu = 256, kRowsCuda = 2048;  // logits of a chunk in float32: 256 x 8192 are 8 MiB, 2048 x 32768 are 256 MiB
constexpr int64_t kColumnsCpu = 8192, kColumnsCuda = 32768;

// Whole rows at a time: one read of the logits for arg-max and log-sum-exp. `argmax` may be undefined.
void look_at_rows(const at::Tensor& logits_rv, at::Tensor log_sum_exp_r, at::Tensor argmax_r) {
  const int64_t r = logits_rv.size(0);
  const at::Tensor unused_label = at::zeros({r}, logits_rv.options().dtype(at::kLong)), unused = at::empty({2, r}, log_sum_exp_r.options());
  if (!argmax_r.defined()) {
    argmax_r = at::empty({r}, unused_label.options());
  }
  check_launch("vocabulary_teacher",
               cuda_launchers()->head_rows_forward({.type = kernel_type(logits_rv), .r = r, .v = logits_rv.size(1), .k = 0, .multiplier = 1, .softcap = 0,
                                                    .logits_rv = pointer(logits_rv), .labels_r = unused_label.const_data_ptr<int64_t>(),
                                                    .wanted_r = nullptr, .log_sum_exp_r = log_sum_exp_r.data_ptr<float>(),
                                                    .nll_r = unused[0].data_ptr<float>(), .argmax_r = argmax_r.data_ptr<int64_t>(),
                                                    .max_probability_r = unused[1].data_ptr<float>(), .top_values_rk = nullptr, .top_ids_rk = nullptr,
                                                    .wanted_values_r = nullptr}, stream_of(logits_rv)));
}

void teach_on_kernels(const VocabularyTeacher& teacher, VocabularyTeaching& found) {
  const int64_t r = teacher.hidden_rh.size(0), v = teacher.head_vh.size(0);
  at::Tensor logits = at::empty({std::min(kRowsCuda, r), v}, teacher.hidden_rh.options().requires_grad(false));
  for (int64_t row = 0; row < r; row += kRowsCuda) {
    const int64_t rows = std::min(kRowsCuda, r - row);
    at::Tensor z = logits.narrow(0, 0, rows);
    at::mm_out(z, teacher.hidden_rh.narrow(0, row, rows), teacher.head_vh.t());
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, row, rows); };
    look_at_rows(z, part(found.log_sum_exp_r), part(found.argmax_r));
    if (teacher.kept_w.defined()) {
      part(found.kept_logits_rw).copy_(z.index_select(1, teacher.kept_w));
      look_at_rows(whole(part(found.kept_logits_rw)), part(found.kept_log_sum_exp_r), at::Tensor());
    } else {
      part(found.kept_logits_rw).copy_(z);
      part(found.kept_log_sum_exp_r).copy_(part(found.log_sum_exp_r));
    }
  }
}

}  // namespace

VocabularyTeaching vocabulary_teacher(const VocabularyTeacher& teacher) {
  at::NoGradGuard no_gradient;
  const at::Tensor &hidden = teacher.hidden_rh, &head = teacher.head_vh;
  SF_CHECK(hidden.dim() == 2 && head.dim() == 2 && hidden.size(0) > 0, "vocabulary_teacher takes hidden [r, h] and head [v, h], found {} and {}",
           hidden.sizes().vec(), head.sizes().vec());
  const int64_t r = hidden.size(0), v = head.size(0);
  SF_CHECK_SHAPE(head, {v, hidden.size(1)});
  SF_CHECK(hidden.scalar_type() == head.scalar_type(), "vocabulary_teacher: hidden is {}, the head {}", c10::toString(hidden.scalar_type()),
           c10::toString(head.scalar_type()));
  const bool keeps_all = !teacher.kept_w.defined();
  const int64_t w = keeps_all ? v : teacher.kept_w.size(0);
  const int64_t* kept = nullptr;
  if (!keeps_all) {
    SF_CHECK(teacher.kept_host_w.defined() && teacher.kept_host_w.is_cpu() && teacher.kept_host_w.is_contiguous(),
             "vocabulary_teacher: kept columns without a copy on the host");
    SF_CHECK_SHAPE(teacher.kept_host_w, {w});
    kept = teacher.kept_host_w.const_data_ptr<int64_t>();
    SF_CHECK(w > 0 && kept[0] >= 0 && kept[w - 1] < v, "vocabulary_teacher: kept columns reach from {} to {} of {}", kept[0], kept[w - 1], v);
  }
  const int64_t step_rows = hidden.is_cpu() ? kRowsCpu : kRowsCuda;
  const int64_t step_columns = teacher.chunk_columns > 0 ? teacher.chunk_columns : hidden.is_cpu() ? kColumnsCpu : kColumnsCuda;
  const at::ScalarType type = wide_type(hidden.scalar_type());

  VocabularyTeaching found;
  found.argmax_r = at::empty({r}, hidden.options().dtype(at::kLong));
  found.log_sum_exp_r = at::empty({r}, hidden.options().dtype(type));
  found.kept_log_sum_exp_r = at::empty({r}, hidden.options().dtype(type));
  found.kept_logits_rw = at::empty({r, w}, hidden.options());
  if (has_kernels({hidden, head})) {
    teach_on_kernels(teacher, found);
    return found;
  }
  for (int64_t row = 0; row < r; row += step_rows) {
    const int64_t rows = std::min(step_rows, r - row);
    const at::Tensor states = hidden.narrow(0, row, rows);
    at::Tensor largest = at::full({rows}, -std::numeric_limits<double>::infinity(), hidden.options().dtype(type));
    at::Tensor sum = at::zeros({rows}, largest.options());
    at::Tensor best = at::zeros({rows}, found.argmax_r.options());
    at::Tensor kept_logits = found.kept_logits_rw.narrow(0, row, rows);
    for (int64_t column = 0; column < v; column += step_columns) {
      const int64_t columns = std::min(step_columns, v - column);
      const at::Tensor z = at::mm(states, head.narrow(0, column, columns).t());
      if (keeps_all) {
        kept_logits.narrow(1, column, columns).copy_(z);
      } else {
        const int64_t from = std::lower_bound(kept, kept + w, column) - kept, to = std::lower_bound(kept, kept + w, column + columns) - kept;
        if (to > from) {
          kept_logits.narrow(1, from, to - from).copy_(z.index_select(1, teacher.kept_w.narrow(0, from, to - from).sub(column)));
        }
      }
      at::Tensor u = wide(z);
      const RowMaxima maxima = find_maxima(u, 0);
      const at::Tensor is_larger = at::gt(maxima.value_r, largest);  // strictly: the lowest token among equals stays
      best = at::where(is_larger, at::add(maxima.column_r, column), best);
      const at::Tensor now = at::maximum(largest, maxima.value_r);
      sum.mul_(at::sub(largest, now).exp_()).add_(u.sub_(now.unsqueeze(1)).exp_().sum(1));
      largest = now;
    }
    found.argmax_r.narrow(0, row, rows).copy_(best);
    found.log_sum_exp_r.narrow(0, row, rows).copy_(at::add(largest, sum.log()));
    found.kept_log_sum_exp_r.narrow(0, row, rows)
        .copy_(keeps_all ? found.log_sum_exp_r.narrow(0, row, rows) : wide(kept_logits).logsumexp(1));
  }
  return found;
}

}  // namespace sf
