// core/base/diagnostics.hpp: problems that a user can mend, collected and shown together.
//
// Each has an id (never reused; docs/errors.md lists them), one sentence with what was found and expected,
// and where there is something to say: the place, the file, why it matters, and what to do.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sf {

struct Place {
  std::string source;  // "recipes/qwen3.toml", "--set training.seed=1"; empty when there is none
  int line = 0;        // from one; 0: the source as a whole
  int column = 0;

  /// "recipes/qwen3.toml:14:1", or "" without a source.
  [[nodiscard]] std::string text() const;
};

enum class Severity { warning, error };

struct Diagnostic {
  std::string id;       // "recipe/unknown-key"
  std::string message;  // one sentence, no final period
  Place place = {};
  std::string note = {};  // a line of its own: did you mean "x"?
  std::string file = {};  // a file that the message is about, with version and the like
  std::string why = {};
  std::string fix = {};
  Severity severity = Severity::error;
};

class Diagnostics {
 public:
  void error(Diagnostic diagnostic);
  void warn(Diagnostic diagnostic);
  void add_all(const Diagnostics& other);

  [[nodiscard]] bool has_errors() const { return error_count_ > 0; }
  [[nodiscard]] std::size_t error_count() const { return error_count_; }
  [[nodiscard]] const std::vector<Diagnostic>& all() const { return all_; }
  /// True when one with this id is there.
  [[nodiscard]] bool contains(std::string_view id) const;

  /// All as text, in the order in which they were found, each ending in a newline:
  ///   error[fp8/device] recipe.toml:14:1: sentence
  ///     did you mean "x"?
  ///     file: ...
  ///     why:  ...
  ///     fix:  ...
  [[nodiscard]] std::string text() const;

 private:
  std::vector<Diagnostic> all_;
  std::size_t error_count_ = 0;
};

}  // namespace sf
