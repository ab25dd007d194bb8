// Kernels without tensor cores, their own source run on the CPU (fibers.hpp), against float64: values, every element written, largest magnitudes.
#include <doctest/doctest.h>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/kernels/cuda/decode_launchers.hpp"
#include "core/kernels/cuda/functions.hpp"

using namespace sf::cuda;

namespace sf::cuda {
const DecodeLaunchers* decode_launchers();
}

namespace {

using Bf16 = __nv_bfloat16;
using Doubles = std::vector<double>;

double wide(float x) { return x; }
double wide(Bf16 x) { return __bfloat162float(x); }
template <class T>
T narrow(float x) {
  if constexpr (sizeof(T) == 2) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}
template <class T>
constexpr Type kType = sizeof(T) == 2 ? Type::bfloat16 : Type::float32;

std::mt19937& generator() {
  static std::mt19937 one(71);
  return one;
}

// Numbers at a multiple of 16 bytes; NaN until they are written.
template <class T>
class Numbers {
 public:
  explicit Numbers(int64_t count) : raw_(static_cast<size_t>(count) + 16 / sizeof(T)), count_(count) {
    begin_ = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(raw_.data()) + 15) / 16 * 16);
    for (int64_t i = 0; i < count; ++i) {
      begin_[i] = narrow<T>(std::numeric_limits<float>::quiet_NaN());
    }
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  void draw() {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count_; ++i) {
      begin_[i] = narrow<T>(normal(generator()));
    }
  }
  [[nodiscard]] T* data() { return begin_; }
  [[nodiscard]] T& operator[](int64_t i) { return begin_[i]; }
  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] double at(int64_t i) const { return wide(begin_[i]); }
  void set(int64_t i, float x) { begin_[i] = narrow<T>(x); }

 private:
  std::vector<T> raw_;
  T* begin_ = nullptr;
  int64_t count_ = 0;
};

template <class T>
void check_near(const char* what, const Numbers<T>& found, const Doubles& expected) {
  CAPTURE(what);
  double error = 0, size = 0;
  for (int64_t i = 0; i < found.count(); ++i) {
    const double e = expected[static_cast<size_t>(i)], d = found.at(i) - e;
    error += d * d;
    size += e * e;
  }
  CHECK(std::sqrt(error) <= (sizeof(T) == 2 ? 4e-3 : 2e-6) * std::sqrt(size));  // NaN is never at most
}

template <class T>
void check_magnitude(const char* what, const Numbers<T>& of, float found) {
  CAPTURE(what);
  double most = 0;
  for (int64_t i = 0; i < of.count(); ++i) {
    most = std::max(most, std::abs(of.at(i)));
  }
  CHECK(found == most);
}

void check_started(Error error) { CHECK(std::string(error == nullptr ? "" : error) == ""); }

struct ConvolutionShape {
  int64_t blocks, block_size, taps, h, groups;
};

