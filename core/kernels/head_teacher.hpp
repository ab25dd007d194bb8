// core/kernels/head_teacher.hpp: what head_objective needs of a teacher: the target's own distributions over the same head, how far a draft's
// distribution is from them, and the gradient of that distance.
//
// Shapes: r rows of the draft · t states of a chunk · v vocabulary
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sf {

struct HeadObjective;

/// The states of one chunk over the whole vocabulary; lives as long as the chunk.
struct TeacherChunk {
  at::Tensor probability_tv;       // wide
  at::Tensor index_r;              // int64: a row's state
  at::Tensor argmax_t;             // int64, the lowest token among equals
  at::Tensor max_probability_t;    // wide
};

/// Chunk number `chunk`, rows [begin, end) of the call. `logits` and `probabilities` hold [t, v] and are written over.
[[nodiscard]] TeacherChunk teacher_chunk(const HeadObjective& objective, int64_t chunk, int64_t begin, int64_t end, at::Tensor& logits,
                                         at::Tensor& probabilities);

struct TeacherDistance {
  at::Tensor distance_r;  // sum over v of |p - q|, in [0, 2]; p the draft's distribution, q the teacher's
  at::Tensor tilt_r;      // sum over v of p * sign(p - q), for the gradient
};

/// p = exponentials / sum; an undefined sum means 1.
[[nodiscard]] TeacherDistance distance_to_teacher(const at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher);
[[nodiscard]] TeacherDistance distance_to_teacher_aten(const at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher);

/// Writes factor * p + distance_factor * p * (sign(p - q) - tilt) over the exponentials: gradient of factor * log-sum-exp and of
/// distance_factor * distance with respect to the logits.
void teacher_gradient(at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher, const at::Tensor& tilt_r,
                      const at::Tensor& factor_r, const at::Tensor& distance_factor_r);
void teacher_gradient_aten(at::Tensor& exponentials_rv, const at::Tensor& sum_r, const TeacherChunk& teacher, const at::Tensor& tilt_r,
                           const at::Tensor& factor_r, const at::Tensor& distance_factor_r);

}  // namespace sf
