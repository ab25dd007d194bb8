// core/recipe/manifest.hpp: what a plugin (or the host, host.toml) says about itself: options, rules,
// capabilities. Text in, data or diagnostics out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/recipe/toml_reader.hpp"
#include "core/recipe/value.hpp"

namespace sf {

struct Option {
  std::string name;  // in the manifest, and as the plugin reads it: "gather", "training.num_anchors"
  std::string key;   // in a recipe: "plugin.fp8.gather"; a dotted name is its own key
  Type type = Type::string;
  std::optional<Value> default_value;  // nothing: required
  std::string help, unit;
  std::optional<double> low, high;  // of the value, or of each element; bounds included unless *_open
  bool low_open = false, high_open = false;
  std::vector<std::string> choices;  // of the value, or of each element of strings
  std::string pattern;               // ECMAScript, matches the whole text (type string, or each of strings); empty: any text
  std::string form;                  // the pattern in words, for people
  std::string deprecated;            // a sentence
  std::string renamed_from;          // full key
  bool is_fixed = false;             // resume = "fixed"
  bool is_experimental = false;
  bool is_for_backend = false;  // backend = true, host.toml alone: a plugin of the stack has to claim it
  std::string owner;  // "host" or the plugin's name
  std::string owner_version;
};

enum class Subject { key, provided, absent };
enum class Test {
  is,
  is_not,
  one_of,
  none_of,
  set,
  empty,
  increasing,
  at_least,
  at_most,
  more_than,
  less_than,
  multiple_of
};

struct Condition {
  Subject subject = Subject::key;
  std::string name;  // full key, or a capability
  Test test = Test::is;
  TomlNode right;         // the literal
  std::string reference;  // "@fact.shard_degree" without the @; empty: the literal counts
  Place place;
};

// at_run: what the rule speaks of shows while a run goes on; its text is data like the others', who meets it asks for it (run_rule).
enum class RuleAction { require, reject, warn, at_run };

struct Rule {
  std::string id, message, fix, why;
  std::vector<Condition> when;
  RuleAction action = RuleAction::require;
  std::vector<Condition> requirements;
  std::string owner;
  Place place;
};

/// A key of another program or an earlier version that a recipe may still have.
struct MovedKey {
  std::string from, to, fix;
};

/// What an algorithm reads from a record, for people; the exact needs come from the algorithm itself.
struct ReadTensor {
  std::string name, dtype, help;
  std::vector<std::string> shape;  // "tokens", "3 * model.hidden_size"
};

struct Manifest {
  std::string name, version, kind, summary, homepage, license;
  std::vector<std::string> provides, wants, conflicts;
  std::vector<std::string> claims;  // the host's options that this plugin reads and acts on, by key
  std::vector<Option> options;
  std::vector<Rule> rules;
  std::vector<ReadTensor> reads;
  std::vector<MovedKey> moved;  // host.toml alone
};

/// Reads a manifest; `source` names it in messages ("plugin.toml in fp8.so"). Every problem becomes a
/// diagnostic plugin/bad-manifest; nothing when there was one.
[[nodiscard]] std::optional<Manifest> parse_manifest(std::string_view text, const std::string& source,
                                                     Diagnostics& problems);

/// core/recipe/host.toml, compiled in.
[[nodiscard]] const Manifest& host_manifest();

/// The value that a TOML node gives to an option, or the reason why not: found and expected.
struct Reading {
  std::optional<Value> value;
  std::string id;       // "recipe/wrong-type", "recipe/out-of-range", "recipe/bad-choice", "recipe/bad-form"
  std::string message;  // "is 0.5 (a float), expected an int"
  std::string note;     // did you mean ...
};
[[nodiscard]] Reading read_value(const TomlNode& node, const Option& option);

}  // namespace sf
