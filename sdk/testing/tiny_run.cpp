// TinyRun: an algorithm over the trainer's own tape, loader and optimizer; and ranks as threads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/dist/comm_base.hpp"
#include "core/dist/rank_group.hpp"
#include "core/kernels/ops.hpp"
#include "core/train/initialize.hpp"
#include "core/train/loader.hpp"
#include "core/train/optimizer.hpp"
#include "core/train/step.hpp"
#include "core/train/workload.hpp"
#include "plugins/sharding/single/single.hpp"
#include "sdk/testing/lone_plugin.hpp"
#include "sdk/testing/plugin_test.hpp"
#include "sdk/testing/tiny_facts.hpp"

namespace sf::testing {
namespace {

std::map<std::string, double> figures(const std::map<std::string, MetricSum>& metrics, const Algorithm& algorithm) {
  std::map<std::string, double> out;
  for (const auto& [name, sum] : metrics) {
    const at::Tensor value = sum.denominator.defined() ? sum.numerator / sum.denominator.clamp_min(1e-12) : sum.numerator;
    if (value.dim() == 0) {
      out[name] = value.item<double>();
      continue;
    }
    for (int64_t position = 0; position < value.size(0); ++position) {
      out[format("position_{}/{}", position + 1, name)] = value[position].item<double>();
    }
  }
  algorithm.derive_metrics(out);
  return out;
}

// Each token as often as it stands at supervised positions, in the order in which they first appear.
std::vector<TokenCount> count_tokens(const SampleSource& source) {
  std::vector<TokenCount> counts;
  for (int64_t index = 0; index < source.size; ++index) {
    const Sample sample = source.read(index);
    const at::Tensor &ids = sample.tensors.at("input_ids"), &mask = sample.tensors.at("loss_mask");
    for (int64_t i = 0; i < sample.tokens; ++i) {
      if (mask.const_data_ptr<int64_t>()[i] == 0) {
        continue;
      }
      const int64_t token = ids.const_data_ptr<int64_t>()[i];
      auto found = std::find_if(counts.begin(), counts.end(), [&](const TokenCount& count) { return count.token == token; });
      if (found == counts.end()) {
        counts.push_back({.token = token, .count = 1});
      } else {
        ++found->count;
      }
    }
  }
  return counts;
}

}  // namespace

struct TinyRun::Parts {
  Algorithm& algorithm;
  TinySetup setup;
  Comm* comm;
  Description description;
  TargetTables tables;
  SingleSharding whole;
  Sharding& sharding;
  Workload workload;
  SampleSource source;
  std::unique_ptr<TapeRunner> runner;
  std::unique_ptr<BatchFields> fields;
  std::unique_ptr<AdamW> optimizer;
  std::unique_ptr<Trainer> trainer;
  SampleOrder order;
  int64_t window = 0;

  Parts(Algorithm& algorithm_, const ModelFacts& facts, const TinySetup& setup_, Sharding* sharding_, Comm* comm_)
      : algorithm(algorithm_), setup(setup_), comm(comm_), description(algorithm.describe(facts)), sharding(sharding_ != nullptr ? *sharding_ : whole),
        order(setup.seed, setup.samples, 1'000'000) {
    workload = {.samples = setup.samples, .tokens = setup.tokens, .vocab = kTinyVocab - 1, .hidden = kTinyHidden, .seed = setup.seed};   // the last token is the mask
    Workload table = workload;
    table.vocab = kTinyVocab;
    const Placement placement{.device = at::kCPU, .dtype = at::kFloat, .comm = comm};
    tables = random_tables(description, table, at::kFloat, at::kCPU);
    sharding.build(description.units, placement);
    initialize_weights(description.units, sharding.shards(), setup.seed);
    for (const UnitSpec& unit : description.units) {
      for (const ParameterSpec& parameter : unit.parameters) {
        for (Shard& shard : sharding.shards()) {
          if (parameter.init == Init::target_embedding && shard.name == unit.prefix + parameter.name) {
            at::NoGradGuard no_grad;
            shard.local.copy_(tables.embedding_vh.reshape({-1}).slice(0, shard.begin, shard.end).view(shard.local.sizes()));
          }
        }
      }
    }
    algorithm.bind(tables, cpu_ops());
    sharding.take_tables({tables.embedding_vh, tables.head_vh});
    std::vector<Unit*> units;
    for (size_t i = 0; i < description.units.size(); ++i) {
      units.push_back(&algorithm.unit(static_cast<int64_t>(i)));
    }
    runner = std::make_unique<TapeRunner>(std::move(units), description.units, sharding, cpu_ops(), placement,
                                          TapeRunner::Options{.gradient_dtype = at::kFloat, .recompute = setup.recompute});
    source = random_samples(description, workload);
    if (description.wants_token_counts) {
      (void)algorithm.set_token_counts(count_tokens(source));
    }
    fields = std::make_unique<BatchFields>(description, find_prototype(source, algorithm, setup.seed, /*evaluating=*/false));
    optimizer = std::make_unique<AdamW>(sharding.shards(), AdamWOptions{.max_grad_norm = 1.0});
    trainer = std::make_unique<Trainer>(algorithm, description, sharding, *runner, *optimizer, placement);
  }

