#include "core/recipe/manifest.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <regex>
#include <utility>

#include "core/base/text.hpp"

namespace sf {

extern const char* const kHostManifestText;  // generated from host.toml

namespace {

using Kind = TomlNode::Kind;

struct TestName {
  Test test;
  const char* name;
};
constexpr std::array<TestName, 12> kTests = {{{Test::is, "is"},
                                              {Test::is_not, "is_not"},
                                              {Test::one_of, "one_of"},
                                              {Test::none_of, "none_of"},
                                              {Test::set, "set"},
                                              {Test::empty, "empty"},
                                              {Test::increasing, "increasing"},
                                              {Test::at_least, "at_least"},
                                              {Test::at_most, "at_most"},
                                              {Test::more_than, "more_than"},
                                              {Test::less_than, "less_than"},
                                              {Test::multiple_of, "multiple_of"}}};

bool is_name(std::string_view text) {
  if (text.empty() || text[0] < 'a' || text[0] > 'z') {
    return false;
  }
  return text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string_view::npos;
}

std::string found_text(const TomlNode& node) {
  switch (node.kind) {
    case Kind::boolean:
      return toml_text(Value(node.boolean)) + " (a bool)";
    case Kind::integer:
      return toml_text(Value(node.integer)) + " (an int)";
    case Kind::real:
      return toml_text(Value(node.real)) + " (a float)";
    case Kind::string:
      return toml_quoted(node.string) + " (a string)";
    default:
      return node.kind_text();
  }
}

const char* expected_text(Type type) {
  switch (type) {
    case Type::boolean:
      return "true or false";
    case Type::integer:
      return "an int";
    case Type::real:
      return "a number";
    case Type::string:
      return "a string";
    case Type::choice:
      return "one of its choices, as a string";
    case Type::path:
      return "a path, as a string";
    case Type::duration:
      return "a duration such as \"90s\" or \"10 min\"";
    case Type::bytes:
      return "a size such as \"512MiB\" or \"4GiB\"";
    case Type::ints:
      return "a list of ints";
    case Type::floats:
      return "a list of numbers";
    case Type::strings:
      return "a list of strings";
  }
  return "a value";
}

bool convert(const TomlNode& node, Type type, Value& value) {
  switch (type) {
    case Type::boolean:
      value = node.boolean;
      return node.kind == Kind::boolean;
    case Type::integer:
      value = node.integer;
      return node.kind == Kind::integer;
    case Type::real:
      value = node.kind == Kind::integer ? static_cast<double>(node.integer) : node.real;
      return node.kind == Kind::integer || node.kind == Kind::real;
    case Type::string:
    case Type::choice:
    case Type::path:
      value = node.string;
      return node.kind == Kind::string;
    case Type::duration: {
      double seconds = 0;
      bool fine = node.kind == Kind::string && parse_duration(node.string, seconds);
      value = seconds;
      return fine;
    }
    case Type::bytes: {
      std::int64_t bytes = node.integer;
      bool fine = node.kind == Kind::integer ? bytes >= 0
                                             : node.kind == Kind::string && parse_bytes(node.string, bytes);
      value = bytes;
      return fine;
    }
    case Type::ints:
    case Type::floats:
    case Type::strings:
      break;
  }
  if (node.kind != Kind::array) {
    return false;
  }
  std::vector<std::int64_t> ints;
  std::vector<double> floats;
  std::vector<std::string> strings;
  for (const TomlNode& item : node.items) {
    if (type == Type::ints && item.kind == Kind::integer) {
      ints.push_back(item.integer);
    } else if (type == Type::floats && (item.kind == Kind::integer || item.kind == Kind::real)) {
      floats.push_back(item.kind == Kind::integer ? static_cast<double>(item.integer) : item.real);
    } else if (type == Type::strings && item.kind == Kind::string) {
      strings.push_back(item.string);
    } else {
      return false;
    }
  }
  if (type == Type::ints) {
    value = std::move(ints);
  } else if (type == Type::floats) {
    value = std::move(floats);
  } else {
    value = std::move(strings);
  }
  return true;
}

// The library's matcher recurses once for each character, so very long texts are refused unseen.
bool has_form(const std::string& text, const std::string& pattern) {
  constexpr std::size_t kLongest = 4096;
  return text.size() <= kLongest && std::regex_match(text, std::regex(pattern));
}

std::string range_text(const Option& option) {
  std::string unit = option.unit.empty() ? "" : " " + option.unit;
  if (option.low && option.high && !option.low_open && !option.high_open) {
    return format("{} to {}{}", *option.low, *option.high, unit);
  }
  if (option.low && option.high) {
    return format("{} {} and {} {}{}", option.low_open ? "above" : "at least", *option.low,
                  option.high_open ? "below" : "at most", *option.high, unit);
  }
  if (option.low) {
    return format("{} {}{}", option.low_open ? "more than" : "at least", *option.low, unit);
  }
  return format("{} {}{}", option.high_open ? "less than" : "at most", *option.high, unit);
}

// Reads a manifest and keeps count of what is wrong.
class ManifestReader {
 public:
  explicit ManifestReader(Diagnostics& problems) : problems_(problems) {}

