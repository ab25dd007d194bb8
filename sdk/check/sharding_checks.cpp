// Checks of sharding backends: what they make of a small draft is what the backend that keeps everything whole makes of it.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/reader.hpp"
#include "core/checkpoint/save.hpp"
#include "core/checkpoint/writer_sync.hpp"
#include "core/train/saved_run.hpp"
#include "sdk/check/tensor_checks.hpp"
#include "sdk/testing/fake_comm.hpp"
#include "sdk/testing/small_draft.hpp"

namespace sf::check {
namespace {

using sf::testing::DraftRun;
using sf::testing::FakeComm;
using sf::testing::FakeHub;
using sf::testing::LonePlugin;
using sf::testing::TemporaryFolder;

constexpr double kShardingTolerance = 2e-5;   // float32 sums in another order, over three updates

class Backends {
 public:
  explicit Backends(const Candidate& candidate) : candidate_(candidate) {}

  std::unique_ptr<Sharding, void (*)(Sharding*)> make() {
    const std::lock_guard lock(mutex_);   // create is [main]: never two at a time
    std::vector<std::string> sets;
    const auto& claims = candidate_.manifest().claims;
    if (std::find(claims.begin(), claims.end(), "training.reduce_dtype") != claims.end()) {
      sets.emplace_back("training.reduce_dtype=\"float32\"");
    }
    plugins_.push_back(std::make_unique<LonePlugin>(candidate_.file, candidate_.entry, candidate_.values(sets), candidate_.services));
    LonePlugin& plugin = *plugins_.back();
    plugin.require(plugin.create(), "create");
    plugin.require(plugin.start(), "start");
    return {static_cast<Sharding*>(const_cast<void*>(plugin.get_interface(kShardingInterface))), [](Sharding*) {}};
  }

