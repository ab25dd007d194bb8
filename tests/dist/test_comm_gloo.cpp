// Collectives over gloo, ranks as threads: every result against a plain loop, the same bits on every rank and in every run.
#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include <csignal>

#include <sys/socket.h>

#include "tests/dist/threads.hpp"

using namespace sf;
using namespace sf::test;

namespace {

// What rank r brings: the same in every run, spread over magnitudes so that the order of a sum matters.
at::Tensor values_of(int64_t rank, int64_t count, at::ScalarType type = at::kFloat) {
  const at::Tensor index = at::arange(count, at::TensorOptions().dtype(at::kDouble));
  const at::Tensor values = (index * 0.37 + static_cast<double>(rank)).sin() * (index * 0.011 * (1.0 + static_cast<double>(rank))).exp().clamp_max(1e6);
  return values.to(type);
}

at::Tensor sum_in_rank_order(int64_t ranks, int64_t count, at::ScalarType type) {
  at::Tensor sum = values_of(0, count, type).to(at::kFloat);
  for (int64_t r = 1; r < ranks; ++r) {
    sum = sum + values_of(r, count, type).to(at::kFloat);
  }
  return sum.to(type);
}

void check_all_fine(const std::vector<RankEnd>& ends) {
  for (const RankEnd& end : ends) {
    CHECK_MESSAGE(end.error.empty(), end.error);
    CHECK_MESSAGE(!end.was_told, end.told);
  }
}

}  // namespace

TEST_CASE("gloo: a gather puts every rank's part in rank order, in place or not") {
  for (const int64_t ranks : {2, 3, 4}) {
    check_all_fine(run_gloo({.ranks = ranks}, [&](RankComm& comm, RankGroup&) {
      const at::Tensor part = values_of(comm.rank(), 17), whole = at::zeros({17 * ranks});
      comm.all_gather(whole, part, "a", Channel::main)->wait();
      const at::Tensor in_place = at::zeros({17 * ranks});
      const at::Tensor own = in_place.slice(0, comm.rank() * 17, (comm.rank() + 1) * 17);
      own.copy_(part);
      comm.all_gather(in_place, own, "b", Channel::main)->wait();
      for (int64_t r = 0; r < ranks; ++r) {
        CHECK(at::equal(whole.slice(0, r * 17, (r + 1) * 17), values_of(r, 17)));
      }
      CHECK(at::equal(whole, in_place));
    }));
  }
}

TEST_CASE("gloo: a reduce-scatter is the sum in rank order in float32, rounded once for bfloat16") {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      check_all_fine(run_gloo({.ranks = ranks}, [&](RankComm& comm, RankGroup&) {
        const int64_t n = 1001;
        const at::Tensor whole = values_of(comm.rank(), n * ranks, type), part = at::zeros({n}, whole.options());
        comm.reduce_scatter(part, whole, "g", Channel::main)->wait();
        CHECK(at::equal(part, sum_in_rank_order(ranks, n * ranks, type).slice(0, comm.rank() * n, (comm.rank() + 1) * n)));
        CHECK(at::equal(whole, values_of(comm.rank(), n * ranks, type)));
        if (type == at::kBFloat16) {  // a wide part keeps what the rounding would take
          at::Tensor sum = values_of(0, n * ranks, type).to(at::kFloat);
          for (int64_t r = 1; r < ranks; ++r) {
            sum = sum + values_of(r, n * ranks, type).to(at::kFloat);
          }
          const at::Tensor wide = at::zeros({n}), own = sum.slice(0, comm.rank() * n, (comm.rank() + 1) * n);
          comm.reduce_scatter(wide, whole, "wide", Channel::main)->wait();
          CHECK(at::equal(wide, own));
          CHECK(!at::equal(wide, own.to(type).to(at::kFloat)));
        }
      }));
    }
  }
}

