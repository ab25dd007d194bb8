// Shapes: r rows · h hidden · v vocabulary · k candidates · x columns of a table
//
// One chunk: logits = hidden @ head^T, their statistics, the caller's loss and its gradient with respect to the statistics, then
//   d loss / d logit[v] = g_nll * (softmax[v] - [v == label]) + sum over candidates c of g_c * [v == id_c]
//                         + g_distance * softmax[v] * (sign(softmax[v] - teacher[v]) - tilt)    (head_teacher.hpp),
// written over the logits and multiplied by the head at once. Nothing of size r x v outlives the chunk.
#include "core/kernels/head_objective.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/float8_head.hpp"
#include "core/kernels/head_teacher.hpp"
#include "core/kernels/lookup.hpp"
#include "core/kernels/row_statistics.hpp"
#include "core/kernels/shape_check.hpp"
#include "core/kernels/slow_paths.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_plain(const HeadObjective& objective) { return objective.logit_multiplier == 1.0 && objective.softcap <= 0; }

// One kernel for what is read off the logits, one that writes the gradient over them: nothing wide of the chunk's size is made.
bool runs_on_kernels(const HeadObjective& objective) {
  if (!has_kernels({objective.hidden_rh, objective.head_vh})) {
    return false;
  }
  if (const char* why = slow_head_objective(objective.top_k)) {
    note_slow_path("head_objective", why);
    return false;
  }
  return true;
}

// Logits as the loss sees them, wide. Keeps the memory of `logits` when nothing has to be done.
at::Tensor transform(const at::Tensor& logits, const HeadObjective& objective) {
  at::Tensor u = wide(logits);
  if (is_plain(objective)) {
    return u;
  }
  u = at::mul(u, objective.logit_multiplier);
  return objective.softcap > 0 ? u.div_(objective.softcap).tanh_().mul_(objective.softcap) : u;
}

// Gradient of transformed logits `u` to that of the logits, in place.
void transform_backward(at::Tensor& gradient, const at::Tensor& u, const HeadObjective& objective) {
  if (objective.softcap > 0) {
    const at::Tensor unit = at::div(u, objective.softcap);
    gradient.mul_(at::mul(unit, unit).neg_().add_(1));
  }
  if (objective.logit_multiplier != 1.0) {
    gradient.mul_(objective.logit_multiplier);
  }
}

// Memory that chunks share: logits, and exponentials (or probabilities) when they cannot take the logits' place.
struct Buffers {
  at::Tensor logits, exponentials;
  at::Tensor teacher_logits, teacher_probabilities;

  Buffers(const HeadObjective& objective, int64_t chunk_rows, bool wants_gradient) {
    const int64_t v = objective.head_vh.size(0);
    const bool comes_from_float8 = wants_gradient && float8_head(objective.head_vh) != nullptr;
    logits = at::empty({comes_from_float8 ? 0 : chunk_rows, v}, objective.hidden_rh.options().requires_grad(false));
    if (objective.teacher_states_nh.defined()) {
      teacher_logits = at::empty({objective.teacher_places_mt.size(1), v}, logits.options());
    }
    if (runs_on_kernels(objective)) {
      return;
    }
    const at::ScalarType type = wide_type(logits.scalar_type());
    const bool in_place = type == logits.scalar_type() && is_plain(objective) && logits.is_cpu() && !comes_from_float8;
    exponentials = in_place ? logits : at::empty({chunk_rows, v}, logits.options().dtype(type));
    if (objective.teacher_states_nh.defined()) {
      teacher_probabilities =
          type == logits.scalar_type() && logits.is_cpu() ? teacher_logits : at::empty(teacher_logits.sizes(), logits.options().dtype(type));
    }
  }
};

struct ChunkGradients {
  at::Tensor hidden_rh;
  at::Tensor candidate_ids, candidate_rows;  // [r*k], [r*k, x]
  at::Tensor bias_rx, bias_table_vx;
  std::vector<at::Tensor> parameters;
};

class ChunkPass {
 public:
  ChunkPass(const HeadObjective& objective, const RowLoss& loss, bool wants_gradient)
      : objective_(objective), loss_(loss), wants_gradient_(wants_gradient), head8_(float8_head(objective.head_vh)) {}

