// The verb `bench`: the recipe's run on random data, timed. docs/benchmarks/README.md defines every figure.
//
// Step by step: resident batches, a host wait between windows alone; what the device does inside a window is timed by events. End to end: the
// verb `train` itself on feature files, read back from its metrics.jsonl.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <optional>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/data/target_config.hpp"
#include "core/plan/plan.hpp"
#include "core/train/evaluate.hpp"
#include "core/train/session.hpp"
#include "core/train/step.hpp"
#include "core/train/verbs.hpp"
#include "core/train/window_trace.hpp"
#include "core/train/workload.hpp"

namespace sf {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }

struct Spread {
  double median = 0, low = 0, high = 0;
};

Spread spread_of(std::vector<double> values) {
  SF_CHECK(!values.empty(), "no measurement to summarise");
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return {.median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2,
          .low = values.front(),
          .high = values.back()};
}

Json to_json(const Spread& spread) {
  Json json = Json::object();
  return json.set("median", spread.median).set("min", spread.low).set("max", spread.high);
}

/// A moment on the device's stream, or on the host's clock where there is no stream.
class Moment {
 public:
  explicit Moment(at::Device device) : time_(Clock::now()) {
    if (!device.is_cpu()) {
      event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
      event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
  }
  /// Both must have happened.
  double milliseconds_to(const Moment& later) const {
    return event_ ? event_->elapsedTime(*later.event_) : std::chrono::duration<double, std::milli>(later.time_ - time_).count();
  }

 private:
  Clock::time_point time_;
  std::optional<c10::Event> event_;
};

void wait_for(at::Device device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

/// Splits a window's time at its marks.
class WindowClock {
 public:
  explicit WindowClock(at::Device device) : device_(device) {}
  void start() { marks_.clear(); }
  void mark(StepMark mark) { marks_.emplace_back(mark, Moment(device_)); }
  /// Milliseconds by part: "forward", "backward", "reduce", "optimizer". After the device is done.
  std::map<std::string, double> parts() const {
    std::map<std::string, double> out;
    for (size_t i = 1; i < marks_.size(); ++i) {
      const StepMark mark = marks_[i].first;
      const char* name = mark == StepMark::forward_done    ? "forward"
                         : mark == StepMark::backward_done ? "backward"
                         : mark == StepMark::updated       ? "optimizer"
                                                           : "reduce";
      out[name] += marks_[i - 1].second.milliseconds_to(marks_[i].second);
    }
    return out;
  }

 private:
  at::Device device_;
  std::vector<std::pair<StepMark, Moment>> marks_;
};

/// TFLOP/s of one large product in the model's type, before anything is timed: the ceiling that shares are taken of.
double product_ceiling(const Placement& placement) {
  const bool on_cpu = placement.device.is_cpu();
  const int64_t m = on_cpu ? 512 : 16384, k = on_cpu ? 512 : 4096, n = on_cpu ? 512 : 12288;
  const auto options = at::TensorOptions().dtype(placement.dtype).device(placement.device);
  const at::Tensor a = at::ones({m, k}, options).mul_(0.01), b = at::ones({k, n}, options).mul_(0.01);
  at::Tensor c = at::mm(a, b);
  constexpr int kTimes = 10;
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    wait_for(placement.device);
    const auto start = Clock::now();
    for (int i = 0; i < kTimes; ++i) {
      at::mm_out(c, a, b);
    }
    wait_for(placement.device);
    best = std::max(best, 2.0 * static_cast<double>(m * k * n) * kTimes / milliseconds_since(start) * 1e-9);
  }
  return best;
}

Json device_json(const Session& session) {
  Json json = Json::object();
  json.set("type", session.placement.device.is_cpu() ? "cpu" : "cuda");
  json.set("dtype", session.placement.dtype == at::kBFloat16 ? "bfloat16" : "float32");
  if (session.placement.device.is_cpu()) {
    json.set("threads", static_cast<int64_t>(at::get_num_threads()));
  }
  return json;
}

constexpr size_t kOperationsShown = 40;

Json to_json(const WindowTrace& trace) {
  Json waits = Json::object();
  for (const auto& [name, count] : trace.waits) {
    waits.set(name, count);
  }
  Json operations = Json::array();
  for (size_t i = 0; i < std::min(kOperationsShown, trace.operations.size()); ++i) {
    const WindowTrace::Operation& operation = trace.operations[i];
    operations.push_back(Json::object().set("name", operation.name).set("count", operation.count).set("ms", operation.milliseconds));
  }
  Json json = Json::object();
  json.set("host_waits", std::move(waits)).set("launches", trace.launches).set("device_operations", trace.device_operations);
  json.set("busy_ms", trace.busy_ms).set("idle_ms", trace.idle_ms).set("operations", std::move(operations));
  return json;
}

Json to_json(const BlockCapture::Counts& counts, int64_t blocks) {
  Json json = Json::object();
  return json.set("blocks", blocks).set("shapes", counts.shapes).set("uses", counts.uses).set("graphs", counts.graphs).set("replays", counts.replays)
      .set("bytes", counts.bytes).set("record_ms", counts.milliseconds);
}

Workload workload_of(const Plan& plan, const BenchArguments& arguments, int64_t samples) {
  const auto folder = plan.get<std::filesystem::path>("model.target_model_path");
  const TargetConfig target = target_config(read_model_config(folder), (folder / "config.json").string());
  return {.samples = samples,
          .tokens = plan.get<int64_t>("data.max_length"),
          .variable_mask = arguments.variable_mask,
          .variable_length = arguments.variable_length,
          .vocab = target.vocab_size,
          .hidden = target.hidden_size,
          .seed = static_cast<uint64_t>(plan.get<int64_t>("training.seed"))};
}

WindowShape window_shape_of(const Plan& plan, int64_t ranks) {
  return {.ranks = ranks,
          .accumulation_steps = plan.get<int64_t>("training.accumulation_steps"),
          .batch_size = plan.get<int64_t>("training.batch_size")};
}

// What the run was: every value that is not its default, the plugins, the data.
Json run_json(const Plan& plan, const Workload& workload, const BenchArguments& arguments) {
  Json options = Json::object();
  for (const auto& [key, value] : plan.values) {
    if (value.is_set && value.type != Type::path) {
      options.set(key, display_text(value.value, value.type));
    }
  }
  Json plugins = Json::object();
  for (const PlanPlugin& plugin : plan.stack) {
    plugins.set(plugin.name, plugin.version);
  }
  Json json = Json::object();
  json.set("label", arguments.label).set("mode", arguments.end_to_end ? "end to end" : "step");
  json.set("workload", workload.text()).set("options", std::move(options)).set("plugins", std::move(plugins));
  return json;
}

// ---- step by step

class StepBench {
 public:
  StepBench(const EngineContext& context, const BenchArguments& arguments, Ranks& ranks)
      : arguments_(arguments), plan_(*context.plan), session_(open_session(context, &ranks, &flops_)), shape_(window_shape_of(plan_, session_->rank_count())),
        ceiling_(product_ceiling(session_->placement)) {
    const int64_t samples = arguments.samples > 0 ? arguments.samples : 2 * shape_.entries();
    workload_ = workload_of(plan_, arguments, samples);
    memory_built_ = memory_use(session_->placement.device).now;
    make_windows();
    optimizer_ = std::make_unique<AdamW>(session_->sharding->shards(),
                                         AdamWOptions{.weight_decay = plan_.get<double>("training.weight_decay"),
                                                      .max_grad_norm = plan_.get<double>("training.max_grad_norm")});
    trainer_ = std::make_unique<Trainer>(*session_->algorithm, session_->description, *session_->sharding, *session_->runner, *optimizer_,
                                         session_->placement);
  }