template <class T>
void check_convolution(const ConvolutionShape& shape) {
  const auto [blocks, j, taps, h, groups] = shape;
  CAPTURE(j);
  CAPTURE(taps);
  CAPTURE(h);
  CAPTURE(groups);
  const int64_t rows = blocks * j, group_size = h / groups, stride = 2 * taps * groups;  // one of two sides of coefficients
  Numbers<T> x(rows * h), grad_y(rows * h), delta(rows * stride), base(taps * h), y(rows * h), grad_x(rows * h), grad_delta(rows * taps * groups), grad_base(taps * h);
  Numbers<float> partial(convolution_partials(blocks, h) * taps * h);
  for (Numbers<T>* in : {&x, &grad_y, &delta, &base}) {
    in->draw();
  }
  float amax = 0;
  GroupedConvolution a{.type = kType<T>, .rows = rows, .h = h, .taps = taps, .groups = groups, .block_size = j, .delta_row_stride = stride, .x_rh = x.data(), .delta_rtc = delta.data(), .base_th = base.data()};
  a.y_rh = y.data();
  a.amax = &amax;
  check_started(grouped_convolution_forward(a, nullptr));
  check_magnitude("y", y, amax);
  amax = 0;
  a.y_rh = nullptr;
  a.grad_y_rh = grad_y.data();
  a.grad_x_rh = grad_x.data();
  a.grad_delta_rtc = grad_delta.data();
  a.grad_base_th = grad_base.data();
  a.partial_pth = partial.data();
  check_started(grouped_convolution_backward(a, nullptr));
  check_magnitude("gradient of x", grad_x, amax);
  const auto zeros = [](int64_t count) { return Doubles(static_cast<size_t>(count)); };
  Doubles y_found = zeros(y.count()), x_found = zeros(x.count()), delta_found = zeros(grad_delta.count()), base_found = zeros(base.count());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t t = 0; t <= r % j && t < taps; ++t) {
      for (int64_t c = 0; c < h; ++c) {
        const double factor = base.at(t * h + c) + delta.at(r * stride + t * groups + c / group_size), value = x.at((r - t) * h + c), g = grad_y.at(r * h + c);
        y_found[static_cast<size_t>(r * h + c)] += factor * value;
        x_found[static_cast<size_t>((r - t) * h + c)] += factor * g;
        delta_found[static_cast<size_t>((r * taps + t) * groups + c / group_size)] += g * value;
        base_found[static_cast<size_t>(t * h + c)] += g * value;
      }
    }
  }
  check_near("y", y, y_found);
  check_near("gradient of x", grad_x, x_found);
  check_near("gradient of delta", grad_delta, delta_found);
  check_near("gradient of base", grad_base, base_found);
}

template <class T>
void check_norm(int64_t r, int64_t h, bool has_residual, bool wants_weight, bool has_other) {
  CAPTURE(r);
  CAPTURE(h);
  CAPTURE(has_residual);
  CAPTURE(wants_weight);
  CAPTURE(has_other);
  Numbers<T> x(r * h), residual(r * h), weight(h), grad_y(r * h), other_grad_y(r * h), grad_sum(r * h), sum(r * h), y(r * h), grad_x(r * h), grad_weight(h);
  Numbers<float> inverse(r), partial(rms_norm_partials(r, h) * h);
  for (Numbers<T>* in : {&x, &residual, &weight, &grad_y, &other_grad_y, &grad_sum}) {
    in->draw();
  }
  float amax = 0;
  check_started(rms_norm_forward({.type = kType<T>, .r = r, .h = h, .eps = 1e-6, .x_rh = x.data(), .residual_rh = has_residual ? residual.data() : nullptr, .weight_h = weight.data(),
                                  .sum_rh = has_residual ? sum.data() : nullptr, .y_rh = y.data(), .inverse_r = inverse.data(), .amax = &amax}, nullptr));
  check_magnitude("y", y, amax);
  amax = 0;
  Numbers<T>& in = has_residual ? sum : x;
  check_started(rms_norm_backward({.type = kType<T>, .r = r, .h = h, .x_rh = in.data(), .weight_h = weight.data(), .inverse_r = inverse.data(), .grad_y_rh = grad_y.data(),
                                   .other_grad_y_rh = has_other ? other_grad_y.data() : nullptr, .grad_sum_rh = has_residual ? grad_sum.data() : nullptr, .grad_x_rh = grad_x.data(), .grad_weight_h = wants_weight ? grad_weight.data() : nullptr,
                                   .partial_ph = partial.data(), .amax = &amax}, nullptr));
  check_magnitude("gradient of x", grad_x, amax);
  const auto gradient = [&](int64_t i) { return grad_y.at(i) + (has_other ? other_grad_y.at(i) : 0); };
  Doubles y_found(static_cast<size_t>(r * h)), x_found(y_found.size()), weight_found(static_cast<size_t>(h));
  for (int64_t i = 0; i < r; ++i) {
    double squares = 0, along = 0;
    for (int64_t c = 0; c < h; ++c) {
      squares += in.at(i * h + c) * in.at(i * h + c);
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(h) + 1e-6);
    for (int64_t c = 0; c < h; ++c) {
      const double unit = in.at(i * h + c) * scale, g = gradient(i * h + c);
      y_found[static_cast<size_t>(i * h + c)] = unit * weight.at(c);
      weight_found[static_cast<size_t>(c)] += g * unit;
      along += g * weight.at(c) * unit / static_cast<double>(h);
    }
    for (int64_t c = 0; c < h; ++c) {
      x_found[static_cast<size_t>(i * h + c)] =
          (gradient(i * h + c) * weight.at(c) - in.at(i * h + c) * scale * along) * scale + (has_residual ? grad_sum.at(i * h + c) : 0);
    }
  }
  check_near("y", y, y_found);
  check_near("gradient of x", grad_x, x_found);
  if (wants_weight) {
    check_near("gradient of the weight", grad_weight, weight_found);
  }
}