  // The chunk's loss; `gradients` are filled when wanted.
  at::Tensor run(int64_t begin, int64_t end, Buffers& buffers, ChunkGradients& gradients) const {
    const at::Tensor hidden = objective_.hidden_rh.detach().narrow(0, begin, end - begin);
    at::Tensor logits;
    if (head8_ != nullptr && wants_gradient_) {
      logits = float8_logits(*head8_, hidden);
    } else {
      logits = buffers.logits.narrow(0, 0, end - begin);
      at::mm_out(logits, hidden, objective_.head_vh.detach().t());
    }
    if (head8_ != nullptr && !wants_gradient_) {
      compare_float8_head(*head8_, hidden, logits, objective_.labels_r.narrow(0, begin, end - begin));
    }
    if (objective_.bias_rx.defined()) {
      logits.addmm_(objective_.bias_rx.detach().narrow(0, begin, end - begin), objective_.bias_table_vx.detach().t());
    }
    HeadRows rows;
    rows.row_begin = begin;
    rows.row_end = end;
    rows.hidden_rh = hidden;
    if (runs_on_kernels(objective_)) {
      look_at_rows(logits, rows);
      TeacherRows teacher;
      if (objective_.teacher_states_nh.defined()) {
        teacher = look_at_teacher(logits, buffers.teacher_logits, begin / std::min(objective_.chunk_rows, objective_.hidden_rh.size(0)), rows);
      }
      look_up_candidates(rows);
      return wants_gradient_ ? differentiate_rows(rows, logits, teacher, gradients) : loss_(rows).detach();
    }
    const at::Tensor u = transform(logits, objective_);
    const at::Tensor label = objective_.labels_r.narrow(0, begin, end - begin).unsqueeze(1);
    const RowMaxima maxima = find_maxima(u, objective_.top_k);
    rows.argmax_r = maxima.column_r;
    pick_candidates(u, maxima, label, begin, rows);
    const at::Tensor label_value = u.gather(1, label).squeeze(1);
    at::Tensor exponentials = buffers.exponentials.narrow(0, 0, end - begin);
    at::Tensor sum;  // of each row of exponentials; undefined when it is 1
    at::Tensor log_sum_exp;
    if (has_row_loops(u)) {
      if (exponentials.const_data_ptr() != u.const_data_ptr()) {
        exponentials.copy_(u);
      }
      sum = exponentiate_rows(exponentials, maxima.value_r);
      log_sum_exp = at::add(maxima.value_r, sum.log());
    } else {
      // The largest probability is at least 1 / v, so its logarithm is exact enough to give the log-sum-exp.
      at::_softmax_out(exponentials, u, 1, /*half_to_float=*/false);
      log_sum_exp = at::sub(maxima.value_r, exponentials.gather(1, maxima.column_r.unsqueeze(1)).squeeze(1).log());
    }
    rows.log_sum_exp_r = log_sum_exp.to(at::kFloat);
    rows.nll_r = at::sub(log_sum_exp, label_value);
    if (u.scalar_type() != at::kDouble) {  // float64 inputs stay as they are, for tests by finite differences
      rows.nll_r = rows.nll_r.clamp_min_(0);
    }
    rows.max_probability_r = at::sub(maxima.value_r, log_sum_exp).exp().to(at::kFloat);
    TeacherChunk teacher;
    TeacherDistance distance;
    if (objective_.teacher_states_nh.defined()) {
      teacher = teacher_chunk(objective_, begin / std::min(objective_.chunk_rows, objective_.hidden_rh.size(0)), begin, end, buffers.teacher_logits,
                              buffers.teacher_probabilities);
      distance = distance_to_teacher(exponentials, sum, teacher);
      rows.distance_r = distance.distance_r;
      rows.teacher_argmax_r = teacher.argmax_t.index_select(0, teacher.index_r);
      rows.teacher_probability_r = teacher.max_probability_t.index_select(0, teacher.index_r).to(at::kFloat);
    }

    look_up_candidates(rows);
    if (!wants_gradient_) {
      return loss_(rows).detach();
    }
    return differentiate(rows, u, label, exponentials, sum, teacher, distance.tilt_r, gradients);
  }

 private:
  void look_up_candidates(HeadRows& rows) const {
    if (objective_.candidate_table_vx.defined()) {
      const at::Tensor& table = objective_.candidate_table_vx;
      rows.candidate_rows_rkx = table.detach()
                                    .index_select(0, rows.top_ids_rk.reshape({-1}))
                                    .view({rows.row_end - rows.row_begin, objective_.top_k, table.size(1)});
    }
  }