TEST_CASE("gloo: a gather goes to the memory of its runs, and a reduction takes a rank's own share from where it lies") {
  for (const int64_t ranks : {2, 3}) {
    check_all_fine(run_gloo({.ranks = ranks}, [&](RankComm& comm, RankGroup&) {
      const int64_t n = 24, rank = comm.rank();
      const at::Tensor part = values_of(rank, n), staging = at::zeros({n * ranks});
      std::vector<PartRun> runs;
      for (int64_t r = ranks - 1; r >= 0; --r) {  // two of each rank, the last two elements are padding
        runs.push_back({.memory = at::zeros({2, 5}), .place = r * n});
        runs.push_back({.memory = at::zeros({12}), .place = r * n + 10});
      }
      comm.all_gather_to(runs, staging, part, "runs", Channel::main)->wait();
      for (const PartRun& run : runs) {
        CHECK(at::equal(run.memory.view({-1}), values_of(run.place / n, n).slice(0, run.place % n, run.place % n + run.memory.numel())));
      }
      const at::Tensor whole = values_of(rank, n * ranks), sum = at::zeros({n});
      const at::Tensor own = whole.slice(0, rank * n, (rank + 1) * n).clone();
      const at::Tensor expected = sum_in_rank_order(ranks, n * ranks, at::kFloat).slice(0, rank * n, (rank + 1) * n);
      whole.slice(0, rank * n, (rank + 1) * n).fill_(1e30);
      comm.reduce_scatter_from({{.memory = own.slice(0, 0, 8), .place = rank * n}, {.memory = own.slice(0, 8), .place = rank * n + 8}}, sum, whole, "own", Channel::main)->wait();
      CHECK(at::equal(sum, expected));
      const std::vector<std::pair<std::string, int64_t>> counts = {{"all_gather runs", 1}, {"reduce_scatter own", 1}};
      CHECK(comm.counts() == counts);
      // On a bfloat16 wire the own share is rounded as those of the others are, and one rank may bring it in `whole` where another doesn't.
      const at::Tensor narrow = values_of(rank, n * ranks, at::kBFloat16), mine = values_of(rank, n * ranks).slice(0, rank * n, (rank + 1) * n), wide = at::zeros({n});
      at::Tensor narrow_sum = values_of(0, n * ranks, at::kBFloat16).to(at::kFloat);
      for (int64_t r = 1; r < ranks; ++r) {
        narrow_sum = narrow_sum + values_of(r, n * ranks, at::kBFloat16).to(at::kFloat);
      }
      if (rank == 0) {
        comm.reduce_scatter(wide, narrow, "mixed", Channel::main)->wait();
      } else {
        narrow.slice(0, rank * n, (rank + 1) * n).fill_(1e30);
        comm.reduce_scatter_from({{.memory = mine, .place = rank * n}}, wide, narrow, "mixed", Channel::main)->wait();
      }
      CHECK(at::equal(wide, narrow_sum.slice(0, rank * n, (rank + 1) * n)));
    }));
  }
}

TEST_CASE("gloo: an all-reduce gives the same bits on every rank for small and large tensors, sums and maxima") {
  for (const int64_t count : {1, 7, 40'000}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      check_all_fine(run_gloo({.ranks = 3}, [&](RankComm& comm, RankGroup&) {
        const at::Tensor tensor = values_of(comm.rank(), count, type);
        comm.all_reduce(tensor, Reduction::sum, "s", Channel::main)->wait();
        CHECK(at::equal(tensor, sum_in_rank_order(3, count, type)));
      }));
    }
  }
  check_all_fine(run_gloo({.ranks = 3}, [&](RankComm& comm, RankGroup&) {
    const at::Tensor count = at::tensor({comm.rank() + 1, int64_t{1} << 53}, at::TensorOptions().dtype(at::kLong));
    comm.all_reduce(count, Reduction::sum, "n", Channel::main)->wait();
    CHECK(count[0].item<int64_t>() == 6);
    CHECK(count[1].item<int64_t>() == 3 * (int64_t{1} << 53));
    const at::Tensor wide = at::full({}, 0.1 * static_cast<double>(comm.rank()), at::TensorOptions().dtype(at::kDouble));
    comm.all_reduce(wide, Reduction::sum, "d", Channel::main)->wait();
    CHECK(wide.item<double>() == (0.0 + 0.1) + 0.2);
    const at::Tensor largest = at::tensor({static_cast<float>(comm.rank()), -static_cast<float>(comm.rank())});
    comm.all_reduce(largest, Reduction::max, "m", Channel::main)->wait();
    CHECK(at::equal(largest, at::tensor({2.0F, 0.0F})));
  }));
}

