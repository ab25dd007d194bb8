#include "core/recipe/render.hpp"

#include <algorithm>
#include <utility>

#include "core/base/text.hpp"

namespace sf {
namespace {

std::string range_words(const Option& option) {
  if (option.low && option.high) {
    return format("{} to {}", *option.low, *option.high);
  }
  if (option.low) {
    return format("{} {}", option.low_open ? "more than" : "at least", *option.low);
  }
  return option.high ? format("{} {}", option.high_open ? "less than" : "at most", *option.high) : "";
}

std::string default_words(const Option& option) {
  if (!option.default_value) {
    return "required";
  }
  std::string unit = option.unit.empty() ? "" : " " + option.unit;
  return format("default {}{}", display_text(*option.default_value, option.type), unit);
}

std::string section_of(const std::string& key) {
  std::size_t dot = key.rfind('.');
  return dot == std::string::npos ? "" : key.substr(0, dot);
}

std::string name_of(const std::string& key) {
  return key.substr(key.rfind('.') + 1);
}

// Sections in the order in which they first appear, with their options.
std::vector<std::pair<std::string, std::vector<const Option*>>> by_section(
    const std::vector<Manifest>& manifests) {
  std::vector<std::pair<std::string, std::vector<const Option*>>> out;
  for (const Manifest& manifest : manifests) {
    for (const Option& option : manifest.options) {
      std::string section = section_of(option.key);
      auto found =
          std::find_if(out.begin(), out.end(), [&](const auto& entry) { return entry.first == section; });
      if (found == out.end()) {
        out.push_back({section, {}});
        found = out.end() - 1;
      }
      found->second.push_back(&option);
    }
  }
  return out;
}

std::string cell(const std::string& text) {
  std::string out;
  for (char c : text) {
    out += c == '|' ? std::string("\\|") : std::string(1, c);
  }
  return out;
}

Json schema_of(const Option& option) {
  Json out = Json::object();
  out.set("description", option.help);
  auto bounds = [&](Json& target) {
    if (option.low) {
      target.set(option.low_open ? "exclusiveMinimum" : "minimum", *option.low);
    }
    if (option.high) {
      target.set(option.high_open ? "exclusiveMaximum" : "maximum", *option.high);
    }
  };
  switch (option.type) {
    case Type::boolean:
      out.set("type", "boolean");
      break;
    case Type::integer:
      out.set("type", "integer");
      bounds(out);
      break;
    case Type::real:
      out.set("type", "number");
      bounds(out);
      break;
    case Type::string:
    case Type::path:
    case Type::duration:
      out.set("type", "string");
      if (!option.pattern.empty()) {
        out.set("pattern", "^(?:" + option.pattern + ")$");
      }
      break;
    case Type::choice:
      out.set("enum", Json::array_of(option.choices));
      break;
    case Type::bytes:
      out.set("type", Json::array_of(std::vector<std::string>{"string", "integer"}));
      break;
    case Type::ints:
    case Type::floats:
    case Type::strings: {
      Json items = Json::object();
      items.set("type", option.type == Type::ints     ? "integer"
                        : option.type == Type::floats ? "number"
                                                      : "string");
      bounds(items);
      if (!option.choices.empty()) {
        items.set("enum", Json::array_of(option.choices));
      }
      if (!option.pattern.empty()) {
        items.set("pattern", "^(?:" + option.pattern + ")$");
      }
      out.set("type", "array");
      out.set("items", std::move(items));
      break;
    }
  }
  if (option.default_value) {
    const std::string text = option.type == Type::duration ? toml_text(*option.default_value, option.type) : "";   // as a recipe writes it: "600s"
    out.set("default", text.empty() ? value_json(*option.default_value) : Json(text.substr(1, text.size() - 2)));
  }
  return out;
}

}  // namespace

std::string option_summary(const Option& option) {
  std::vector<std::string> parts = {type_name(option.type), default_words(option)};
  if (!option.choices.empty()) {
    parts.push_back("one of " + join(option.choices, " "));
  }
  if (std::string range = range_words(option); !range.empty()) {
    parts.push_back(range);
  }
  if (!option.form.empty()) {
    parts.push_back(option.form);
  }
  if (option.is_fixed) {
    parts.emplace_back("fixed on resume");
  }
  if (option.is_experimental) {
    parts.emplace_back("experimental");
  }
  if (!option.deprecated.empty()) {
    parts.push_back("deprecated: " + option.deprecated);
  }
  return join(parts, ", ");
}

std::string options_help(const std::vector<Option>& options, std::size_t width) {
  std::size_t column = 0;
  for (const Option& option : options) {
    column = std::max(column, option.key.size());
  }
  column = std::min<std::size_t>(column, 34);
  std::string out;
  for (const Option& option : options) {
    std::string key = option.key;
    key.resize(std::max(column, key.size()), ' ');
    out += format("  {}  {}\n", key, wrap(option_summary(option), width, column + 4));
    out += format("      {}\n", wrap(option.help, width, 6));
  }
  return out;
}

std::string recipes_markdown(const std::vector<Manifest>& manifests) {
  std::string out;
  for (const auto& [section, options] : by_section(manifests)) {
    out += section.empty() ? "\n### Top level\n" : format("\n### [{}]\n", section);
    out += "\n| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n";
    for (const Option* option : options) {
      std::string allowed = !option->choices.empty() ? join(option->choices, ", ")
                            : !option->form.empty()  ? option->form
                                                     : range_words(*option);
      std::string fallback =
          option->default_value ? "`" + display_text(*option->default_value, option->type) + "`" : "required";
      std::string unit = option->unit.empty() ? "" : " " + option->unit;
      std::string notes = option->is_fixed ? " (fixed on resume)" : "";
      std::string owner = option->owner == "host" ? "" : format(" [{}]", option->owner);
      out += format("| `{}` | {} | {}{} | {} | {}{}{} |\n", name_of(option->key), type_name(option->type),
                    fallback, unit, cell(allowed), cell(option->help), notes, owner);
    }
  }
  out += "\n### Rules\n\n| id | of | action | message | fix |\n|---|---|---|---|---|\n";
  for (const Manifest& manifest : manifests) {
    for (const Rule& rule : manifest.rules) {
      out +=
          format("| `{}` | {} | {} | {} | {} |\n", rule.id, rule.owner,
                 rule.action == RuleAction::warn ? "warning" : rule.action == RuleAction::at_run ? "while running" : "error", cell(rule.message), cell(rule.fix));
    }
  }
  out += "\n### Keys that live elsewhere here\n\n| key of the reference | here |\n|---|---|\n";
  for (const Manifest& manifest : manifests) {
    for (const MovedKey& moved : manifest.moved) {
      out += format("| `{}` | `{}` |\n", moved.from, moved.to);
    }
  }
  return out;
}

std::string plugins_markdown(const std::vector<Manifest>& manifests) {
  std::string out = "\n| name | kind | provides | summary |\n|---|---|---|---|\n";
  for (const Manifest& manifest : manifests) {
    if (manifest.kind != "host") {
      out += format("| [`{}`](#{}) | {} | {} | {} |\n", manifest.name, manifest.name, manifest.kind, join(manifest.provides, ", "), cell(manifest.summary));
    }
  }
  for (const Manifest& manifest : manifests) {
    if (manifest.kind == "host") {
      continue;
    }
    out += format("\n## {}\n\n{} {}: {}.\n", manifest.name, manifest.kind, manifest.version, manifest.summary);
    for (const auto& [what, names] : {std::pair("Provides", &manifest.provides), std::pair("Wants", &manifest.wants), std::pair("Conflicts with", &manifest.conflicts),
                                      std::pair("Acts on the host's options", &manifest.claims)}) {
      if (!names->empty()) {
        out += format("\n{}: `{}`.\n", what, join(*names, "`, `"));
      }
    }
    if (!manifest.options.empty()) {
      out += "\n| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n";
      for (const Option& option : manifest.options) {
        const std::string allowed = !option.choices.empty() ? join(option.choices, ", ") : !option.form.empty() ? option.form : range_words(option);
        const std::string fallback = option.default_value ? "`" + display_text(*option.default_value, option.type) + "`" : "required";
        out += format("| `{}` | {} | {}{} | {} | {}{} |\n", option.key, type_name(option.type), fallback, option.unit.empty() ? "" : " " + option.unit, cell(allowed),
                      cell(option.help), option.is_fixed ? " (fixed on resume)" : "");
      }
    }
    if (!manifest.rules.empty()) {
      out += "\n| rule | action | message | fix |\n|---|---|---|---|\n";
      for (const Rule& rule : manifest.rules) {
        out += format("| `{}` | {} | {} | {} |\n", rule.id, rule.action == RuleAction::warn ? "warning" : "error", cell(rule.message), cell(rule.fix));
      }
    }
    if (!manifest.reads.empty()) {
      out += "\n| reads | type | shape | what |\n|---|---|---|---|\n";
      for (const ReadTensor& read : manifest.reads) {
        out += format("| `{}` | {} | [{}] | {} |\n", read.name, read.dtype, join(read.shape, ", "), cell(read.help));
      }
    }
  }
  return out;
}

Json recipe_schema(const std::vector<Manifest>& manifests) {
  Json root = Json::object();
  root.set("$schema", "http://json-schema.org/draft-07/schema#");
  root.set("title", "sf recipe");
  root.set("type", "object");
  root.set("additionalProperties", false);
  root.set("properties", Json::object());
  Json include = Json::object();
  include.set("type", "string");
  include.set("description", "a base recipe, relative to this file; what follows here wins");
  root.find("properties")->set("include", std::move(include));
  for (const Manifest& manifest : manifests) {
    for (const Option& option : manifest.options) {
      Json* table = &root;
      std::vector<std::string> parts = split(option.key, '.');
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        Json* properties = table->find("properties");
        if (!properties->contains(parts[i])) {
          Json section = Json::object();
          section.set("type", "object");
          section.set("additionalProperties", false);
          section.set("properties", Json::object());
          properties->set(parts[i], std::move(section));
        }
        table = properties->find(parts[i]);
      }
      table->find("properties")->set(parts.back(), schema_of(option));
    }
  }
  return root;
}