  void look_at_rows(const at::Tensor& logits, HeadRows& rows) const {
    const int64_t r = rows.row_end - rows.row_begin, k = objective_.top_k;
    const auto floats = logits.options().dtype(at::kFloat), integers = logits.options().dtype(at::kLong);
    const at::Tensor label = whole(objective_.labels_r.narrow(0, rows.row_begin, r));
    at::Tensor wanted, wanted_values;
    if (k > 0) {
      rows.top_values_rk = at::empty({r, k}, floats);
      rows.top_ids_rk = at::empty({r, k}, integers);
      if (objective_.must_include_r.defined()) {
        wanted = whole(objective_.must_include_r.narrow(0, rows.row_begin, r));
        wanted_values = at::empty({r}, floats);
      }
    }
    rows.log_sum_exp_r = at::empty({r}, floats);
    rows.nll_r = at::empty({r}, floats);
    rows.argmax_r = at::empty({r}, integers);
    rows.max_probability_r = at::empty({r}, floats);
    check_launch("head_objective",
                 cuda_launchers()->head_rows_forward({.type = kernel_type(logits), .r = r, .v = logits.size(1), .k = k,
                                                      .multiplier = static_cast<float>(objective_.logit_multiplier),
                                                      .softcap = static_cast<float>(std::max(0.0, objective_.softcap)),
                                                      .logits_rv = pointer(logits), .labels_r = label.const_data_ptr<int64_t>(),
                                                      .wanted_r = static_cast<const int64_t*>(pointer(wanted)),
                                                      .log_sum_exp_r = rows.log_sum_exp_r.data_ptr<float>(),
                                                      .nll_r = rows.nll_r.data_ptr<float>(), .argmax_r = rows.argmax_r.data_ptr<int64_t>(),
                                                      .max_probability_r = rows.max_probability_r.data_ptr<float>(),
                                                      .top_values_rk = static_cast<float*>(pointer_to_write(rows.top_values_rk)),
                                                      .top_ids_rk = static_cast<int64_t*>(pointer_to_write(rows.top_ids_rk)),
                                                      .wanted_values_r = static_cast<float*>(pointer_to_write(wanted_values))},
                                                     stream_of(logits)));
    if (k > 0) {
      include(wanted.defined() ? wanted.unsqueeze(1) : wanted, wanted_values.defined() ? wanted_values.unsqueeze(1) : wanted_values, rows);
    }
  }

  // A chunk's states of the teacher as logits, and what the kernels need of them.
  struct TeacherRows {
    at::Tensor logits_tv, log_sum_exp_t, index_r, tilt_r;
  };

  TeacherRows look_at_teacher(const at::Tensor& logits, at::Tensor& teacher_logits, int64_t chunk, HeadRows& rows) const {
    const at::Tensor states = objective_.teacher_states_nh.detach().index_select(0, objective_.teacher_places_mt.select(0, chunk));
    at::mm_out(teacher_logits, states, objective_.head_vh.detach().t());
    const int64_t t = states.size(0), r = logits.size(0);
    const auto floats = logits.options().dtype(at::kFloat), integers = logits.options().dtype(at::kLong);
    const at::Tensor unused_label = at::zeros({t}, integers), unused_nll = at::empty({t}, floats), argmax = at::empty({t}, integers),
                     max_probability = at::empty({t}, floats);
    TeacherRows teacher{teacher_logits, at::empty({t}, floats), whole(objective_.teacher_index_r.narrow(0, rows.row_begin, r)), at::empty({r}, floats)};
    check_launch("head_objective, teacher",
                 cuda_launchers()->head_rows_forward({.type = kernel_type(logits), .r = t, .v = logits.size(1), .k = 0, .multiplier = 1, .softcap = 0,
                                                      .logits_rv = pointer(teacher_logits), .labels_r = unused_label.const_data_ptr<int64_t>(),
                                                      .wanted_r = nullptr, .log_sum_exp_r = teacher.log_sum_exp_t.data_ptr<float>(),
                                                      .nll_r = unused_nll.data_ptr<float>(), .argmax_r = argmax.data_ptr<int64_t>(),
                                                      .max_probability_r = max_probability.data_ptr<float>(), .top_values_rk = nullptr,
                                                      .top_ids_rk = nullptr, .wanted_values_r = nullptr}, stream_of(logits)));
    rows.distance_r = at::empty({r}, floats);
    rows.teacher_argmax_r = argmax.index_select(0, teacher.index_r);
    rows.teacher_probability_r = max_probability.index_select(0, teacher.index_r);
    check_launch("head_objective, distance to the teacher",
                 cuda_launchers()->head_distance({.type = kernel_type(logits), .r = r, .v = logits.size(1),
                                                  .multiplier = static_cast<float>(objective_.logit_multiplier),
                                                  .softcap = static_cast<float>(std::max(0.0, objective_.softcap)), .logits_rv = pointer(logits),
                                                  .log_sum_exp_r = rows.log_sum_exp_r.const_data_ptr<float>(), .teacher_tv = pointer(teacher_logits),
                                                  .teacher_log_sum_exp_t = teacher.log_sum_exp_t.const_data_ptr<float>(),
                                                  .teacher_index_r = teacher.index_r.const_data_ptr<int64_t>(),
                                                  .distance_r = rows.distance_r.data_ptr<float>(), .tilt_r = teacher.tilt_r.data_ptr<float>()},
                                                 stream_of(logits)));
    return teacher;
  }

