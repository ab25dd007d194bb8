#include "core/recipe/rules.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/base/error.hpp"
#include "core/base/text.hpp"

namespace sf {
namespace {

using Kind = TomlNode::Kind;

enum class Truth { no, yes, unknown };

// Judges one rule and remembers which keys it looked at.
class Judge {
 public:
  Judge(const Rule& rule, const RuleInput& input, Diagnostics& problems)
      : rule_(rule), input_(input), problems_(problems) {}

  Truth all_of(const std::vector<Condition>& conditions) {
    Truth result = Truth::yes;
    for (const Condition& condition : conditions) {
      Truth one = judge(condition);
      if (one == Truth::no) {
        return Truth::no;
      }
      result = one == Truth::unknown ? one : result;
    }
    return result;
  }

  [[nodiscard]] const std::vector<std::string>& looked_at() const { return looked_at_; }
  [[nodiscard]] const std::vector<std::string>& missing() const { return missing_; }
  [[nodiscard]] bool is_bad() const { return is_bad_; }

 private:
  void bad(const Condition& condition, const std::string& message) {
    is_bad_ = true;
    problems_.error({.id = "plugin/bad-manifest",
                     .message = format("rule {} of \"{}\": {}", rule_.id, rule_.owner, message),
                     .place = condition.place});
  }

  // The value of an option or fact. Nothing when it is an option of a plugin outside the stack, a fact that
  // is not known here, or a mistake.
  const Value* look_up(const std::string& key, const Condition& condition) {
    auto option = input_.values.find(key);
    if (option != input_.values.end()) {
      if (std::find(looked_at_.begin(), looked_at_.end(), key) == looked_at_.end()) {
        looked_at_.push_back(key);
      }
      return &option->second.value;
    }
    auto fact = input_.facts.find(key);
    if (fact != input_.facts.end()) {
      return &fact->second;
    }
    if (key.starts_with("fact.") || key.starts_with("model.")) {
      missing_.push_back(key);
      return nullptr;
    }
    if (key.starts_with("plugin.")) {
      std::vector<std::string> parts = split(key, '.');
      if (parts.size() >= 3 && input_.plugins.count(parts[1]) == 0) {
        return nullptr;  // not in the stack: the condition is false
      }
    }
    bad(condition, format("there is no option or fact \"{}\"", key));
    return nullptr;
  }

  Truth judge(const Condition& condition) {
    if (condition.subject != Subject::key) {
      bool is_there = input_.provided.count(condition.name) > 0;
      return is_there == (condition.subject == Subject::provided) ? Truth::yes : Truth::no;
    }
    std::size_t missing_before = missing_.size();
    const Value* left = look_up(condition.name, condition);
    const Value* right = condition.reference.empty() ? nullptr : look_up(condition.reference, condition);
    if (left == nullptr || (right == nullptr && !condition.reference.empty())) {
      return missing_.size() > missing_before ? Truth::unknown : Truth::no;
    }
    return test(condition, *left, right) ? Truth::yes : Truth::no;
  }

  bool test(const Condition& condition, const Value& left, const Value* right) {
    switch (condition.test) {
      case Test::set: {
        auto option = input_.values.find(condition.name);
        return (option != input_.values.end() && option->second.is_set) == condition.right.boolean;
      }
      case Test::empty:
        return is_empty(condition, left) == condition.right.boolean;
      case Test::increasing: {
        std::vector<double> numbers;
        if (!numbers_of(left, numbers)) {
          bad(condition, format("{} has no order to be increasing in", condition.name));
          return false;
        }
        return (std::adjacent_find(numbers.begin(), numbers.end(), [](double a, double b) {
                  return a >= b;
                }) == numbers.end()) == condition.right.boolean;
      }
      case Test::is:
        return right != nullptr ? left == *right : equals(left, condition.right);
      case Test::is_not:
        return !(right != nullptr ? left == *right : equals(left, condition.right));
      case Test::one_of:
      case Test::none_of: {
        bool found = std::any_of(condition.right.items.begin(), condition.right.items.end(),
                                 [&](const TomlNode& node) { return equals(left, node); });
        return found == (condition.test == Test::one_of);
      }
      default:
        return compare(condition, left, right);
    }
  }

