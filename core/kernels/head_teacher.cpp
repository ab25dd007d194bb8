#include "core/kernels/head_teacher.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "core/kernels/row_statistics.hpp"
#include "core/kernels/shape_check.hpp"
#include "sf/ops.hpp"

namespace sf {
namespace {

constexpr int64_t kLanes = 16;         // 64 bytes of float32
constexpr int64_t kSumColumns = 2048;  // float32 partial sums of this many columns are added in float64

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

#define SF_FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))

double total(const Floats& lanes) {
  double sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum += static_cast<double>(lanes[lane]);
  }
  return sum;
}

struct RowDistance {
  double distance = 0, tilt = 0;
};

SF_FOR_EACH_PROCESSOR
RowDistance row_distance(const float* exponentials, const float* teacher, int64_t columns, float scale) {
  RowDistance result;
  int64_t c = 0;
  while (c + kLanes <= columns) {
    Floats distance = {}, tilt = {};
    const int64_t end = std::min(columns / kLanes * kLanes, c + kSumColumns);
    for (; c < end; c += kLanes) {
      Floats p, q;
      std::memcpy(&p, exponentials + c, sizeof(p));
      std::memcpy(&q, teacher + c, sizeof(q));
      p = p * scale;
      const Floats d = p - q;
      distance += d < 0.0f ? -d : d;
      tilt += d > 0.0f ? p : (d < 0.0f ? -p : Floats{});
    }
    result.distance += total(distance);
    result.tilt += total(tilt);
  }
  for (; c < columns; ++c) {
    const float p = exponentials[c] * scale, d = p - teacher[c];
    result.distance += d < 0 ? -d : d;
    result.tilt += d > 0 ? p : d < 0 ? -p : 0;
  }
  return result;
}

// row = p * (factor - distance_factor * tilt + distance_factor * sign(p - q))
SF_FOR_EACH_PROCESSOR
void row_gradient(float* row, const float* teacher, int64_t columns, float scale, float level, float above, float below) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Floats p, q;
    std::memcpy(&p, row + c, sizeof(p));
    std::memcpy(&q, teacher + c, sizeof(q));
    p = p * scale;
    const Floats d = p - q;
    p = p * (d > 0.0f ? Floats{} + above : (d < 0.0f ? Floats{} + below : Floats{} + level));
    std::memcpy(row + c, &p, sizeof(p));
  }
  for (; c < columns; ++c) {
    const float p = row[c] * scale, d = p - teacher[c];
    row[c] = p * (d > 0 ? above : d < 0 ? below : level);
  }
}

at::Tensor probabilities_of(const at::Tensor& exponentials_rv, const at::Tensor& sum_r) {
  return sum_r.defined() ? at::div(exponentials_rv, sum_r.unsqueeze(1)) : exponentials_rv;
}

bool takes_loops(const at::Tensor& exponentials_rv, const TeacherChunk& teacher) {
  return has_row_loops(exponentials_rv) && has_row_loops(teacher.probability_tv);
}

}  // namespace

TeacherChunk teacher_chunk(const HeadObjective& objective, int64_t chunk, int64_t begin, int64_t end, at::Tensor& logits,
                           at::Tensor& probabilities) {
  const at::Tensor states = objective.teacher_states_nh.detach().index_select(0, objective.teacher_places_mt.select(0, chunk));
  at::mm_out(logits, states, objective.head_vh.detach().t());
  const at::Tensor u = wide(logits);
  const RowMaxima maxima = find_maxima(u, 0);
  TeacherChunk teacher;
  teacher.index_r = objective.teacher_index_r.narrow(0, begin, end - begin);
  teacher.argmax_t = maxima.column_r;
  if (has_row_loops(u)) {
    if (probabilities.const_data_ptr() != u.const_data_ptr()) {
      probabilities.copy_(u);
    }
    const at::Tensor sum = exponentiate_rows(probabilities, maxima.value_r);
    probabilities.mul_(sum.reciprocal().unsqueeze(1));
  } else {
    at::_softmax_out(probabilities, u, 1, /*half_to_float=*/false);
  }
  teacher.probability_tv = probabilities;
  teacher.max_probability_t = probabilities.gather(1, maxima.column_r.unsqueeze(1)).squeeze(1);
  return teacher;
}