  // Notes the strict last candidate, and lets a wanted token that is not among the candidates take its place. wanted [r, 1] or undefined.
  void include(const at::Tensor& wanted, const at::Tensor& wanted_value, HeadRows& rows) const {
    const int64_t k = objective_.top_k;
    rows.last_value_r = rows.top_values_rk.select(1, k - 1).clone();
    rows.last_id_r = rows.top_ids_rk.select(1, k - 1).clone();
    if (wanted.defined()) {
      const at::Tensor missing = at::eq(rows.top_ids_rk, wanted).any(1, true).logical_not_();
      at::Tensor last_id = rows.top_ids_rk.narrow(1, k - 1, 1);
      at::Tensor last_value = rows.top_values_rk.narrow(1, k - 1, 1);
      last_value.copy_(at::where(missing, wanted_value, last_value));
      last_id.copy_(at::where(missing, wanted, last_id));
    }
  }

  void pick_candidates(const at::Tensor& u, const RowMaxima& maxima, const at::Tensor& label, int64_t begin, HeadRows& rows) const {
    const int64_t k = objective_.top_k;
    if (k == 0) {
      return;
    }
    rows.top_values_rk = maxima.top_values_rk;
    rows.top_ids_rk = maxima.top_columns_rk;
    at::Tensor wanted;
    if (objective_.must_include_r.defined()) {
      wanted = objective_.must_include_r.narrow(0, begin, label.size(0)).unsqueeze(1);
    }
    include(wanted, wanted.defined() ? u.gather(1, wanted) : wanted, rows);
  }

  // The caller's loss of a chunk and its gradients.
  struct Differentiated {
    at::Tensor value;
    at::Tensor grad_hidden, grad_nll, grad_top, grad_candidate_rows, grad_distance;
  };

  Differentiated differentiate_loss(HeadRows& rows, ChunkGradients& gradients) const {
    at::AutoGradMode record(true);
    rows.hidden_rh = rows.hidden_rh.detach().requires_grad_();
    rows.nll_r = rows.nll_r.detach().requires_grad_();
    variable_list leaves{rows.hidden_rh, rows.nll_r};
    if (objective_.top_k > 0) {
      rows.top_values_rk = rows.top_values_rk.detach().requires_grad_();
      leaves.push_back(rows.top_values_rk);
    }
    size_t table_place = 0;
    if (objective_.candidate_table_vx.defined() && objective_.candidate_table_vx.requires_grad()) {
      rows.candidate_rows_rkx = rows.candidate_rows_rkx.requires_grad_();
      table_place = leaves.size();
      leaves.push_back(rows.candidate_rows_rkx);
    }
    size_t distance_place = 0;
    if (rows.distance_r.defined()) {
      rows.distance_r = rows.distance_r.detach().requires_grad_();
      distance_place = leaves.size();
      leaves.push_back(rows.distance_r);
    }
    size_t next = leaves.size();
    for (const at::Tensor& parameter : objective_.parameters) {
      if (parameter.requires_grad()) {
        leaves.push_back(parameter);
      }
    }
    const at::Tensor value = loss_(rows);
    SF_CHECK(value.defined() && value.dim() == 0, "head_objective: the loss of a chunk is a scalar, found {} dimensions",
             value.defined() ? value.dim() : -1);
    variable_list found(leaves.size());
    if (value.requires_grad()) {
      found = torch::autograd::grad({value}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/false, /*allow_unused=*/true);
    }
    Differentiated result;
    result.value = value.detach();
    result.grad_hidden = found[0];
    result.grad_nll = found[1];
    result.grad_top = objective_.top_k > 0 ? found[2] : at::Tensor();
    result.grad_distance = distance_place != 0 ? found[distance_place] : at::Tensor();
    result.grad_candidate_rows = table_place != 0 ? found[table_place] : at::Tensor();
    gradients.parameters.resize(objective_.parameters.size());
    for (size_t i = 0; i < objective_.parameters.size(); ++i) {
      if (objective_.parameters[i].requires_grad()) {
        gradients.parameters[i] = found[next++];
      }
    }
    return result;
  }

