// fsdp1 and fsdp2 over ranks that are threads: everything equals `single`, and what they communicate is counted.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

#include "plugins/sharding/fsdp1/fsdp1.hpp"
#include "plugins/sharding/fsdp2/fsdp2.hpp"
#include "plugins/sharding/single/single.hpp"
#include "sf/error.hpp"
#include "sdk/testing/small_draft.hpp"
#include "tests/dist/threads.hpp"

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

Maker fsdp2_with(fsdp::Fsdp2Options options) {
  if (options.reduce_dtype == "bfloat16") {
    options.reduce_dtype = "float32";
  }
  return [=] { return made(fsdp::fsdp2_settings(options)); };
}

Maker fsdp2(const std::string& mode) { return fsdp2_with({.fsdp_sharding = mode}); }

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
      DraftRun straight = run;
      straight.gathers_straight = true;
      check_equal(train_ranks(straight, ranks, fsdp2(mode)), expected);
    }
  }
}

TEST_CASE("fsdp: a block used four times, and one whose forward runs again in backward, train as one process does") {
  for (const DraftShape& shape : {DraftShape{.block_uses = 4, .has_frozen = false}, DraftShape{.recompute = {"block.*"}}}) {
    const DraftRun run{.shape = shape, .windows = 3};
    const Outcome expected = train_single(run);
    for (const std::string& mode : kModes) {
      CAPTURE(mode);
      check_equal(train_ranks(run, 2, fsdp1(mode)), expected);
      check_equal(train_ranks(run, 2, fsdp2(mode)), expected);
      DraftRun straight = run;
      straight.gathers_straight = true;
      check_equal(train_ranks(straight, 2, fsdp2(mode)), expected);
    }
  }
}

TEST_CASE("fsdp: a parameter that only some ranks touch, in some windows, trains as in one process") {
  const std::vector<std::function<bool(int64_t, int64_t)>> uses = {
      [](int64_t, int64_t sample) { return sample == 1; },                             // in every window one rank alone
      [](int64_t window, int64_t sample) { return window == 1 && sample == 0; },       // once, one rank alone
      [](int64_t window, int64_t sample) { return window % 2 == 0 && sample % 3 == 2; }};
  for (const bool is_idle : {true, false}) {
    for (size_t i = 0; i < uses.size(); ++i) {
      CAPTURE(is_idle);
      CAPTURE(i);
      DraftRun run{.shape = {.has_rare = true, .rare_is_idle = is_idle}, .windows = 4, .accumulation = 1, .samples = 6};
      run.uses_rare = uses[i];
      const Outcome expected = train_single(run);
      DraftRun without = run;
      without.uses_rare = [](int64_t, int64_t) { return false; };
      CHECK(largest_difference({{"rare", expected.weights.at("layers.1.rare")}}, {{"rare", train_single(without).weights.at("layers.1.rare")}}) > 1e-3);
      for (const int64_t ranks : {2, 3}) {
        for (const std::string& mode : kModes) {
          CAPTURE(ranks);
          CAPTURE(mode);
          check_equal(train_ranks(run, ranks, fsdp1(mode)), expected, 2e-5);
          check_equal(train_ranks(run, ranks, fsdp2(mode)), expected, 2e-5);
        }
      }
    }
  }
}

TEST_CASE("fsdp: over gloo, a parameter that one of two ranks touches trains on both as in one process") {
  for (const bool is_idle : {true, false}) {
    DraftRun run{.shape = {.has_rare = true, .rare_is_idle = is_idle}, .windows = 4, .accumulation = 1, .samples = 2};
    run.uses_rare = [](int64_t window, int64_t sample) { return window != 2 && sample == window % 2; };  // by turns, and in one window nobody
    const Outcome expected = train_single(run);
    for (const Maker& maker : {fsdp1(), fsdp2("SHARD_GRAD_OP"), fsdp2("FULL_SHARD"), fsdp2("NO_SHARD")}) {
      std::vector<Outcome> found(2);
      const auto ends = test::run_gloo({.ranks = 2}, [&](RankComm& comm, RankGroup&) {
        Outcome& mine = found[static_cast<size_t>(comm.rank())];
        for (const auto& [name, tensor] : expected.weights) {
          mine.weights[name] = at::full_like(tensor, NAN);
          mine.gradients[name] = at::full_like(tensor, NAN);
        }
        const Made sharding = maker();
        run.train(*sharding, &comm, mine);
      });
      for (const test::RankEnd& end : ends) {
        CHECK_MESSAGE(end.error.empty(), end.error);
        CHECK_MESSAGE(!end.was_told, end.told);
      }
      CHECK(found[0].norms == found[1].norms);
      for (const auto& [name, wanted] : expected.weights) {  // each rank filled in what it holds; what both hold is the same
        CAPTURE(name);
        const at::Tensor& a = found[0].weights.at(name), &b = found[1].weights.at(name);
        CHECK(at::equal(at::where(at::isnan(a), b, a), at::where(at::isnan(b), a, b)));
        CHECK(largest_difference({{name, at::where(at::isnan(a), b, a)}}, {{name, wanted}}) < 2e-5);
      }
    }
  }
}