 private:
  const Candidate& candidate_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<LonePlugin>> plugins_;
};

bool shards(const Candidate& candidate) {
  const auto& provides = candidate.manifest().provides;
  return std::find(provides.begin(), provides.end(), "sharded-parameters") != provides.end();
}

Outcome compare(const Candidate& candidate, const DraftRun& run, std::int64_t ranks) {
  if (ranks > 1 && !shards(candidate)) {
    return skipped("it does not provide sharded-parameters: one process");
  }
  const sf::testing::Outcome expected = sf::testing::train_single(run);
  Backends backends(candidate);
  sf::testing::Outcome found;
  if (ranks == 1) {
    found = expected;
    const auto backend = backends.make();
    for (auto* tensors : {&found.weights, &found.gradients}) {
      for (auto& [name, tensor] : *tensors) {
        tensor = at::full_like(tensor, NAN);
      }
    }
    found.losses.clear();
    found.norms.clear();
    run.train(*backend, nullptr, found);
  } else {
    found = sf::testing::train_ranks(run, ranks, [&] { return backends.make(); });
  }
  for (std::size_t window = 0; window < expected.losses.size(); ++window) {
    const auto is_near = [](double a, double b) { return std::abs(a - b) <= kShardingTolerance * std::max(std::abs(b), 1e-6); };
    if (!is_near(found.losses[window], expected.losses[window])) {
      return failed(format("window {}: loss {}, unsharded {}", window, found.losses[window], expected.losses[window]));
    }
    if (!is_near(found.norms[window], expected.norms[window])) {
      return failed(format("window {}: gradient norm {}, unsharded {}", window, found.norms[window], expected.norms[window]));
    }
  }
  const double weights = sf::testing::largest_difference(found.weights, expected.weights);
  const double gradients = sf::testing::largest_difference(found.gradients, expected.gradients);
  if (!(weights <= kShardingTolerance && gradients <= kShardingTolerance)) {
    return failed(format("weights differ by {}, gradients by {} of their largest element", weights, gradients));
  }
  return passed(format("weights differ by {} at most", weights));
}

Check sharding_check(const char* id, const char* sentence, DraftRun run, std::int64_t ranks) {
  return {id, sentence, [run, ranks](const Candidate& candidate) { return compare(candidate, run, ranks); }};
}

// ---- saving and going on

SavePeers peers_of(Comm& comm) {
  return {.rank = static_cast<int>(comm.rank()), .world_size = static_cast<int>(comm.size()),
          .gather = [&comm](const std::string& text, std::string_view label) { return comm.gather_texts(text, label); }};
}

void save(AdamW& optimizer, Sharding& sharding, Comm& comm, const std::filesystem::path& folder) {
  SyncWriter writer;
  CheckpointSaver saver(folder, writer.writer(), peers_of(comm));
  SavedTensors tensors = copy_to_host(sharding.shards(), optimizer);
  CheckpointSaver::Request request{.state = {.run_id = "check", .step = 1}, .tensors = std::move(tensors.slices), .keep_alive = std::move(tensors.keep_alive)};
  request.state.progress.set("update_counts", std::move(tensors.update_counts));
  saver.start(std::move(request));
  saver.wait();
}

Outcome goes_on(const Candidate& candidate) {
  const std::int64_t ranks = shards(candidate) ? 2 : 1;
  const TemporaryFolder folder;
  Backends backends(candidate);
  const auto train = [&](const DraftRun& run) { return sf::testing::train_ranks(run, ranks, [&] { return backends.make(); }); };
  const DraftRun whole{.windows = 4, .samples = 4};
  const sf::testing::Outcome expected = train(whole);
  DraftRun half = whole;
  half.windows = 2;
  half.at_end = [&](AdamW& optimizer, Sharding& sharding, Comm* comm) { save(optimizer, sharding, *comm, folder.path()); };
  (void)train(half);
  DraftRun rest = whole;
  rest.first_window = 2;
  rest.before_start = [&](AdamW& optimizer, Sharding& sharding, Comm*) {
    read_tensors(CheckpointReader::open(folder.path() / "step-00000001"), sharding.shards(), optimizer);
  };
  const sf::testing::Outcome found = train(rest);
  for (std::size_t window = 0; window < found.norms.size(); ++window) {
    if (found.norms[window] != expected.norms[window + 2]) {
      return failed(format("window {} after going on has gradient norm {}, {} in the run that was not stopped", window + 2, found.norms[window], expected.norms[window + 2]));
    }
  }
  const double difference = sf::testing::largest_difference(found.weights, expected.weights);
  return difference == 0 ? passed(format("on {} {}, after two of four windows", ranks, ranks == 1 ? "rank" : "ranks"))
                         : failed(format("the weights of a run that was saved and went on differ by {} of their largest element", difference));
}

// ---- collectives that fail

/// Throws in the collective number `at`, when it is issued or when it is waited for; -1: never.
class FailingComm final : public Comm {
 public:
  FailingComm(FakeComm& inner, std::int64_t at, bool in_wait) : inner_(inner), at_(at), in_wait_(in_wait) {}
  [[nodiscard]] std::int64_t issued() const { return issued_; }

  std::int64_t rank() const override { return inner_.rank(); }
  std::int64_t size() const override { return inner_.size(); }
  std::int64_t local_rank() const override { return inner_.local_rank(); }
  std::unique_ptr<CommWork> all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label, Channel channel) override {
    return issue([&] { return inner_.all_gather(whole, part, label, channel); });
  }
  std::unique_ptr<CommWork> reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label, Channel channel) override {
    return issue([&] { return inner_.reduce_scatter(part, whole, label, channel); });
  }
  std::unique_ptr<CommWork> all_reduce(const at::Tensor& tensor, Reduction reduction, std::string_view label, Channel channel) override {
    return issue([&] { return inner_.all_reduce(tensor, reduction, label, channel); });
  }
  std::unique_ptr<CommWork> broadcast(const at::Tensor& tensor, std::int64_t root, std::string_view label, Channel channel) override {
    return issue([&] { return inner_.broadcast(tensor, root, label, channel); });
  }
  std::unique_ptr<CommWork> all_gather_to(const std::vector<PartRun>& runs, const at::Tensor& staging, const at::Tensor& part, std::string_view label,
                                          Channel channel) override {
    return issue([&] { return inner_.all_gather_to(runs, staging, part, label, channel); });
  }
  std::unique_ptr<CommWork> reduce_scatter_from(const std::vector<PartRun>& own, const at::Tensor& part, const at::Tensor& whole, std::string_view label,
                                                Channel channel) override {
    return issue([&] { return inner_.reduce_scatter_from(own, part, whole, label, channel); });
  }
  void open_reduction_channel() override { inner_.open_reduction_channel(); }
  void register_buffer(const at::Tensor& buffer) override { inner_.register_buffer(buffer); }
  bool gathers_straight() const override { return inner_.gathers_straight(); }
  std::vector<std::string> gather_texts(const std::string& text, std::string_view label) override { return inner_.gather_texts(text, label); }
  std::vector<std::pair<std::string, std::int64_t>> counts() const override { return inner_.counts(); }