struct HeadShape {
  int64_t rows, heads, e, f, angle_rows;
};

template <class T>
void check_heads(const HeadShape& shape, bool has_weight) {
  const auto [rows, heads, e, f, angle_rows] = shape;
  CAPTURE(rows);
  CAPTURE(e);
  CAPTURE(has_weight);
  const int64_t count = rows * heads * e;
  Numbers<T> x(count), weight(e), y(count), grad_y(count), grad_x(count), grad_weight(e);
  Numbers<float> cos(angle_rows * f), sin(angle_rows * f), inverse(rows * heads), partial(head_norm_partials(rows) * e);
  for (Numbers<T>* in : {&x, &weight, &grad_y}) {
    in->draw();
  }
  for (int64_t i = 0; i < cos.count(); ++i) {
    const double angle = 0.37 * static_cast<double>(i);
    cos.set(i, static_cast<float>(std::cos(angle)));
    sin.set(i, static_cast<float>(std::sin(angle)));
  }
  float amax = 0;
  HeadNormRope a{.type = kType<T>, .rows = rows, .heads = heads, .e = e, .f = f, .angle_rows = angle_rows, .eps = 1e-6, .x_rne = x.data(), .weight_e = has_weight ? weight.data() : nullptr,
                 .cos_rf = cos.data(), .sin_rf = sin.data()};
  a.inverse_rn = inverse.data();
  a.y_rne = y.data();
  check_started(head_norm_rope_forward(a, nullptr));
  a.grad_y_rne = grad_y.data();
  a.grad_x_rne = grad_x.data();
  a.grad_weight_e = has_weight ? grad_weight.data() : nullptr;
  a.partial_pe = partial.data();
  a.amax = &amax;
  check_started(head_norm_rope_backward(a, nullptr));
  check_magnitude("gradient of x", grad_x, amax);
  Doubles y_found(static_cast<size_t>(count)), x_found(y_found.size()), weight_found(static_cast<size_t>(e)), u(static_cast<size_t>(e)), g(u.size());
  const auto of = [](Doubles& values, int64_t i) -> double& { return values[static_cast<size_t>(i)]; };
  for (int64_t head = 0; head < rows * heads; ++head) {
    const int64_t from = head * e, angles = head / heads % angle_rows * f;
    double squares = 0, along = 0;
    for (int64_t i = 0; i < e; ++i) {
      squares += x.at(from + i) * x.at(from + i);
    }
    const double scale = has_weight ? 1 / std::sqrt(squares / static_cast<double>(e) + 1e-6) : 1;
    for (int64_t i = 0; i < e; ++i) {
      of(u, i) = x.at(from + i) * scale * (has_weight ? weight.at(i) : 1);
      of(g, i) = grad_y.at(from + i);
      of(y_found, from + i) = of(u, i);
    }
    for (int64_t i = 0; i < f; ++i) {
      const double c = cos.at(angles + i), s = sin.at(angles + i), first = of(g, i), second = of(g, f + i);
      of(y_found, from + i) = of(u, i) * c - of(u, f + i) * s;
      of(y_found, from + f + i) = of(u, f + i) * c + of(u, i) * s;
      of(g, i) = first * c + second * s;
      of(g, f + i) = second * c - first * s;
    }
    for (int64_t i = 0; i < e && has_weight; ++i) {
      const double unit = x.at(from + i) * scale;
      of(weight_found, i) += of(g, i) * unit;
      of(g, i) *= weight.at(i);
      along += of(g, i) * unit / static_cast<double>(e);
    }
    for (int64_t i = 0; i < e; ++i) {
      of(x_found, from + i) = has_weight ? (of(g, i) - x.at(from + i) * scale * along) * scale : of(g, i);
    }
  }
  check_near("y", y, y_found);
  check_near("gradient of x", grad_x, x_found);
  if (has_weight) {
    check_near("gradient of the weight", grad_weight, weight_found);
  }
}