TEST_CASE("fsdp: gathers and reductions of a window are counted by group, and what accumulates communicates nothing") {
  // blocks, uses of one block, micro-steps; gathers of a window in the three modes
  struct Row {
    int64_t blocks, uses, micro_steps, grad_op, full;
  };
  // FULL_SHARD: the root once; each block for each pass, but the first block once for a backward pass and the forward pass after it.
  for (const Row& row : {Row{5, 1, 1, 6, 11}, Row{5, 1, 4, 6, 1 + 4 * 10 - 3}, Row{1, 7, 2, 2, 1 + 2 * 2 - 1}}) {
    for (const auto& maker : {std::function<Maker(const std::string&)>([](const std::string& mode) { return fsdp1(mode); }),
                              std::function<Maker(const std::string&)>([](const std::string& mode) { return fsdp2(mode); })}) {
      for (const std::string& mode : kModes) {
        CAPTURE(mode);
        CAPTURE(row.blocks);
        CAPTURE(row.micro_steps);
        const DraftRun run{.shape = {.blocks = row.blocks, .block_uses = row.uses, .has_frozen = false}, .windows = 4,
                     .accumulation = row.micro_steps, .samples = 2};
        // Of runs with two and with four windows: the difference is two windows with everything known.
        std::vector<std::map<std::string, int64_t>> counts(2);
        (void)train_ranks(run, 2, maker(mode), [&](FakeComm& comm, Sharding&) {
          if (comm.rank() == 0) {
            counts[1] = comm.counted;
          }
        });
        DraftRun shorter = run;
        shorter.windows = 2;
        (void)train_ranks(shorter, 2, maker(mode), [&](FakeComm& comm, Sharding&) {
          if (comm.rank() == 0) {
            counts[0] = comm.counted;
          }
        });
        const auto in_two_windows = [&](const std::string& kind) {
          int64_t sum = 0;
          for (const auto& [name, times] : counts[1]) {
            sum += name.starts_with(kind) ? times - counts[0][name] : 0;
          }
          return sum;
        };
        const int64_t groups = row.blocks + 1;
        CHECK(in_two_windows("all_gather") == 2 * (mode == "NO_SHARD" ? 0 : mode == "FULL_SHARD" ? row.full : row.grad_op));
        CHECK(in_two_windows("reduce_scatter") == (mode == "NO_SHARD" ? 0 : 2 * groups));
        CHECK(in_two_windows("all_reduce idle parameters") == 2);
        CHECK(in_two_windows("all_reduce") - 2 == 2 * (mode == "NO_SHARD" ? groups : 1));
        CHECK(in_two_windows("all_reduce gradient norm") == (mode == "NO_SHARD" ? 0 : 2));
      }
    }
  }
}

TEST_CASE("fsdp: at most n inputs of reductions are in flight, oldest waited for first, none after the window; no bit depends on n or on the communicator") {
  const DraftRun base{.shape = {.blocks = 4}, .windows = 3};
  std::optional<Outcome> first;
  for (const bool separate : {false, true}) {
    for (const int64_t limit : {1, 2, 3, 64}) {
      CAPTURE(separate);
      CAPTURE(limit);
      DraftRun run = base;
      run.after_window = [](int64_t, Sharding&) {};
      const Outcome found = train_ranks(run, 2, fsdp2_with({.reduce_scatter_max_input_buffers = limit, .separate_reduce_scatter_group = separate}),
                                        [&](FakeComm& comm, Sharding& sharding) {
        CHECK(comm.separate == separate);
        CHECK(comm.most_reductions_in_flight == std::min<int64_t>(limit, 5));
        CHECK(comm.reductions_in_flight == 0);
        CHECK(grouped(sharding).reduce_buffers() == std::min<int64_t>(limit, 5));
        std::deque<std::string> open;
        for (const std::string& event : comm.events) {
          if (event.starts_with("issue reduce_scatter")) {
            open.push_back(event.substr(6));
          } else if (event.starts_with("wait reduce_scatter")) {
            REQUIRE_FALSE(open.empty());
            CHECK(open.front() == event.substr(5));
            open.pop_front();
          } else if (event.starts_with("issue all_reduce")) {  // the norm: the window has ended
            CHECK(open.empty());
          }
          CHECK(static_cast<int64_t>(open.size()) <= limit);
        }
      });
      if (!first) {
        first = found;
      }
      CHECK(largest_difference(found.weights, first->weights) == 0);
      CHECK(largest_difference(found.gradients, first->gradients) == 0);
      CHECK(found.norms == first->norms);
    }
  }
}

