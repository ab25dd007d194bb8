#include "core/recipe/schema.hpp"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "core/base/text.hpp"

namespace sf {
namespace {

std::string section_of(std::string_view key) {
  std::size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? "" : std::string(key.substr(0, dot));
}

std::string in_section(const std::string& key) {
  std::string section = section_of(key);
  std::string name = key.substr(section.empty() ? 0 : section.size() + 1);
  return section.empty() ? format("\"{}\"", name) : format("\"{}\" in [{}]", name, section);
}

// Is the key surely not one of a plugin that could not be had: a moved one, a near miss, or in a section that plugins add nothing to?
bool is_mistyped(const std::string& key, const std::vector<Option>& options, const std::vector<MovedKey>& moved) {
  std::string section = section_of(key);
  std::vector<std::string> neighbours;
  for (const Option& option : options) {
    if (section_of(option.key) == section) {
      neighbours.push_back(option.key.substr(section.size()));
    }
  }
  bool is_moved = std::any_of(moved.begin(), moved.end(), [&](const MovedKey& one) { return one.from == key; });
  bool is_hosts = section.empty() || section == "model" || section == "data" || section == "backend";
  return is_moved || is_hosts || (section != "algorithm" && !did_you_mean(key.substr(section.size()), neighbours).empty());
}

// What a shell would have put something in the place of; as a path it would make a folder of that name.
std::string shell_word(const std::string& path) {
  return path.starts_with('~') || path.starts_with('$') ? path.substr(0, path.find('/')) : "";
}

void make_absolute(Value& value, const std::filesystem::path& folder) {
  auto& text = std::get<std::string>(value);
  if (!text.empty()) {
    text = (folder / text).lexically_normal().string();
    if (text.size() > 1 && text.ends_with('/')) {
      text.pop_back();
    }
  }
}

}  // namespace

void Schema::add(const Manifest& manifest, Diagnostics& problems) {
  for (const Option& option : manifest.options) {
    if (const Option* other = find(option.key)) {
      problems.error({.id = "plugin/option-clash",
                      .message = format("\"{}\" and \"{}\" both declare option {}", other->owner,
                                        option.owner, option.key),
                      .fix = "one of the two has to rename its option; use only one of them until then"});
      continue;
    }
    options_.push_back(option);
  }
  moved_.insert(moved_.end(), manifest.moved.begin(), manifest.moved.end());
}

const Option* Schema::find(std::string_view key) const {
  auto found =
      std::find_if(options_.begin(), options_.end(), [&](const Option& option) { return option.key == key; });
  return found == options_.end() ? nullptr : &*found;
}

void Schema::report_unknown(const std::string& key, const RawValue& raw,
                            const std::vector<Manifest>& installed, Diagnostics& problems) const {
  for (const MovedKey& moved : moved_) {
    if (moved.from == key) {
      problems.error({.id = "recipe/moved-key",
                      .message = format("{} is called {} here", key, moved.to),
                      .place = raw.place,
                      .fix = moved.fix.empty() ? format("write {} instead", moved.to) : moved.fix});
      return;
    }
  }
  for (const Manifest& manifest : installed) {
    bool has = std::any_of(manifest.options.begin(), manifest.options.end(),
                           [&](const Option& option) { return option.key == key; });
    if (has || key.starts_with("plugin." + manifest.name + ".")) {
      bool is_used = std::any_of(options_.begin(), options_.end(),
                                 [&](const Option& option) { return option.owner == manifest.name; });
      if (!is_used) {
        problems.error(
            {.id = "recipe/unknown-key",
             .message = format("option {} belongs to plugin \"{}\", which is not in this run's stack",
                               in_section(key), manifest.name),
             .place = raw.place,
             .fix = format("add the {} to the stack, or remove the key", manifest.kind)});
        return;
      }
    }
  }
  if (std::any_of(options_.begin(), options_.end(),
                  [&](const Option& option) { return option.key.starts_with(key + "."); })) {
    problems.error({.id = "recipe/wrong-type",
                    .message = format("{} is {}, expected a table", key, raw.node.kind_text()),
                    .place = raw.place,
                    .fix = format("write it once, as [{}]", key)});
    return;
  }
  std::vector<std::string> names;
  std::string section = section_of(key);
  if (section.starts_with("plugin.")) {
    const std::string plugin = split(section, '.')[1];
    for (const Manifest& manifest : installed) {
      names.push_back(manifest.name);
    }
    if (std::find(names.begin(), names.end(), plugin) == names.end()) {
      const std::string near = did_you_mean(plugin, names);
      problems.error({.id = "recipe/unknown-key",
                      .message = format("option {} is for a plugin that is not installed: \"{}\"", in_section(key), plugin),
                      .place = raw.place,
                      .note = near.empty() ? "" : format("did you mean [plugin.{}]?", near),
                      .fix = "sf-host plugins lists the installed ones"});
      return;
    }
    names.clear();
  }
  for (const Option& option : options_) {
    if (section_of(option.key) == section) {
      names.push_back(option.key.substr(section.empty() ? 0 : section.size() + 1));
    }
  }
  std::string name = key.substr(section.empty() ? 0 : section.size() + 1);
  std::string near = did_you_mean(name, names);
  if (near.empty()) {  // right name, wrong section?
    for (const Option& option : options_) {
      if (option.key.substr(section_of(option.key).empty() ? 0 : section_of(option.key).size() + 1) == name) {
        near = option.key;
      }
    }
  }
  problems.error({.id = "recipe/unknown-key",
                  .message = format("unknown option {}", in_section(key)),
                  .place = raw.place,
                  .note = near.empty() ? "" : format("did you mean \"{}\"?", near)});
}

PlanValues Schema::resolve(const RawValues& raw, const std::vector<Manifest>& installed, bool is_partial,
                           Diagnostics& problems) const {
  PlanValues out;
  std::set<std::string> used;
  for (const Option& option : options_) {
    PlanValue value{.value = option.default_value.value_or(Value(std::string())),
                    .type = option.type,
                    .owner = option.owner,
                    .is_fixed = option.is_fixed};
    value.origin =
        option.owner == "host" ? "default" : format("default ({} {})", option.owner, option.owner_version);
    std::filesystem::path folder = std::filesystem::current_path();
    auto found = raw.find(option.key);
    if (found == raw.end() && !option.renamed_from.empty()) {
      found = raw.find(option.renamed_from);
      if (found != raw.end()) {
        problems.warn({.id = "recipe/renamed-key",
                       .message = format("{} is now called {}", option.renamed_from, option.key),
                       .place = found->second.place,
                       .fix = format("write {}", option.key)});
        used.insert(option.renamed_from);
      }
    }
    if (found != raw.end()) {
      used.insert(option.key);
      const RawValue& given = found->second;
      value.place = given.place;
      Reading reading = read_value(given.node, option);
      if (!reading.value) {
        problems.error({.id = reading.id,
                        .message = format("{} {}", option.key, reading.message),
                        .place = given.place,
                        .note = reading.note,
                        .fix = option.help.empty() ? "" : format("{}: {}", option.key, option.help)});
        continue;
      }
      if (const std::string word = option.type == Type::path ? shell_word(std::get<std::string>(*reading.value)) : ""; !word.empty()) {
        problems.error({.id = "recipe/bad-form",
                        .message = format("{} is {}, and {} is nothing but a name here: only shells put a folder in its place", option.key, toml_text(*reading.value), word),
                        .place = given.place,
                        .fix = format("write the folder out; one that is called so is \"./{}\"", word)});
        continue;
      }
      if (option.type == Type::path && std::get<std::string>(*reading.value).find('\0') != std::string::npos) {  // the system would read up to there
        problems.error({.id = "recipe/bad-form",
                        .message = format("{} is {}, and no path has a zero byte", option.key, toml_text(*reading.value)),
                        .place = given.place,
                        .fix = "write the path without it"});
        continue;
      }
      value.value = *reading.value;
      value.origin = given.origin;
      value.is_set = true;
      folder = given.folder;
      if (!option.deprecated.empty()) {
        problems.warn({.id = "recipe/deprecated",
                       .message = format("{} is deprecated: {}", option.key, option.deprecated),
                       .place = given.place});
      }
    } else if (!option.default_value) {
      problems.error({.id = "recipe/missing",
                      .message = format("{} is not given, and it has no default", option.key),
                      .fix = format("{}: {}", option.key, option.help)});
      continue;
    }
    if (option.type == Type::path) {
      make_absolute(value.value, folder);
    }
    out[option.key] = std::move(value);
  }
  std::vector<std::pair<std::string, const RawValue*>> unknown;
  for (const auto& [key, value] : raw) {
    bool may_be_a_plugins = is_partial && !is_mistyped(key, options_, moved_);
    if (used.count(key) == 0 && !may_be_a_plugins) {
      unknown.emplace_back(key, &value);
    }
  }
  std::stable_sort(unknown.begin(), unknown.end(),
                   [](const auto& a, const auto& b) { return a.second->place.line < b.second->place.line; });
  for (const auto& [key, value] : unknown) {
    report_unknown(key, *value, installed, problems);
  }
  return out;
}

}  // namespace sf
