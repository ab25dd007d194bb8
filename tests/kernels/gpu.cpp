#include "tests/kernels/gpu.hpp"

#include "core/kernels/cuda_library.hpp"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <cstdio>

namespace sf::test {

bool has_gpu() {
  static const bool found = [] {
    if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      std::printf("skipped: LibTorch's CUDA library can't be opened here\n");
      return false;
    }
    const auto* guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(at::kCUDA)].load();
    if (guard == nullptr || guard->deviceCount() == 0) {
      std::printf("skipped: no GPU\n");
      return false;
    }
    at::globalContext().lazyInitDevice(at::kCUDA);
    open_engine_cuda();
    if (cuda_launchers() == nullptr) {
      std::printf("skipped: a build without kernels\n");
      return false;
    }
    return true;
  }();
  return found;
}

}  // namespace sf::test