  Json run(const EngineContext& context) {
    WindowClock clock(session_->placement.device);
    bool is_counted = false;
    trainer_->on_mark([&](StepMark mark) {
      clock.mark(mark);
      if (mark == StepMark::begin && !is_counted) {  // one forward pass, the first: no block has been recorded yet
        flops_.start();
        is_counted = true;
      } else {
        flops_.stop();
      }
    });
    for (int64_t i = 0; i < arguments_.warmup; ++i) {
      window();
    }
    wait_for(session_->placement.device);
    if (context.check_effects) {
      context.check_effects();
    }
    const int64_t memory_at_rest = memory_use(session_->placement.device).now;
    reset_memory_peak(session_->placement.device);

    std::vector<double> step_ms;
    std::map<std::string, std::vector<double>> parts_ms;
    for (int64_t repeat = 0; repeat < arguments_.repeats; ++repeat) {
      double total = 0;
      std::map<std::string, double> parts;
      for (int64_t i = 0; i < arguments_.steps; ++i) {
        if (last_.stop || (session_->placement.comm == nullptr && context.stop_requested && context.stop_requested())) {
          throw Error(ExitCode::kInterrupted, "asked to stop: the benchmark has no result");
        }
        clock.start();
        const auto start = Clock::now();
        window();
        wait_for(session_->placement.device);
        samples_ += last_.samples;
        tokens_ += last_.tokens;
        total += milliseconds_since(start);
        for (const auto& [name, value] : clock.parts()) {
          parts[name] += value;
        }
      }
      step_ms.push_back(total / static_cast<double>(arguments_.steps));
      for (const auto& [name, value] : parts) {
        parts_ms[name].push_back(value / static_cast<double>(arguments_.steps));
      }
      log_info("repeat {} of {}: {} ms a step", repeat + 1, arguments_.repeats, format_fixed(step_ms.back(), 1));
    }
    const MemoryUse memory = memory_use(session_->placement.device);

    Json json = run_json(plan_, workload_, arguments_);
    json.set("device", device_json(*session_)).set("ranks", session_->rank_count());
    if (session_->placement.comm != nullptr) {
      Json counts = Json::object();
      for (const auto& [name, count] : session_->placement.comm->counts()) {
        counts.set(name, count);
      }
      json.set("windows", updates_).set("collectives", std::move(counts));
    }
    const Spread step = spread_of(step_ms);
    json.set("step_ms", to_json(step));
    Json split = Json::object();
    for (auto& [name, values] : parts_ms) {
      split.set(name, spread_of(values).median);
    }
    json.set("split_ms", std::move(split));
    json.set("samples_per_second", static_cast<double>(samples_) / static_cast<double>(arguments_.repeats * arguments_.steps) / step.median * 1e3);
    json.set("tokens_per_second", static_cast<double>(tokens_) / static_cast<double>(arguments_.repeats * arguments_.steps) / step.median * 1e3);
    Json sizes = Json::object();
    // What recorded graphs keep counts as free for the allocator, which gives it to nobody else.
    const BlockCapture::Counts captured = session_->runner->capture_counts();
    sizes.set("built", memory_built_).set("at_rest", memory_at_rest + captured.bytes).set("peak", memory.peak + captured.bytes).set("reserved_peak", memory.reserved_peak);
    sizes.set("planned", plan_sizes(plan_, session_->description, session_->sharding, session_->transforms.get()).back().bytes);
    json.set("memory_bytes", std::move(sizes));
    json.set("loss", last_.loss).set("grad_norm", last_.gradient_norm);
    if (session_->recorder != nullptr) {
      json.set("capture", to_json(captured, session_->runner->captured_units()));
    }
    if (!session_->placement.device.is_cpu()) {
      const WindowTrace trace = trace_window([this] { window(); });
      if (trace.is_known) {
        json.set("host_reads_per_step", trace.host_waits).set("trace", to_json(trace));
      } else {
        log_warn("the driver gave no record of a window: host reads are not counted");
      }
    }
    json.set("product_ceiling_tflops", ceiling_);
    // Of a window on this rank. All micro-steps have the shapes of the one that was counted, but for the lengths of samples and blocks.
    const ModelFlops flops = flops_.read();
    const double micro_steps = static_cast<double>(shape_.accumulation_steps), in_a_second = flops.all() * micro_steps / step.median * 1e-9;
    Json model = Json::object();
    model.set("products", flops.products * micro_steps).set("head", flops.head * micro_steps).set("attention", flops.attention * micro_steps);
    json.set("model_flop", std::move(model)).set("model_tflops", in_a_second).set("share_of_product_ceiling", in_a_second / ceiling_);
    return json;
  }

