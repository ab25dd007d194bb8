// core/dist/peer_copies.hpp: gathers and reductions between GPUs of one machine whose data moves by the GPUs' copy engines. A collective of NCCL is a kernel
// that takes multiprocessors for as long as it lasts, and a product that was cut for all of them then runs its last tiles alone; a copy takes none.
//
// Memory of another process is reached by CUDA's IPC. Ranks wait for each other on the GPU: each has two words for every other rank, "my source is ready" and
// "I have read yours", which that rank writes by a copy of its own number of the exchange, and which the stream's front end waits for. No kernel waits.
// In libsf_engine_cuda.so; no LibTorch. Functions throw std::runtime_error.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace sf {

/// What another process of this machine opens memory with: CUDA's handle of the allocation, and where in it.
struct PeerHandle {
  cudaIpcMemHandle_t allocation;
  uint64_t offset;
};

struct PeerCopy {
  void* to;
  const void* from;
  uint64_t bytes;
};

/// sum[i] = parts[0][i] + parts[1][i] + ..., in this order, in float32.
struct PeerSum {
  float* sum;
  const void* const* parts;
  int count;
  uint64_t elements;
  bool is_bfloat16;     // parts; else float32
  int float_part = -1;  // number of one that is float32 all the same; -1: none
};

class PeerCopies {
 public:
  PeerCopies(int rank, int size);
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  /// Of device memory that this process allocated by cudaMalloc and keeps.
  [[nodiscard]] PeerHandle handle_of(const void* data) const;
  /// Its address here; stays open for the process's life.
  [[nodiscard]] void* open(const PeerHandle& handle);

  [[nodiscard]] PeerHandle flags() const { return handle_of(flags_); }
  /// The flags of every rank, as opened here (own ones as they are), in rank order. Once, before the first exchange.
  void meet(std::vector<void*> flags_of_ranks);

  /// Enqueues: all ranks have come this far; the copies; the sums, if there are any; all ranks have copied. Same calls on all ranks, on one stream.
  void exchange(const PeerCopy* copies, int count, const std::vector<PeerSum>& sums, cudaStream_t stream);
  /// Whatever a stream waits for has come. The results of what is in flight mean nothing any more. By any thread.
  void give_up();

 private:
  void wait_for_all(int words, cudaStream_t stream);

  int rank_, size_;
  uint32_t* flags_ = nullptr;             // [ready of each rank, read by each rank, own number]
  std::vector<uint32_t*> flags_of_ranks_;
  std::map<std::array<char, sizeof(cudaIpcMemHandle_t)>, char*> open_;
  std::atomic<uint32_t> number_ = 0;
  cudaStream_t rescue_ = nullptr;
};

}  // namespace sf
