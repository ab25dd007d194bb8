// core/train/session.hpp: what every verb that needs a draft has in hand: device, algorithm, parameters, tables, runner. Opened from a plan
// and created plugins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/data/feature_store.hpp"
#include "core/dist/comm_base.hpp"
#include "core/train/engine.hpp"
#include "core/train/loader.hpp"
#include "core/train/model_flops.hpp"
#include "core/train/optimizer.hpp"
#include "core/train/plugin_calls.hpp"
#include "core/train/tape.hpp"
#include "sf/algorithm.hpp"
#include "sf/backend.hpp"

namespace sf {

/// The plugin's interface over its instance. Throws Error(kPlugin) when no plugin of the stack is of that kind.
Algorithm& algorithm_of(const EngineContext& context);
Sharding& sharding_of(const EngineContext& context);
/// The transforms of the stack in the order of the recipe, over the linears of the units; null when there is none. They keep a pointer to what `calls` gets.
std::unique_ptr<Transforms> transforms_of(const EngineContext& context, const std::vector<UnitSpec>& units, std::vector<std::unique_ptr<NamedTransform>>& calls);

/// The plan's [model] section as the algorithm wants it; reads the two configuration files. Throws Error(kData) when one is not readable.
ModelFacts model_facts(const Plan& plan);

/// "cpu" or "cuda"; opens LibTorch's CUDA library first when it is the latter, and takes the GPU of this rank: number local_rank, or the only one that its
/// launcher shows it. Throws Error(kDevice) with what is missing.
at::Device open_device(const std::string& name, const World& world = {});
/// 90 for 9.0; 0 when it is no GPU or the driver does not say.
int64_t compute_capability(at::Device device);
/// Bytes of the device's memory in use by this process now and at most: the allocator's on a GPU, resident memory on the CPU.
struct MemoryUse {
  int64_t now = 0, peak = 0;
  int64_t reserved_peak = 0;   // what the allocator took from the GPU; 0 on the CPU
};
MemoryUse memory_use(at::Device device);
/// The peaks begin anew; no effect on the CPU, whose peak is the process's.
void reset_memory_peak(at::Device device);

struct Session {
  const EngineContext* context = nullptr;
  const Plan* plan = nullptr;
  Placement placement;             // placement.comm: null with one rank
  RankGroup* ranks = nullptr;      // null with one rank
  Algorithm* algorithm = nullptr;
  Sharding* sharding = nullptr;
  Ops* ops = nullptr;
  Description description;
  TargetTables tables;
  std::unique_ptr<NamedAlgorithm> algorithm_calls;   // what `algorithm` and `sharding` point to: the plugins, with their names on what they throw
  std::unique_ptr<NamedSharding> sharding_calls;
  std::vector<std::unique_ptr<NamedTransform>> transform_calls;
  std::unique_ptr<Transforms> transforms;    // null: none, or a verb that does not train; outlives the runner
  std::unique_ptr<GraphRecorder> recorder;   // of training.compile_blocks; outlives the runner
  std::unique_ptr<TapeRunner> runner;
  std::string target_fingerprint;
  std::filesystem::path run_folder;     // output_dir / run_id
  uint64_t seed = 0;
  BatchShape batch_shape;

  /// Rank 0, which alone writes logs, metrics and the recipe.
  bool is_lead() const { return placement.comm == nullptr || placement.comm->rank() == 0; }
  int64_t rank() const { return placement.comm == nullptr ? 0 : placement.comm->rank(); }
  int64_t rank_count() const { return placement.comm == nullptr ? 1 : placement.comm->size(); }
};

/// What the ranks of a run have between them; lives until the process ends, as plugins keep the collectives.
struct Ranks {
  std::unique_ptr<RankGroup> group;   // null with one rank
  std::unique_ptr<RankComm> comm;     // made with the session, once the device is known
};

/// Meets the other ranks, when there are any, and compares recipe, plugins and build with them. Throws Error(kCommunication).
std::unique_ptr<Ranks> meet_ranks(const EngineContext& context);
/// What rank 0 says, on all ranks.
std::string told_by_lead(const Session& session, const std::string& text, std::string_view label);

/// Describes, builds and initialises the draft, loads the tables, binds the algorithm, and ends the run when an option had no effect in that.
/// `ranks`: null for a verb of one process. `flops`: counts what the units compute, and outlives the session; may be null.
std::unique_ptr<Session> open_session(const EngineContext& context, Ranks* ranks = nullptr, FlopCount* flops = nullptr);

/// Opens features at `path` and checks them against what the algorithm reads and the plan's target.
std::unique_ptr<FeatureStore> open_features(const Session& session, const std::filesystem::path& path, const std::string& key);
/// Samples of a store, which must outlive it.
SampleSource sample_source(const FeatureStore& store);

}  // namespace sf