template <class T>
void check_swiglu(int64_t count) {
  CAPTURE(count);
  Numbers<T> gate(count), up(count), grad_y(count), y(count), grad_gate(count), grad_up(count);
  for (Numbers<T>* in : {&gate, &up, &grad_y}) {
    in->draw();
  }
  float amax = 0, amax_up = 0;
  Swiglu a{.type = kType<T>, .count = count, .gate = gate.data(), .up = up.data(), .y = y.data()};
  a.amax = &amax;
  check_started(swiglu_forward(a, nullptr));
  check_magnitude("y", y, amax);
  amax = 0;
  a.grad_y = grad_y.data();
  a.grad_gate = grad_gate.data();
  a.grad_up = grad_up.data();
  a.amax_up = &amax_up;
  check_started(swiglu_backward(a, nullptr));
  check_magnitude("gradient of gate", grad_gate, amax);
  check_magnitude("gradient of up", grad_up, amax_up);
  Doubles y_found(static_cast<size_t>(count)), gate_found(y_found.size()), up_found(y_found.size());
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    const double x = gate.at(i), sigmoid = 1 / (1 + std::exp(-x));
    y_found[at] = x * sigmoid * up.at(i);
    up_found[at] = grad_y.at(i) * x * sigmoid;
    gate_found[at] = grad_y.at(i) * up.at(i) * sigmoid * (1 + x * (1 - sigmoid));
  }
  check_near("y", y, y_found);
  check_near("gradient of gate", grad_gate, gate_found);
  check_near("gradient of up", grad_up, up_found);
}

// What a row's kernel says against sorted numbers in float64; `kind` 0: random, 1: few distinct values (+ 0: no zero is negative), 2: all equal, 3: zeros of both signs,
// which the kernel ranks by sign and sorting does not.
template <class T>
void check_rows(int64_t r, int64_t v, int64_t k, float multiplier, float softcap, int kind) {
  CAPTURE(v);
  CAPTURE(k);
  CAPTURE(softcap);
  CAPTURE(kind);
  Numbers<T> logits(r * v);
  logits.draw();
  for (int64_t i = 0; i < r * v && kind != 0; ++i) {
    const float x = std::round(static_cast<float>(logits.at(i)));
    logits.set(i, kind == 1 ? x + 0.0F : kind == 2 ? 1.5F : x > 0 ? 0.0F : -0.0F);
  }
  Numbers<float> lse(r), nll(r), most(r), values(r * k), wanted_values(r);
  std::vector<int64_t> labels, wanted, argmax(static_cast<size_t>(r), -1), ids(static_cast<size_t>(r * k), -1);
  for (int64_t i = 0; i < r; ++i) {
    labels.push_back(static_cast<int64_t>(generator()() % static_cast<uint64_t>(v)));
    wanted.push_back(static_cast<int64_t>(generator()() % static_cast<uint64_t>(v)));
  }
  check_started(head_rows_forward({.type = kType<T>, .r = r, .v = v, .k = k, .multiplier = multiplier, .softcap = softcap, .logits_rv = logits.data(), .labels_r = labels.data(), .wanted_r = wanted.data(),
                                   .log_sum_exp_r = lse.data(), .nll_r = nll.data(), .argmax_r = argmax.data(), .max_probability_r = most.data(), .top_values_rk = values.data(), .top_ids_rk = ids.data(),
                                   .wanted_values_r = wanted_values.data()}, nullptr));
  for (int64_t row = 0; row < r; ++row) {
    Doubles u;
    for (int64_t i = 0; i < v; ++i) {
      const float x = static_cast<float>(logits.at(row * v + i)) * multiplier;
      u.push_back(softcap > 0 ? softcap * std::tanh(x / softcap) : x);
    }
    std::vector<int64_t> order(static_cast<size_t>(v));
    std::iota(order.begin(), order.end(), 0);
    const auto value = [&](int64_t i) { return u[static_cast<size_t>(i)]; };
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t other) { return value(i) > value(other); });
    double total = 0;
    for (const double x : u) {
      total += std::exp(x - value(order[0]));
    }
    const auto at = static_cast<size_t>(row);
    CHECK(std::abs(lse.at(row) - (value(order[0]) + std::log(total))) < 1e-5);
    CHECK(std::abs(most.at(row) - 1 / total) < 1e-5 / total);
    CHECK(std::abs(nll.at(row) - (value(order[0]) + std::log(total) - value(labels[at]))) < 1e-5);
    CHECK(wanted_values.at(row) == value(wanted[at]));
    CHECK((kind == 3 ? value(argmax[at]) == value(order[0]) : argmax[at] == order[0]));
    for (int64_t i = 0; i < k; ++i) {
      const int64_t id = ids[static_cast<size_t>(row * k + i)];
      CHECK(values.at(row * k + i) == value(order[static_cast<size_t>(i)]));
      CHECK((kind == 3 ? value(id) == values.at(row * k + i) : id == order[static_cast<size_t>(i)]));
    }
  }
}

