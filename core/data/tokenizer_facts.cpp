#include "core/data/tokenizer_facts.hpp"

#include "sf/json.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <algorithm>
#include <string>

namespace sf {
namespace {

constexpr int64_t kLargestId = (int64_t{1} << 31) - 1;

Json read_json(const std::filesystem::path& path) {
  try {
    return Json::parse(read_file(path, ExitCode::kData), path.string());
  } catch (const JsonError& error) {
    throw Error(ExitCode::kData, error.what(), "fetch the target's tokenizer again, or set model.mask_token_id");
  }
}

// Calls visit(text, id) for each token: added ones, then the vocabulary (an object of ids, or a list of [text, score]).
template <class Visit>
void for_each_token(const Json& tokenizer, Visit&& visit) {
  if (const Json* added = tokenizer.find("added_tokens"); added != nullptr && added->is_array()) {
    for (const Json& token : added->items()) {
      const Json* id = token.find("id");
      const Json* content = token.find("content");
      if (id != nullptr && id->is_int()) {
        visit(content != nullptr && content->is_string() ? content->as_string() : std::string(), id->as_int());
      }
    }
  }
  const Json* model = tokenizer.find("model");
  const Json* vocabulary = model == nullptr ? nullptr : model->find("vocab");
  if (vocabulary != nullptr && vocabulary->is_object()) {
    for (const auto& [text, id] : vocabulary->entries()) {
      if (id.is_int()) {
        visit(text, id.as_int());
      }
    }
  } else if (vocabulary != nullptr && vocabulary->is_array()) {
    int64_t id = 0;
    for (const Json& entry : vocabulary->items()) {
      const bool named = entry.is_array() && entry.size() > 0 && entry.at(size_t{0}).is_string();
      visit(named ? entry.at(size_t{0}).as_string() : std::string(), id++);
    }
  }
}

}  // namespace

TokenizerFacts read_tokenizer_facts(const std::filesystem::path& target) {
  TokenizerFacts facts;
  if (!std::filesystem::exists(target / "tokenizer.json")) {
    return facts;
  }
  std::string mask;
  if (std::filesystem::exists(target / "tokenizer_config.json")) {
    const Json config = read_json(target / "tokenizer_config.json");
    const Json* token = config.find("mask_token");
    if (token != nullptr && token->is_object()) {
      token = token->find("content");
    }
    if (token != nullptr && token->is_string()) {
      mask = token->as_string();
    }
  }
  const Json tokenizer = read_json(target / "tokenizer.json");
  int64_t largest = -1;
  for_each_token(tokenizer, [&](const std::string& text, int64_t id) {
    if (id < 0 || id > kLargestId) {
      throw Error(ExitCode::kData, format("{}: the token \"{}\" has the id {}, 0 to {} expected", target / "tokenizer.json", text, id, kLargestId),
                  "fetch the target's tokenizer again, or set model.mask_token_id");
    }
    largest = std::max(largest, id);
    if (!mask.empty() && text == mask && facts.mask_token_id < 0) {
      facts.mask_token_id = id;
    }
  });
  facts.tokens = largest < 0 ? -1 : largest + 1;
  return facts;
}

bool names_mask_token(const std::string& draft_config) {
  try {
    const Json config = Json::parse(draft_config);
    for (const Json* place : {&config, config.find("dflash_config")}) {
      const Json* token = place == nullptr ? nullptr : place->find("mask_token_id");
      if (token != nullptr && !token->is_null()) {
        return true;
      }
    }
  } catch (const JsonError&) {  // refused where it is read
  }
  return false;
}

}  // namespace sf