  bool is_empty(const Condition& condition, const Value& left) {
    if (const auto* text = std::get_if<std::string>(&left)) {
      return text->empty();
    }
    if (const auto* texts = std::get_if<std::vector<std::string>>(&left)) {
      return texts->empty();
    }
    std::vector<double> numbers;
    if (std::holds_alternative<bool>(left) || std::holds_alternative<std::int64_t>(left) ||
        std::holds_alternative<double>(left) || !numbers_of(left, numbers)) {
      bad(condition, format("{} can't be empty", condition.name));
      return false;
    }
    return numbers.empty();
  }

  static bool equals(const Value& left, const TomlNode& right) {
    if (const auto* boolean = std::get_if<bool>(&left)) {
      return right.kind == Kind::boolean && *boolean == right.boolean;
    }
    if (const auto* text = std::get_if<std::string>(&left)) {
      return right.kind == Kind::string && *text == right.string;
    }
    if (const auto* texts = std::get_if<std::vector<std::string>>(&left)) {
      return right.kind == Kind::array && texts->size() == right.items.size() &&
             std::equal(texts->begin(), texts->end(), right.items.begin(),
                        [](const std::string& a, const TomlNode& b) { return a == b.string; });
    }
    std::vector<double> numbers;
    numbers_of(left, numbers);
    std::vector<double> others;
    for (const TomlNode& item : right.kind == Kind::array ? right.items : std::vector<TomlNode>{right}) {
      if (item.kind != Kind::integer && item.kind != Kind::real) {
        return false;
      }
      others.push_back(item.kind == Kind::integer ? static_cast<double>(item.integer) : item.real);
    }
    return numbers == others;
  }

  // Numbers; each element of a list must pass.
  bool compare(const Condition& condition, const Value& left, const Value* reference) {
    std::vector<double> numbers;
    std::vector<double> bound;
    if (reference != nullptr) {
      numbers_of(*reference, bound);
    } else if (condition.right.kind == Kind::integer || condition.right.kind == Kind::real) {
      bound.push_back(condition.right.kind == Kind::integer ? static_cast<double>(condition.right.integer)
                                                            : condition.right.real);
    }
    if (!numbers_of(left, numbers) || bound.size() != 1) {
      bad(condition, format("{} is compared as a number", condition.name));
      return false;
    }
    return std::all_of(numbers.begin(), numbers.end(), [&](double number) {
      switch (condition.test) {
        case Test::at_least:
          return number >= bound[0];
        case Test::at_most:
          return number <= bound[0];
        case Test::more_than:
          return number > bound[0];
        case Test::less_than:
          return number < bound[0];
        default:
          return bound[0] != 0 && std::fmod(number, bound[0]) == 0;  // multiple_of
      }
    });
  }

