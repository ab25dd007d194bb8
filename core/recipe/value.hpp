// core/recipe: text in, typed values out. Manifests (host.toml is one of them) say which options exist; a
// recipe and --set give them values; rules judge the result. No LibTorch, no library is opened.
//
// value.hpp: the values themselves, their types and how they are written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/base/error.hpp"

namespace sf {

/// What an option may hold. choice, path: a string. duration: seconds as a double. bytes: an integer.
enum class Type { boolean, integer, real, string, choice, path, duration, bytes, ints, floats, strings };

using Value = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                           std::vector<double>, std::vector<std::string>>;

/// "bool", "int", "float", "string", "choice", "path", "duration", "bytes", "ints", "floats", "strings": as
/// manifests write it.
[[nodiscard]] const char* type_name(Type type);
[[nodiscard]] bool parse_type(std::string_view name, Type& type);

/// The value as TOML: true, 16, 0.5, "text", [1, 2].
[[nodiscard]] std::string toml_text(const Value& value);
/// As a recipe writes an option of this type: a duration is a text, "600s".
[[nodiscard]] std::string toml_text(const Value& value, Type type);
/// A string as TOML, quoted and escaped.
[[nodiscard]] std::string toml_quoted(std::string_view text);
/// The value as people read it: strings without quotes, bytes and durations with units.
[[nodiscard]] std::string display_text(const Value& value, Type type);

/// Numbers of a value, for comparisons: a number or each number of a list. False for other kinds.
bool numbers_of(const Value& value, std::vector<double>& numbers);

template <class T>
[[nodiscard]] T value_as(const Value& value, std::string_view key) {
  if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return value_as<std::string>(value, key);
  } else {
    const T* held = std::get_if<T>(&value);
    SF_CHECK(held != nullptr, "option {} is read with another type than it is declared with", key);
    return *held;
  }
}

}  // namespace sf