  // What follows the gradient of the logits.
  at::Tensor finish(const Differentiated& loss, const HeadRows& rows, const at::Tensor& grad_logits, ChunkGradients& gradients) const {
    const at::Tensor narrow_grad = grad_logits.to(objective_.head_vh.scalar_type());
    gradients.hidden_rh = head8_ != nullptr ? float8_head_gradient(*head8_, narrow_grad) : at::mm(narrow_grad, objective_.head_vh.detach());
    if (objective_.bias_rx.defined()) {
      if (objective_.bias_rx.requires_grad()) {
        gradients.bias_rx = at::mm(narrow_grad, objective_.bias_table_vx.detach());
      }
      if (objective_.bias_table_vx.requires_grad()) {
        gradients.bias_table_vx = at::mm(narrow_grad.t(), objective_.bias_rx.detach().narrow(0, rows.row_begin, rows.row_end - rows.row_begin));
      }
    }
    if (loss.grad_hidden.defined()) {
      gradients.hidden_rh.add_(loss.grad_hidden);
    }
    if (loss.grad_candidate_rows.defined()) {
      gradients.candidate_ids = rows.top_ids_rk.reshape({-1});
      gradients.candidate_rows = loss.grad_candidate_rows.reshape({gradients.candidate_ids.size(0), -1});
    }
    return loss.value;
  }

  at::Tensor differentiate_rows(HeadRows& rows, at::Tensor& logits, const TeacherRows& teacher, ChunkGradients& gradients) const {
    const Differentiated loss = differentiate_loss(rows, gradients);
    const int64_t r = logits.size(0);
    const at::Tensor label = whole(objective_.labels_r.narrow(0, rows.row_begin, r));
    const at::Tensor grad_nll = whole(loss.grad_nll), grad_top = whole(loss.grad_top), ids = whole(rows.top_ids_rk);
    const at::Tensor grad_distance = whole(loss.grad_distance);
    check_launch("head_objective backward",
                 cuda_launchers()->head_rows_backward({.type = kernel_type(logits), .r = r, .v = logits.size(1),
                                                       .k = grad_top.defined() ? objective_.top_k : 0,
                                                       .multiplier = static_cast<float>(objective_.logit_multiplier),
                                                       .softcap = static_cast<float>(std::max(0.0, objective_.softcap)),
                                                       .logits_rv = pointer_to_write(logits), .labels_r = label.const_data_ptr<int64_t>(),
                                                       .log_sum_exp_r = rows.log_sum_exp_r.const_data_ptr<float>(),
                                                       .grad_nll_r = static_cast<const float*>(pointer(grad_nll)),
                                                       .ids_rk = static_cast<const int64_t*>(pointer(ids)),
                                                       .grad_values_rk = static_cast<const float*>(pointer(grad_top)),
                                                       .grad_distance_r = static_cast<const float*>(pointer(grad_distance)),
                                                       .tilt_r = static_cast<const float*>(pointer(teacher.tilt_r)),
                                                       .teacher_tv = pointer(teacher.logits_tv),
                                                       .teacher_log_sum_exp_t = static_cast<const float*>(pointer(teacher.log_sum_exp_t)),
                                                       .teacher_index_r = static_cast<const int64_t*>(pointer(teacher.index_r))},
                                                      stream_of(logits)));
    return finish(loss, rows, logits, gradients);
  }

