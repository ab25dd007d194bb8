// core/prepare/stop.hpp: how a stop that the user asks for gets out of whatever is being done.
#pragma once

#include <functional>

#include "sf/error.hpp"

namespace sf {

using StopRequest = std::function<bool()>;  // asked from any thread, often; empty: never

/// Thrown in the place of a result. What is done so far is kept.
class Stopped : public Error {
 public:
  Stopped() : Error(ExitCode::kInterrupted, "stopped", "run it again to go on") {}
};

inline void throw_if_stopped(const StopRequest& stop) {
  if (stop && stop()) throw Stopped();
}

}  // namespace sf