  Manifest read(const TomlNode& root) {
    Manifest out;
    const TomlNode* plugin = root.find("plugin");
    if (plugin == nullptr || plugin->kind != Kind::table) {
      bad(root.place, "there is no [plugin] table");
      return out;
    }
    for (const TomlEntry& entry : plugin->entries) {
      read_plugin_entry(entry, out);
    }
    if (!is_name(out.name)) {
      bad(plugin->place, format("plugin.name is \"{}\", expected the form [a-z][a-z0-9_]*", out.name));
    }
    for (const auto& [field, text] : {std::pair("version", &out.version), std::pair("kind", &out.kind),
                                      std::pair("summary", &out.summary)}) {
      if (text->empty()) {
        bad(plugin->place, format("plugin.{} is missing", field));
      }
    }
    for (const TomlEntry& entry : root.entries) {
      if (entry.key == "options") {
        read_options(entry.value, out);
      }
    }
    for (const TomlEntry& entry : root.entries) {
      if (entry.key == "rules") {
        for (const TomlNode& item : tables_of(entry)) {
          out.rules.push_back(read_rule(item, out));
        }
      } else if (entry.key == "moved") {
        for (const TomlNode& item : tables_of(entry)) {
          out.moved.push_back({text_of(item, "from"), text_of(item, "to"), text_of(item, "fix", false)});
        }
      } else if (entry.key == "reads") {
        for (const TomlNode& item : tables_of(entry)) {
          out.reads.push_back(read_tensor(item));
        }
      } else if (entry.key != "plugin" && entry.key != "options") {
        unknown(entry, {"plugin", "options", "rules", "reads"});
      }
    }
    return out;
  }

 private:
  void bad(const Place& place, std::string message) {
    problems_.error({.id = "plugin/bad-manifest", .message = std::move(message), .place = place});
  }
  void unknown(const TomlEntry& entry, const std::vector<std::string>& known) {
    std::string near = did_you_mean(entry.key, known);
    problems_.error({.id = "plugin/bad-manifest",
                     .message = format("unknown key \"{}\"", entry.key),
                     .place = entry.place,
                     .note = near.empty() ? "" : format("did you mean \"{}\"?", near)});
  }

  std::string as_text(const TomlEntry& entry) {
    if (entry.value.kind != Kind::string) {
      bad(entry.value.place, format("{} is {}, expected a string", entry.key, found_text(entry.value)));
    }
    return entry.value.string;
  }
  std::vector<std::string> as_texts(const TomlEntry& entry) {
    Value value = std::vector<std::string>();
    if (!convert(entry.value, Type::strings, value)) {
      bad(entry.value.place,
          format("{} is {}, expected a list of strings", entry.key, found_text(entry.value)));
      return {};
    }
    return std::get<std::vector<std::string>>(value);
  }
  std::string text_of(const TomlNode& table, const char* key, bool required = true) {
    const TomlNode* found = table.find(key);
    if (found == nullptr || found->kind != Kind::string) {
      if (required || found != nullptr) {
        bad(table.place, format("\"{}\" must be given, as a string", key));
      }
      return "";
    }
    return found->string;
  }
  std::vector<TomlNode> tables_of(const TomlEntry& entry) {
    bool fine = entry.value.kind == Kind::array &&
                std::all_of(entry.value.items.begin(), entry.value.items.end(),
                            [](const TomlNode& n) { return n.kind == Kind::table; });
    if (!fine) {
      bad(entry.place,
          format("\"{}\" is {}, expected [[{}]]", entry.key, entry.value.kind_text(), entry.key));
      return {};
    }
    return entry.value.items;
  }

