#include "core/prepare/text_worker.hpp"

#include "core/base/error.hpp"

#include <charconv>
#include <cstdlib>
#include <span>
#include <system_error>

#ifndef SF_PYTHON_DIR
#define SF_PYTHON_DIR ""
#endif

namespace sf {

namespace {

constexpr double kSecondsPerByte = 1e-5;  // the slowest tokenizers make a million bytes a second

constexpr const char* kWithoutPython =
    "install python3 with the packages tokenizers and jinja2 (tools/setup does; SF_PYTHON names another python3), or bring token records (JSONL with "
    "input_ids and loss_mask), which need no Python";

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != 0 ? value : otherwise;
}

// SF_TEXT_SECONDS, or 30: ten thousand times what a conversation takes.
double seconds_allowed() {
  const std::string text = variable("SF_TEXT_SECONDS", "30");
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds > 0)) {
    throw Error(ExitCode::kUsage, format("SF_TEXT_SECONDS is \"{}\", a number of seconds above 0 expected", text), "for example SF_TEXT_SECONDS=300");
  }
  return seconds;
}

void throw_if_error(const Json& reply) {
  if (const Json* error = reply.find("error")) throw Error(ExitCode::kData, error->as_string(), reply.at("fix").as_string());
}

}  // namespace

class TextWorker::TooSlow : public std::exception {};

Json TextWorkerSettings::to_json() const {
  return Json::object({{"template_path", template_path.string()},
                       {"template_options", template_options},
                       {"date", date},
                       {"max_length", max_length},
                       {"ignored", Json::array_of(ignored)},
                       {"text_supervision", whole_texts ? "all" : "answers"},
                       {"prompts", prompts},
                       {"skip_special_text", skip_special_text}});
}

TextWorker::TextWorker(const TextWorkerSettings& settings) : settings_(settings), python_(variable("SF_PYTHON", "python3")) {
  if (settings_.seconds <= 0) settings_.seconds = seconds_allowed();
  if (!std::filesystem::is_regular_file(settings.script)) {
    throw Error(ExitCode::kInternal, format("this installation lacks \"{}\"", settings.script), "build or install again");
  }
  start();
}

void TextWorker::start() {
  deadline_ = 0;
  process_ = std::make_unique<ChildProcess>(std::vector<std::string>{python_, settings_.script.string()},
                                            std::vector<std::string>{"TOKENIZERS_PARALLELISM=false", "RAYON_NUM_THREADS=1", "FASTOKENS_BPE_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"});
  process_->set_watch([this] {
    throw_if_stopped(settings_.stop_requested);
    if (deadline_ > 0 && process_->processor_seconds() > deadline_) throw TooSlow();
  });
  Json first = settings_.to_json();
  first.set("target", settings_.target.string()).set("input_bytes", settings_.input_bytes);
  Json packages = Json::array();
  const std::string folder = variable("SF_PYTHON_DIR", SF_PYTHON_DIR);
  if (std::error_code ignored; !folder.empty() && std::filesystem::is_directory(folder, ignored)) packages.push_back(folder);
  Json own = Json::array();
  for (const std::string_view name : kOwnTemplateValues) own.push_back(std::string(name));
  first.set("packages", std::move(packages)).set("own_values", std::move(own));
  if (!process_->write(first.dump() + "\n")) fail();
  Json reply = answer();
  if (reply.find("reading") != nullptr) {  // the chat template, tried with small conversations; a large tokenizer has been read and may have taken its time
    allow(settings_.seconds);
    try {
      reply = answer();
    } catch (const TooSlow&) {
      throw Error(ExitCode::kData, format("{}: the chat template is still at work on a conversation of few words after {} s of a processor; a thousandth of that is usual",
                                          settings_.template_path.empty() ? settings_.target : settings_.template_path, settings_.seconds),
                  "it loops without an end, or nearly so: mend it, or name another one with data.chat_template_path; SF_TEXT_SECONDS=N allows N s");
    }
  }
  throw_if_error(reply);
  facts_ = reply.at("ready");
}

// From now on, of processor time.
void TextWorker::allow(double seconds) {
  deadline_ = process_->processor_seconds() + seconds;
}

std::vector<TextRow> TextWorker::rows(const std::vector<std::string_view>& lines) {
  try {
    return ask(lines);
  } catch (const TooSlow&) {
    if (lines.size() == 1) throw SlowLine(0, settings_.seconds);
  }
  // Which of them it is, if it is one: each has the time that all had together.
  start();
  std::vector<TextRow> result;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    try {
      result.push_back(std::move(ask(std::span(lines).subspan(i, 1)).front()));
    } catch (const TooSlow&) {
      throw SlowLine(i, settings_.seconds);
    }
  }
  return result;
}

std::vector<TextRow> TextWorker::ask(std::span<const std::string_view> lines) {
  std::string request = Json::object({{"op", "rows"}, {"count", lines.size()}}).dump() + "\n";
  for (const std::string_view line : lines) {
    request += line;
    request += '\n';
  }
  allow(settings_.seconds + kSecondsPerByte * static_cast<double>(request.size()));
  if (!process_->write(request)) fail();
  std::vector<TextRow> result(lines.size());
  for (TextRow& row : result) {
    row.said = answer();
    throw_if_error(row.said);
    const Json* count = row.said.find("ids");
    if (count == nullptr) continue;
    row.ids.resize(static_cast<std::size_t>(count->as_int()));
    if (!process_->read_bytes(std::as_writable_bytes(std::span(row.ids)))) fail();
  }
  return result;
}

std::vector<std::vector<std::string>> TextWorker::texts(const std::vector<std::vector<int64_t>>& ids) {
  deadline_ = 0;
  Json lists = Json::array();
  for (const std::vector<int64_t>& list : ids) lists.push_back(Json::array_of(list));
  if (!process_->write(Json::object({{"op", "texts"}, {"ids", std::move(lists)}}).dump() + "\n")) fail();
  std::vector<std::vector<std::string>> result;
  const Json reply = answer();
  for (const Json& list : reply.at("texts").items()) {
    std::vector<std::string>& texts = result.emplace_back();
    for (const Json& text : list.items()) texts.push_back(text.as_string());
  }
  return result;
}

Json TextWorker::answer() {
  std::string line;
  if (!process_->read_line(line)) fail();
  try {
    return Json::parse(line, "text worker");
  } catch (const JsonError& error) {
    throw Error(ExitCode::kInternal, format("the text worker ({}) wrote what is no answer: {}", python_, error.what()));
  }
}

void TextWorker::fail() {
  throw_if_stopped(settings_.stop_requested);  // a signal to the whole group has ended it, too
  const std::string how = process_->how_it_ended();
  if (how == "exit code 127") throw Error(ExitCode::kData, format("there is no Python: \"{}\" can't be started", python_), kWithoutPython);
  throw Error(ExitCode::kData, format("the text worker ({}) ended with {}", python_, how), "what it said stands above; is there enough memory?");
}

}  // namespace sf