TEST_CASE("fsdp: the bound on reductions holds for groups in any order, with sums that no order changes") {
  for (const int64_t limit : {1, 2, 3}) {
    FakeHub(2).run([&](FakeComm& comm) {
      std::vector<fsdp::Reducer::Group> groups;
      std::vector<std::vector<at::Tensor>> gradients;
      for (int64_t g = 0; g < 6; ++g) {
        groups.push_back({.name = "group " + std::to_string(g), .layout = fsdp::row_layout({{.rows = 3 + g, .row_elements = 2}, {.rows = 1, .row_elements = 1}}, 2)});
        gradients.push_back({at::full({3 + g, 2}, 1.0 + g + comm.rank()), g % 2 == 0 ? at::full({1}, 10.0) : at::Tensor()});
      }
      fsdp::Reducer reducer(groups, {.comm = &comm, .max_inputs = limit});
      for (const std::vector<int64_t>& order : {std::vector<int64_t>{0, 1, 2, 3, 4, 5}, {5, 0, 4, 1, 3, 2}, {3, 3, 3, 0, 5, 1, 2, 4}}) {
        for (const int64_t group : order) {
          reducer.reduce(group, gradients[static_cast<size_t>(group)]);
          CHECK(comm.reductions_in_flight <= limit);
        }
        CHECK(comm.reductions_in_flight == std::min<int64_t>(limit, 6));
        reducer.drain();
        CHECK(comm.reductions_in_flight == 0);
        for (int64_t g = 0; g < 6; ++g) {
          const fsdp::Own own = fsdp::own_of(groups[static_cast<size_t>(g)].layout, 2, comm.rank())[0];
          const at::Tensor part = reducer.reduced(g).narrow(0, own.place, own.end - own.begin);
          CHECK(at::equal(part, at::full_like(part, 3.0 + 2.0 * static_cast<double>(g))));
        }
      }
    });
  }
}

