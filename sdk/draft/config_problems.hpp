// sdk/draft/config_problems.hpp: what is wrong with a draft's configuration, collected so that its writer sees all of it at once. No LibTorch.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "sf/error.hpp"

namespace sf::draft {

class ConfigProblems {
 public:
  /// `file`: the configuration's path for messages; empty when the configuration is made from the target's.
  explicit ConfigProblems(std::string file = "") : file_(std::move(file)) {}

  /// `key` is where it stands, dotted ("dflash_config.block_size"); empty for the whole. Without `fix` the advice is to correct the key in the file.
  void add(const std::string& key, const std::string& message, const std::string& fix = "");
  /// Runs a check that throws; an sf::Error (usage) becomes a problem of `key`, with its hint as the advice. False then.
  bool attempt(const std::string& key, const std::function<void()>& check);
  /// Whether something is wrong with this key, so that what is compared with it can be left alone.
  [[nodiscard]] bool is_bad(const std::string& key) const { return bad_.count(key) != 0; }
  [[nodiscard]] bool any() const { return !problems_.empty(); }
  /// Throws sf::Error (usage) with all of them when there is one.
  void finish() const;
  /// "dflash_config.block_size of /drafts/config.json", for an advice.
  [[nodiscard]] std::string place_of(const std::string& key) const;

 private:
  std::string file_;
  std::vector<Problem> problems_;
  std::set<std::string> bad_;
};

}  // namespace sf::draft
