// core/base: what every other folder stands on: errors, diagnostics, the log, text, files. No LibTorch,
// nothing of the trainer.
//
// error.hpp: sf::Error and ExitCode (from the SDK, so that plugins throw the same type) and SF_CHECK for our
// own mistakes.
#pragma once

#include "sf/error.hpp"

#include "core/base/text.hpp"

#include <string>

namespace sf {

/// Throws an internal error "internal: file.cpp:41: text". Never reachable by user input.
[[noreturn]] void fail_check(const char* file, int line, const std::string& text);

}  // namespace sf

/// SF_CHECK(cond, "text {}", value): a mistake of ours ends the run with file and line, in release too.
#define SF_CHECK(cond, ...)                                            \
  do {                                                                 \
    if (!(cond)) [[unlikely]] {                                        \
      ::sf::fail_check(__FILE__, __LINE__, ::sf::format(__VA_ARGS__)); \
    }                                                                  \
  } while (false)