 private:
  // All windows in memory before the clock starts.
  void make_windows() {
    if (session_->description.wants_token_counts) {
      (void)session_->algorithm->set_token_counts({});  // any vocabulary of the right size does
    }
    const SampleSource source = random_samples(session_->description, workload_);
    fields_ = std::make_unique<BatchFields>(session_->description,
                                            find_prototype(source, *session_->algorithm, session_->seed, /*evaluating=*/false));
    const int64_t count = std::max<int64_t>(1, workload_.samples / shape_.entries());
    WindowLoader loader(source, *session_->algorithm, *fields_,
                        {.seed = session_->seed, .window = shape_, .rank = session_->rank(), .epochs = 1, .batch = session_->batch_shape,
                         .first_window = 0, .last_window = count});
    for (int64_t i = 0; i < count; ++i) {
      windows_.push_back(loader.next());
    }
  }

  void window() {
    const StepInfo step{.update = updates_, .updates_total = std::max<int64_t>(10000, updates_ + 1), .wants_details = false};
    const auto next = [&] { return &windows_[static_cast<size_t>(updates_ + 1) % windows_.size()]; };
    last_ = trainer_->run(windows_[static_cast<size_t>(updates_) % windows_.size()], step, plan_.get<double>("training.learning_rate"),
                          {.wants_stop = session_->context->stop_requested && session_->context->stop_requested(), .upcoming = next});
    ++updates_;
    if (!last_.updated) {
      throw Error(ExitCode::kUsage, format("update {} of the benchmark changed nothing: loss {}, gradient norm {}{}", updates_, last_.loss, last_.gradient_norm,
                                              last_.alarm.empty() ? std::string() : "; " + last_.alarm),
                  "lower training.learning_rate: what diverges is not worth timing");
    }
  }

