#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "core/data/order.hpp"
#include "core/data/philox.hpp"

using namespace sf;

TEST_CASE("philox: the known answers of its authors come out") {
  // Random123's kat_vectors, "philox4x32 10".
  CHECK(philox4x32_10({0, 0, 0, 0}, {0, 0}) ==
        std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("philox: each of seed, stream, epoch, sample and position changes the draw") {
  const PhiloxStream stream(42, "anchors");
  std::set<uint64_t> draws{stream.bits(0, 0, 0),
                           stream.bits(1, 0, 0),
                           stream.bits(0, 1, 0),
                           stream.bits(0, uint64_t{1} << 32, 0),
                           stream.bits(0, 0, 1),
                           PhiloxStream(43, "anchors").bits(0, 0, 0),
                           PhiloxStream(42 + (uint64_t{1} << 32), "anchors").bits(0, 0, 0),
                           PhiloxStream(42, "order").bits(0, 0, 0)};
  CHECK(draws.size() == 8);
  CHECK(stream.bits(3, 7, 11) == PhiloxStream(42, "anchors").bits(3, 7, 11));
}

TEST_CASE("philox: uniform draws lie in [0, 1) and average one half") {
  const PhiloxStream stream(1, "test");
  double sum = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    const double draw = stream.uniform(0, i, 0);
    REQUIRE(draw >= 0);
    REQUIRE(draw < 1);
    sum += draw;
  }
  CHECK(sum / 10000 == doctest::Approx(0.5).epsilon(0.03));  // five standard errors are 0.0144
}

TEST_CASE("order: the draws of a saved run never change") {
  // A run that is resumed with a newer build must see the same samples: these numbers are part of the
  // checkpoint format.
  CHECK(epoch_permutation(42, 0, 8) == std::vector<int64_t>{3, 5, 6, 4, 7, 2, 1, 0});
  CHECK(epoch_permutation(42, 1, 8) == std::vector<int64_t>{4, 6, 7, 0, 1, 2, 3, 5});
}

TEST_CASE("order: every epoch is a permutation, and epochs and seeds differ") {
  const auto sorted = [](std::vector<int64_t> values) {
    std::sort(values.begin(), values.end());
    return values;
  };
  const std::vector<int64_t> first = epoch_permutation(7, 0, 100);
  std::vector<int64_t> all(100);
  for (int64_t i = 0; i < 100; ++i) all[static_cast<size_t>(i)] = i;
  CHECK(sorted(first) == all);
  CHECK(first != all);
  CHECK(epoch_permutation(7, 1, 100) != first);
  CHECK(epoch_permutation(8, 0, 100) != first);
}

TEST_CASE("order: the windows of a run hold every entry once, for any split of the same window") {
  struct Row {
    const char* name;
    WindowShape shape;
  };
  const Row rows[] = {{"one rank, one row, 8 micro-steps", {1, 8, 1}},
                      {"one rank, batch 4", {1, 2, 4}},
                      {"two ranks", {2, 2, 2}},
                      {"four ranks", {4, 1, 2}},
                      {"eight ranks", {8, 1, 1}}};
  std::vector<std::multiset<int64_t>> expected;
  for (const Row& row : rows) {
    CAPTURE(row.name);
    SampleOrder order(3, 13, 2);  // 26 entries: three windows of 8 and a short one of 2
    REQUIRE(order.windows_left(0, row.shape) == 4);
    std::vector<std::multiset<int64_t>> windows;
    std::vector<int64_t> seen(13, 0);
    int64_t dead = 0;
    int64_t position = 0;
    while (order.windows_left(position, row.shape) != 0) {
      std::multiset<int64_t> window;
      for (int64_t m = 0; m < row.shape.accumulation_steps; ++m) {
        for (int64_t r = 0; r < row.shape.ranks; ++r) {
          for (const auto& entry : order.rows(position, row.shape, m, r)) {
            if (!entry) {
              ++dead;
              continue;
            }
            window.insert(entry->epoch * 13 + entry->sample);
            ++seen[static_cast<size_t>(entry->sample)];
          }
        }
      }
      windows.push_back(window);
      position = order.next_position(position, row.shape);
    }
    CHECK(position == 26);
    CHECK(dead == 6);
    CHECK(std::all_of(seen.begin(), seen.end(), [](int64_t count) { return count == 2; }));
    if (expected.empty()) expected = windows;
    CHECK(windows == expected);
  }
}

TEST_CASE("order: micro-step m, rank r, row j gets entry (m*b + j)*W + r of the window") {
  const WindowShape shape{3, 2, 4};
  SampleOrder order(11, 1000, 1);
  const int64_t window = 2 * shape.entries();
  for (int64_t m = 0; m < 2; ++m) {
    for (int64_t r = 0; r < 3; ++r) {
      const auto rows = order.rows(window, shape, m, r);
      for (int64_t j = 0; j < 4; ++j) {
        CHECK(rows[static_cast<size_t>(j)] == order.at(window + (m * 4 + j) * 3 + r));
      }
    }
  }
}

TEST_CASE("order: a run without a last epoch never ends, one with it does") {
  SampleOrder endless(1, 5, 0);
  CHECK_FALSE(endless.windows_left(0, {}).has_value());
  CHECK(endless.at(5'000'003)->epoch == 1'000'000);
  SampleOrder finite(1, 5, 2);
  CHECK(finite.at(9).has_value());
  CHECK_FALSE(finite.at(10).has_value());
  CHECK(finite.windows_left(10, {}) == 0);
}
