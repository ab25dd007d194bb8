#include "core/kernels/row_statistics.hpp"

#include "core/kernels/exponential.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace sf {
namespace {

constexpr int64_t kGroupColumns = 64;      // ATen way
constexpr int64_t kLanes = 16;             // 64 bytes of float32
constexpr int64_t kLoopColumns = 128;      // columns of a group in the loops: 8 registers' worth

// Registers of 64 bytes; the compiler splits them where the processor has narrower ones.
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

#define SF_FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))

// Largest of each group of kLoopColumns; the last group may be short.
SF_FOR_EACH_PROCESSOR
void group_maxima(const float* row, int64_t columns, float* maxima) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const int64_t whole = columns / kLoopColumns;
  for (int64_t group = 0; group < whole; ++group) {
    const float* at = row + group * kLoopColumns;
    Floats best;
    std::memcpy(&best, at, sizeof(best));
    for (int64_t c = kLanes; c < kLoopColumns; c += kLanes) {
      Floats x;
      std::memcpy(&x, at + c, sizeof(x));
      best = x > best ? x : best;
    }
    float largest = best[0];
    for (int64_t lane = 1; lane < kLanes; ++lane) {
      largest = best[lane] > largest ? best[lane] : largest;
    }
    maxima[group] = largest;
  }
  if (whole * kLoopColumns < columns) {
    float largest = kLowest;
    for (int64_t c = whole * kLoopColumns; c < columns; ++c) {
      largest = row[c] > largest ? row[c] : largest;
    }
    maxima[whole] = largest;
  }
}

// row = exp(row - largest); returns the sum.
SF_FOR_EACH_PROCESSOR
double exponentiate_row(float* row, int64_t columns, float largest) {
  double total = 0;
  int64_t c = 0;
  while (c + kLanes <= columns) {
    Floats sum = {};
    const int64_t end = std::min(columns / kLanes * kLanes, c + kLoopColumns);
    for (; c < end; c += kLanes) {
      Floats x;
      std::memcpy(&x, row + c, sizeof(x));
      x = x - largest;
      exponentiate<Ints>(x);
      std::memcpy(row + c, &x, sizeof(x));
      sum = sum + x;
    }
    float part = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      part += sum[lane];
    }
    total += part;
  }
  for (; c < columns; ++c) {
    row[c] = std::exp(std::max(row[c] - largest, -87.0f));
    total += row[c];
  }
  return total;
}

// The k largest of a row, descending, lower columns first among equals. Every one of them is at least the k-th largest of the group maxima, so only
// groups that reach it are looked at.
class TopOfRow {
 public:
  TopOfRow(int64_t columns, int64_t k) : columns_(columns), k_(k) {}

  void find(const float* row, const std::vector<float>& maxima, float* values, int64_t* places) {
    float threshold = -std::numeric_limits<float>::infinity();
    if (static_cast<int64_t>(maxima.size()) > k_) {
      sorted_ = maxima;
      std::nth_element(sorted_.begin(), sorted_.begin() + (k_ - 1), sorted_.end(), std::greater<>());
      threshold = sorted_[static_cast<size_t>(k_ - 1)];
    }
    found_.clear();
    for (size_t group = 0; group < maxima.size(); ++group) {
      if (maxima[group] >= threshold) {
        const int64_t begin = static_cast<int64_t>(group) * kLoopColumns;
        const int64_t end = std::min(columns_, begin + kLoopColumns);
        for (int64_t c = begin; c < end; ++c) {
          if (row[c] >= threshold) {
            found_.emplace_back(row[c], c);
          }
        }
      }
    }
    // Rows with NaN may leave too few; what fills up has no meaning then, and the loss is NaN anyway.
    while (static_cast<int64_t>(found_.size()) < k_) {
      found_.emplace_back(std::numeric_limits<float>::quiet_NaN(), 0);
    }
    std::partial_sort(found_.begin(), found_.begin() + k_, found_.end(), [](const auto& a, const auto& b) {
      return a.first > b.first || (a.first == b.first && a.second < b.second);
    });
    for (int64_t i = 0; i < k_; ++i) {
      values[i] = found_[static_cast<size_t>(i)].first;
      places[i] = found_[static_cast<size_t>(i)].second;
    }
  }

 private:
  int64_t columns_, k_;
  std::vector<float> sorted_;
  std::vector<std::pair<float, int64_t>> found_;
};

