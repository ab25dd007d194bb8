// core/train/verbs.hpp: what libsf_engine.so does, one function for each verb of sf-host that needs tensors. Each returns the summary that --json
// prints and throws sf::Error when it can't.
#pragma once

#include <vector>

#include "core/train/engine.hpp"
#include "sf/algorithm.hpp"
#include "sf/backend.hpp"

namespace sf {

struct Ranks;
class Transforms;

/// Trains; "interrupted": true after a stop request (the window is finished and saved).
Json train(const EngineContext& context, const TrainArguments& arguments, Ranks& ranks);
/// Runs the target over conversations and stores its hidden states.
Json capture(const EngineContext& context, const CaptureArguments& arguments);
/// What the context's algorithm reads of the target's states.
std::vector<CaptureRead> capture_reads(const EngineContext& context);
/// Loss, metrics and acceptance length on held-out features, beside the bigram baseline.
Json evaluate_checkpoint(const EngineContext& context, const EvalArguments& arguments);
/// A folder that serving engines load.
Json export_draft(const EngineContext& context, const ExportArguments& arguments);
/// The target's answers to prompts, written as token records.
Json generate_answers(const EngineContext& context, const GenerateArguments& arguments);
/// Speculative decoding with several drafts beside plain decoding, and what it says about them.
Json evaluate_speculative(const std::vector<SpeculativeDraft>& drafts, const SpeculateArguments& arguments);
/// Times, memory and rates of the recipe's run on random data.
Json bench(const EngineContext& context, const BenchArguments& arguments, Ranks& ranks);
/// Bytes by kind on the rank that holds most, from the algorithm's description and the backend's own account; the last line is their sum. The
/// number of ranks is the plan's fact.world_size. Without a backend: as if one process held everything.
std::vector<SizeLine> plan_sizes(const Plan& plan, const Description& description, const Sharding* sharding = nullptr, const Transforms* transforms = nullptr);

/// Memory that a run may take now; below 0 when nobody can say. `what` is for messages.
struct AvailableMemory {
  int64_t bytes = 0;
  std::string what;
};
[[nodiscard]] AvailableMemory available_memory(at::Device device);
/// Throws Error(kDevice) when the plan's sizes are more than what `processes` ranks on this device may take, with what would fit; warns on the CPU where the
/// estimate is too rough to be sure.
void require_memory(const Plan& plan, const Description& description, const Sharding* sharding, const Transforms* transforms, const AvailableMemory& available, int64_t processes);

/// Operations that will run slower than they could on a GPU because no kernel takes their shape or type, with the reason; from shapes alone.
[[nodiscard]] std::vector<std::string> slow_paths(const Plan& plan, const Description& description);

}  // namespace sf
