#include "core/model/prompts.hpp"

#include "sf/json.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"

#include <algorithm>
#include <map>
#include <string>

namespace sf {

namespace {

class PromptTooLong final : public JsonError {
 public:
  using JsonError::JsonError;
};

constexpr size_t kReportedMax = 20;

Prompt parse_prompt(std::string_view line, int64_t number, int64_t vocab_size, int64_t context_tokens) {
  const Json record = Json::parse(line, "line");
  if (!record.is_object()) throw JsonError(std::string("expected an object, found ") + record.kind_name());
  Prompt prompt;
  const Json* id = record.find("id");
  prompt.id = id == nullptr || id->is_null() ? format("line {}", number) : id->is_string() ? id->as_string() : id->dump();
  const size_t slash = prompt.id.find('/');
  const Json* category = record.find("category");
  prompt.category = category != nullptr && category->is_string() ? category->as_string()
                    : slash != std::string::npos && slash > 0    ? prompt.id.substr(0, slash)
                                                                 : "all";
  const Json::Array& ids = record.at("input_ids").items();
  size_t end = ids.size();
  if (const Json* mask = record.find("loss_mask"); mask != nullptr) {
    if (mask->items().size() != ids.size()) {
      throw JsonError(format("input_ids has {} elements, loss_mask {}; the same number expected", ids.size(), mask->items().size()));
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      const Json& supervised = mask->items()[i];
      if (supervised.is_bool() ? supervised.as_bool() : supervised.as_int() != 0) {
        end = i;
        break;
      }
    }
  }
  for (size_t i = 0; i < end; ++i) {
    const int64_t token = ids[i].as_int();
    if (token < 0 || token >= vocab_size) {
      throw JsonError(format("input_ids[{}] is {}, but the target has the tokens 0 to {}", i, token, vocab_size - 1));
    }
    prompt.ids.push_back(token);
  }
  if (prompt.ids.empty()) throw JsonError("there is no token before the answer, so nothing to answer to");
  if (context_tokens > 0 && static_cast<int64_t>(prompt.ids.size()) >= context_tokens) {
    throw PromptTooLong(format("the prompt has {} tokens, and the target's context ends at {}", prompt.ids.size(), context_tokens));
  }
  return prompt;
}

void add_stop_tokens(const std::filesystem::path& file, std::vector<int64_t>& tokens) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return;
  const Json config = Json::parse(read_file(file), file.string());
  const Json* text = config.find("text_config");
  for (const Json* place : {&config, text}) {
    const Json* found = place != nullptr ? place->find("eos_token_id") : nullptr;
    if (found == nullptr || found->is_null()) continue;
    if (found->is_array()) {
      for (const Json& token : found->items()) tokens.push_back(token.as_int());
    } else {
      tokens.push_back(found->as_int());
    }
    return;
  }
}

}  // namespace

std::vector<Prompt> read_prompts(const std::filesystem::path& path, int64_t vocab_size, int64_t context_tokens, int64_t most) {
  const MappedFile file(path);
  std::vector<Prompt> prompts;
  std::string problems;
  size_t broken = 0, too_long = 0;
  std::string_view rest = file.text();
  for (int64_t number = 1; !rest.empty() && (most == 0 || static_cast<int64_t>(prompts.size()) < most); ++number) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
    if (trim(line).empty()) continue;
    try {
      prompts.push_back(parse_prompt(line, number, vocab_size, context_tokens));
    } catch (const JsonError& error) {
      too_long += dynamic_cast<const PromptTooLong*>(&error) != nullptr ? 1 : 0;
      if (++broken <= kReportedMax) problems += format("\n  {}:{}: {}", path, number, error.what());
    }
  }
  if (broken > 0) {
    if (broken > kReportedMax) problems += format("\n  and {} more", broken - kReportedMax);
    throw Error(ExitCode::kData, format("{}: {} of {} prompts can't be used{}", path, broken, broken + prompts.size(), problems),
                too_long == broken ? "leave them out; sf-host prepare skips prompts that are longer than data.max_length"
                                   : "each line is an object with input_ids, a list of integers; with loss_mask the prompt ends before the first 1. Text becomes "
                                     "tokens with sf-host prepare");
  }
  if (prompts.empty()) {
    throw Error(ExitCode::kData, format("{}: there is no prompt in it", path), "one object a line: {\"input_ids\": [...]}");
  }
  return prompts;
}

std::vector<int64_t> draw_names(const std::vector<Prompt>& prompts) {
  std::map<std::string, int64_t> seen;
  std::vector<int64_t> names;
  for (const Prompt& prompt : prompts) {
    const std::string ids = sha256(format("{}", prompt.ids));
    names.push_back(static_cast<int64_t>(std::stoull(sha256(format("{} {}", ids, seen[ids]++)).substr(0, 15), nullptr, 16)));
  }
  return names;
}

std::vector<int64_t> stop_tokens_of(const std::filesystem::path& target_folder) {
  std::vector<int64_t> tokens;
  for (const char* name : {"generation_config.json", "config.json"}) {
    if (tokens.empty()) add_stop_tokens(target_folder / name, tokens);
  }
  if (tokens.empty()) {
    throw Error(ExitCode::kData, format("{}: neither generation_config.json nor config.json has an eos_token_id", target_folder),
                "name the tokens that end an answer with --stop-tokens 2,5, or --stop-tokens none to generate up to the limit");
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

}  // namespace sf
