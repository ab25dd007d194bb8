// Products of few rows against the library's. About 0.1 s.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <doctest/doctest.h>

#include "core/model/skinny_product.hpp"

using namespace sf;

namespace {

at::Tensor drawn(at::IntArrayRef shape, int64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return at::empty(shape, at::kFloat).normal_(0.0, 1.0, generator);
}

}  // namespace

TEST_CASE("skinny product: any number of rows, columns and outputs gives the library's product") {
  for (const int64_t rows : {1, 3, 4, 5, 16, 31, 33}) {
    for (const int64_t columns : {1, 15, 16, 64, 100}) {
      for (const int64_t outs : {1, 3, 4, 70}) {
        CAPTURE(rows);
        CAPTURE(columns);
        CAPTURE(outs);
        const at::Tensor x = drawn({rows, 1, columns}, rows), weight = drawn({outs, columns}, outs), bias = drawn({outs}, 7);
        // Sums of up to 100 products of normal numbers in another order.
        CHECK((skinny_linear(x, weight, bias) - at::linear(x, weight, bias)).abs().max().item<float>() < 1e-4F);
        CHECK(skinny_linear(x, weight, {}).sizes().vec() == std::vector<int64_t>{rows, 1, outs});
      }
    }
  }
}

TEST_CASE("skinny product: a row's product has the same bits whatever rows stand beside it") {
  const at::Tensor x = drawn({32, 200}, 1), weight = drawn({150, 200}, 2);
  const at::Tensor whole = skinny_linear(x, weight, {});
  for (const int64_t rows : {1, 2, 5, 16}) {
    CAPTURE(rows);
    CHECK(at::equal(skinny_linear(x.narrow(0, 3, rows), weight, {}), whole.narrow(0, 3, rows)));
  }
  // Rows that do not lie side by side, as attention leaves them.
  const at::Tensor apart = x.t().contiguous().t();
  CHECK(at::equal(skinny_linear(apart, weight, {}), whole));
}
