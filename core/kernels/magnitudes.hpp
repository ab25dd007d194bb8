// core/kernels/magnitudes.hpp: largest magnitudes on their way from the kernel that makes a tensor to the float8 cast that reads it, so that the cast needs no look at the tensor before.
//
// Kernels find them in passing once a float8 cast has asked for one. What is known of a tensor holds for its memory, its number of elements and its version: a view of all of it has
// the same magnitude, a part or a tensor that was written since has none. A unit's forward or backward begins knowing nothing, so that a recorded graph never reads what
// another one wrote. Safe to call from several threads (autograd has its own).
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// A zero for a kernel to raise; undefined when nobody asks for magnitudes.
[[nodiscard]] at::Tensor open_magnitude(const at::Tensor& like);

/// The kernel that was just enqueued writes `tensor` and its magnitude. An undefined magnitude is passed over.
void note_magnitude(const at::Tensor& tensor, const at::Tensor& magnitude);

/// float32 scalar, or undefined. From the first call on magnitudes are found.
[[nodiscard]] at::Tensor known_magnitude(const at::Tensor& tensor);

void forget_magnitudes();

/// Where a kernel writes it; null for an undefined one.
[[nodiscard]] inline float* magnitude_pointer(const at::Tensor& magnitude) { return magnitude.defined() ? magnitude.data_ptr<float>() : nullptr; }

}  // namespace sf