  void read_plugin_entry(const TomlEntry& entry, Manifest& out) {
    const std::pair<const char*, std::string*> texts[] = {
        {"name", &out.name},       {"version", &out.version},   {"kind", &out.kind},
        {"summary", &out.summary}, {"homepage", &out.homepage}, {"license", &out.license}};
    for (const auto& [key, text] : texts) {
      if (entry.key == key) {
        *text = as_text(entry);
        return;
      }
    }
    if (entry.key == "provides") {
      out.provides = as_texts(entry);
    } else if (entry.key == "wants") {
      out.wants = as_texts(entry);
    } else if (entry.key == "conflicts") {
      out.conflicts = as_texts(entry);
    } else if (entry.key == "claims") {
      out.claims = as_texts(entry);
    } else {
      unknown(entry, {"name", "version", "kind", "summary", "homepage", "license", "provides", "wants",
                      "conflicts", "claims"});
    }
  }

  ReadTensor read_tensor(const TomlNode& table) {
    ReadTensor out{text_of(table, "name"), text_of(table, "dtype"), text_of(table, "help"), {}};
    for (const TomlEntry& entry : table.entries) {
      if (entry.key == "shape") {
        out.shape = as_texts(entry);
      } else if (entry.key != "name" && entry.key != "dtype" && entry.key != "help") {
        unknown(entry, {"name", "dtype", "shape", "help"});
      }
    }
    return out;
  }

  void read_options(const TomlNode& options, Manifest& out) {
    if (options.kind != Kind::table) {
      bad(options.place, format("options is {}, expected a table", options.kind_text()));
      return;
    }
    for (const TomlEntry& entry : options.entries) {
      if (entry.value.kind != Kind::table) {
        bad(entry.place, format("options.{} is {}, expected a table", entry.key, entry.value.kind_text()));
        continue;
      }
      for (const std::string& part : split(entry.key, '.')) {
        if (!is_name(part)) {
          bad(entry.place, format("the option name \"{}\" is not of the form [a-z][a-z0-9_]*, with dots "
                                  "between the parts of a full key",
                                  entry.key));
        }
      }
      bool is_key = out.kind == "host" || entry.key.find('.') != std::string::npos;
      Option option;
      option.name = entry.key;
      option.key = is_key ? entry.key : "plugin." + out.name + "." + entry.key;
      option.owner = out.name;
      option.owner_version = out.version;
      read_option(entry, option);
      out.options.push_back(std::move(option));
    }
  }

