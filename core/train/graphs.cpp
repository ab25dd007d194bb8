#include "core/train/graphs.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

namespace sf {

std::unique_ptr<GraphRecorder> open_graph_recorder(at::Device device) {
  const std::string path = engine_library("libsf_graphs_cuda.so").string();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(ExitCode::kDevice, std::string("the part of the engine that records CUDA graphs can't be opened: ") + dlerror(),
                "build the target sf_graphs_cuda; training runs without it where training.compile_blocks = false");
  }
  const auto entry = reinterpret_cast<GraphRecorder* (*)(int)>(dlsym(library, "sf_graph_recorder_v1"));
  SF_CHECK(entry != nullptr, "{} has no sf_graph_recorder_v1", path);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  guard.synchronizeDevice(device.index());
  (void)guard.exchangeStream(stream);
  return std::unique_ptr<GraphRecorder>(entry(device.index()));
}

}  // namespace sf