// Bytes at a multiple of 16.
class Bytes {
 public:
  explicit Bytes(int64_t count) : raw_(static_cast<size_t>(count) + 15, 0x55) {}
  [[nodiscard]] unsigned char* data() { return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(raw_.data()) + 15) / 16 * 16); }

 private:
  std::vector<unsigned char> raw_;
};

template <class T>
void check_encode(int64_t r, int64_t c, Float8 format, bool row_wise, bool is_bad) {
  CAPTURE(r);
  CAPTURE(c);
  CAPTURE(static_cast<int>(format));
  CAPTURE(row_wise);
  CAPTURE(is_bad);
  const int64_t padded = float8_padded(r);
  Numbers<T> x(r * c);
  x.draw();
  if (is_bad) {
    x.set(r / 2 * c + 3, std::numeric_limits<float>::infinity());
  }
  Numbers<float> amax_r(r), amax_c(c), inverse_r(r), inverse_c(c);
  float amax = 7, inverse = 0, alarm = 0;
  Bytes rows(r * c), columns(c * padded), transposed(c * padded);
  check_started(float8_amax({.type = kType<T>, .r = r, .c = c, .x_rc = x.data(), .amax = row_wise ? nullptr : &amax, .amax_r = amax_r.data(), .amax_c = amax_c.data()}, nullptr));
  check_started(float8_encode({.type = kType<T>, .format = format, .r = r, .c = c, .x_rc = x.data(), .amax = row_wise ? nullptr : &amax, .amax_r = amax_r.data(), .amax_c = amax_c.data(),
                               .values_rc = rows.data(), .values_cr = columns.data(), .inverse_scale = &inverse, .inverse_scale_r = inverse_r.data(), .inverse_scale_c = inverse_c.data(),
                               .alarm = &alarm}, nullptr));
  const double most = format == Float8::e4m3 ? 448 : 57344;
  const auto scale_over = [&](int64_t first_row, int64_t last_row, int64_t first_column, int64_t last_column) {
    double largest = 0;
    for (int64_t i = first_row; i < last_row; ++i) {
      for (int64_t k = first_column; k < last_column; ++k) {
        largest = std::max(largest, std::abs(x.at(i * c + k)));
      }
    }
    return std::isfinite(largest) ? static_cast<float>(most / std::max(largest, 1e-12)) : std::numeric_limits<float>::quiet_NaN();
  };
  const auto byte_of = [&](double value, float scale) {
    return __nv_cvt_float_to_fp8(static_cast<float>(value) * scale, __NV_SATFINITE, format == Float8::e4m3 ? __NV_E4M3 : __NV_E5M2);
  };
  int64_t wrong_rows = 0, wrong_columns = 0, wrong_ends = 0;
  const float of_all = scale_over(0, r, 0, c);
  for (int64_t i = 0; i < r; ++i) {
    const float scale = row_wise ? scale_over(i, i + 1, 0, c) : of_all;
    for (int64_t k = 0; k < c; ++k) {
      wrong_rows += rows.data()[i * c + k] != byte_of(x.at(i * c + k), scale) ? 1 : 0;
    }
  }
  for (int64_t k = 0; k < c; ++k) {
    const float scale = row_wise ? scale_over(0, r, k, k + 1) : of_all;
    for (int64_t i = 0; i < padded; ++i) {
      const unsigned char byte = columns.data()[k * padded + i];
      if (i < r) {
        wrong_columns += byte != byte_of(x.at(i * c + k), scale) ? 1 : 0;
      } else {
        wrong_ends += byte != 0 ? 1 : 0;
      }
    }
  }
  CHECK(wrong_rows == 0);
  CHECK(wrong_columns == 0);
  CHECK(wrong_ends == 0);
  CHECK(alarm == (is_bad ? 1 : 0));
  if (!row_wise) {
    CHECK((is_bad ? std::isnan(inverse) : inverse == 1 / of_all));
    check_started(float8_transpose({.r = r, .c = c, .values_rc = rows.data(), .values_cr = transposed.data()}, nullptr));
    CHECK(std::memcmp(transposed.data(), columns.data(), static_cast<size_t>(c * padded)) == 0);
  }
}

}  // namespace