  void read_option(const TomlEntry& option_entry, Option& option) {
    const TomlNode& table = option_entry.value;
    const TomlNode* type = table.find("type");
    if (type == nullptr || type->kind != Kind::string || !parse_type(type->string, option.type)) {
      bad(option_entry.place, format("option {} has no known \"type\" (bool, int, float, string, choice, "
                                     "path, duration, bytes, ints, floats, strings)",
                                     option.name));
      return;
    }
    const TomlNode* default_node = nullptr;
    bool required = false;
    for (const TomlEntry& entry : table.entries) {
      if (entry.key == "type") {
        continue;
      }
      if (entry.key == "default") {
        default_node = &entry.value;
      } else if (entry.key == "required") {
        required = entry.value.boolean;
      } else if (entry.key == "help") {
        option.help = as_text(entry);
      } else if (entry.key == "unit") {
        option.unit = as_text(entry);
      } else if (entry.key == "choices") {
        option.choices = as_texts(entry);
      } else if (entry.key == "pattern") {
        option.pattern = as_text(entry);
      } else if (entry.key == "form") {
        option.form = as_text(entry);
      } else if (entry.key == "range") {
        read_range(entry, option);
      } else if (entry.key == "more_than" || entry.key == "less_than") {
        read_open_bound(entry, option);
      } else if (entry.key == "resume") {
        std::string resume = as_text(entry);
        option.is_fixed = resume == "fixed";
        if (resume != "fixed" && resume != "free") {
          bad(entry.value.place, format("resume is \"{}\", expected \"free\" or \"fixed\"", resume));
        }
      } else if (entry.key == "deprecated") {
        option.deprecated = as_text(entry);
      } else if (entry.key == "renamed_from") {
        option.renamed_from = as_text(entry);
      } else if (entry.key == "stage") {
        option.is_experimental = as_text(entry) == "experimental";
      } else if (entry.key == "backend" && option.owner == "host") {
        option.is_for_backend = entry.value.boolean;
      } else {
        unknown(entry, {"type", "default", "required", "help", "unit", "choices", "pattern", "form",
                        "range", "more_than", "less_than", "resume", "deprecated", "renamed_from", "stage"});
      }
    }
    if (option.help.empty()) {
      bad(option_entry.place, format("option {} has no help", option.name));
    }
    if ((option.type == Type::choice) != !option.choices.empty() && option.type != Type::strings) {
      bad(option_entry.place,
          format("option {}: \"choices\" and type \"choice\" belong together", option.name));
      option.choices.clear();
    }
    check_pattern(option_entry.place, option);
    if ((default_node != nullptr) == required) {
      bad(option_entry.place,
          format("option {} must have either \"default\" or required = true", option.name));
    }
    if (default_node != nullptr) {
      Reading reading = read_value(*default_node, option);
      if (!reading.value) {
        bad(default_node->place, format("the default of option {} {}", option.name, reading.message));
      }
      option.default_value = reading.value;
    }
  }

  void check_pattern(const Place& place, Option& option) {
    if (option.pattern.empty() != option.form.empty()) {
      bad(place, format("option {}: \"pattern\" and \"form\", which says it in words, belong together", option.name));
    }
    if (!option.pattern.empty() && option.type != Type::string && option.type != Type::strings) {
      bad(place, format("option {}: \"pattern\" is for the types string and strings", option.name));
      option.pattern.clear();
    }
    try {
      (void)std::regex(option.pattern);
    } catch (const std::regex_error&) {
      bad(place, format("option {}: \"pattern\" is no ECMAScript regular expression: {}", option.name, option.pattern));
      option.pattern.clear();
    }
  }

  void read_range(const TomlEntry& entry, Option& option) {
    Value value = std::vector<double>();
    if (!convert(entry.value, Type::floats, value) || std::get<std::vector<double>>(value).size() != 2) {
      bad(entry.value.place, "range must be a list of two numbers; use inf or -inf for an open end");
      return;
    }
    const auto& bounds = std::get<std::vector<double>>(value);
    if (std::isfinite(bounds[0])) {
      option.low = bounds[0];
    }
    if (std::isfinite(bounds[1])) {
      option.high = bounds[1];
    }
  }

  void read_open_bound(const TomlEntry& entry, Option& option) {
    Value value = 0.0;
    if (!convert(entry.value, Type::real, value)) {
      bad(entry.value.place, format("{} is {}, expected a number", entry.key, found_text(entry.value)));
      return;
    }
    if (entry.key == "more_than") {
      option.low = std::get<double>(value);
      option.low_open = true;
    } else {
      option.high = std::get<double>(value);
      option.high_open = true;
    }
  }

