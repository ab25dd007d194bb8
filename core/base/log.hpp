// core/base/log.hpp: the log that a person watches. One line is one fact: lower case, no final period, names
// in quotes, units.
//
// Lines go to stderr. A library with its own copy of this code (the engine) sends them through the host with
// redirect_log.
#pragma once

#include <functional>
#include <string_view>

#include "sf/level.hpp"

#include "core/base/text.hpp"

namespace sf {

/// Takes one finished line. Called from any thread.
using LogFunction = std::function<void(Level, std::string_view)>;

/// Lines below `level` are dropped. At the start: kInfo.
void set_log_level(Level level);
[[nodiscard]] bool is_logged(Level level);

/// From now on lines go to `function` instead of stderr; an empty one restores stderr. Before other threads
/// log.
void redirect_log(LogFunction function);

void log_line(Level level, std::string_view line);
void flush_log();

template <class... Values>
void log_at(Level level, std::string_view pattern, const Values&... values) {
  if (is_logged(level)) {
    log_line(level, format(pattern, values...));
  }
}
template <class... Values>
void log_debug(std::string_view pattern, const Values&... values) {
  log_at(Level::kDebug, pattern, values...);
}
template <class... Values>
void log_info(std::string_view pattern, const Values&... values) {
  log_at(Level::kInfo, pattern, values...);
}
template <class... Values>
void log_warn(std::string_view pattern, const Values&... values) {
  log_at(Level::kWarn, pattern, values...);
}
template <class... Values>
void log_error(std::string_view pattern, const Values&... values) {
  log_at(Level::kError, pattern, values...);
}

}  // namespace sf