TEST_CASE("fsdp: a failure inside backward leaves nothing behind, with gathers and reductions in flight") {
  for (const auto& [at_boundary, straight] : {std::pair(false, false), std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
    const DraftRun run{.windows = 4, .gathers_straight = straight};
    DraftRun failing = run;
    failing.throw_in_window = 2;
    failing.throw_at_boundary = at_boundary;
    for (const std::string& mode : kModes) {
      CAPTURE(mode);
      CAPTURE(at_boundary);
      for (const Maker& maker : {fsdp1(mode), fsdp2_with({.fsdp_sharding = mode, .reduce_scatter_max_input_buffers = 2})}) {
        const Outcome clean = train_ranks(run, 2, maker);
        const Outcome found = train_ranks(failing, 2, maker);
        CHECK(largest_difference(found.weights, clean.weights) == 0);
        CHECK(found.norms == clean.norms);
      }
    }
  }
  for (const bool straight : {false, true}) {
    DraftRun first = {.windows = 2, .gathers_straight = straight};
    first.throw_in_window = 0;  // while the plan of uses is unknown
    check_equal(train_ranks(first, 2, fsdp2("FULL_SHARD")), train_single({.windows = 2}));
  }
}

TEST_CASE("fsdp: an evaluation between windows gathers for itself and changes nothing") {
  for (const auto& [mode, straight] : {std::pair("SHARD_GRAD_OP", false), std::pair("FULL_SHARD", false), std::pair("NO_SHARD", false), std::pair("SHARD_GRAD_OP", true),
                                       std::pair("FULL_SHARD", true)}) {
    CAPTURE(mode);
    CAPTURE(straight);
    const DraftRun run{.windows = 3, .gathers_straight = straight};
    DraftRun evaluating = run;
    evaluating.evaluate_between = true;
    for (const Maker& maker : {fsdp1(mode), fsdp2(mode)}) {
      int64_t plain = 0, evaluated = 0;
      const Outcome expected = train_ranks(run, 2, maker, [&](FakeComm& comm, Sharding&) { plain = comm.rank() == 0 ? comm.count("all_gather") : plain; });
      const Outcome found = train_ranks(evaluating, 2, maker, [&](FakeComm& comm, Sharding&) { evaluated = comm.rank() == 0 ? comm.count("all_gather") : evaluated; });
      CHECK(largest_difference(found.weights, expected.weights) == 0);
      // Five groups: root, three blocks, the frozen one. Each is gathered once per evaluation, or once per batch.
      const bool is_full = mode == std::string("FULL_SHARD");
      CHECK(evaluated - plain == (mode == std::string("NO_SHARD") ? 0 : !is_full ? 3 * 5 : evaluated - plain));
      CHECK((!is_full || (evaluated - plain >= 3 * 5 && evaluated - plain <= 3 * 10)));
    }
  }
}

TEST_CASE("fsdp: in bfloat16 training stays close to one process, whatever the type of the sums") {
  const DraftRun run{.windows = 3, .dtype = at::kBFloat16};
  const Outcome expected = train_single(run);
  for (const std::string type : {"bfloat16", "float32"}) {
    const Maker maker = [&] { return made(fsdp::fsdp2_settings({.reduce_dtype = type})); };
    const Outcome found = train_ranks(run, 2, maker);
    CHECK(found.norms[0] == doctest::Approx(expected.norms[0]).epsilon(type == "float32" ? 1e-5 : 1e-2));
    CHECK(largest_difference(found.weights, expected.weights) < 5e-2);  // AdamW's first updates go by the sign of a gradient
  }
  CHECK(train_ranks(run, 2, fsdp1()).norms[0] == doctest::Approx(expected.norms[0]).epsilon(1e-2));
}

TEST_CASE("fsdp: what a rank holds falls as 1 / ranks, and is what the plan says") {
  const DraftShape shape{.blocks = 4};
  const std::vector<UnitSpec> specs = draft_specs(shape);
  const int64_t whole = SingleSharding().memory(specs, 1, at::kFloat).weights;
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const std::string& mode : kModes) {
      for (const bool is_fsdp1 : {true, false}) {
        CAPTURE(ranks);
        CAPTURE(mode);
        CAPTURE(is_fsdp1);
        const Maker maker = is_fsdp1 ? fsdp1(mode) : fsdp2_with({.fsdp_sharding = mode, .reduce_scatter_max_input_buffers = 2});
        const ShardingMemory planned = maker()->memory(specs, ranks, at::kFloat);
        std::mutex mutex;
        ShardingMemory most;
        int64_t trained = 0;
        (void)train_ranks({.shape = shape, .windows = 2, .samples = 12}, ranks, maker, [&](FakeComm&, Sharding& sharding) {
          const std::lock_guard<std::mutex> lock(mutex);
          const ShardingMemory held = grouped(sharding).held();
          most.weights = std::max(most.weights, held.weights);
          most.whole = std::max(most.whole, held.whole + held.buffers);
          trained = std::max(trained, held.trainable_elements);
        });
        const bool is_cut = ranks > 1 && mode != "NO_SHARD";
        CHECK(most.weights == planned.weights);
        CHECK(trained == planned.trainable_elements);
        CHECK(most.whole == planned.buffers + (is_fsdp1 ? 0 : planned.whole));  // fsdp1 gives its buffers back
        if (is_cut) {
          CHECK(planned.whole >= whole * (mode == "FULL_SHARD" ? 0 : 1));
          CHECK(planned.whole < 3 * whole);
        } else {
          CHECK(most.weights == whole);
        }
      }
    }
  }
  // Where padding is small beside the tensors.
  std::vector<UnitSpec> large = {{.name = "a", .prefix = "a.", .shard_group = "root", .parameters = {{.name = "w", .shape = {100, 64}}, {.name = "b", .shape = {100}}}},
                                 {.name = "b", .prefix = "b.", .shard_group = "block", .parameters = {{.name = "w", .shape = {501, 40}}, {.name = "n", .shape = {3, 100}}}}};
  const auto all = static_cast<double>(SingleSharding().memory(large, 1, at::kFloat).weights);
  for (const int64_t ranks : {2, 3, 4}) {
    for (const Maker& maker : {fsdp1("SHARD_GRAD_OP"), fsdp2("SHARD_GRAD_OP")}) {
      FakeHub(ranks).run([&](FakeComm& comm) {
        const Made sharding = maker();
        sharding->build(large, {.comm = &comm});
        CHECK(static_cast<double>(grouped(*sharding).held().weights) < 1.03 * all / static_cast<double>(ranks));
      });
    }
  }
  const auto slots = [&](const std::string& mode) { return fsdp2(mode)()->memory(specs, 2, at::kFloat).whole; };
  CHECK(slots("FULL_SHARD") < slots("SHARD_GRAD_OP") / 2);
}

