#include "sdk/draft/config_problems.hpp"

namespace sf::draft {

void ConfigProblems::add(const std::string& key, const std::string& message, const std::string& fix) {
  bad_.insert(key);
  problems_.push_back({.id = "draft/bad-config", .message = message, .place = file_, .fix = fix.empty() ? "correct " + place_of(key) : fix});
}

bool ConfigProblems::attempt(const std::string& key, const std::function<void()>& check) {
  try {
    check();
    return true;
  } catch (const Error& error) {
    if (error.code() != ExitCode::kUsage) {
      throw;
    }
    if (error.problems().empty()) {
      add(key, error.what(), error.hint());
    }
    problems_.insert(problems_.end(), error.problems().begin(), error.problems().end());
    bad_.insert(key);
    return false;
  }
}

void ConfigProblems::finish() const {
  if (any()) {
    throw Error(ExitCode::kUsage, problems_);
  }
}

std::string ConfigProblems::place_of(const std::string& key) const {
  const std::string file = file_.empty() ? "the draft's configuration" : file_;
  return key.empty() ? file : "\"" + key + "\" in " + file;
}

}  // namespace sf::draft