TeacherDistance distance_to_teacher(const at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher) {
  if (!takes_loops(exponentials_rv, teacher)) {
    return distance_to_teacher_aten(exponentials_rv, sum_r, teacher);
  }
  const int64_t r = exponentials_rv.size(0), v = exponentials_rv.size(1);
  TeacherDistance result{at::empty({r}, exponentials_rv.options()), at::empty({r}, exponentials_rv.options())};
  const float* rows = exponentials_rv.const_data_ptr<float>();
  const float* states = teacher.probability_tv.const_data_ptr<float>();
  const int64_t* index = teacher.index_r.const_data_ptr<int64_t>();
  const float* sum = sum_r.defined() ? sum_r.const_data_ptr<float>() : nullptr;
  float* distance = result.distance_r.data_ptr<float>();
  float* tilt = result.tilt_r.data_ptr<float>();
  at::parallel_for(0, r, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowDistance found = row_distance(rows + i * v, states + index[i] * v, v, sum == nullptr ? 1.0f : 1.0f / sum[i]);
      distance[i] = static_cast<float>(found.distance);
      tilt[i] = static_cast<float>(found.tilt);
    }
  });
  return result;
}

TeacherDistance distance_to_teacher_aten(const at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher) {
  const at::Tensor p = probabilities_of(exponentials_rv, sum_r);
  const at::Tensor difference = at::sub(p, teacher.probability_tv.index_select(0, teacher.index_r));
  return {difference.abs().sum(1), at::mul(p, difference.sign()).sum(1)};
}

void teacher_gradient(at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher, const at::Tensor& tilt_r,
                      const at::Tensor& factor_r, const at::Tensor& distance_factor_r) {
  if (!takes_loops(exponentials_rv, teacher)) {
    teacher_gradient_aten(exponentials_rv, sum_r, teacher, tilt_r, factor_r, distance_factor_r);
    return;
  }
  const int64_t r = exponentials_rv.size(0), v = exponentials_rv.size(1);
  const at::Tensor level_r = at::sub(factor_r, at::mul(distance_factor_r, tilt_r));
  float* rows = exponentials_rv.data_ptr<float>();
  const float* states = teacher.probability_tv.const_data_ptr<float>();
  const int64_t* index = teacher.index_r.const_data_ptr<int64_t>();
  const float* sum = sum_r.defined() ? sum_r.const_data_ptr<float>() : nullptr;
  const at::Tensor level_dense = level_r.contiguous(), distance_dense = distance_factor_r.contiguous();
  const float* level = level_dense.const_data_ptr<float>();
  const float* step = distance_dense.const_data_ptr<float>();
  at::parallel_for(0, r, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      row_gradient(rows + i * v, states + index[i] * v, v, sum == nullptr ? 1.0f : 1.0f / sum[i], level[i], level[i] + step[i], level[i] - step[i]);
    }
  });
}

void teacher_gradient_aten(at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher, const at::Tensor& tilt_r,
                           const at::Tensor& factor_r, const at::Tensor& distance_factor_r) {
  if (sum_r.defined()) {
    exponentials_rv.div_(sum_r.unsqueeze(1));
  }
  at::Tensor sign = at::sub(exponentials_rv, teacher.probability_tv.index_select(0, teacher.index_r)).sign_();
  sign.sub_(tilt_r.unsqueeze(1)).mul_(distance_factor_r.unsqueeze(1)).add_(factor_r.unsqueeze(1));
  exponentials_rv.mul_(sign);
}

}  // namespace sf
