// core/train/decoding_setup.hpp: what generating and speculative decoding take from a recipe and from flags: the target whole, its stop tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/model/target.hpp"
#include "core/train/engine.hpp"
#include "sf/algorithm.hpp"
#include "sf/drafter.hpp"

namespace sf {

struct TargetIdentity {
  TargetConfig config;
  std::string fingerprint;
};

/// Configuration and fingerprint of the plan's target, before its weights are read.
[[nodiscard]] TargetIdentity identify_target(const Plan& plan);
/// All layers and the head, on the plan's device, in the type that computes fastest there.
[[nodiscard]] Target load_whole_target(const Plan& plan, const TargetConfig& config);
/// "2,5", "none", or empty for what the target's configuration says. Throws sf::Error (usage, data).
[[nodiscard]] std::vector<int64_t> stop_tokens_from(const std::string& text, const Plan& plan, int64_t vocab_size);

/// The algorithm's interface for decoding. Throws Error(plugin) when it has none.
[[nodiscard]] const Drafter& drafter_of(const EngineContext& context);
/// Tokens that a draft was trained to guess in one pass.
[[nodiscard]] int64_t trained_tokens(const Description& description);

}  // namespace sf