  at::Tensor differentiate(HeadRows& rows, const at::Tensor& u, const at::Tensor& label, at::Tensor& exponentials,
                           const at::Tensor& sum, const TeacherChunk& teacher, const at::Tensor& tilt_r, ChunkGradients& gradients) const {
    const Differentiated loss = differentiate_loss(rows, gradients);
    at::Tensor& grad_logits = exponentials;
    if (loss.grad_distance.defined()) {
      const at::Tensor factor = loss.grad_nll.defined() ? loss.grad_nll.to(grad_logits.scalar_type()) : at::zeros_like(tilt_r);
      teacher_gradient(grad_logits, sum, teacher, tilt_r, factor, loss.grad_distance.to(grad_logits.scalar_type()));
      grad_logits.scatter_add_(1, label, at::neg(factor).unsqueeze(1));
    } else if (loss.grad_nll.defined()) {
      const at::Tensor factor = loss.grad_nll.to(grad_logits.scalar_type()).unsqueeze(1);
      grad_logits.mul_(sum.defined() ? at::div(factor, sum.unsqueeze(1)) : factor);
      grad_logits.scatter_add_(1, label, at::neg(factor));
    } else {
      grad_logits.zero_();
    }
    if (loss.grad_top.defined()) {
      grad_logits.scatter_add_(1, rows.top_ids_rk, loss.grad_top.to(grad_logits.scalar_type()));
    }
    if (!is_plain(objective_)) {
      transform_backward(grad_logits, u, objective_);
    }
    return finish(loss, rows, grad_logits, gradients);
  }

  const HeadObjective& objective_;
  const RowLoss& loss_;
  bool wants_gradient_;
  const Float8Head* head8_;   // null: the head in its own type
};

struct HeadObjectiveFunction : torch::autograd::Function<HeadObjectiveFunction> {
  // Objective and loss are passed by address; they are used during this call alone.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden_rh, const std::optional<at::Tensor>& candidate_table_vx,
                            const std::optional<at::Tensor>& bias_rx, const std::optional<at::Tensor>& bias_table_vx, at::TensorList parameters, int64_t objective_address, int64_t loss_address, bool wants_gradient) {
    const auto& objective = *reinterpret_cast<const HeadObjective*>(objective_address);
    const auto& loss = *reinterpret_cast<const RowLoss*>(loss_address);
    const int64_t rows = hidden_rh.size(0);
    const int64_t step = std::min(objective.chunk_rows, rows);
    const ChunkPass pass(objective, loss, wants_gradient);
    Buffers buffers(objective, step, wants_gradient);

    at::Tensor total = at::zeros({}, hidden_rh.options().dtype(wide_type(hidden_rh.scalar_type())).requires_grad(false));
    constexpr size_t kFixed = 4;  // hidden, candidate table, bias, bias table
    variable_list kept(kFixed + parameters.size());
    if (wants_gradient) {
      kept[0] = at::empty(hidden_rh.sizes(), hidden_rh.options().requires_grad(false));
    }
    const bool collects = runs_on_kernels(objective);  // sorting by token once is cheaper than once for each chunk
    variable_list candidate_ids, candidate_rows;
    for (int64_t begin = 0; begin < rows; begin += step) {
      const int64_t end = std::min(rows, begin + step);
      ChunkGradients gradients;
      total.add_(pass.run(begin, end, buffers, gradients));
      if (!wants_gradient) {
        continue;
      }
      kept[0].narrow(0, begin, end - begin).copy_(gradients.hidden_rh);
      if (gradients.candidate_rows.defined() && collects) {
        candidate_ids.push_back(gradients.candidate_ids);
        candidate_rows.push_back(gradients.candidate_rows);
      } else if (gradients.candidate_rows.defined()) {
        if (!kept[1].defined()) {
          const auto type = wide_type(candidate_table_vx->scalar_type());
          kept[1] = at::zeros(candidate_table_vx->sizes(), gradients.candidate_rows.options().dtype(type));
        }
        add_by_token(kept[1], gradients.candidate_ids, gradients.candidate_rows);
      }
      if (gradients.bias_rx.defined()) {
        if (!kept[2].defined()) {
          kept[2] = at::empty(bias_rx->sizes(), gradients.bias_rx.options());
        }
        kept[2].narrow(0, begin, end - begin).copy_(gradients.bias_rx);
      }
      if (gradients.bias_table_vx.defined()) {
        kept[3] = kept[3].defined() ? kept[3].add_(gradients.bias_table_vx) : wide(gradients.bias_table_vx);
      }
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor& sum = kept[kFixed + i];
        if (gradients.parameters[i].defined()) {
          sum = sum.defined() ? sum.add_(gradients.parameters[i]) : gradients.parameters[i];
        }
      }
    }
    if (!candidate_ids.empty()) {
      kept[1] = at::zeros(candidate_table_vx->sizes(), hidden_rh.options().dtype(at::kFloat).requires_grad(false));
      add_by_token(kept[1], at::cat(candidate_ids), at::cat(candidate_rows));
    }
    if (kept[1].defined()) {
      kept[1] = kept[1].to(candidate_table_vx->scalar_type());
    }
    if (kept[3].defined()) {
      kept[3] = kept[3].to(bias_table_vx->scalar_type());
    }
    context->save_for_backward(kept);
    return total;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    variable_list result = context->get_saved_variables();
    for (at::Tensor& gradient : result) {
      if (gradient.defined()) {
        gradient = at::mul(gradient, gradients[0].to(gradient.scalar_type()));  // by 1 in training, which changes no bit
      }
    }
    result.resize(result.size() + 3);
    return result;
  }
};

}  // namespace

