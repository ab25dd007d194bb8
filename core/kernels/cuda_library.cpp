#include "core/kernels/cuda_library.hpp"

#include "core/base/error.hpp"
#include "core/base/log.hpp"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <set>
#include <string>

namespace sf {
namespace {

void* library = nullptr;
const cuda::Launchers* launchers = nullptr;

}  // namespace

// Beside this library (libsf_engine.so), or where a test binary finds it from bin/.
std::filesystem::path engine_library(const char* name) {
  Dl_info info{};
  std::filesystem::path folder;
  if (dladdr(reinterpret_cast<void*>(&open_engine_cuda), &info) != 0 && info.dli_fname != nullptr) {
    std::error_code ignored;
    folder = std::filesystem::canonical(info.dli_fname, ignored).parent_path();
  }
  if (std::filesystem::exists(folder / name)) {
    return folder / name;
  }
  return folder.parent_path() / "lib" / "sf" / name;
}

void open_engine_cuda() {
  static std::once_flag once;
  std::call_once(once, [] {
    const std::string path = engine_library("libsf_engine_cuda.so").string();
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw Error(ExitCode::kDevice, std::string("the GPU part of the engine can't be opened: ") + dlerror(),
                  "build the target sf_engine_cuda, or set device = \"cpu\"");
    }
    using Entry = const cuda::Launchers* (*)();
    const auto entry = reinterpret_cast<Entry>(dlsym(library, "sf_cuda_launchers_v1"));
    launchers = entry == nullptr ? nullptr : entry();
    if (launchers == nullptr) {
      log_warn("this build has no CUDA kernels (it was configured without nvcc): LibTorch's own operations run instead, several times slower");
    }
  });
}

void* engine_cuda_handle() { return library; }

const cuda::Launchers* cuda_launchers() { return launchers; }

bool has_kernels(std::initializer_list<at::Tensor> tensors) {
  if (launchers == nullptr) {
    return false;
  }
  at::ScalarType type = at::kDouble;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    if (!tensor.is_cuda() || (type != at::kDouble && tensor.scalar_type() != type) || tensor.numel() == 0) {
      return false;
    }
    type = tensor.scalar_type();
  }
  return type == at::kFloat || type == at::kBFloat16;
}

cuda::Type kernel_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ? cuda::Type::bfloat16 : cuda::Type::float32;
}

at::Tensor whole(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  at::Tensor found = tensor.contiguous();
  if (reinterpret_cast<uintptr_t>(found.const_data_ptr()) % 16 != 0) {
    found = found.clone();
  }
  return found;
}

void* stream_of(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  return guard.getStream(tensor.device()).native_handle();
}

void check_launch(const char* operation, cuda::Error error) {
  if (error != nullptr) {
    throw Error(ExitCode::kDevice, std::string(operation) + ": CUDA reports \"" + error + "\"",
                "check the driver with nvidia-smi; compute-sanitizer names the kernel");
  }
}

void note_slow_path(const char* operation, const char* why) {
  static std::mutex mutex;
  static std::set<std::string> noted;
  const std::lock_guard lock(mutex);
  if (launchers != nullptr && noted.insert(operation).second) {
    log_info("{} runs as LibTorch operations, which is slower: {}", operation, why);
  }
}

}  // namespace sf