  [[nodiscard]] int64_t rank() const { return comm == nullptr ? 0 : comm->rank(); }
  [[nodiscard]] WindowShape shape() const {
    return {.ranks = comm == nullptr ? 1 : comm->size(), .accumulation_steps = setup.accumulation_steps, .batch_size = setup.batch_size};
  }

  // As WindowLoader makes it, on this thread.
  Window make(int64_t number, bool is_dead) {
    Window made;
    made.number = number;
    Unusable unusable;
    for (int64_t m = 0; m < setup.accumulation_steps; ++m) {
      std::vector<std::optional<Sample>> rows(static_cast<size_t>(is_dead ? setup.batch_size : 0));
      if (!is_dead) {
        for (const auto& entry : order.rows(number * shape().entries(), shape(), m, rank())) {
          std::optional<Sample> sample;
          if (entry) {
            sample = read_prepared(source, algorithm, entry->sample, sample_context(setup.seed, entry->epoch, entry->sample, false), unusable);
          }
          made.samples += sample ? 1 : 0;
          made.tokens += sample ? sample->tokens : 0;
          rows.push_back(std::move(sample));
        }
      }
      Batch batch = fields->stack(rows, {.max_tokens = setup.tokens, .is_static = false, .buckets = {}});
      algorithm.finish(batch);
      made.denominators.push_back(algorithm.weigh(batch));
      made.batches.push_back(std::move(batch));
    }
    return made;
  }

  // Forward and backward alone, on one rank.
  TinyOutcome differentiate(const Window& window_) {
    TinyOutcome outcome;
    for (const double denominator : window_.denominators) {
      outcome.denominator += denominator;
    }
    const at::Tensor d_a = at::tensor(window_.denominators, at::TensorOptions().dtype(at::kDouble));
    const at::Tensor seeds_a = window_seeds({.own_a = d_a, .pooled_a = d_a, .live_ranks_a = (d_a > 0).to(at::kDouble)}, description.pooling);
    runner->begin_window(seeds_a[0], {.update = 0, .updates_total = 1, .wants_details = true});
    for (size_t m = 0; m < window_.batches.size(); ++m) {
      runner->begin_micro_step();
      runner->set_seed(seeds_a[static_cast<int64_t>(m)]);
      algorithm.micro_step(*runner, to_device(window_.batches[m], description, at::kCPU, at::kFloat));
      runner->backward(/*boundary=*/m + 1 == window_.batches.size());
    }
    const std::vector<at::Tensor> gradients = sharding.end_window();
    outcome.gradient_norm = sharding.gradient_norm(gradients).item<double>();
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) {
        outcome.gradients[sharding.shards()[i].name] = gradients[i].clone();
      }
    }
    outcome.loss = runner->loss_sum().item<double>();
    outcome.metrics = figures(runner->metrics(), algorithm);
    return outcome;
  }
};

TinyRun::TinyRun(FakeHost& host, const TinySetup& setup, Sharding* sharding, Comm* comm)
    : TinyRun(host.get_interface<Algorithm>(kAlgorithmInterface), host.model_facts(), setup, sharding, comm) {}