  const BenchArguments& arguments_;
  const Plan& plan_;
  FlopCount flops_;
  std::unique_ptr<Session> session_;
  WindowShape shape_;
  double ceiling_ = 0;
  Workload workload_;
  std::unique_ptr<BatchFields> fields_;
  std::vector<Window> windows_;
  std::unique_ptr<AdamW> optimizer_;
  std::unique_ptr<Trainer> trainer_;
  StepResult last_;
  int64_t updates_ = 0, samples_ = 0, tokens_ = 0, memory_built_ = 0;
};

// ---- end to end

Json end_to_end(const EngineContext& context, const BenchArguments& arguments, Ranks& ranks) {
  Plan plan = *context.plan;
  const WindowShape shape = window_shape_of(plan, context.world.size);
  const int64_t measured = std::max<int64_t>(1, arguments.steps * arguments.repeats);
  const int64_t steps = arguments.warmup + measured;
  const Workload workload = workload_of(plan, arguments, arguments.samples > 0 ? arguments.samples : steps * shape.entries());
  const auto features = plan.get<std::filesystem::path>("data.hidden_states_path");
  if (features.empty()) {
    throw Error(ExitCode::kUsage, "an end-to-end benchmark writes feature files, and data.hidden_states_path names no folder for them",
                "--set data.hidden_states_path=FOLDER");
  }
  const auto put = [&](const char* key, Value value) { plan.values.at(key).value = std::move(value); };
  put("data.eval_hidden_states_path", std::string());
  put("training.eval_interval", int64_t{0});
  put("training.save_interval", plan.get<int64_t>("training.save_interval"));
  const auto details_interval = plan.get<int64_t>("training.log_interval");
  put("training.log_interval", int64_t{1});   // every window is timed; metrics come as often as in a run
  put("training.max_steps", steps);
  put("training.num_epochs", (steps * shape.entries() + workload.samples - 1) / workload.samples);
  std::string number = to_text(static_cast<int64_t>(Clock::now().time_since_epoch().count()));
  if (context.world.is_lead()) {
    write_random_features(features, algorithm_of(context).describe(model_facts(plan)), workload);
  }
  if (ranks.group != nullptr) {  // one run folder for all, and features that are whole
    number = ranks.group->gather_texts(number, "the benchmark's features").front();
  }
  put("run_id", plan.get<std::string>("run_id") + "-bench-" + number);

  EngineContext inner = context;
  inner.plan = &plan;
  const Json summary = train(inner, {.details_interval = details_interval}, ranks);
  if (summary.at("interrupted").as_bool()) {
    throw Error(ExitCode::kInterrupted, "asked to stop: the benchmark has no result");
  }
  if (!context.world.is_lead()) {
    return Json::object();  // rank 0 has the metrics
  }
  const auto run_folder = plan.get<std::filesystem::path>("output_dir") / plan.get<std::string>("run_id");
  std::vector<double> step_ms, wait_ms, quiet_ms, beside_ms, stall_ms, held_ms, save_s;
  int64_t save_bytes = 0;
  std::ifstream lines(run_folder / "metrics.jsonl");
  for (std::string text; std::getline(lines, text);) {
    const Json line = Json::parse(text, (run_folder / "metrics.jsonl").string());
    if (line.find("perf/optimizer_step_time_s") != nullptr && line.at("step").as_int() > arguments.warmup) {
      step_ms.push_back(line.at("perf/optimizer_step_time_s").as_double() * 1e3);
      wait_ms.push_back(line.at("perf/data_wait_time_s").as_double() * 1e3);
      (line.find("perf/beside_save") != nullptr ? beside_ms : quiet_ms).push_back(step_ms.back());
    }
    if (const Json* save = line.find("save"); save != nullptr && line.at("step").as_int() < steps) {  // the last one is waited for by the end of the run
      stall_ms.push_back(save->at("stall_s").as_double() * 1e3);
      held_ms.push_back(save->at("device_wait_s").as_double() * 1e3);
      save_s.push_back(save->at("seconds").as_double());
      save_bytes = save->at("bytes").as_int();
    }
  }
  Json json = run_json(plan, workload, arguments);
  const Spread step = spread_of(step_ms);
  json.set("step_ms", to_json(step)).set("data_wait_ms", to_json(spread_of(wait_ms)));
  json.set("samples_per_second", static_cast<double>(shape.entries()) / step.median * 1e3);
  if (!stall_ms.empty()) {
    Json save = Json::object();
    save.set("count", static_cast<int64_t>(stall_ms.size())).set("bytes", save_bytes);
    save.set("stall_ms", to_json(spread_of(stall_ms))).set("device_wait_ms", to_json(spread_of(held_ms))).set("seconds", to_json(spread_of(save_s)));
    for (const auto& [name, values] : {std::pair("step_ms_quiet", &quiet_ms), std::pair("step_ms_beside_save", &beside_ms)}) {
      if (!values->empty()) {
        save.set(name, to_json(spread_of(*values)));
      }
    }
    json.set("save", std::move(save));
  }
  json.set("run", summary);
  return json;
}

}  // namespace

Json bench(const EngineContext& context, const BenchArguments& arguments, Ranks& ranks) {
  EngineContext with_random_tables = context;
  with_random_tables.random_tables = true;
  Json json = arguments.end_to_end ? end_to_end(with_random_tables, arguments, ranks)
                                   : StepBench(with_random_tables, arguments, ranks).run(with_random_tables);
  if (!context.world.is_lead()) {
    return json;
  }
  log_info("{}: {} ms a step", arguments.label.empty() ? "bench" : arguments.label,
           format_fixed(json.at("step_ms").at("median").as_double(), 1));
  return json;
}

}  // namespace sf