 private:
  [[noreturn]] static void fail() { throw Error(ExitCode::kCommunication, "the network is gone"); }
  struct FailingWork final : CommWork {
    std::unique_ptr<CommWork> inner;
    explicit FailingWork(std::unique_ptr<CommWork> work) : inner(std::move(work)) {}
    void wait() override { fail(); }
  };
  std::unique_ptr<CommWork> issue(const std::function<std::unique_ptr<CommWork>()>& make) {
    const bool fails = issued_++ == at_;
    if (fails && !in_wait_) {
      fail();
    }
    auto work = make();
    return fails ? std::make_unique<FailingWork>(std::move(work)) : std::move(work);
  }

  FakeComm& inner_;
  std::int64_t at_, issued_ = 0;
  bool in_wait_;
};

Outcome collectives_fail(const Candidate& candidate) {
  if (!shards(candidate)) {
    return skipped("it does not provide sharded-parameters: one process");
  }
  const DraftRun run{.windows = 3, .samples = 4};
  std::string told;
  // Returns how many collectives rank 0 has issued in a run that succeeded.
  const auto train = [&](std::int64_t at, bool in_wait) {
    Backends backends(candidate);
    std::int64_t issued = 0;
    told.clear();
    try {
      FakeHub(2).run([&](FakeComm& comm) {
        FailingComm failing(comm, comm.rank() == 0 ? at : -1, in_wait);
        const auto backend = backends.make();
        sf::testing::Outcome ignored;
        try {
          run.train(*backend, &failing, ignored);
        } catch (...) {
          backend->abandon();   // the engine's own answer; must not wait for anybody
          throw;
        }
        if (comm.rank() == 0) {
          issued = failing.issued();
        }
      });
    } catch (const std::exception& error) {
      told = error.what();
    }
    return issued;
  };
  const std::int64_t all = train(-1, false);
  if (!told.empty()) {
    return failed("without a failing collective: " + told);
  }
  int tried = 0;
  for (const std::int64_t at : {std::int64_t{0}, all / 3, all / 2, all - 1}) {
    for (const bool in_wait : {false, true}) {
      (void)train(at, in_wait);
      if (told.empty()) {
        return failed(format("collective {} of {} failed {}, and the run went on", at + 1, all, in_wait ? "while it was waited for" : "when it was issued"));
      }
      ++tried;
    }
  }
  return passed(format("{} failures among {} collectives; the last said: {}", tried, all, told));
}

}  // namespace

std::vector<Check> sharding_checks() {
  std::vector<Check> out;
  out.push_back(sharding_check("sharding/one", "one rank equals the backend that keeps everything whole", {.samples = 4}, 1));
  out.push_back(sharding_check("sharding/two", "two ranks give the unsharded losses, norms, gradients and weights", {.samples = 4}, 2));
  out.push_back(sharding_check("sharding/four", "so do four", {.samples = 4}, 4));
  out.push_back(sharding_check("sharding/unrolled", "a block that is used three times, on two ranks", {.shape = {.blocks = 1, .block_uses = 3, .has_frozen = false}, .samples = 4}, 2));
  out.push_back(sharding_check("sharding/recompute", "blocks run forward again in backward, on two ranks", {.shape = {.recompute = {"block.*"}}, .samples = 4}, 2));
  out.push_back(sharding_check("sharding/evaluate", "evaluations between windows change nothing", {.samples = 4, .evaluate_between = true}, 2));
  out.push_back(sharding_check("sharding/failure", "a window that fails and is run again changes nothing", {.samples = 4, .throw_in_window = 1}, 2));
  out.push_back({"sharding/go-on", "a run that was saved and goes on has the bits of one that never stopped", goes_on});
  out.push_back({"sharding/bad-comm", "a collective that fails ends the run with an error on every rank, without a crash and without waiting", collectives_fail});
  return out;
}

}  // namespace sf::check
