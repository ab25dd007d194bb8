// core/train/ranks.hpp: a run with many ranks: how they meet, what they compare, which collectives they use, and how all end when one fails.
#pragma once

#include <memory>

#include "core/train/session.hpp"

namespace sf {

/// All ranks have the same values of the recipe, the same plugins and the same build. Throws Error(kCommunication) that says who differs.
void compare_ranks(RankGroup& group, const EngineContext& context);
/// gloo on the CPU; NCCL on GPUs, beside their copy engines as `peers` says. Throws Error(kCommunication).
std::unique_ptr<RankComm> open_comm(RankGroup& group, at::Device device, PeerCopying peers);

/// This rank can't go on: the others learn why. Throws what is to be told here, or leaves without a word when rank 0 tells.
[[noreturn]] void end_rank(const EngineContext& context, RankGroup& group, const Error& error);

/// Runs `body` as one rank of the run. When it throws, the other ranks learn why and end, too; this one ends quietly unless it is the one to tell.
template <class Body>
auto as_rank(const EngineContext& context, Ranks& ranks, Body&& body) {
  if (ranks.group == nullptr) {
    return body();
  }
  try {
    ranks.group->meet();
    compare_ranks(*ranks.group, context);
    auto result = body();
    ranks.group->finish();
    return result;
  } catch (const Error& error) {
    end_rank(context, *ranks.group, error);
  } catch (const std::exception& error) {
    end_rank(context, *ranks.group, Error(ExitCode::kInternal, error.what()));
  }
}

}  // namespace sf