TinyRun::TinyRun(Algorithm& algorithm, const ModelFacts& facts, const TinySetup& setup, Sharding* sharding, Comm* comm)
    : parts_(std::make_unique<Parts>(algorithm, facts, setup, sharding, comm)) {}
TinyRun::~TinyRun() = default;

TinyOutcome TinyRun::train() {
  Parts& parts = *parts_;
  const Window window = parts.make(parts.window++, false);
  const StepResult result = parts.trainer->run(window, {.update = window.number, .updates_total = 1000, .wants_details = true}, parts.setup.learning_rate);
  if (!result.alarm.empty()) {
    throw Error(ExitCode::kInternal, format("the run diverged: in window {} {}", window.number, result.alarm));
  }
  if (!result.updated && result.denominator != 0) {
    throw Error(ExitCode::kInternal, format("the run diverged: window {} has loss {} and gradient norm {}", window.number, result.loss, result.gradient_norm));
  }
  return {.loss = result.loss,
          .gradient_norm = result.gradient_norm,
          .denominator = result.denominator,
          .metrics = figures(parts.runner->metrics(), parts.algorithm),
          .gradients = {}};
}

TinyOutcome TinyRun::gradients() { return parts_->differentiate(parts_->make(0, false)); }
TinyOutcome TinyRun::dead() { return parts_->differentiate(parts_->make(0, true)); }

TinyOutcome TinyRun::evaluate() {
  Parts& parts = *parts_;
  at::NoGradGuard no_grad;
  TinyOutcome outcome;
  parts.runner->begin_evaluation({.update = 0, .updates_total = 1, .wants_details = true});
  Unusable unusable;
  const BatchFields fields(parts.description, find_prototype(parts.source, parts.algorithm, parts.setup.seed, /*evaluating=*/true));
  for (int64_t index = 0; index < parts.source.size; ++index) {
    std::vector<std::optional<Sample>> rows;
    rows.push_back(read_prepared(parts.source, parts.algorithm, index, sample_context(parts.setup.seed, 0, index, true), unusable));
    Batch batch = fields.stack(rows, {.max_tokens = parts.setup.tokens, .is_static = false, .buckets = {}});
    parts.algorithm.finish(batch);
    outcome.denominator += parts.algorithm.weigh(batch);
    parts.runner->begin_micro_step();
    parts.algorithm.micro_step(*parts.runner, to_device(batch, parts.description, at::kCPU, at::kFloat));
  }
  parts.runner->end_evaluation();
  outcome.loss = parts.runner->loss_sum().item<double>() / std::max(outcome.denominator, 1e-12);
  outcome.metrics = figures(parts.runner->metrics(), parts.algorithm);
  return outcome;
}

const Description& TinyRun::description() const { return parts_->description; }

std::map<std::string, at::Tensor> TinyRun::weights() {
  std::map<std::string, at::Tensor> out;
  for (const Shard& shard : parts_->sharding.shards()) {
    out[shard.name] = shard.local;
  }
  return out;
}

const TargetTables& TinyRun::tables() const { return parts_->tables; }

void run_ranks(std::int64_t ranks, const std::function<void(Comm&)>& body) {
  at::set_num_threads(1);   // threads below threads would fight for the processors
  const TemporaryFolder folder;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  const auto fail = [&] {
    const std::lock_guard lock(mutex);
    if (!first) {
      first = std::current_exception();
    }
  };
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<RankGroup> group;
      const auto told = [&](const Error& error) {
        fail();
        if (group != nullptr) {
          (void)group->report(error);
        }
      };
      try {
        World world;
        world.rank = world.local_rank = rank;
        world.size = world.local_size = ranks;
        world.host = "localhost";
        world.folder = folder.path().string();
        group = RankGroup::open({.world = world, .limit = std::chrono::seconds(30), .leave = [](ExitCode, const std::string&, const std::string&) {}});
        group->meet();
        const auto comm = open_gloo(*group, library_folder() / "libsf_comm_gloo.so");
        body(*comm);
        group->finish();
      } catch (const Error& error) {
        told(error);
      } catch (const std::exception& error) {
        told(Error(ExitCode::kInternal, error.what()));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

}  // namespace sf::testing
