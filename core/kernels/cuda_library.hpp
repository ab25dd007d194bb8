// core/kernels/cuda_library.hpp: the way from the operations to the launchers of libsf_engine_cuda.so.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <initializer_list>

#include "core/kernels/cuda/launchers.hpp"

namespace sf {

/// Opens libsf_engine_cuda.so, which lies beside the library or in ../lib/sf of the program that holds this code; once. Needs CUDA's libraries. A build without
/// nvcc is warned about: its operations are compositions of LibTorch's own. Throws Error(kDevice) when the library can't be opened.
void open_engine_cuda();

/// Where a library of the engine lies: beside the one that holds this code, or in ../lib/sf of the program that does.
[[nodiscard]] std::filesystem::path engine_library(const char* name);

/// What dlopen gave, null before open_engine_cuda.
[[nodiscard]] void* engine_cuda_handle();

/// Null on a machine or in a build without kernels.
[[nodiscard]] const cuda::Launchers* cuda_launchers();

/// Are there kernels for these tensors? True when all that are defined lie on a GPU and share one type, float32 or bfloat16.
[[nodiscard]] bool has_kernels(std::initializer_list<at::Tensor> tensors);

[[nodiscard]] cuda::Type kernel_type(const at::Tensor& tensor);

/// The tensor in one piece that begins at a multiple of 16 bytes; itself when it is so already. An undefined one stays undefined.
[[nodiscard]] at::Tensor whole(const at::Tensor& tensor);

/// The stream that LibTorch enqueues on for this tensor's device.
[[nodiscard]] void* stream_of(const at::Tensor& tensor);

/// Throws when a launcher returned an error.
void check_launch(const char* operation, cuda::Error error);

/// Says once for each operation that it goes a slower way, and why.
void note_slow_path(const char* operation, const char* why);

[[nodiscard]] inline const void* pointer(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
[[nodiscard]] inline void* pointer_to_write(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

}  // namespace sf
