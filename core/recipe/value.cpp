#include "core/recipe/value.hpp"

#include <array>
#include <cstdio>

namespace sf {
namespace {

struct TypeName {
  Type type;
  const char* name;
};
constexpr std::array<TypeName, 11> kTypes = {{{Type::boolean, "bool"},
                                              {Type::integer, "int"},
                                              {Type::real, "float"},
                                              {Type::string, "string"},
                                              {Type::choice, "choice"},
                                              {Type::path, "path"},
                                              {Type::duration, "duration"},
                                              {Type::bytes, "bytes"},
                                              {Type::ints, "ints"},
                                              {Type::floats, "floats"},
                                              {Type::strings, "strings"}}};

std::string real_text(double value) {
  std::string text = to_text(value);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

struct TomlWriter {
  std::string operator()(bool v) const { return v ? "true" : "false"; }
  std::string operator()(std::int64_t v) const { return std::to_string(v); }
  std::string operator()(double v) const { return real_text(v); }
  std::string operator()(const std::string& v) const { return toml_quoted(v); }
  template <class T>
  std::string operator()(const std::vector<T>& list) const {
    std::string out = "[";
    for (const T& item : list) {
      out += (out.size() > 1 ? ", " : "") + (*this)(item);
    }
    return out + "]";
  }
};

}  // namespace

const char* type_name(Type type) {
  for (const TypeName& known : kTypes) {
    if (known.type == type) {
      return known.name;
    }
  }
  return "unknown";
}

bool parse_type(std::string_view name, Type& type) {
  for (const TypeName& known : kTypes) {
    if (known.name == name) {
      type = known.type;
      return true;
    }
  }
  return false;
}

std::string toml_quoted(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      std::array<char, 8> code{};
      std::snprintf(code.data(), code.size(), "\\u%04x",
                    static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += code.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string toml_text(const Value& value) {
  return std::visit(TomlWriter{}, value);
}

std::string toml_text(const Value& value, Type type) {
  return type == Type::duration ? format("\"{}s\"", std::get<double>(value)) : toml_text(value);
}

std::string display_text(const Value& value, Type type) {
  if (type == Type::bytes) {
    return human_bytes(static_cast<std::uint64_t>(std::get<std::int64_t>(value)));
  }
  if (type == Type::duration) {
    return human_duration(std::get<double>(value));
  }
  return toml_text(value);
}

bool numbers_of(const Value& value, std::vector<double>& numbers) {
  numbers.clear();
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    numbers.push_back(static_cast<double>(*integer));
  } else if (const auto* real = std::get_if<double>(&value)) {
    numbers.push_back(*real);
  } else if (const auto* ints = std::get_if<std::vector<std::int64_t>>(&value)) {
    numbers.assign(ints->begin(), ints->end());
  } else if (const auto* floats = std::get_if<std::vector<double>>(&value)) {
    numbers = *floats;
  } else {
    return false;
  }
  return true;
}

}  // namespace sf
