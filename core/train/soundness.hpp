// core/train/soundness.hpp: whether a draft's weights are numbers that can be trained on and saved.
#pragma once

#include "core/base/error.hpp"
#include "core/train/session.hpp"

namespace sf {

/// What evaluate() throws when the loss is not finite: kUsage when the weights are to blame, else kData.
struct LossNotFinite : Error {
  using Error::Error;
};

/// Whether the weights of every rank are finite and of a size whose squares are; false when a run has diverged. All ranks call it, and get the same answer.
[[nodiscard]] bool are_weights_sound(const Session& session);

}  // namespace sf