  Rule read_rule(const TomlNode& table, const Manifest& manifest) {
    Rule rule;
    rule.owner = manifest.name;
    rule.place = table.place;
    int actions = 0;
    for (const TomlEntry& entry : table.entries) {
      if (entry.key == "id") {
        rule.id = as_text(entry);
      } else if (entry.key == "message") {
        rule.message = as_text(entry);
      } else if (entry.key == "fix") {
        rule.fix = as_text(entry);
      } else if (entry.key == "why") {
        rule.why = as_text(entry);
      } else if (entry.key == "when") {
        rule.when = read_conditions(entry, manifest);
      } else if (entry.key == "require") {
        rule.requirements = read_conditions(entry, manifest);
        ++actions;
      } else if (entry.key == "reject" || entry.key == "warn") {
        rule.action = entry.key == "reject" ? RuleAction::reject : RuleAction::warn;
        if (!entry.value.boolean) {
          bad(entry.place, format("{} can only be true", entry.key));
        }
        ++actions;
      } else if (entry.key == "phase") {
        rule.action = RuleAction::at_run;
        if (as_text(entry) != "run") {
          bad(entry.value.place, format("phase is \"{}\", and only \"run\" is known", as_text(entry)));
        }
        ++actions;
      } else {
        unknown(entry, {"id", "when", "require", "reject", "warn", "phase", "message", "fix", "why"});
      }
    }
    if (rule.id.empty() || rule.message.empty() || rule.fix.empty()) {
      bad(table.place, format("rule \"{}\" needs id, message and fix", rule.id));
    }
    if (actions != 1) {
      bad(table.place,
          format("rule \"{}\" must have exactly one of require, reject = true, warn = true, phase = \"run\"", rule.id));
    }
    return rule;
  }

  std::vector<Condition> read_conditions(const TomlEntry& entry, const Manifest& manifest) {
    std::vector<Condition> out;
    for (const TomlNode& item : tables_of(entry)) {
      out.push_back(read_condition(item, manifest));
    }
    return out;
  }

  Condition read_condition(const TomlNode& table, const Manifest& manifest) {
    Condition out;
    out.place = table.place;
    int subjects = 0;
    int tests = 0;
    const Option* option = nullptr;
    for (const TomlEntry& entry : table.entries) {
      if (entry.key == "option") {
        std::string name = as_text(entry);
        auto found = std::find_if(manifest.options.begin(), manifest.options.end(),
                                  [&](const Option& o) { return o.name == name; });
        if (found == manifest.options.end()) {
          bad(entry.value.place, format("a rule names option \"{}\", which this manifest lacks", name));
        } else {
          option = &*found;
          out.name = option->key;
        }
        ++subjects;
      } else if (entry.key == "key") {
        out.name = as_text(entry);
        ++subjects;
      } else if (entry.key == "provided" || entry.key == "absent") {
        out.subject = entry.key == "provided" ? Subject::provided : Subject::absent;
        out.name = as_text(entry);
        ++subjects;
        ++tests;
      } else {
        auto test = std::find_if(kTests.begin(), kTests.end(),
                                 [&](const TestName& t) { return entry.key == t.name; });
        if (test == kTests.end()) {
          unknown(entry,
                  {"option", "key", "provided", "absent", "is", "is_not", "one_of", "none_of", "set", "empty",
                   "increasing", "at_least", "at_most", "more_than", "less_than", "multiple_of"});
          continue;
        }
        out.test = test->test;
        out.right = entry.value;
        if (entry.value.kind == Kind::string && entry.value.string.starts_with('@')) {
          out.reference = entry.value.string.substr(1);
        }
        ++tests;
      }
    }
    if (subjects != 1 || tests != 1) {
      bad(table.place,
          "a condition needs one subject (option, key, provided, absent) and, for option and key, one test");
    } else if (option != nullptr && out.reference.empty()) {
      check_type(*option, out);
    }
    return out;
  }

  void check_type(const Option& option, const Condition& condition) {
    bool is_list = option.type == Type::ints || option.type == Type::floats || option.type == Type::strings;
    bool is_number = option.type == Type::integer || option.type == Type::real ||
                     option.type == Type::bytes || option.type == Type::duration ||
                     option.type == Type::ints || option.type == Type::floats;
    bool right_number = condition.right.kind == Kind::integer || condition.right.kind == Kind::real;
    bool fine = true;
    switch (condition.test) {
      case Test::set:
        fine = condition.right.kind == Kind::boolean;
        break;
      case Test::empty:
        fine = condition.right.kind == Kind::boolean &&
               (is_list || option.type == Type::string || option.type == Type::path);
        break;
      case Test::increasing:
        fine = condition.right.kind == Kind::boolean &&
               (option.type == Type::ints || option.type == Type::floats);
        break;
      case Test::is:
      case Test::is_not:
        fine = read_value(condition.right, option).value.has_value();
        break;
      case Test::one_of:
      case Test::none_of:
        fine = condition.right.kind == Kind::array &&
               std::all_of(condition.right.items.begin(), condition.right.items.end(),
                           [&](const TomlNode& n) { return read_value(n, option).value.has_value(); });
        break;
      default:
        fine = is_number && right_number;
        break;
    }
    if (!fine) {
      bad(condition.place, format("a rule tests option {} (type {}) in a way that its type does not have",
                                  option.name, type_name(option.type)));
    }
  }

