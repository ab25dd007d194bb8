// fsdp1 and fsdp2 over ranks that are threads: everything equals `single`, and what they communicate is counted.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <cmath>
#include <set>

#include "core/train/saved_run.hpp"
#include "plugins/sharding/fsdp1/fsdp1.hpp"
#include "plugins/sharding/fsdp2/fsdp2.hpp"
#include "tests/sharding/small_draft.hpp"

using namespace sf;
using namespace sf::testing;
using fsdp::GroupedSharding;

namespace {

using Made = std::unique_ptr<Sharding, void (*)(Sharding*)>;
using Maker = std::function<Made()>;

Made made(fsdp::Settings settings) {
  return Made(new GroupedSharding(std::move(settings)), [](Sharding* sharding) { delete static_cast<GroupedSharding*>(sharding); });
}

Maker fsdp1(const std::string& mode = "SHARD_GRAD_OP") {
  return [=] { return made(fsdp::fsdp1_settings(mode)); };
}

Maker fsdp2(fsdp::Fsdp2Options options = {}) {
  if (options.reduce_dtype == "bfloat16") {
    options.reduce_dtype = "float32";
  }
  return [=] { return made(fsdp::fsdp2_settings(options)); };
}

Maker fsdp2(const std::string& mode) { return fsdp2(fsdp::Fsdp2Options{.fsdp_sharding = mode}); }

const std::vector<std::string> kModes = {"SHARD_GRAD_OP", "FULL_SHARD", "NO_SHARD"};

void check_equal(const Outcome& found, const Outcome& expected, double tolerance = 2e-6) {
  CHECK(largest_difference(found.weights, expected.weights) < tolerance);
  // Sums in another order differ by some 1e-7; AdamW divides by small moments, so later windows see a little more of it.
  CHECK(largest_difference(found.gradients, expected.gradients) < 5 * tolerance);
  REQUIRE(found.norms.size() == expected.norms.size());
  for (size_t window = 0; window < found.norms.size(); ++window) {
    CHECK(found.norms[window] == doctest::Approx(expected.norms[window]).epsilon(1e-6));
    CHECK(found.losses[window] == doctest::Approx(expected.losses[window]).epsilon(1e-6));
  }
}

GroupedSharding& grouped(Sharding& sharding) { return static_cast<GroupedSharding&>(sharding); }

}  // namespace

TEST_CASE("fsdp: odd shapes on 1 to 4 ranks train as one process does, in every mode of both backends") {
  const DraftRun run{.windows = 3, .accumulation = 3, .samples = 4};  // 12 samples in a window: 12, 6, 4 and 3 micro-steps
  const Outcome expected = train_single(run);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const std::string& mode : kModes) {
      CAPTURE(ranks);
      CAPTURE(mode);
      check_equal(train_ranks(run, ranks, fsdp1(mode)), expected);
      check_equal(train_ranks(run, ranks, fsdp2(mode)), expected);
    }
  }
}