TEST_CASE("gloo: a broadcast copies the root's tensor; empty tensors, two channels and counts work") {
  check_all_fine(run_gloo({.ranks = 3}, [&](RankComm& comm, RankGroup&) {
    comm.open_reduction_channel();
    const at::Tensor tensor = values_of(comm.rank(), 5);
    comm.broadcast(tensor, 1, "w", Channel::main)->wait();
    CHECK(at::equal(tensor, values_of(1, 5)));
    const at::Tensor nothing = at::zeros({0});
    comm.all_gather(nothing, nothing, "empty", Channel::main)->wait();
    for (int i = 0; i < 3; ++i) {
      const at::Tensor part = at::zeros({2}), whole = values_of(comm.rank(), 6);
      comm.reduce_scatter(part, whole, "root", Channel::reduction)->wait();
    }
    const std::vector<std::pair<std::string, int64_t>> expected = {{"all_gather empty", 1}, {"broadcast w", 1}, {"reduce_scatter root", 3}};
    CHECK(comm.counts() == expected);
  }));
}

TEST_CASE("gloo: to write to a rank that is gone is an error and not the end of the process, whose own handler stays") {
  const auto disposition = [] {
    struct sigaction now {};
    sigaction(SIGPIPE, nullptr, &now);
    return now.sa_handler;
  };
  struct sigaction own {};
  own.sa_handler = [](int) {};
  sigaction(SIGPIPE, &own, nullptr);
  check_all_fine(run_gloo({.ranks = 2}, [](RankComm&, RankGroup&) {}));
  CHECK((disposition() == own.sa_handler));
  (void)signal(SIGPIPE, SIG_DFL);
  for (int trial = 0; trial < 5; ++trial) {
    const auto ends = run_gloo({.ranks = 2, .limit = std::chrono::milliseconds(2000)}, [](RankComm& comm, RankGroup&) {
      const at::Tensor tensor = at::ones({4});
      comm.all_reduce(tensor, Reduction::sum, "norm", Channel::main)->wait();
      if (comm.rank() == 1) return;
      for (int fd = 3; fd < 256; ++fd) (void)::shutdown(fd, SHUT_WR);  // of all sockets here: what is written to one now raises the signal
      comm.all_reduce(tensor, Reduction::sum, "norm", Channel::main)->wait();
    });
    CHECK(ends[0].code == ExitCode::kCommunication);
  }
  CHECK((disposition() == SIG_IGN));
}

TEST_CASE("gloo: a missing library says that CPU runs of several ranks need it") {
  const auto ends = run_ranks({.ranks = 1}, [&](RankGroup& group) { (void)open_gloo(group, "/nowhere/libsf_comm_gloo.so"); });
  CHECK(ends[0].error.find("CPU run of several ranks needs libsf_comm_gloo.so") != std::string::npos);
  CHECK(ends[0].code == ExitCode::kCommunication);
}

TEST_CASE("gloo: a collective that one rank never joins ends all within the limit and names the rank, the operation and its number") {
  const auto start = std::chrono::steady_clock::now();
  const auto ends = run_gloo({.ranks = 3, .limit = std::chrono::milliseconds(2000)}, [&](RankComm& comm, RankGroup& group) {
    const at::Tensor tensor = at::zeros({4});
    comm.all_reduce(tensor, Reduction::sum, "denominators", Channel::main)->wait();
    if (comm.rank() == 2) {  // stuck elsewhere until its watchdog would have ended it
      (void)group.watchdog().wait_for_failure(std::chrono::seconds(8));
      return;
    }
    comm.all_reduce(tensor, Reduction::sum, "norm", Channel::main)->wait();
  });
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(9));
  const std::string& told = ends[0].was_told ? ends[0].told : ends[0].error;
  CHECK_MESSAGE(told.find("'all_reduce norm'") != std::string::npos, told);
  CHECK_MESSAGE(told.find("rank 2 had not arrived") != std::string::npos, told);
  CHECK_MESSAGE(told.find("all_reduce denominators") != std::string::npos, told);
  for (const RankEnd& end : ends) {
    CHECK(end.code == ExitCode::kCommunication);
  }
}
