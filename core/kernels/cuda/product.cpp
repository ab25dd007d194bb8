// Weight gradients: bfloat16 products summed in float32 straight into the gradient buffer.
#include "core/kernels/cuda/functions.hpp"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <array>
#include <mutex>

namespace sf::cuda {
namespace {

const char* text(cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS ? nullptr : cublasGetStatusString(status); }

// One handle for each device of the process; the engine's training thread is its only user, the lock guards the tests.
struct Handles {
  std::mutex mutex;
  std::array<cublasHandle_t, 64> by_device = {};
};

Handles& handles() {
  static auto* all = new Handles();  // never destroyed: the driver may be gone by then
  return *all;
}

}  // namespace

Error accumulate_product(const AccumulateProduct& a, void* stream) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  cublasHandle_t& handle = all.by_device.at(static_cast<size_t>(device));
  if (handle == nullptr) {
    if (Error error = text(cublasCreate(&handle))) {
      return error;
    }
  }
  if (Error error = text(cublasSetStream(handle, static_cast<cudaStream_t>(stream)))) {
    return error;
  }
  if (Error error = text(cublasSetWorkspace(handle, a.workspace, static_cast<size_t>(a.workspace_bytes)))) {
    return error;
  }
  // Row-major c[m, n] is column-major c^T[n, m] = b^T a.
  const float one = 1.0f;
  const int m = static_cast<int>(a.m), n = static_cast<int>(a.n), k = static_cast<int>(a.k);
  return text(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_T, n, m, k, &one, a.b_kn, CUDA_R_16BF, n, a.a_km, CUDA_R_16BF, m, &one, a.c_mn,
                           CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

}  // namespace sf::cuda
