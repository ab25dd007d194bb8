// core/prepare/text_worker.hpp: the Python process that renders and tokenizes (text_worker.py says how), as an object.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sf/json.hpp"

#include "core/prepare/child_process.hpp"
#include "core/prepare/records.hpp"
#include "core/prepare/stop.hpp"

namespace sf {

/// Of a chat template's values: what a record says, or prepare, and no option may.
inline constexpr std::string_view kOwnTemplateValues[] = {"messages", "tools", "documents", "add_generation_prompt"};

struct TextWorkerSettings {
  std::filesystem::path script;         // text_worker.py
  std::filesystem::path target;         // folder with the tokenizer's files
  std::filesystem::path template_path;  // instead of the target's own chat template; empty: its own
  Json template_options = Json::object();  // handed to the template: {"enable_thinking": false}
  std::string date;                     // what strftime_now tells a template, "2026-01-31"; empty: today
  int64_t max_length = 0;               // ids are cut to it; 0: they are not
  std::vector<std::string> ignored;     // texts whose tokens are reported
  bool whole_texts = false;             // a preformatted text is supervised as a whole
  bool prompts = false;                 // conversations up to the next answer, whose generation prompt is rendered
  bool skip_special_text = false;       // a message with the text of a special token in it is a reason to skip the row
  int64_t input_bytes = 0;              // of all lines that rows() will be asked for: a faster library is loaded where that pays (docs/data.md)
  StopRequest stop_requested;           // ends whatever is waited for, with Stopped
  double seconds = 0;                   // of a processor, for one line, and more for a long one; 0: SF_TEXT_SECONDS, or 30

  /// What the result of rows() depends on, less the files and input_bytes.
  [[nodiscard]] Json to_json() const;
};

/// The text of a line is not ready in the time that a line has: the template does not end, or nearly so.
class SlowLine : public std::exception {
 public:
  SlowLine(std::size_t which, double limit) : index(which), seconds(limit) {}
  [[nodiscard]] const char* what() const noexcept override { return "a line takes too long"; }

  std::size_t index;  // among the lines that were asked for
  double seconds;
};

class TextWorker {
 public:
  /// Starts Python: SF_PYTHON, or python3 from PATH, with the packages of SF_PYTHON_DIR or of the folder that this build was made with. Throws
  /// Error(data): no Python, no packages, no usable tokenizer or template, each with what to do; a template that does not end is not usable.
  explicit TextWorker(const TextWorkerSettings& settings);
  TextWorker(const TextWorker&) = delete;
  TextWorker& operator=(const TextWorker&) = delete;

  /// tokens, largest_id, tokenizer_sha256, template_sha256, closers, header, generation_marks, reads_date, encoder.
  [[nodiscard]] const Json& facts() const { return facts_; }
  /// One answer for each line, in order. Throws Error(data) when the libraries disagree about a text, and SlowLine.
  [[nodiscard]] std::vector<TextRow> rows(const std::vector<std::string_view>& lines);
  /// The text of each token.
  [[nodiscard]] std::vector<std::vector<std::string>> texts(const std::vector<std::vector<int64_t>>& ids);

 private:
  class TooSlow;

  void start();
  void allow(double seconds);
  std::vector<TextRow> ask(std::span<const std::string_view> lines);
  Json answer();
  [[noreturn]] void fail();

  TextWorkerSettings settings_;
  std::unique_ptr<ChildProcess> process_;
  std::string python_;
  Json facts_;
  double deadline_ = 0;  // in processor seconds of the process; 0: none
};

}  // namespace sf
