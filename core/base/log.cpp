#include "core/base/log.hpp"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#define SPDLOG_FMT_EXTERNAL
#define FMT_HEADER_ONLY
#include <spdlog/logger.h>
#include <spdlog/sinks/ansicolor_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

namespace sf {
namespace {

// One of the two objects of the process that outlive main: threads may log until the end.
struct Log {
  spdlog::logger logger;
  LogFunction function;
  std::atomic<Level> level = Level::kInfo;

  Log()
      : logger("sf",
               std::make_shared<spdlog::sinks::ansicolor_stderr_sink_mt>(
                   isatty(STDERR_FILENO) == 1 ? spdlog::color_mode::automatic : spdlog::color_mode::never)) {
    logger.set_level(spdlog::level::trace);
    logger.set_pattern("%H:%M:%S %^%l%$ %v");
    logger.flush_on(spdlog::level::info);
  }
};

Log& process_log() {
  static Log& log = *std::make_unique<Log>().release();
  return log;
}

}  // namespace

void set_log_level(Level level) {
  process_log().level = level;
}
bool is_logged(Level level) {
  return level >= process_log().level.load(std::memory_order_relaxed);
}
void redirect_log(LogFunction function) {
  process_log().function = std::move(function);
}

void log_line(Level level, std::string_view line) {
  Log& log = process_log();
  if (!is_logged(level)) {
    return;
  }
  if (log.function) {
    log.function(level, line);
    return;
  }
  constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::trace, spdlog::level::debug,
                                                   spdlog::level::info, spdlog::level::warn,
                                                   spdlog::level::err};
  log.logger.log(kLevels[static_cast<int>(level)], spdlog::string_view_t(line.data(), line.size()));
}

void flush_log() {
  process_log().logger.flush();
}

}  // namespace sf