Json value_json(const Value& value) {
  return std::visit(
      [](const auto& held) -> Json {
        if constexpr (requires { typename std::decay_t<decltype(held)>::value_type; } &&
                      !std::is_same_v<std::decay_t<decltype(held)>, std::string>) {
          return Json::array_of(held);
        } else {
          return Json(held);
        }
      },
      value);
}

Json option_json(const Option& option) {
  Json out = Json::object();
  out.set("key", option.key);
  out.set("type", type_name(option.type));
  out.set("default", option.default_value ? value_json(*option.default_value) : Json());
  out.set("help", option.help);
  if (!option.unit.empty()) {
    out.set("unit", option.unit);
  }
  if (!option.choices.empty()) {
    out.set("choices", Json::array_of(option.choices));
  }
  if (option.low) {
    out.set(option.low_open ? "more_than" : "at_least", *option.low);
  }
  if (option.high) {
    out.set(option.high_open ? "less_than" : "at_most", *option.high);
  }
  out.set("resume", option.is_fixed ? "fixed" : "free");
  return out;
}

Json manifest_json(const Manifest& manifest) {
  Json out = Json::object();
  out.set("name", manifest.name);
  out.set("version", manifest.version);
  out.set("kind", manifest.kind);
  out.set("summary", manifest.summary);
  out.set("provides", Json::array_of(manifest.provides));
  out.set("wants", Json::array_of(manifest.wants));
  out.set("conflicts", Json::array_of(manifest.conflicts));
  Json options = Json::array();
  for (const Option& option : manifest.options) {
    options.push_back(option_json(option));
  }
  out.set("options", std::move(options));
  Json rules = Json::array();
  for (const Rule& rule : manifest.rules) {
    Json one = Json::object();
    one.set("id", rule.id);
    one.set("action", rule.action == RuleAction::warn ? "warning" : rule.action == RuleAction::at_run ? "while running" : "error");
    one.set("message", rule.message);
    one.set("fix", rule.fix);
    rules.push_back(std::move(one));
  }
  out.set("rules", std::move(rules));
  return out;
}

}  // namespace sf