TEST_CASE("fsdp2: whole parameters stay at one address once the plan is known; under FULL_SHARD blocks share a slot, or two where gathers go straight to them") {
  std::map<std::pair<std::string, bool>, int64_t> held_by;
  for (const auto& [mode, straight] : {std::pair("SHARD_GRAD_OP", false), std::pair("SHARD_GRAD_OP", true), std::pair("FULL_SHARD", false), std::pair("FULL_SHARD", true)}) {
    DraftRun run{.shape = {.blocks = 4, .has_frozen = false}, .windows = 4, .evaluate_between = true, .gathers_straight = straight};
    std::mutex mutex;
    std::map<const Sharding*, std::vector<const void*>> addresses;
    run.after_window = [&](int64_t window, Sharding& sharding) {
      std::vector<const void*> now;
      for (int64_t unit = 0; unit < 6; ++unit) {
        now.push_back(sharding.whole(unit, 0).data_ptr());
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (window == 0) {
        addresses[&sharding] = now;
      }
      CHECK(addresses[&sharding] == now);
    };
    int64_t& held = held_by[{mode, straight}];
    (void)train_ranks(run, 2, fsdp2(mode), [&](FakeComm& comm, Sharding& sharding) { held = comm.rank() == 0 ? grouped(sharding).held().whole : held; });
    for (const auto& [sharding, found] : addresses) {
      const std::set<const void*> blocks(found.begin() + 1, found.begin() + 5);
      CHECK(blocks.size() == (mode == std::string("SHARD_GRAD_OP") ? 4 : straight ? 2 : 1));
      CHECK(blocks.count(found[0]) == 0);
      CHECK(blocks.count(found[5]) == 0);
    }
  }
  const auto held = [&](const char* mode, bool straight) { return static_cast<double>(held_by[{mode, straight}]); };
  CHECK(held("SHARD_GRAD_OP", true) < 0.9 * held("SHARD_GRAD_OP", false));  // no buffer for gathers
  CHECK(held("FULL_SHARD", true) < 1.05 * held("FULL_SHARD", false));       // a second slot instead of it
  CHECK(held("FULL_SHARD", true) < 0.7 * held("SHARD_GRAD_OP", true));
}

TEST_CASE("fsdp2: a gather that goes straight to a slot leaves one in use alone, in evaluations of any order") {
  const std::vector<UnitSpec> specs = draft_specs({.blocks = 5, .has_frozen = false});
  for (const bool straight : {false, true}) {
    FakeHub(2, straight).run([&](FakeComm& comm) {
      const Made sharding = fsdp2("FULL_SHARD")();
      sharding->build(specs, {.comm = &comm});
      for (Shard& shard : sharding->shards()) {
        const int64_t number = &shard - sharding->shards().data();
        shard.local.copy_(at::arange(shard.begin, shard.end, at::kFloat).view(shard.local.sizes()).add(1000.0 * static_cast<double>(number)));
      }
      const auto use = [&](int64_t unit, Phase phase) {
        sharding->before_use(unit, phase, 1);
        int64_t number = 0;
        for (int64_t before = 0; before < unit; ++before) {
          number += static_cast<int64_t>(specs[static_cast<size_t>(before)].parameters.size());
        }
        for (size_t p = 0; p < specs[static_cast<size_t>(unit)].parameters.size(); ++p) {
          const at::Tensor whole = sharding->whole(unit, static_cast<int64_t>(p));
          CHECK(at::equal(whole, at::arange(whole.numel(), at::kFloat).view(whole.sizes()).add(1000.0 * static_cast<double>(number + static_cast<int64_t>(p)))));
        }
        sharding->after_use(unit, phase, 1);
      };
      const std::vector<int64_t> order = {0, 1, 2, 3, 4, 5, 6};
      sharding->plan(Phase::forward, order);
      sharding->begin_window();
      for (int micro_step = 0; micro_step < 2; ++micro_step) {
        for (const int64_t unit : order) {
          use(unit, Phase::forward);
        }
        for (int64_t unit = 6; unit >= 0; --unit) {
          use(unit, Phase::backward);
        }
      }
      sharding->abandon();
      for (const std::vector<int64_t>& evaluated : {std::vector<int64_t>{0, 1, 3, 2, 4, 5, 6}, std::vector<int64_t>{1, 3, 5, 1}, std::vector<int64_t>{5, 4, 3, 2, 1, 0}}) {
        sharding->begin_evaluation();
        sharding->plan(Phase::evaluate, evaluated);
        for (int batch = 0; batch < 2; ++batch) {
          for (const int64_t unit : evaluated) {
            use(unit, Phase::evaluate);
          }
        }
        sharding->end_evaluation();
      }
    });
  }
}

TEST_CASE("fsdp: with a known plan the next group is on its way before its unit runs") {
  const std::vector<UnitSpec> specs = draft_specs({.blocks = 2, .has_frozen = false});
  for (const Maker& maker : {fsdp1("FULL_SHARD"), fsdp2("FULL_SHARD")}) {
    FakeHub(2).run([&](FakeComm& comm) {
      const Made sharding = maker();
      sharding->build(specs, {.comm = &comm});
      const auto events_of = [&](int64_t unit, Phase phase) {
        comm.events.clear();
        sharding->before_use(unit, phase, 1);
        const std::vector<std::string> events = comm.events;
        sharding->after_use(unit, phase, 1);
        return events;
      };
      using Events = std::vector<std::string>;
      const std::vector<int64_t> order = {0, 1, 2, 3};
      sharding->begin_window();
      CHECK(events_of(0, Phase::forward) == Events{"issue all_gather root", "wait all_gather root"});
      CHECK(events_of(1, Phase::forward) == Events{"issue all_gather block.0", "wait all_gather block.0"});
      CHECK(events_of(2, Phase::forward) == Events{"issue all_gather block.1", "wait all_gather block.1"});
      CHECK(events_of(3, Phase::forward).empty());
      CHECK(events_of(2, Phase::backward).empty());  // unknown plan: nothing was given back
      sharding->abandon();
      sharding->plan(Phase::forward, order);
      CHECK(events_of(0, Phase::forward) == Events{"issue all_gather root", "wait all_gather root", "issue all_gather block.0"});
      CHECK(events_of(1, Phase::forward) == Events{"wait all_gather block.0", "issue all_gather block.1"});
      CHECK(events_of(2, Phase::forward) == Events{"wait all_gather block.1"});  // block.1 itself comes next, after it was given back
      CHECK(events_of(3, Phase::forward) == Events{"issue all_gather block.1"});
      CHECK(events_of(3, Phase::backward).empty());
      CHECK(events_of(2, Phase::backward) == Events{"wait all_gather block.1", "issue all_gather block.0"});
    });
  }
}

TEST_CASE("fsdp2: frozen tables are whole in windows and evaluations, hold no memory outside, and cost one gather") {
  for (const int64_t ranks : {2, 3}) {
    FakeHub(ranks).run([&](FakeComm& comm) {
      at::Tensor embedding, head;
      {
        const std::lock_guard<std::mutex> lock([]() -> std::mutex& { static std::mutex one; return one; }());
        at::manual_seed(1);
        embedding = at::randn({13, 5});
        head = at::randn({13, 5}).to(at::kBFloat16);
      }
      const at::Tensor kept_embedding = embedding.clone(), kept_head = head.clone();
      std::vector<int64_t> reported;
      fsdp::Settings settings = fsdp::fsdp2_settings({.shard_frozen_tables = true});
      settings.on_tables = [&](int64_t count) { reported.push_back(count); };
      const Made sharding = made(std::move(settings));
      sharding->build(draft_specs({}), {.comm = &comm});
      sharding->take_tables({embedding, head, embedding, at::Tensor()});
      CHECK(reported == std::vector<int64_t>{2});
      for (int round = 0; round < 2; ++round) {
        CHECK(embedding.storage().nbytes() == 0);
        CHECK(head.storage().nbytes() == 0);
        comm.reset_counts();
        sharding->begin_window();
        CHECK(at::equal(embedding, kept_embedding));
        CHECK(at::equal(head, kept_head));
        for (int64_t unit = 0; unit < 6; ++unit) {
          sharding->reduce(unit, std::vector<at::Tensor>(draft_specs({})[static_cast<size_t>(unit)].parameters.size()));
        }
        (void)sharding->end_window();
        CHECK(comm.count("all_gather frozen tables") == 1);
        CHECK(head.storage().nbytes() == 0);
        sharding->begin_evaluation();
        CHECK(at::equal(head, kept_head));
        sharding->end_evaluation();
        CHECK(embedding.storage().nbytes() == 0);
      }
    });
  }
}

TEST_CASE("fsdp: layouts cover every element once, rows stay together in fsdp2, and the last ranks may hold nothing") {
  const std::vector<fsdp::Extent> members = {{1, 1}, {3, 4}, {10, 7}, {5, 1}};
  for (const int64_t ranks : {1, 2, 3, 4, 8}) {
    for (const auto& layout : {fsdp::row_layout(members, ranks), fsdp::flat_layout(members, ranks)}) {
      std::vector<int64_t> place_used(static_cast<size_t>(layout.elements()), 0);
      std::vector<std::vector<int64_t>> seen;
      for (const fsdp::Extent& member : members) {
        seen.emplace_back(static_cast<size_t>(member.elements()), 0);
      }
      for (const fsdp::Piece& piece : layout.pieces) {
        for (int64_t i = 0; i < piece.count; ++i) {
          ++place_used[static_cast<size_t>(piece.place + i)];
          ++seen[static_cast<size_t>(piece.member)][static_cast<size_t>(piece.begin + i)];
        }
      }
      for (const fsdp::Run& gap : layout.gaps) {
        for (int64_t i = 0; i < gap.count; ++i) {
          ++place_used[static_cast<size_t>(gap.place + i)];
        }
      }
      CHECK(std::all_of(place_used.begin(), place_used.end(), [](int64_t times) { return times == 1; }));
      for (size_t m = 0; m < members.size(); ++m) {
        CHECK(std::all_of(seen[m].begin(), seen[m].end(), [](int64_t times) { return times == 1; }));
        int64_t at = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const fsdp::Own own = fsdp::own_of(layout, 4, rank)[m];
          CHECK((own.begin == own.end || own.begin == at));
          at = own.begin == own.end ? at : own.end;
        }
        CHECK(at == members[m].elements());
      }
    }
  }
  const fsdp::Layout rows = fsdp::row_layout(members, 4);
  CHECK(fsdp::own_of(rows, 4, 0)[0].end == 1);
  CHECK(fsdp::own_of(rows, 4, 1)[0].end == 0);   // one row: rank 0 owns it
  CHECK(fsdp::own_of(rows, 4, 2)[1].begin == 8);  // ceil(3 / 4) = 1 row each
  CHECK(fsdp::own_of(rows, 4, 3)[1].end == fsdp::own_of(rows, 4, 3)[1].begin);
  CHECK(fsdp::own_of(rows, 4, 3)[2].begin == 9 * 7);
  CHECK(fsdp::own_of(rows, 4, 3)[2].end == 10 * 7);
}