TEST_CASE("on the CPU: the convolution's kernels, with two taps and whole rows and otherwise") {
  for (const ConvolutionShape& shape : {ConvolutionShape{3, 4, 2, 512, 32}, {9, 7, 2, 512, 128}, {5, 3, 2, 1024, 8}, {7, 5, 2, 2048, 128}, {3, 1, 2, 1024, 64}, {40, 1, 2, 512, 16}, {3, 5, 3, 96, 6}, {2, 4, 2, 64, 4}, {3, 2, 4, 8, 8}}) {
    check_convolution<Bf16>(shape);
    check_convolution<float>(shape);
  }
  check_convolution<Bf16>({1030, 5, 2, 512, 64});  // more blocks of rows than partial sums
}

TEST_CASE("on the CPU: row norms, rows that fit a block of threads and longer ones") {
  for (const bool has_residual : {false, true}) {
    for (const bool wants_weight : {false, true}) {
      for (const auto& [r, h] : {std::pair<int64_t, int64_t>{5, 8}, {3, 7}, {3, 2056}}) {
        for (const bool has_other : {false, true}) {
          check_norm<Bf16>(r, h, has_residual, wants_weight, has_other);
          check_norm<float>(r, h, has_residual, wants_weight, has_other);
        }
      }
      check_norm<Bf16>(2, 4096, has_residual, wants_weight, has_residual);  // wide rows take long here: each width with one of the two
      check_norm<float>(2, 8200, has_residual, wants_weight, !has_residual);
      check_norm<Bf16>(1100, 64, has_residual, wants_weight, has_residual);  // more rows than blocks
      check_norm<Bf16>(2, has_residual ? 8192 : 5120, has_residual, wants_weight, false);
    }
  }
}

TEST_CASE("on the CPU: norm and rotation of heads, all of a head in pairs, by vectors, and otherwise") {
  for (const bool has_weight : {true, false}) {
    for (const HeadShape& shape : {HeadShape{3, 5, 128, 64, 3}, {4, 2, 64, 32, 2}, {5, 3, 96, 32, 5}, {7, 9, 128, 64, 7}, {9, 3, 64, 32, 3}, {3, 33, 64, 32, 3}, {2, 1, 32, 16, 2}, {400, 8, 128, 64, 200}}) {
      check_heads<Bf16>(shape, has_weight);
    }
    check_heads<float>({3, 5, 128, 64, 3}, has_weight);
  }
}

TEST_CASE("on the CPU: swiglu and its gradients") {
  for (const int64_t count : {1, 13, 64, 4096, 5000}) {
    check_swiglu<Bf16>(count);
    check_swiglu<float>(count);
  }
}

