// Rows added to a table by token, without atomics. Ids are sorted; a block takes 64 of them and sums runs of equal ids in order. A run that lies inside goes
// to the table at once; the parts of one that crosses blocks are kept and added in order by the block in which it begins.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) inside_kernel(SegmentSum a) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSegmentRows;
  const int64_t end = begin + kSegmentRows < a.count ? begin + kSegmentRows : a.count;
  float* partial = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * a.x;
  for (int64_t c = threadIdx.x; c < a.x; c += kThreads) {
    float sum = 0;
    int64_t run = begin;  // where the run began
    for (int64_t i = begin; i < end; ++i) {
      sum += to_float(static_cast<const T*>(a.rows)[a.order[i] * a.x + c]);
      const int64_t id = a.sorted_ids[i];
      const bool ends = i + 1 == a.count || a.sorted_ids[i + 1] != id;
      if (!ends && i + 1 < end) {
        continue;
      }
      const bool began_before = run == begin && begin > 0 && a.sorted_ids[begin - 1] == id;
      if (began_before) {
        partial[c] = sum;
      } else if (!ends) {
        partial[a.x + c] = sum;
      } else {
        a.table_vx[id * a.x + c] += sum;
      }
      sum = 0;
      run = i + 1;
    }
  }
}

__global__ void __launch_bounds__(kThreads) crossing_kernel(SegmentSum a) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSegmentRows;
  const int64_t end = begin + kSegmentRows;
  if (end >= a.count || a.sorted_ids[end] != a.sorted_ids[end - 1]) {
    return;  // no run goes on
  }
  const int64_t id = a.sorted_ids[end];
  if (begin > 0 && a.sorted_ids[begin - 1] == id) {
    return;  // it began before this block
  }
  for (int64_t c = threadIdx.x; c < a.x; c += kThreads) {
    float sum = a.partial[(static_cast<int64_t>(blockIdx.x) * 2 + 1) * a.x + c];
    for (int64_t next = end; next < a.count && a.sorted_ids[next] == id; next += kSegmentRows) {
      sum += a.partial[next / kSegmentRows * 2 * a.x + c];
    }
    a.table_vx[id * a.x + c] += sum;
  }
}

}  // namespace

Error segment_sum(const SegmentSum& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const auto grid = static_cast<unsigned>((a.count + kSegmentRows - 1) / kSegmentRows);
  if (a.row_type == Type::bfloat16) {
    inside_kernel<bf16><<<grid, kThreads, 0, on>>>(a);
  } else {
    inside_kernel<float><<<grid, kThreads, 0, on>>>(a);
  }
  if (Error error = last_error()) {
    return error;
  }
  crossing_kernel<<<grid, kThreads, 0, on>>>(a);
  return last_error();
}

}  // namespace sf::cuda