TEST_CASE("fsdp: a rank's own share is added where it lies, in float32, whatever is missing, narrow, uneven or not aligned on some rank") {
  // Rows for all, for the first rank alone, in odd numbers that no vector load takes; ranks without rows of any parameter.
  const std::vector<fsdp::Extent> members = {{7, 3}, {1, 5}, {4, 16}, {9, 1}};
  const auto gradient_of = [&](size_t member, int64_t rank, int64_t window) {  // numbers that bfloat16 has, so that sums are exact whatever the wire
    const int64_t count = members[member].elements();
    return at::arange(count, at::kFloat).remainder(13).add(static_cast<double>(1 + rank + window)).view({members[member].rows, members[member].row_elements});
  };
  for (const int64_t ranks : {2, 3, 5}) {
    for (const auto cut : {fsdp::row_layout, fsdp::flat_layout}) {
      for (const at::ScalarType wire : {at::kFloat, at::kBFloat16}) {
        CAPTURE(ranks);
        FakeHub(ranks).run([&](FakeComm& comm) {
          const fsdp::Layout layout = cut(members, ranks);
          fsdp::Reducer reducer({{.name = "one", .layout = layout}, {.name = "other", .layout = layout}}, {.comm = &comm, .dtype = wire, .max_inputs = 2});
          for (int64_t window = 0; window < 4; ++window) {
            // 0: all there; 1: one rank has none of a parameter; 2: one rank has a narrow one; 3: one rank has nothing at all
            const bool is_odd = comm.rank() == ranks - 1;
            std::vector<at::Tensor> given, expected;
            for (size_t m = 0; m < members.size(); ++m) {
              at::Tensor gradient = gradient_of(m, comm.rank(), window);
              if (is_odd && ((window == 1 && m == 2) || window == 3)) {
                gradient = at::Tensor();
              } else if (is_odd && window == 2 && m == 0) {
                gradient = gradient.to(at::kBFloat16);
              }
              given.push_back(gradient);
              expected.push_back(at::zeros({members[m].elements()}));
              for (int64_t r = 0; r < ranks; ++r) {
                if (r < ranks - 1 || !((window == 1 && m == 2) || window == 3)) {
                  expected.back() += gradient_of(m, r, window).view({-1});
                }
              }
            }
            reducer.reduce(0, given);
            reducer.reduce(1, given);
            reducer.drain();
            for (const at::Tensor& gradient : given) {
              if (gradient.defined()) {
                gradient.zero_();  // as the next window does
              }
            }
            for (const int64_t group : {0, 1}) {
              for (size_t m = 0; m < members.size(); ++m) {
                const fsdp::Own own = fsdp::own_of(layout, static_cast<int64_t>(members.size()), comm.rank())[m];
                CHECK(at::equal(reducer.reduced(group).narrow(0, own.place, own.end - own.begin), expected[m].slice(0, own.begin, own.end)));
              }
            }
          }
        });
      }
    }
  }
}

