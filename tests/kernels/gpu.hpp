// tests/kernels/gpu.hpp: for tests that need a GPU.
#pragma once

namespace sf::test {

/// Opens LibTorch's CUDA half and our kernels once. False, said once on standard output, when this machine has no GPU or the build no kernels.
bool has_gpu();

}  // namespace sf::test
