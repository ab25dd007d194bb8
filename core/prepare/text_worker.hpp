// core/prepare/text_worker.hpp: the Python process that renders and tokenizes (text_worker.py says how), as an object.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sf/json.hpp"

#include "core/prepare/child_process.hpp"
#include "core/prepare/records.hpp"

namespace sf {

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
  int64_t input_bytes = 0;              // of all lines that rows() will be asked for: a faster library is loaded where that pays (docs/data.md)

  /// What the result of rows() depends on, less the files and input_bytes.
  [[nodiscard]] Json to_json() const;
};

class TextWorker {
 public:
  /// Starts Python: SF_PYTHON, or python3 from PATH, with the packages of SF_PYTHON_DIR or of the folder that this build was made with. Throws
  /// Error(data): no Python, no packages, no usable tokenizer or template, each with what to do.
  explicit TextWorker(const TextWorkerSettings& settings);

  /// tokens, largest_id, tokenizer_sha256, template_sha256, closers, header, generation_marks, reads_date, encoder.
  [[nodiscard]] const Json& facts() const { return facts_; }
  /// One answer for each line, in order. Throws Error(data) when the libraries disagree about a text.
  [[nodiscard]] std::vector<TextRow> rows(const std::vector<std::string_view>& lines);
  /// The text of each token.
  [[nodiscard]] std::vector<std::vector<std::string>> texts(const std::vector<std::vector<int64_t>>& ids);

 private:
  Json answer();
  [[noreturn]] void fail();

  std::unique_ptr<ChildProcess> process_;
  std::string python_;
  Json facts_;
};

}  // namespace sf