TEST_CASE("fsdp: gradients of a reduction in flight stay as they are until it is waited for; a window that is given up frees them") {
  const fsdp::Layout layout = fsdp::row_layout({{4, 8}}, 2);
  const auto train = [&](bool is_given_up) {
    FakeHub(2).run([&](FakeComm& comm) {
      fsdp::Reducer reducer({{.name = "one", .layout = layout}}, {.comm = &comm});
      const at::Tensor gradient = at::ones({4, 8});
      reducer.reduce(0, {gradient});
      if (is_given_up) {
        reducer.abandon();
        CHECK(comm.reductions_in_flight == 0);
      }
      gradient.fill_(2);
      if (is_given_up) {
        reducer.reduce(0, {gradient});
      }
      reducer.drain();
      CHECK(at::equal(reducer.reduced(0), at::full({16}, 4.0)));
    });
  };
  CHECK_THROWS_WITH_AS(train(false), "the input of reduce_scatter one changed while it was in flight", std::logic_error);
  train(true);
  // What is given up is looked at, too.
  CHECK_THROWS_WITH_AS(FakeHub(2).run([&](FakeComm& comm) {
    fsdp::Reducer reducer({{.name = "one", .layout = layout}}, {.comm = &comm});
    const at::Tensor gradient = at::ones({4, 8});
    reducer.reduce(0, {gradient});
    gradient.fill_(2);
    reducer.abandon();
  }), "the input of reduce_scatter one changed while it was in flight", std::logic_error);
}

