#include "core/dist/peer_copies.hpp"

#include "core/kernels/cuda/sum_parts.hpp"

#include <cuda.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace sf {
namespace {

constexpr size_t kFlagBytes = 2 << 20;  // a whole allocation, as a handle opens all of one

void check(cudaError_t code, const char* doing) {
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(code));
  }
}

// Of the driver, which nothing links.
struct Driver {
  CUresult (*address_range)(CUdeviceptr*, size_t*, CUdeviceptr) = nullptr;
  CUresult (*write)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
  CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;

  template <class Function>
  static void find(const char* name, Function& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
    if (result != cudaDriverEntryPointSuccess || found == nullptr) {
      throw std::runtime_error(std::string("the driver has no ") + name);
    }
    function = reinterpret_cast<Function>(found);
  }
  Driver() {
    find("cuMemGetAddressRange", address_range);
    find("cuStreamWriteValue32", write);
    find("cuStreamWaitValue32", wait);
  }
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

void check(CUresult code, const char* doing) {
  if (code != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(doing) + ": the driver's error " + std::to_string(static_cast<int>(code)));
  }
}

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

PeerCopies::PeerCopies(int rank, int size) : rank_(rank), size_(size) {
  (void)driver();
  check(cudaMalloc(reinterpret_cast<void**>(&flags_), kFlagBytes), "memory for flags");
  check(cudaMemset(flags_, 0, kFlagBytes), "clearing flags");
  check(cudaDeviceSynchronize(), "clearing flags");
  check(cudaStreamCreateWithFlags(&rescue_, cudaStreamNonBlocking), "making a stream");
}

// Other ranks may still write to the flags: they and what was opened end with the process.
PeerCopies::~PeerCopies() { cudaStreamDestroy(rescue_); }

PeerHandle PeerCopies::handle_of(const void* data) const {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  check(driver().address_range(&base, &bytes, address(data)), "finding an allocation");
  PeerHandle handle{};
  check(cudaIpcGetMemHandle(&handle.allocation, reinterpret_cast<void*>(base)), "sharing memory with other processes");
  handle.offset = address(data) - base;
  return handle;
}

void* PeerCopies::open(const PeerHandle& handle) {
  std::array<char, sizeof(cudaIpcMemHandle_t)> key{};
  std::memcpy(key.data(), &handle.allocation, key.size());
  auto found = open_.find(key);
  if (found == open_.end()) {
    void* base = nullptr;
    check(cudaIpcOpenMemHandle(&base, handle.allocation, cudaIpcMemLazyEnablePeerAccess), "opening memory of another process");
    found = open_.emplace(key, static_cast<char*>(base)).first;
  }
  return found->second + handle.offset;
}

void PeerCopies::meet(std::vector<void*> flags_of_ranks) {
  flags_of_ranks_.clear();
  for (void* flags : flags_of_ranks) {
    flags_of_ranks_.push_back(static_cast<uint32_t*>(flags));
  }
}

// `words`: 0 for "ready", 1 for "read".
void PeerCopies::wait_for_all(int words, cudaStream_t stream) {
  const int first = words * size_;
  uint32_t* own = flags_ + 2 * size_;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      check(cudaMemcpyAsync(flags_of_ranks_[static_cast<size_t>(peer)] + first + rank_, own, sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream), "writing a flag");
    }
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      check(driver().wait(stream, address(flags_ + first + peer), number_, CU_STREAM_WAIT_VALUE_GEQ), "waiting for a flag");
    }
  }
}

void PeerCopies::exchange(const PeerCopy* copies, int count, const std::vector<PeerSum>& sums, cudaStream_t stream) {
  ++number_;
  check(driver().write(stream, address(flags_ + 2 * size_), number_, CU_STREAM_WRITE_VALUE_DEFAULT), "writing a flag");
  wait_for_all(0, stream);
  for (int i = 0; i < count; ++i) {
    check(cudaMemcpyAsync(copies[i].to, copies[i].from, copies[i].bytes, cudaMemcpyDeviceToDevice, stream), "copying from another GPU");
  }
  for (const PeerSum& sum : sums) {
    if (const char* problem = cuda::sum_parts({.sum = sum.sum, .parts = sum.parts, .count = sum.count, .elements = static_cast<int64_t>(sum.elements),
                                               .is_bfloat16 = sum.is_bfloat16, .float_part = sum.float_part}, stream)) {
      throw std::runtime_error(problem);
    }
  }
  wait_for_all(1, stream);
}

void PeerCopies::give_up() {
  const std::vector<uint32_t> passed(static_cast<size_t>(2 * size_), number_ + (uint32_t{1} << 30));
  (void)cudaMemcpyAsync(flags_, passed.data(), passed.size() * sizeof(uint32_t), cudaMemcpyHostToDevice, rescue_);
  (void)cudaStreamSynchronize(rescue_);
}

}  // namespace sf