at::Tensor head_objective(const HeadObjective& objective, const RowLoss& loss) {
  SF_CHECK(objective.hidden_rh.dim() == 2 && objective.head_vh.dim() == 2, "head_objective takes hidden [r, h] and head [v, h], found {} and {}",
           objective.hidden_rh.sizes().vec(), objective.head_vh.sizes().vec());
  const int64_t r = objective.hidden_rh.size(0), h = objective.hidden_rh.size(1), v = objective.head_vh.size(0);
  SF_CHECK(r > 0 && objective.chunk_rows > 0, "head_objective: {} rows in chunks of {}", r, objective.chunk_rows);
  SF_CHECK(objective.top_k >= 0 && objective.top_k <= v, "head_objective: {} candidates of {} tokens", objective.top_k, v);
  SF_CHECK(objective.hidden_rh.scalar_type() == objective.head_vh.scalar_type(), "head_objective: hidden is {}, the head {}",
           c10::toString(objective.hidden_rh.scalar_type()), c10::toString(objective.head_vh.scalar_type()));
  SF_CHECK_SHAPE(objective.head_vh, {v, h});
  SF_CHECK_SHAPE(objective.labels_r, {r});
  if (objective.must_include_r.defined()) {
    SF_CHECK(objective.top_k > 0, "head_objective: must_include without candidates");
    SF_CHECK_SHAPE(objective.must_include_r, {r});
  }
  if (objective.candidate_table_vx.defined()) {
    SF_CHECK(objective.top_k > 0, "head_objective: a candidate table without candidates");
    SF_CHECK_SHAPE(objective.candidate_table_vx, {v, objective.candidate_table_vx.size(-1)});
  }
  SF_CHECK(objective.bias_rx.defined() == objective.bias_table_vx.defined(), "head_objective: a bias has rows and a table");
  if (objective.bias_rx.defined()) {
    const int64_t x = objective.bias_rx.size(-1);
    SF_CHECK_SHAPE(objective.bias_rx, {r, x});
    SF_CHECK_SHAPE(objective.bias_table_vx, {v, x});
    SF_CHECK(objective.bias_rx.scalar_type() == objective.head_vh.scalar_type() && objective.bias_table_vx.scalar_type() == objective.head_vh.scalar_type(),
             "head_objective: the bias is {} and {}, the head {}", c10::toString(objective.bias_rx.scalar_type()),
             c10::toString(objective.bias_table_vx.scalar_type()), c10::toString(objective.head_vh.scalar_type()));
  }
  if (objective.teacher_states_nh.defined()) {
    const int64_t step = std::min(objective.chunk_rows, r);
    SF_CHECK_SHAPE(objective.teacher_states_nh, {objective.teacher_states_nh.size(0), h});
    SF_CHECK_SHAPE(objective.teacher_places_mt, {(r + step - 1) / step, objective.teacher_places_mt.size(-1)});
    SF_CHECK_SHAPE(objective.teacher_index_r, {r});
  }
  const auto optional = [](const at::Tensor& tensor) { return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt; };
  return HeadObjectiveFunction::apply(objective.hidden_rh, optional(objective.candidate_table_vx), optional(objective.bias_rx),
                                      optional(objective.bias_table_vx), at::TensorList(objective.parameters), reinterpret_cast<int64_t>(&objective),
                                      reinterpret_cast<int64_t>(&loss), at::GradMode::is_enabled());
}

}  // namespace sf
