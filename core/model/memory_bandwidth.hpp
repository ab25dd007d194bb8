// core/model/memory_bandwidth.hpp: how fast a device's memory is, which bounds decoding: each step reads all weights.
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// Bytes a second, the best of some trials: on a CPU what LibTorch's threads read together, on a GPU what a copy reads and writes. Takes about half a second.
[[nodiscard]] double memory_bandwidth(at::Device device);

}  // namespace sf
