#include "core/recipe/recipe_reader.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/recipe/value.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

void flatten(const TomlNode& table, const std::string& prefix, const std::string& name,
             const fs::path& folder, RawValues& out) {
  for (const TomlEntry& entry : table.entries) {
    std::string key = prefix.empty() ? entry.key : prefix + "." + entry.key;
    if (entry.value.kind == TomlNode::Kind::table) {
      flatten(entry.value, key, name, folder, out);
    } else {
      out[key] = {entry.value, entry.place, format("{}:{}", name, entry.place.line), folder};
    }
  }
}

void read_into(const fs::path& path, const std::string& source, std::vector<fs::path>& open, RawValues& out,
               Diagnostics& problems) {
  std::string text;
  try {
    text = read_file(path, ExitCode::kUsage);
  } catch (const Error& error) {
    problems.error({.id = "recipe/not-readable", .message = error.what(), .fix = error.hint().empty() ? "name a recipe: a file of TOML" : error.hint()});
    return;
  }
  fs::path real = fs::weakly_canonical(path);
  if (std::find(open.begin(), open.end(), real) != open.end()) {
    problems.error(
        {.id = "recipe/include-cycle",
         .message = format("\"{}\" includes itself, directly or through others", source),
         .fix = "a base recipe includes nothing that includes it; remove one of the include lines"});
    return;
  }
  TomlNode root;
  if (!parse_toml(text, source, root, problems, "recipe/syntax")) {
    return;
  }
  open.push_back(real);
  fs::path folder = fs::absolute(path).parent_path();
  for (const TomlEntry& entry : root.entries) {
    if (entry.key != "include") {
      continue;
    }
    if (entry.value.kind != TomlNode::Kind::string) {
      problems.error({.id = "recipe/wrong-type",
                      .message = format("include is {}, expected the path of one base recipe, as a string",
                                        entry.value.kind_text()),
                      .place = entry.place,
                      .fix = "for example include = \"base.toml\""});
      continue;
    }
    fs::path base = folder / entry.value.string;
    std::string base_source =
        entry.value.string.starts_with('/')
            ? entry.value.string
            : (fs::path(source).parent_path() / entry.value.string).lexically_normal().string();
    read_into(base, base_source, open, out, problems);
  }
  std::erase_if(root.entries, [](const TomlEntry& entry) { return entry.key == "include"; });
  flatten(root, "", fs::path(source).filename().string(), folder, out);
  open.pop_back();
}

// A number that TOML could not take, "99999999999999999999" or "1e400": as text it would be refused for the wrong reason.
// Leading zeros make a name: "007".
bool is_number(std::string_view word) {
  const std::string_view digits = word.substr(word.starts_with('-') || word.starts_with('+') ? 1 : 0);
  if (digits.empty() || digits[0] < '0' || digits[0] > '9' || (digits.size() > 1 && digits[0] == '0' && digits[1] != '.')) {
    return false;
  }
  double ignored = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), ignored);
  return error != std::errc::invalid_argument && end == digits.data() + digits.size();
}

}  // namespace

RawValues read_recipe(const fs::path& path, Diagnostics& problems) {
  RawValues out;
  std::vector<fs::path> open;
  read_into(path, path.string(), open, out, problems);
  return out;
}

void apply_overrides(const std::vector<std::string>& overrides, RawValues& values, Diagnostics& problems) {
  for (const std::string& text : overrides) {
    std::string source = "--set " + text;
    std::size_t equals = text.find('=');
    std::string key(trim(std::string_view(text).substr(0, equals)));
    if (equals == std::string::npos || key.empty()) {
      problems.error({.id = "recipe/bad-override",
                      .message = format("\"--set {}\" is not of the form key=value", text),
                      .fix = "for example --set training.batch_size=4"});
      continue;
    }
    if (key.starts_with('.') || key.ends_with('.') || key.find("..") != std::string::npos) {
      problems.error({.id = "recipe/bad-override",
                      .message = format("\"--set {}\": the key \"{}\" has a dot too many", text, key),
                      .fix = "write section.option: --set training.batch_size=4"});
      continue;
    }
    std::string_view right = trim(std::string_view(text).substr(equals + 1));
    Diagnostics first;
    TomlNode root;
    if (!parse_toml(format("{} = {}", key, right), source, root, first, "recipe/bad-override")) {
      bool is_word = right.find_first_of("\"'[]{}\n") ==
                     std::string_view::npos;  // a path or a name, typed without quotes
      if (is_number(right)) {
        problems.error({.id = "recipe/bad-override",
                        .message = format("\"--set {}\": {} is not a number that fits into 64 bits, or not written as TOML writes one", text, right),
                        .fix = format("give another number; as text it takes quotes: --set '{}=\"{}\"'", key, right)});
        continue;
      }
      if (!is_word || !parse_toml(format("{} = {}", key, toml_quoted(right)), source, root, first,
                                  "recipe/bad-override")) {
        problems.error({.id = "recipe/bad-override",
                        .message = format("\"--set {}\": {}", text, first.all().front().message),
                        .fix = "the right side is TOML: 4, 0.5, true, \"text\", [1, 2]"});
        continue;
      }
    }
    RawValues one;
    flatten(root, "", "--set", std::filesystem::current_path(), one);
    for (auto& [name, value] : one) {
      value.origin = "--set";
      value.place = {source, 0, 0};
      value.node.place = value.place;
      values[name] = std::move(value);
    }
  }
}

RawValue raw_text(const std::string& text, const std::string& origin) {
  RawValue out;
  out.node.kind = TomlNode::Kind::string;
  out.node.string = text;
  out.origin = origin;
  out.place = {origin, 0, 0};
  return out;
}

RawValue raw_texts(const std::vector<std::string>& texts, const std::string& origin) {
  RawValue out = raw_text("", origin);
  out.node.kind = TomlNode::Kind::array;
  for (const std::string& text : texts) {
    out.node.items.push_back(raw_text(text, origin).node);
  }
  return out;
}

}  // namespace sf