TEST_CASE("on the CPU: rows of logits, by vectors and one by one, with ties, more equal logits than are ranked at once, and zeros of both signs") {
  for (const int kind : {0, 1, 2, 3}) {
    check_rows<Bf16>(2, 24, 5, 1, 0, kind);
    check_rows<Bf16>(2, 1003, 16, 1, 0, kind);
    check_rows<Bf16>(2, 40008, 16, 1, 0, kind);
    check_rows<Bf16>(1, 20000, 32, 0.7F, 3, kind);
    check_rows<float>(2, 9004, 16, 1, 0, kind);
    check_rows<float>(1, 777, 8, 0.7F, 3, kind);
  }
  check_rows<Bf16>(2, 7, 7, 1, 0, 0);
  check_rows<Bf16>(2, 5000, 0, 1, 0, 0);
}

TEST_CASE("on the CPU: float8 casts, byte for byte, with NaN under an infinite magnitude and zeros behind the rows") {
  for (const Float8 format : {Float8::e4m3, Float8::e5m2}) {
    for (const bool row_wise : {false, true}) {
      for (const bool is_bad : {false, true}) {
        for (const auto& [r, c] : {std::pair<int64_t, int64_t>{1, 16}, {20, 32}, {129, 144}, {127, 128}}) {
          check_encode<Bf16>(r, c, format, row_wise, is_bad);
          check_encode<float>(r, c, format, row_wise, is_bad);
        }
      }
    }
  }
}

// Attention of a new token for each position, without norm, rotated by angles that turn nothing; the cache holds NaN behind each sequence.
template <class T>
void check_decode_attention(int64_t n, int64_t m, int64_t e, const std::vector<int64_t>& positions, double tolerance) {
  const auto b = static_cast<int64_t>(positions.size()), group = n / m, x = n + 2 * m, f = e / 2;
  constexpr int64_t kRoom = 320;
  Numbers<T> qkv(b * x * e), keys(b * m * kRoom * e), values(b * m * kRoom * e), out(b * n * e);
  Numbers<float> cos(b * f), sin(b * f);
  qkv.draw();
  for (int64_t i = 0; i < b * f; ++i) cos[i] = 1, sin[i] = 0;
  std::normal_distribution<float> normal;
  for (int64_t row = 0; row < b * m; ++row) {
    for (int64_t i = 0; i < positions[static_cast<size_t>(row / m)] * e; ++i) {
      keys[row * kRoom * e + i] = narrow<T>(normal(generator()));
      values[row * kRoom * e + i] = narrow<T>(normal(generator()));
    }
  }
  const double scale = 1 / std::sqrt(static_cast<double>(e));
  REQUIRE(decode_launchers()->attention({.type = kType<T>, .b = b, .n = n, .m = m, .e = e, .f = f, .capacity = kRoom, .eps = 1e-6, .scale = static_cast<float>(scale), .qkv_bxe = qkv.data(),
                                         .query_weight_e = nullptr, .key_weight_e = nullptr, .cos_bf = cos.data(), .sin_bf = sin.data(), .positions_b = positions.data(),
                                         .keys_bmce = keys.data(), .values_bmce = values.data(), .out_bne = out.data()}, nullptr) == nullptr);
  double worst = 0;
  for (int64_t sequence = 0; sequence < b; ++sequence) {
    const int64_t tokens = positions[static_cast<size_t>(sequence)] + 1;
    for (int64_t head = 0; head < n; ++head) {
      const int64_t row = (sequence * m + head / group) * kRoom * e;
      Doubles found(static_cast<size_t>(e), 0.0);
      double total = 0;
      for (int64_t s = 0; s < tokens; ++s) {
        double score = 0;
        for (int64_t i = 0; i < e; ++i) score += wide(qkv[(sequence * x + head) * e + i]) * wide(keys[row + s * e + i]);
        const double weight = std::exp(score * scale);
        total += weight;
        for (int64_t i = 0; i < e; ++i) found[static_cast<size_t>(i)] += weight * wide(values[row + s * e + i]);
      }
      for (int64_t i = 0; i < e; ++i) {
        const double off = std::abs(wide(out[(sequence * n + head) * e + i]) - found[static_cast<size_t>(i)] / total);
        worst = std::isfinite(off) ? std::max(worst, off) : 1e9;
      }
    }
    for (int64_t i = 0; i < m * e; ++i) {
      const int64_t at = (sequence * m + i / e) * kRoom * e + (tokens - 1) * e + i % e;
      CHECK(wide(keys[at]) == wide(qkv[(sequence * x + n) * e + i]));
      CHECK(wide(values[at]) == wide(qkv[(sequence * x + n + m) * e + i]));
    }
  }
  CAPTURE(n);
  CAPTURE(e);
  CHECK(worst < tolerance);
}

