// core/model/memory_bandwidth.hpp: how fast a device's memory is, which bounds decoding: each step reads all weights.
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// Bytes a second, the best of twelve trials, as a shared memory is disturbed and never helped: on a CPU what the threads of a decoding step (kernels/crew.hpp) read
/// together, 256 MiB a trial, plainly from eight places each and as the weights of a product in turn; on a GPU what a copy reads and writes. Takes less than half a second.
[[nodiscard]] double memory_bandwidth(at::Device device);

}  // namespace sf
