// A draft's rows of logits against a teacher's over the same tokens: cross-entropy and acceptance in one read of both, the gradient written over the draft's in another.
//
// p = softmax(draft), P = softmax(teacher), Q = share * P with share = the kept tokens' part of the teacher's mass:
//   cross-entropy  log-sum-exp - <P, z>      gradient  p - P
//   acceptance     sum min(p, Q)             gradient  p ([p < Q] - sum p [p < Q])
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 512;
constexpr float kLog2E = 1.4426950408889634f;

struct Row {
  float log_sum_exp, teacher_log_sum_exp, log_share;

  __device__ Row(const DistillRows& a, int64_t r)
      : log_sum_exp(a.log_sum_exp_r[r]), teacher_log_sum_exp(a.teacher_kept_log_sum_exp_r[r]),
        log_share(a.teacher_kept_log_sum_exp_r[r] - a.teacher_log_sum_exp_r[r]) {}

  __device__ float draft(float z) const { return exp2f((z - log_sum_exp) * kLog2E); }
  __device__ float teacher(float t) const { return exp2f((t - teacher_log_sum_exp) * kLog2E); }
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(DistillRows a) {
  __shared__ float scratch[32];
  const int64_t r = blockIdx.x;
  const Row row(a, r);
  const float share = exp2f(row.log_share * kLog2E);
  const T* draft = static_cast<const T*>(a.logits_rw) + r * a.w;
  const T* teacher = static_cast<const T*>(a.teacher_rw) + r * a.w;
  float expected = 0, acceptance = 0, below = 0;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * N; c < a.w; c += static_cast<int64_t>(kThreads) * N) {
    float z[N], t[N];
    load(z, draft + c);
    load(t, teacher + c);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float p = row.draft(z[n]), wanted = row.teacher(t[n]), q = wanted * share;
      expected += wanted * (row.log_sum_exp - z[n]);  // small differences: the mean of logits alone would lose digits
      acceptance += p < q ? p : q;
      below += p < q ? p : 0.0f;
    }
  }
  expected = block_sum(expected, scratch);
  acceptance = block_sum(acceptance, scratch);
  below = block_sum(below, scratch);
  if (threadIdx.x == 0) {
    a.cross_entropy_r[r] = expected;
    a.acceptance_r[r] = acceptance;
    a.below_r[r] = below;
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) backward_kernel(DistillRows a) {
  const int64_t r = blockIdx.x;
  const Row row(a, r);
  const float share = exp2f(row.log_share * kLog2E);
  const float of_entropy = a.grad_cross_entropy_r == nullptr ? 0.0f : a.grad_cross_entropy_r[r];
  const float of_acceptance = a.grad_acceptance_r == nullptr ? 0.0f : a.grad_acceptance_r[r], below = a.below_r[r];
  T* draft = static_cast<T*>(a.logits_rw) + r * a.w;
  const T* teacher = static_cast<const T*>(a.teacher_rw) + r * a.w;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * N; c < a.w; c += static_cast<int64_t>(kThreads) * N) {
    float z[N], t[N];
    load(z, draft + c);
    load(t, teacher + c);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float p = row.draft(z[n]), wanted = row.teacher(t[n]);
      z[n] = of_entropy * (p - wanted) + of_acceptance * p * ((p < wanted * share ? 1.0f : 0.0f) - below);
    }
    store(draft + c, z);
  }
}

template <class T, int N>
Error run(const DistillRows& a, bool is_backward, cudaStream_t stream) {
  if (is_backward) {
    backward_kernel<T, N><<<static_cast<unsigned>(a.r), kThreads, 0, stream>>>(a);
  } else {
    forward_kernel<T, N><<<static_cast<unsigned>(a.r), kThreads, 0, stream>>>(a);
  }
  return last_error();
}

Error by_type(const DistillRows& a, bool is_backward, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const bool aligned = are_aligned(a.logits_rw, a.teacher_rw);
  if (a.type == Type::bfloat16) {
    return aligned && a.w % 8 == 0 ? run<bf16, 8>(a, is_backward, on) : run<bf16, 1>(a, is_backward, on);
  }
  return aligned && a.w % 4 == 0 ? run<float, 4>(a, is_backward, on) : run<float, 1>(a, is_backward, on);
}

}  // namespace

Error distill_rows_forward(const DistillRows& a, void* stream) { return by_type(a, false, stream); }
Error distill_rows_backward(const DistillRows& a, void* stream) { return by_type(a, true, stream); }

}  // namespace sf::cuda
