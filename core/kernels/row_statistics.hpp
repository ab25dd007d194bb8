// core/kernels/row_statistics.hpp: what a loss needs to know of each row of logits: maximum, candidates, exponentials and their sum.
//
// Two ways to the same numbers: ATen calls for any type and device, and for float32 rows on the CPU loops that read a row while it is in the cache
// (the ATen calls are their twin in tests).
//
// Shapes: r rows · v columns · k candidates
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sf {

struct RowMaxima {
  at::Tensor value_r;         // the largest
  at::Tensor column_r;        // int64, its column, the lowest among equals
  at::Tensor top_values_rk;   // descending; undefined when k = 0
  at::Tensor top_columns_rk;  // int64
};

/// True for float32 rows on the CPU that lie close together: find_maxima and exponentiate_rows then take their loops.
[[nodiscard]] bool has_row_loops(const at::Tensor& rows_rv);

[[nodiscard]] RowMaxima find_maxima(const at::Tensor& rows_rv, int64_t k);
[[nodiscard]] RowMaxima find_maxima_aten(const at::Tensor& rows_rv, int64_t k);

/// Replaces each row by exp(row - value) and returns the sums [r]. Needs has_row_loops. Relative error about 2e-7 of exp of the rounded difference; what lies below e^-87 of the
/// largest counts as e^-87.
[[nodiscard]] at::Tensor exponentiate_rows(at::Tensor& rows_rv, const at::Tensor& value_r);

}  // namespace sf