TEST_CASE("on the CPU: attention of a step over caches of any length, in registers and on tensor cores, reads nothing behind a sequence") {
  check_decode_attention<float>(6, 2, 64, {0, 3, 31, 70}, 2e-5);
  check_decode_attention<Bf16>(6, 2, 64, {0, 15, 16, 300}, 2e-2);
  check_decode_attention<Bf16>(4, 1, 128, {1, 127, 128, 289}, 2e-2);
  check_decode_attention<Bf16>(14, 2, 64, {33}, 2e-2);
  check_decode_attention<Bf16>(12, 1, 128, {40}, 2e-2);
  check_decode_attention<Bf16>(2, 2, 128, {17}, 2e-2);
}

TEST_CASE("on the CPU: a step begins with embeddings and angles and ends with the first of the largest logits") {
  constexpr int64_t kB = 3, kH = 40, kF = 6;
  Numbers<Bf16> embedding(10 * kH), x(kB * kH);
  Numbers<float> frequencies(kF), cos(kB * kF), sin(kB * kF);
  embedding.draw();
  for (int64_t i = 0; i < kF; ++i) frequencies[i] = 1 / static_cast<float>(i + 1);
  std::vector<int64_t> ids{7, 0, 9}, positions{0, 5, 31}, said(kB, -1);
  REQUIRE(decode_launchers()->start({.type = Type::bfloat16, .b = kB, .h = kH, .f = kF, .scaling = 1.25F, .ids_b = ids.data(), .positions_b = positions.data(), .embedding_vh = embedding.data(),
                                     .inverse_frequencies_f = frequencies.data(), .x_bh = x.data(), .cos_bf = cos.data(), .sin_bf = sin.data()}, nullptr) == nullptr);
  for (int64_t i = 0; i < kB * kH; ++i) CHECK(wide(x[i]) == wide(embedding[ids[static_cast<size_t>(i / kH)] * kH + i % kH]));
  for (int64_t i = 0; i < kB * kF; ++i) {
    const float angle = static_cast<float>(positions[static_cast<size_t>(i / kF)]) * frequencies[i % kF];
    CHECK(cos[i] == wide(narrow<Bf16>(std::cos(angle) * 1.25F)));
    CHECK(sin[i] == wide(narrow<Bf16>(std::sin(angle) * 1.25F)));
  }
  for (const int64_t v : {1, 250, 2051, 8192}) {
    Numbers<Bf16> logits(kB * v);
    logits.draw();
    std::vector<int64_t> expected;
    for (int64_t row = 0; row < kB; ++row) {
      if (v > 100) logits[row * v + v - 1 - row] = logits[row * v + v / 2 + row] = narrow<Bf16>(9.0F);  // two of them
      int64_t best = 0;
      for (int64_t i = 1; i < v; ++i) best = wide(logits[row * v + i]) > wide(logits[row * v + best]) ? i : best;
      expected.push_back(best);
    }
    positions = {0, 5, 31};
    REQUIRE(decode_launchers()->choose({.type = Type::bfloat16, .b = kB, .v = v, .logits_bv = logits.data(), .said_b = said.data(), .ids_b = ids.data(), .positions_b = positions.data()}, nullptr) == nullptr);
    CHECK(said == expected);
    CHECK(ids == expected);
    CHECK(positions == std::vector<int64_t>{1, 6, 32});
  }
}
