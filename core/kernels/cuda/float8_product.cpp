// Float8 products by cuBLASLt. What it takes to start one (descriptors, the library's choice of a kernel) is made once for each shape and kept.
#include "core/kernels/cuda/functions.hpp"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <compare>
#include <map>
#include <mutex>
#include <vector>

namespace sf::cuda {
namespace {

constexpr int kProposals = 8;

const char* text(cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS ? nullptr : cublasGetStatusString(status); }

struct Key {
  int device;
  int64_t m, n, k;
  Float8 a_format, b_format;
  Type d_type;
  bool adds, fast_accumulation, row_wise;
  int64_t workspace_bytes;

  auto operator<=>(const Key&) const = default;
};

struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  std::vector<cublasLtMatmulAlgo_t> proposals;
};

// The engine's training thread is the only user, the lock guards the tests. Never destroyed: the driver may be gone by then.
struct Library {
  std::mutex mutex;
  std::array<cublasLtHandle_t, 64> by_device = {};
  std::map<Key, Plan> plans;
};

Library& library() {
  static auto* all = new Library();
  return *all;
}

cudaDataType_t type_of(Float8 format) { return format == Float8::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }
cudaDataType_t type_of(Type type) { return type == Type::bfloat16 ? CUDA_R_16BF : CUDA_R_32F; }

template <class T>
cublasStatus_t set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  return cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value));
}

// Row-major d[m, n] = a b^T is column-major d^T[n, m] = b a^T, so cuBLASLt's first factor is our b: both stand with their inner size first, the one layout that takes float8.
Error make(const Float8Product& p, cublasLtHandle_t handle, Plan& plan) {
  const auto m = static_cast<uint64_t>(p.m), n = static_cast<uint64_t>(p.n), k = static_cast<uint64_t>(p.k);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const int8_t fast = p.fast_accumulation ? 1 : 0;
  const cublasLtMatmulMatrixScale_t scales = p.row_wise ? CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  for (cublasStatus_t status :
       {cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), cublasLtMatrixLayoutCreate(&plan.a, type_of(p.b_format), k, n, p.k),
        cublasLtMatrixLayoutCreate(&plan.b, type_of(p.a_format), k, m, p.k), cublasLtMatrixLayoutCreate(&plan.d, type_of(p.d_type), n, m, p.n)}) {
    if (Error error = text(status)) {
      return error;
    }
  }
  for (cublasStatus_t status :
       {set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, transposed), set(plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast),
        set(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scales), set(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scales),
        set(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale), set(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale)}) {
    if (Error error = text(status)) {
      return error;
    }
  }
  cublasLtMatmulPreference_t preference = nullptr;
  if (Error error = text(cublasLtMatmulPreferenceCreate(&preference))) {
    return error;
  }
  const auto bytes = static_cast<uint64_t>(p.workspace_bytes);
  std::array<cublasLtMatmulHeuristicResult_t, kProposals> found{};
  int count = 0;
  cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes));
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatmulAlgoGetHeuristic(handle, plan.product, plan.a, plan.b, plan.d, plan.d, preference, kProposals, found.data(), &count);
  }
  cublasLtMatmulPreferenceDestroy(preference);
  if (Error error = text(status)) {
    return error;
  }
  for (int i = 0; i < count; ++i) {
    if (found[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS) {
      plan.proposals.push_back(found[static_cast<size_t>(i)].algo);
    }
  }
  return plan.proposals.empty() ? "cuBLASLt has no float8 product of this shape for this card" : nullptr;
}

void destroy(Plan& plan) {
  if (plan.product != nullptr) {
    cublasLtMatmulDescDestroy(plan.product);
  }
  for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.d}) {
    if (layout != nullptr) {
      cublasLtMatrixLayoutDestroy(layout);
    }
  }
}

}  // namespace

Error float8_product(const Float8Product& p, void* stream) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  Library& all = library();
  const std::lock_guard lock(all.mutex);
  cublasLtHandle_t& handle = all.by_device.at(static_cast<size_t>(device));
  if (handle == nullptr) {
    if (Error error = text(cublasLtCreate(&handle))) {
      return error;
    }
  }
  const Key key{device, p.m, p.n, p.k, p.a_format, p.b_format, p.d_type, p.adds, p.fast_accumulation, p.row_wise, p.workspace_bytes};
  auto found = all.plans.find(key);
  if (found == all.plans.end()) {
    Plan plan;
    if (Error error = make(p, handle, plan)) {
      destroy(plan);
      return error;
    }
    found = all.plans.emplace(key, plan).first;
  }
  const Plan& plan = found->second;
  if (p.choice < 0 || static_cast<size_t>(p.choice) >= plan.proposals.size()) {
    return "cuBLASLt has no so many proposals";
  }
  for (cublasStatus_t status : {set(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale), set(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale)}) {
    if (Error error = text(status)) {
      return error;
    }
  }
  const float one = 1.0f, beta = p.adds ? 1.0f : 0.0f;
  return text(cublasLtMatmul(handle, plan.product, &one, p.b_nk, plan.a, p.a_mk, plan.b, &beta, p.d_mn, plan.d, p.d_mn, plan.d,
                             &plan.proposals[static_cast<size_t>(p.choice)], p.workspace, static_cast<size_t>(p.workspace_bytes), static_cast<cudaStream_t>(stream)));
}

}  // namespace sf::cuda
