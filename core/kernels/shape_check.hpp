// core/kernels/: the fused operations behind sf/ops.hpp. What comes in: tensors of any float type on any device. What goes out: tensors of
// the same type, computed in float32 (float64 for float64 inputs) and rounded once. Each is an autograd function with a backward of its own.
//
// shape_check.hpp: what each of them asks first, and the type that it computes in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>

namespace sf {

/// Throws an internal error "NAME has shape [..], expected [..] (EXPECTED_TEXT)".
void check_shape(const char* file, int line, const at::Tensor& tensor, const char* name, std::initializer_list<int64_t> expected,
                 const char* expected_text);

/// float64 for float64, float32 for every other float type.
at::ScalarType wide_type(at::ScalarType type);

/// The tensor in its wide type; itself when it is wide already.
at::Tensor wide(const at::Tensor& tensor);

}  // namespace sf

/// SF_CHECK_SHAPE(x_bth, {b, t, h})
#define SF_CHECK_SHAPE(tensor, ...) ::sf::check_shape(__FILE__, __LINE__, tensor, #tensor, __VA_ARGS__, #__VA_ARGS__)