RowMaxima find_maxima_loops(const at::Tensor& rows_rv, int64_t k) {
  const int64_t r = rows_rv.size(0), v = rows_rv.size(1);
  RowMaxima result;
  result.value_r = at::empty({r}, rows_rv.options());
  result.column_r = at::empty({r}, rows_rv.options().dtype(at::kLong));
  if (k > 0) {
    result.top_values_rk = at::empty({r, k}, rows_rv.options());
    result.top_columns_rk = at::empty({r, k}, rows_rv.options().dtype(at::kLong));
  }
  const float* data = rows_rv.const_data_ptr<float>();
  float* value = result.value_r.data_ptr<float>();
  int64_t* column = result.column_r.data_ptr<int64_t>();
  float* top_values = k > 0 ? result.top_values_rk.data_ptr<float>() : nullptr;
  int64_t* top_columns = k > 0 ? result.top_columns_rk.data_ptr<int64_t>() : nullptr;
  at::parallel_for(0, r, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> maxima(static_cast<size_t>((v + kLoopColumns - 1) / kLoopColumns));
    TopOfRow top(v, k);
    for (int64_t i = begin; i < end; ++i) {
      const float* row = data + i * v;
      group_maxima(row, v, maxima.data());
      const int64_t group = std::max_element(maxima.begin(), maxima.end()) - maxima.begin();
      const float* from = row + group * kLoopColumns;
      const float* to = row + std::min(v, (group + 1) * kLoopColumns);
      const float* found = std::find(from, to, maxima[static_cast<size_t>(group)]);
      column[i] = (found == to ? from : found) - row;
      value[i] = row[column[i]];
      if (k > 0) {
        top.find(row, maxima, top_values + i * k, top_columns + i * k);
      }
    }
  });
  return result;
}

}  // namespace

bool has_row_loops(const at::Tensor& rows_rv) {
  return rows_rv.is_cpu() && rows_rv.scalar_type() == at::kFloat && rows_rv.is_contiguous();
}

RowMaxima find_maxima(const at::Tensor& rows_rv, int64_t k) {
  return has_row_loops(rows_rv) ? find_maxima_loops(rows_rv, k) : find_maxima_aten(rows_rv, k);
}

RowMaxima find_maxima_aten(const at::Tensor& rows_rv, int64_t k) {
  const int64_t r = rows_rv.size(0), v = rows_rv.size(1), groups = v / kGroupColumns, rest = v - groups * kGroupColumns;
  RowMaxima result;
  if (groups < 2) {
    const at::Tensor column = rows_rv.argmax(1, true);
    result.value_r = rows_rv.gather(1, column).squeeze(1);
    result.column_r = column.squeeze(1);
    if (k > 0) {
      std::tie(result.top_values_rk, result.top_columns_rk) = rows_rv.topk(k, 1);
    }
    return result;
  }
  // Maxima of groups of neighbouring columns; what is left over stays outside.
  const at::Tensor maxima = rows_rv.narrow(1, 0, groups * kGroupColumns).view({r, groups, kGroupColumns}).amax(-1);
  const at::Tensor inside_columns = at::arange(kGroupColumns, rows_rv.options().dtype(at::kLong));
  const at::Tensor group = maxima.argmax(1, true);  // the lowest among equals
  const at::Tensor inside = rows_rv.gather(1, at::add(group.mul(kGroupColumns), inside_columns)).argmax(1, true);
  at::Tensor column = at::add(group.mul(kGroupColumns), inside);
  at::Tensor value = rows_rv.gather(1, column);
  if (rest > 0) {
    const at::Tensor tail = rows_rv.narrow(1, v - rest, rest);
    const at::Tensor tail_column = tail.argmax(1, true);
    const at::Tensor tail_value = tail.gather(1, tail_column);
    const at::Tensor better = at::gt(tail_value, value);
    column = at::where(better, tail_column + (v - rest), column);
    value = at::where(better, tail_value, value);
  }
  result.value_r = value.squeeze(1);
  result.column_r = column.squeeze(1);
  if (k == 0) {
    return result;
  }
  if (groups <= 2 * k) {
    std::tie(result.top_values_rk, result.top_columns_rk) = rows_rv.topk(k, 1);
    return result;
  }
  // The k largest lie in the k groups with the largest maxima, or in the rest.
  const at::Tensor best = std::get<1>(maxima.topk(k, 1, /*largest=*/true, /*sorted=*/false));
  at::Tensor columns = at::add(best.mul(kGroupColumns).unsqueeze(-1), inside_columns).flatten(1);
  if (rest > 0) {
    columns = at::cat({columns, at::arange(v - rest, v, columns.options()).expand({r, rest})}, 1);
  }
  const auto [values, places] = rows_rv.gather(1, columns).topk(k, 1);
  result.top_values_rk = values;
  result.top_columns_rk = columns.gather(1, places);
  return result;
}

at::Tensor exponentiate_rows(at::Tensor& rows_rv, const at::Tensor& value_r) {
  const int64_t r = rows_rv.size(0), v = rows_rv.size(1);
  at::Tensor sum_r = at::empty({r}, rows_rv.options());
  float* data = rows_rv.data_ptr<float>();
  float* sum = sum_r.data_ptr<float>();
  const float* largest = value_r.const_data_ptr<float>();
  at::parallel_for(0, r, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      sum[i] = static_cast<float>(exponentiate_row(data + i * v, v, largest[i]));
    }
  });
  return sum_r;
}

}  // namespace sf
