// sf/error.hpp: how a failure of the world (disk, device, bad file) travels. Thrown by host and plugins
// alike.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sf {

/// What a process ends with, and so what kind of failure an Error is. On the command line: never reuse a
/// number.
enum class ExitCode : int {
  kOk = 0,
  kInternal = 1,       // a mistake in this program or in a plugin
  kUsage = 2,          // recipe or command line
  kPlugin = 3,         // a plugin was refused
  kData = 4,           // target, features or conversations
  kDevice = 5,         // device or memory
  kCommunication = 6,  // between ranks
  kCheckpoint = 7,     // saving or resuming
  kInterrupted = 130   // asked to stop; the window is finished and a checkpoint is saved
};

/// One of several things that are wrong at once; the host prints it like its own diagnostics.
struct Problem {
  std::string id;          // "draft/bad-config", listed in docs/errors.md
  std::string message;     // one sentence: what was found and what was expected
  std::string place = {};  // the file it stands in, where there is one
  std::string why = {};
  std::string fix = {};
};

/// what(): one sentence, what was found and what was expected. hint(): what to do about it, may be empty.
/// Default visibility and inline members: one type for the process, so that a catch works across libraries.
class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& what, std::string hint = "")
      : std::runtime_error(what), code_(code), hint_(std::move(hint)) {}
  /// Everything that is wrong, at least one problem; what() has all of it as text.
  Error(ExitCode code, std::vector<Problem> problems)
      : std::runtime_error(text_of(problems)), code_(code), problems_(std::move(problems)) {}

  [[nodiscard]] ExitCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& hint() const noexcept { return hint_; }
  [[nodiscard]] const std::vector<Problem>& problems() const noexcept { return problems_; }

  /// The same error with what a caller was doing put before it: "saving step 4000: no space left on device".
  [[nodiscard]] Error within(const std::string& context) const {
    return Error(code_, context + ": " + what(), hint_);
  }

 private:
  static std::string text_of(const std::vector<Problem>& problems) {
    std::string text;
    for (const Problem& problem : problems) {
      text += (text.empty() ? "" : "\n") + (problem.place.empty() ? "" : problem.place + ": ") + problem.message;
      text += problem.fix.empty() ? "" : " (" + problem.fix + ")";
    }
    return text;
  }

  ExitCode code_;
  std::string hint_;
  std::vector<Problem> problems_;
};

}  // namespace sf
