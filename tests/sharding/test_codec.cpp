// Gathers of fsdp2 through the codec of the fp8 transform, in emulation: ranks are threads.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <mutex>

#include "plugins/sharding/fsdp2/fsdp2.hpp"
#include "plugins/transform/fp8/fp8.hpp"
#include "sdk/testing/small_draft.hpp"

using namespace sf;
using namespace sf::testing;
using fsdp::GroupedSharding;

namespace {

using Made = std::unique_ptr<Sharding, void (*)(Sharding*)>;

Made fsdp2(const std::string& mode) {
  return Made(new GroupedSharding(fsdp::fsdp2_settings({.fsdp_sharding = mode, .reduce_dtype = "float32"})), [](Sharding* sharding) { delete static_cast<GroupedSharding*>(sharding); });
}

// 32 rows of `up` in 3 parts are 11, 11 and 10, 16 of `down` are 6, 6 and 4; in 5 parts the last rank has none of `down`.
DraftRun run_with(bool gather, bool evaluates) {
  DraftRun run{.shape = {.hidden = 16, .inner = 32}, .windows = 4, .accumulation = 1, .samples = 30, .evaluate_between = evaluates};
  run.make_transform = [gather] {
    return std::unique_ptr<Transform, void (*)(Transform*)>(new fp8::Fp8({.emulate = true, .gather = gather}), [](Transform* transform) { delete static_cast<fp8::Fp8*>(transform); });
  };
  return run;
}

void check_same_bits(const Outcome& found, const Outcome& expected) {
  CHECK(found.losses == expected.losses);
  CHECK(found.norms == expected.norms);
  REQUIRE(found.weights.size() == expected.weights.size());
  for (const auto& [name, weight] : expected.weights) {
    CAPTURE(name);
    const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 0, 0, /*equal_nan=*/true); };  // what has no gradient is NaN
    CHECK(is_same(found.weights.at(name), weight));
    CHECK(is_same(found.gradients.at(name), expected.gradients.at(name)));
  }
}

}  // namespace

TEST_CASE("codec: weights that are gathered in float8 train to the same bits as whole ones that are encoded, however their rows are cut") {
  const Outcome alone = train_single(run_with(false, false));
  for (const std::string mode : {"SHARD_GRAD_OP", "FULL_SHARD"}) {
    for (const int64_t ranks : {2, 3, 5}) {
      for (const bool evaluates : {false, true}) {
        CAPTURE(mode);
        CAPTURE(ranks);
        CAPTURE(evaluates);
        const Outcome plain = train_ranks(run_with(false, evaluates), ranks, [&] { return fsdp2(mode); });
        const Outcome coded = train_ranks(run_with(true, evaluates), ranks, [&] { return fsdp2(mode); });
        check_same_bits(coded, plain);
        // Samples have micro-steps of their own, so each has the scale that it has on one rank; sums over the ranks have another order.
        CHECK(largest_difference(coded.weights, alone.weights) < 1e-4);
      }
    }
  }
}

TEST_CASE("codec: a window has as many gathers as without one, and one maximum over the ranks for all scales") {
  for (const std::string mode : {"SHARD_GRAD_OP", "FULL_SHARD"}) {
    CAPTURE(mode);
    std::mutex mutex;
    std::map<std::string, int64_t> plain, coded;
    for (const bool gather : {false, true}) {
      (void)train_ranks(run_with(gather, false), 3, [&] { return fsdp2(mode); }, [&](FakeComm& comm, Sharding&) {
        const std::lock_guard lock(mutex);
        (gather ? coded : plain) = comm.counted;
      });
    }
    CHECK(coded.at("all_reduce weight magnitudes") == 4);
    coded.erase("all_reduce weight magnitudes");
    CHECK(coded == plain);
  }
}

TEST_CASE("codec: what is carried has no whole copy in the model's type outside evaluations") {
  std::mutex mutex;
  int64_t plain = 0, coded = 0;
  const auto held = [&](bool gather, bool evaluates) {
    int64_t bytes = 0;
    (void)train_ranks(run_with(gather, evaluates), 2, [&] { return fsdp2("SHARD_GRAD_OP"); }, [&](FakeComm&, Sharding& sharding) {
      const std::lock_guard lock(mutex);
      bytes = static_cast<GroupedSharding&>(sharding).held().whole;
    });
    return bytes;
  };
  plain = held(false, false);
  coded = held(true, false);
  // Three blocks of up and down in float32; half of them is in the payload of a rank, a byte for each number, beside what travels as it is.
  const int64_t carried = 3 * 2 * 16 * 32;
  CHECK(plain - coded > 4 * carried - carried / 2 - 3 * 2048);
  CHECK(held(true, true) == coded);
}

TEST_CASE("codec: parameters that change between windows, as a load changes them, are gathered with scales of their own") {
  const auto changed = [](bool gather) {
    DraftRun run = run_with(gather, false);
    run.after_window = [](int64_t window, Sharding& sharding) {
      if (window == 1) {
        at::NoGradGuard no_grad;
        for (Shard& shard : sharding.shards()) {
          shard.local.mul_(3);
        }
      }
    };
    return train_ranks(run, 3, [&] { return fsdp2("SHARD_GRAD_OP"); });
  };
  check_same_bits(changed(true), changed(false));
}
