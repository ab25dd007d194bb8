#include "core/train/engine.hpp"

#include <ATen/ATen.h>

#include "core/base/error.hpp"
#include "core/base/file_system.hpp"
#include "core/base/log.hpp"
#include "core/kernels/float8_head.hpp"
#include "core/kernels/ops.hpp"
#include "core/plan/plan.hpp"
#include "core/train/out_of_memory.hpp"
#include "core/train/ranks.hpp"
#include "core/train/session.hpp"
#include "core/train/verbs.hpp"
#include "sf/algorithm.hpp"
#include "sf/comm.hpp"

namespace sf {
namespace {

// Log lines of this library go through the host; LibTorch's errors lose their backtrace, and running out of memory is its own kind, with what the verb can do about it.
template <class Body>
auto guarded(const EngineContext& context, const char* advice, Body&& body) {
  redirect_log(context.log);
  set_log_level(Level::kTrace);  // the host filters
  try {
    return body();
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) {
      throw out_of_memory(error, "", advice);
    }
    throw Error(ExitCode::kInternal, error.what_without_backtrace());
  } catch (const std::filesystem::filesystem_error& error) {
    throw told_of_path(error);
  }
}

// What the plugin throws gets its name, as within a session.
NamedAlgorithm named_algorithm(const EngineContext& context) { return {algorithm_of(context), context.plan->get<std::string>("algorithm.name")}; }

class EngineLibrary final : public Engine {
 public:
  const void* service(std::string_view id) override {
    if (id == kCommService) {
      if (ranks_.empty() || ranks_.back()->comm == nullptr) {
        throw Error(ExitCode::kPlugin, "there are no collectives: the run has one process, or its ranks have not met yet", "ask in Algorithm::bind or later, and do without when there are none");
      }
      return static_cast<const Comm*>(ranks_.back()->comm.get());
    }
    return id == kOpsService ? static_cast<const void*>(&cpu_ops()) : id == kFloat8HeadsService ? static_cast<const void*>(&float8_heads()) : nullptr;
  }
  std::vector<SizeLine> sizes(const EngineContext& context) override {
    return guarded(context, less_memory::kTraining, [&] {
      const Description description = named_algorithm(context).describe(model_facts(*context.plan));
      NamedSharding sharding(sharding_of(context), context.plan->get<std::string>("backend.sharding"));
      std::vector<std::unique_ptr<NamedTransform>> calls;
      const auto transforms = transforms_of(context, description.units, calls);
      return plan_sizes(*context.plan, description, &sharding, transforms.get());
    });
  }
  std::vector<std::string> slow_paths(const EngineContext& context) override {
    return guarded(context, less_memory::kTraining, [&] { return sf::slow_paths(*context.plan, named_algorithm(context).describe(model_facts(*context.plan))); });
  }
  Json train(const EngineContext& context, const TrainArguments& arguments) override {
    return on_ranks(context, [&](Ranks& ranks) { return sf::train(context, arguments, ranks); });
  }
  std::vector<CaptureRead> reads(const EngineContext& context) override {
    return guarded(context, less_memory::kCapturing, [&] { return capture_reads(context); });
  }
  Json capture(const EngineContext& context, const CaptureArguments& arguments) override {
    return guarded(context, less_memory::kCapturing, [&] { return sf::capture(context, arguments); });
  }
  Json evaluate(const EngineContext& context, const EvalArguments& arguments) override {
    return guarded(context, less_memory::kEvaluating, [&] { return evaluate_checkpoint(context, arguments); });
  }
  Json export_draft(const EngineContext& context, const ExportArguments& arguments) override {
    return guarded(context, less_memory::kExporting, [&] { return sf::export_draft(context, arguments); });
  }
  Json generate(const EngineContext& context, const GenerateArguments& arguments) override {
    return guarded(context, less_memory::kGenerating, [&] { return generate_answers(context, arguments); });
  }
  Json speculate(const std::vector<SpeculativeDraft>& drafts, const SpeculateArguments& arguments) override {
    SF_CHECK(!drafts.empty(), "no draft to decode with");
    return guarded(*drafts.front().context, less_memory::kSpeculating, [&] { return evaluate_speculative(drafts, arguments); });
  }
  Json bench(const EngineContext& context, const BenchArguments& arguments) override {
    return on_ranks(context, [&](Ranks& ranks) { return sf::bench(context, arguments, ranks); });
  }

 private:
  // The inner guard turns what LibTorch throws into what ranks can tell each other.
  template <class Body>
  Json on_ranks(const EngineContext& context, Body&& body) {
    return guarded(context, less_memory::kTraining, [&] {
      Ranks& ranks = *ranks_.emplace_back(meet_ranks(context));
      return as_rank(context, ranks, [&] { return guarded(context, less_memory::kTraining, [&] { return body(ranks); }); });
    });
  }

  std::vector<std::unique_ptr<Ranks>> ranks_;   // plugins keep the collectives until the process ends
};

}  // namespace
}  // namespace sf

__attribute__((visibility("default"))) sf::Engine* sf_engine_v1() {
  static sf::EngineLibrary* engine = new sf::EngineLibrary();  // never destroyed: plugins hold services until the process ends
  return engine;
}
