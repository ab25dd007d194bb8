// sf/level.hpp: how important a log line is. The numbers are those of sf/plugin.h.
#pragma once

#include <cstdint>

namespace sf {

enum class Level : std::int32_t {
  kTrace = 0,  // each micro-step
  kDebug = 1,  // why
  kInfo = 2,   // what happens
  kWarn = 3,   // a person should act
  kError = 4   // the run ends
};

}  // namespace sf