  Diagnostics& problems_;
};

}  // namespace

Reading read_value(const TomlNode& node, const Option& option) {
  Reading out;
  Value value;
  if (!convert(node, option.type, value)) {
    out.id = "recipe/wrong-type";
    out.message = format("is {}, expected {}", found_text(node), expected_text(option.type));
    return out;
  }
  if (!option.choices.empty()) {
    const auto* text = std::get_if<std::string>(&value);
    std::vector<std::string> given =
        text != nullptr ? std::vector<std::string>{*text} : std::get<std::vector<std::string>>(value);
    for (const std::string& one : given) {
      if (std::find(option.choices.begin(), option.choices.end(), one) == option.choices.end()) {
        std::string near = did_you_mean(one, option.choices);
        out.id = "recipe/bad-choice";
        out.message = format("is \"{}\", expected one of {}", one, join(option.choices, ", "));
        out.note = near.empty() ? "" : format("did you mean \"{}\"?", near);
        return out;
      }
    }
  }
  if (!option.pattern.empty()) {
    const auto* text = std::get_if<std::string>(&value);
    const std::vector<std::string> given =
        text != nullptr ? std::vector<std::string>{*text} : std::get<std::vector<std::string>>(value);
    for (const std::string& one : given) {
      if (!has_form(one, option.pattern)) {
        out.id = "recipe/bad-form";
        out.message = format("is {}, expected {}", toml_quoted(one.substr(0, 200)), option.form);
        return out;
      }
    }
  }
  std::vector<double> numbers;
  if (numbers_of(value, numbers)) {
    for (double number : numbers) {
      bool fine = std::isfinite(number) &&
                  (!option.low || number > *option.low || (!option.low_open && number == *option.low)) &&
                  (!option.high || number < *option.high || (!option.high_open && number == *option.high));
      if (!fine) {
        out.id = "recipe/out-of-range";
        out.message =
            format("is {}, expected {}",
                   numbers.size() > 1 ? to_text(number) + " in " + toml_text(value) : toml_text(value),
                   !std::isfinite(number) || !(option.low || option.high) ? std::string("a finite number") : range_text(option));
        return out;
      }
    }
  }
  out.value = std::move(value);
  return out;
}

std::optional<Manifest> parse_manifest(std::string_view text, const std::string& source,
                                       Diagnostics& problems) {
  std::size_t before = problems.error_count();
  TomlNode root;
  if (!parse_toml(text, source, root, problems, "plugin/bad-manifest")) {
    return std::nullopt;
  }
  Manifest manifest = ManifestReader(problems).read(root);
  std::vector<std::string> seen;
  for (const Rule& rule : manifest.rules) {
    if (std::find(seen.begin(), seen.end(), rule.id) != seen.end()) {
      problems.error({.id = "plugin/bad-manifest",
                      .message = format("two rules have the id \"{}\"", rule.id),
                      .place = rule.place});
    }
    seen.push_back(rule.id);
  }
  if (problems.error_count() > before) {
    return std::nullopt;
  }
  return manifest;
}

const Manifest& host_manifest() {
  static const Manifest* const manifest = [] {
    Diagnostics problems;
    std::optional<Manifest> parsed = parse_manifest(kHostManifestText, "host.toml", problems);
    SF_CHECK(parsed.has_value(), "host.toml: {}", problems.text());
    return std::make_unique<Manifest>(std::move(*parsed)).release();
  }();
  return *manifest;
}

}  // namespace sf
