// A run with many ranks: how they meet, what they compare, which collectives they use.
#include <dlfcn.h>

#include <filesystem>
#include <map>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/plan/plan.hpp"
#include "core/train/ranks.hpp"

namespace sf {
namespace {

// The folder of the library that this code is in.
std::filesystem::path own_folder() {
  Dl_info info{};
  SF_CHECK(dladdr(reinterpret_cast<void*>(&meet_ranks), &info) != 0, "this library does not know its own path");
  return std::filesystem::path(info.dli_fname).parent_path();
}

// What must be the same everywhere: each value of the recipe, plugins by content, and what they were built with.
std::map<std::string, std::string> compared_values(const EngineContext& context) {
  std::map<std::string, std::string> values;
  for (const auto& [key, value] : context.plan->values) {
    values[key] = toml_text(value.value);
  }
  for (const PlanPlugin& plugin : context.plan->stack) {
    values[plugin.slot + " plugin " + plugin.name] = plugin.sha256.empty() ? plugin.version : plugin.sha256.substr(0, 16);
  }
  values["sf-host"] = format("{} with LibTorch {}", SF_SDK_VERSION, SF_TORCH_VARIANT);
  return values;
}

}  // namespace

std::unique_ptr<Ranks> meet_ranks(const EngineContext& context) {
  auto ranks = std::make_unique<Ranks>();
  if (context.world.size == 1) {
    return ranks;
  }
  const auto limit = std::chrono::milliseconds(static_cast<int64_t>(context.plan->get<double>("training.dist_timeout") * 1000));
  ranks->group = RankGroup::open({.world = context.world, .limit = limit, .leave = context.leave, .stop_requested = context.stop_requested});
  return ranks;
}

void compare_ranks(RankGroup& group, const EngineContext& context) { group.require_same(compared_values(context), "the recipe"); }

void end_rank(const EngineContext& context, RankGroup& group, const Error& error) {
  const Failure first = group.report(error);
  const bool store_is_gone = first.rank < -1;
  const bool is_own = first.rank == context.world.rank;
  if (context.world.is_lead()) {
    throw Error(first.code, (first.rank >= 0 && !is_own && first.what != error.what() ? format("rank {}: ", first.rank) : "") + first.what, first.hint);
  }
  if (store_is_gone && context.world.folder.empty()) {  // nobody else can tell
    throw error.within(format("rank {}", context.world.rank));
  }
  context.leave(first.code, "", "");
  throw error;
}

std::unique_ptr<RankComm> open_comm(RankGroup& group, at::Device device, PeerCopying peers) {
  auto comm = device.is_cpu() ? open_gloo(group, own_folder() / "libsf_comm_gloo.so") : open_nccl(group, device, engine_cuda_handle(), peers);
  log_info("{} ranks, collectives by {}", comm->size(), comm->library());
  return comm;
}

std::string told_by_lead(const Session& session, const std::string& text, std::string_view label) {
  return session.placement.comm == nullptr ? text : session.placement.comm->gather_texts(text, label).front();
}

}  // namespace sf