TEST_CASE("fake ranks: memory that a gather goes to is nobody's until it is waited for") {
  for (const bool writes : {false, true}) {
    const auto gather = [&] {
      FakeHub(2).run([&](FakeComm& comm) {
        const at::Tensor part = at::full({4}, 1.0 + static_cast<double>(comm.rank())), staging = at::zeros({8}), slot = at::zeros({3});
        const auto work = comm.all_gather_to({{.memory = slot, .place = 5}}, staging, part, "slots", Channel::main);
        CHECK(at::isnan(slot).all().item<bool>());
        if (writes) {
          slot[1] = 7;
        }
        work->wait();
        CHECK(at::equal(slot, at::full({3}, 2.0)));
        CHECK(at::isnan(staging).all().item<bool>());
      });
    };
    if (writes) {
      CHECK_THROWS_WITH_AS(gather(), "memory of all_gather slots was written while it was in flight", std::logic_error);
    } else {
      gather();
    }
  }
}

TEST_CASE("fsdp: an order of units that differs from the plan is an error that names the place") {
  fsdp::UsePlan plan({0, 1, 0});
  CHECK(plan.advance(2, Phase::forward) == -1);  // unknown yet
  plan.learn(Phase::forward, {0, 1, 2});
  CHECK(plan.advance(0, Phase::forward) == 0);
  CHECK_THROWS_AS(plan.advance(2, Phase::forward), Error);
  plan.restart();
  CHECK(plan.advance(0, Phase::forward) == 0);
  CHECK(plan.spans()[0].size() == 1);  // root: from the first use in forward to the last in backward
  CHECK(plan.spans()[0][0].last == 5);
  CHECK(plan.spans()[1].size() == 2);
}

TEST_CASE("fsdp: what ends a micro-step stays for the next one that begins with it, whatever is whole throughout beside it") {
  const auto kept = [](const std::vector<int64_t>& group_of_unit, const std::vector<int64_t>& order, Phase phase) {
    fsdp::UsePlan plan(group_of_unit);
    plan.learn(phase, order);
    std::vector<int64_t> last;  // positions after which something is given back
    const int64_t positions = static_cast<int64_t>(order.size()) * (phase == Phase::evaluate ? 1 : 2);
    for (int64_t position = 0; position < positions; ++position) {
      if (plan.is_last(phase, position)) {
        last.push_back(position);
      }
    }
    return last;
  };
  using Positions = std::vector<int64_t>;
  // root, three blocks, root | root, three blocks, root: nothing after 8, the first block's backward, nor after 9
  CHECK(kept({0, 1, 2, 3, 0}, {0, 1, 2, 3, 4}, Phase::forward) == Positions{1, 2, 3, 6, 7});
  CHECK(kept({1, 2}, {0, 1}, Phase::forward) == Positions{0, 2});              // no root: after its backward pass the first block stays
  CHECK(kept({0, 1, 2}, {0, 1, 2}, Phase::evaluate) == Positions{0, 1, 2});    // an evaluation ends with another than it begins with
  CHECK(kept({0, 1, 0}, {0, 1, 2}, Phase::evaluate) == Positions{});           // root throughout, and one block
  const std::vector<std::vector<fsdp::Span>> longer = fsdp::with_gathers({{{0, 9}}, {{1, 1}, {8, 8}}, {{2, 2}, {7, 7}}});
  CHECK(longer[0][0].first == 0);
  CHECK(longer[1][0].first == 0);
  CHECK(longer[1][1].first == 7);
  CHECK(longer[2][0].first == 1);
  CHECK(longer[2][1].first == 2);
  CHECK(fsdp::share_slots(longer) == std::vector<int64_t>{0, 1, 2});
}

TEST_CASE("fake ranks: several threads begin in a forked child, which has no pool of LibTorch's threads yet") {
  at::set_num_threads(1);   // makes the pool, which no child takes over
  for (int round = 0; round < 100; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        std::atomic<int> begun = 0;
        FakeHub(2).run([&](FakeComm&) {
          for (++begun; begun < 2;) {  // both at once
          }
          (void)at::arange(4).numel();
        });
        _exit(0);
      } catch (const std::exception&) {
        _exit(1);
      }
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(status == 0);
  }
}
