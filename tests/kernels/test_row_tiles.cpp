// Few rows on a CPU against plain loops in double, by every kind of processor that this one can be. About 0.2 s.
#include <doctest/doctest.h>

#include "core/kernels/row_tiles.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace sf {
#if defined(__x86_64__)
extern const RowTiles row_tiles_avx2, row_tiles_avx512;
#endif
}  // namespace sf

namespace {

std::vector<const sf::RowTiles*> kinds() {
  std::vector<const sf::RowTiles*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") != 0) found.push_back(&sf::row_tiles_avx512);
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0) found.push_back(&sf::row_tiles_avx2);
#endif
  return found;
}

std::vector<float> drawn(int64_t count, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    seed = seed * 1664525U + 1013904223U;
    value = static_cast<float>(seed >> 8) / 8388608.0F - 1;
  }
  return values;
}

double times(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

}  // namespace

TEST_CASE("row tiles: products of any rows, columns and outputs are those of plain loops, and the same bits on every processor and beside any rows") {
  for (const int64_t columns : {1, 15, 16, 64, 100, 576}) {
    for (const int64_t outs : {1, 3, 4, 9, 70}) {
      const std::vector<float> x = drawn(33 * columns, 1), weight = drawn(outs * columns, 2);
      std::vector<float> first;
      for (const sf::RowTiles* tiles : kinds()) {
        for (const int64_t rows : {1, 2, 3, 4, 5, 8, 16, 33}) {
          CAPTURE(columns);
          CAPTURE(outs);
          CAPTURE(rows);
          std::vector<float> y(static_cast<size_t>(rows * (outs + 2)), -7.0F);
          tiles->product(x.data(), rows, columns, weight.data(), outs, y.data(), outs + 2);
          double worst = 0;
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t o = 0; o < outs; ++o) {
              worst = std::max(worst, std::abs(y[static_cast<size_t>(r * (outs + 2) + o)] - times(x.data() + r * columns, weight.data() + o * columns, columns)));
            }
            CHECK(y[static_cast<size_t>(r * (outs + 2) + outs)] == -7.0F);  // nothing beside its own outputs
          }
          CHECK(worst < 2e-5);
          const std::vector<float> row(y.begin(), y.begin() + outs);
          if (first.empty()) first = row;
          CHECK(row == first);
        }
      }
    }
  }
}

TEST_CASE("row tiles: the gate is silu(gate) up, with biases and far from zero, in every row") {
  constexpr int64_t kColumns = 40, kRows = 19;
  for (const sf::RowTiles* tiles : kinds()) {
    for (const int64_t outs : {1, 16, 33, 70}) {
      CAPTURE(outs);
      const std::vector<float> x = drawn(kRows * kColumns, 3), gate = drawn(outs * kColumns, 4), up = drawn(outs * kColumns, 5), up_bias = drawn(outs, 7);
      std::vector<float> gate_bias = drawn(outs, 6), y(static_cast<size_t>(kRows * outs));
      for (float& bias : gate_bias) bias *= 120;  // e^120 is no float
      tiles->gate(x.data(), kRows, kColumns, gate.data(), up.data(), gate_bias.data(), up_bias.data(), outs, y.data(), outs);
      double worst = 0;
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t o = 0; o < outs; ++o) {
          const double g = times(x.data() + r * kColumns, gate.data() + o * kColumns, kColumns) + gate_bias[static_cast<size_t>(o)];
          const double expected = g / (1 + std::exp(-g)) * (times(x.data() + r * kColumns, up.data() + o * kColumns, kColumns) + up_bias[static_cast<size_t>(o)]);
          worst = std::max(worst, std::abs(y[static_cast<size_t>(r * outs + o)] - expected) / std::max(1.0, std::abs(expected)));
        }
      }
      CHECK(worst < 1e-4);  // a gate of 120 times what rounding leaves of the other factor
    }
  }
}

TEST_CASE("row tiles: the norm of a sum, for widths that are no multiple of a register") {
  for (const sf::RowTiles* tiles : kinds()) {
    for (const int64_t h : {1, 16, 100, 576}) {
      for (const bool has_delta : {false, true}) {
        CAPTURE(h);
        const std::vector<float> x = drawn(h, 8), delta = drawn(h, 9), weight = drawn(h, 10);
        std::vector<float> sum(static_cast<size_t>(h)), normed(static_cast<size_t>(h));
        tiles->add_norm(x.data(), has_delta ? delta.data() : nullptr, weight.data(), h, 1e-5F, sum.data(), normed.data());
        std::vector<float> expected = x;
        for (size_t i = 0; i < expected.size() && has_delta; ++i) expected[i] += delta[i];
        if (has_delta) CHECK(sum == expected);
        const double inverse = 1 / std::sqrt(times(expected.data(), expected.data(), h) / static_cast<double>(h) + 1e-5);
        double worst = 0;
        for (size_t i = 0; i < expected.size(); ++i) worst = std::max(worst, std::abs(normed[i] - expected[i] * inverse * weight[i]));
        CHECK(worst < 1e-6);
      }
    }
  }
}

TEST_CASE("row tiles: attention sees the keys it may see and no others, whatever lies behind them") {
  for (const sf::RowTiles* tiles : kinds()) {
    for (const int64_t e : {16, 64, 80, 128}) {
      for (const int64_t queries : {1, 3, 4, 7}) {
        CAPTURE(e);
        CAPTURE(queries);
        constexpr int64_t kTokens = 53;
        const std::vector<float> query = drawn(queries * e, 11), keys = drawn(kTokens * e, 12), values = drawn(kTokens * e, 13);
        std::vector<int64_t> seen;
        for (int64_t j = 0; j < queries; ++j) seen.push_back(j % 2 == 0 ? 1 + 16 * j / 2 : kTokens - j);
        std::vector<float> scores(static_cast<size_t>(queries * sf::score_stride(kTokens))), out(static_cast<size_t>(queries * e)), alone(static_cast<size_t>(e));
        tiles->attend(query.data(), queries, e, keys.data(), values.data(), seen.data(), scores.data(), out.data());
        for (int64_t j = 0; j < queries; ++j) {
          std::vector<double> expected(static_cast<size_t>(e), 0.0);
          double total = 0;
          for (int64_t s = 0; s < seen[static_cast<size_t>(j)]; ++s) {
            const double weight = std::exp(times(query.data() + j * e, keys.data() + s * e, e));
            total += weight;
            for (int64_t i = 0; i < e; ++i) expected[static_cast<size_t>(i)] += weight * values[static_cast<size_t>(s * e + i)];
          }
          double worst = 0;
          for (int64_t i = 0; i < e; ++i) worst = std::max(worst, std::abs(out[static_cast<size_t>(j * e + i)] - expected[static_cast<size_t>(i)] / total));
          CHECK(worst < 1e-5);
          tiles->attend(query.data() + j * e, 1, e, keys.data(), values.data(), seen.data() + j, scores.data(), alone.data());
          CHECK(std::equal(alone.begin(), alone.end(), out.begin() + j * e));
        }
      }
    }
  }
}

TEST_CASE("row tiles: the largest is the first among equals") {
  for (const sf::RowTiles* tiles : kinds()) {
    for (const int64_t count : {1, 15, 16, 17, 1000}) {
      std::vector<float> values = drawn(count, 14);
      CHECK(tiles->largest(values.data(), count) == std::max_element(values.begin(), values.end()) - values.begin());
      values[static_cast<size_t>(count / 2)] = values.back() = 3;
      CHECK(tiles->largest(values.data(), count) == count / 2);
    }
  }
}