  const Rule& rule_;
  const RuleInput& input_;
  Diagnostics& problems_;
  std::vector<std::string> looked_at_;
  std::vector<std::string> missing_;
  bool is_bad_ = false;
};

// "{backend.sharding}" in a message: the value of that option.
std::string with_values(std::string text, const PlanValues& values) {
  for (std::size_t open = text.find('{'); open != std::string::npos; open = text.find('{', open + 1)) {
    const std::size_t close = text.find('}', open);
    const auto found = close == std::string::npos ? values.end() : values.find(text.substr(open + 1, close - open - 1));
    if (found != values.end()) {
      const auto* plain = std::get_if<std::string>(&found->second.value);
      text.replace(open, close - open + 1, plain != nullptr ? *plain : toml_text(found->second.value));
    }
  }
  return text;
}

std::string with_texts(std::string text, const std::map<std::string, std::string>& values) {
  for (std::size_t open = text.find('{'); open != std::string::npos; open = text.find('{', open)) {
    const std::size_t close = text.find('}', open);
    const auto found = close == std::string::npos ? values.end() : values.find(text.substr(open + 1, close - open - 1));
    SF_CHECK(found != values.end(), "a rule's text names what nobody gave: {}", text);
    text.replace(open, close - open + 1, found->second);
    open += found->second.size();  // a value may have braces of its own
  }
  return text;
}

}  // namespace

RunRule run_rule(std::string_view id, const std::map<std::string, std::string>& values) {
  const std::vector<Rule>& rules = host_manifest().rules;
  const auto rule = std::find_if(rules.begin(), rules.end(), [&](const Rule& r) { return r.id == id && r.action == RuleAction::at_run; });
  SF_CHECK(rule != rules.end(), "host.toml has no rule \"{}\" of the phase run", id);
  return {.message = with_texts(rule->message, values), .why = with_texts(rule->why, values), .fix = with_texts(rule->fix, values)};
}

void check_rules(const std::vector<Rule>& rules, const RuleInput& input, Diagnostics& problems,
                 std::vector<std::string>& undecided) {
  for (const Rule& rule : rules) {
    if (rule.action == RuleAction::at_run) {
      continue;
    }
    Judge judge(rule, input, problems);
    Truth when = judge.all_of(rule.when);
    Truth broken = when;
    if (when != Truth::no && rule.action == RuleAction::require) {
      Truth holds = judge.all_of(rule.requirements);
      broken = holds == Truth::yes ? Truth::no : holds == Truth::no ? when : Truth::unknown;
    }
    if (judge.is_bad() || broken == Truth::no) {
      continue;
    }
    if (broken == Truth::unknown) {
      undecided.push_back(format("{}: needs {}", rule.id, join(judge.missing(), ", ")));
      continue;
    }
    std::vector<std::string> values;
    Place place;
    for (const std::string& key : judge.looked_at()) {
      const PlanValue& value = input.values.at(key);
      values.push_back(format("{} = {} ({})", key, toml_text(value.value), value.origin));
      if (place.source.empty() && value.is_set) {
        place = value.place;
      }
    }
    Diagnostic diagnostic{.id = rule.id,
                          .message = with_values(rule.message, input.values),
                          .place = place,
                          .note = join(values, ", "),
                          .why = rule.why,
                          .fix = rule.fix};
    if (rule.action == RuleAction::warn) {
      problems.warn(diagnostic);
    } else {
      problems.error(diagnostic);
    }
  }
}

void check_claims(const std::vector<Manifest>& stack, const std::vector<Manifest>& installed, const PlanValues& values,
                  Diagnostics& problems) {
  const auto claims = [](const Manifest& manifest, const std::string& key) {
    return std::find(manifest.claims.begin(), manifest.claims.end(), key) != manifest.claims.end();
  };
  const std::vector<Option>& options = host_manifest().options;
  for (const Manifest& manifest : stack) {
    for (const std::string& key : manifest.claims) {
      if (std::none_of(options.begin(), options.end(), [&](const Option& option) { return option.key == key && option.is_for_backend; })) {
        problems.error({.id = "plugin/bad-manifest",
                        .message = format("plugin \"{}\" claims the option {}, which the host does not hand to plugins", manifest.name, key)});
      }
    }
  }
  for (const Option& option : options) {
    const auto found = values.find(option.key);
    if (!option.is_for_backend || found == values.end() || found->second.value == option.default_value ||
        std::any_of(stack.begin(), stack.end(), [&](const Manifest& manifest) { return claims(manifest, option.key); })) {
      continue;
    }
    std::vector<std::string> others;
    for (const Manifest& manifest : installed) {
      if (claims(manifest, option.key)) {
        others.push_back(manifest.name);
      }
    }
    problems.error({.id = "recipe/not-offered",
                    .message = format("{} = {}, but no plugin of this run offers it", option.key, toml_text(found->second.value)),
                    .place = found->second.place,
                    .why = "an option that nobody acts on would be lost in silence",
                    .fix = others.empty() ? "leave the key out" : format("use {}, or leave the key out", join(others, " or "))});
  }
}

void check_capabilities(const std::vector<Manifest>& stack, Diagnostics& problems) {
  for (const Manifest& manifest : stack) {
    for (const std::string& capability : manifest.wants) {
      bool found = std::any_of(stack.begin(), stack.end(), [&](const Manifest& other) {
        return std::find(other.provides.begin(), other.provides.end(), capability) != other.provides.end();
      });
      if (!found) {
        problems.error(
            {.id = "plugin/unmet-want",
             .message = format("plugin \"{}\" wants the capability {}, which no plugin of this run provides",
                               manifest.name, capability),
             .fix = "sf-host plugins lists what each plugin provides; choose one that has it"});
      }
    }
    for (const std::string& capability : manifest.conflicts) {
      for (const Manifest& other : stack) {
        if (&other != &manifest &&
            std::find(other.provides.begin(), other.provides.end(), capability) != other.provides.end()) {
          problems.error(
              {.id = "plugin/conflict",
               .message = format("plugin \"{}\" does not go together with {}, which \"{}\" provides",
                                 manifest.name, capability, other.name),
               .fix = "use only one of the two"});
        }
      }
    }
  }
}

}  // namespace sf
