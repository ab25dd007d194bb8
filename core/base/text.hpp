// core/base/text.hpp: small text functions: {} formatting for messages, suggestions for misspelt names, sizes
// and durations for people.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace sf {

std::string to_text(std::string_view value);
std::string to_text(bool value);
std::string to_text(std::int64_t value);
std::string to_text(std::uint64_t value);
std::string to_text(double value);  // the shortest text that reads back exactly: 0.5, 1e-04, 3

template <class T>
std::string to_text_any(const T& value) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    return to_text(std::string_view(value));
  } else if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return value.string();
  } else if constexpr (std::is_same_v<T, bool>) {
    return to_text(static_cast<bool>(value));
  } else if constexpr (std::is_same_v<T, char>) {
    return std::string(1, value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return to_text(static_cast<double>(value));
  } else if constexpr (std::is_enum_v<T>) {  // NOLINT(bugprone-branch-clone): enums are numbers of their own, written as signed ones are
    return to_text(static_cast<std::int64_t>(value));
  } else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    return to_text(static_cast<std::int64_t>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return to_text(static_cast<std::uint64_t>(value));
  } else {  // a range, as shapes are: [4, 512]
    std::string out = "[";
    for (const auto& item : value) {
      out += (out.size() > 1 ? ", " : "") + to_text_any(item);
    }
    return out + "]";
  }
}

/// Puts the texts in place of each "{}" of `pattern`, in order. Surplus "{}" stay, surplus texts are
/// appended.
std::string format_texts(std::string_view pattern, std::initializer_list<std::string> texts);

struct Format {
  template <class... Values>
  std::string operator()(std::string_view pattern, const Values&... values) const {
    return format_texts(pattern, {to_text_any(values)...});
  }
};
/// format("step {} of {}", 3, 8). Takes text, numbers, bools, enums, paths and ranges of them. No format
/// specifications. An object and not a function: a call's std::string arguments would bring in std::format, which
/// libstdc++ has from g++ 13 on, as an equal candidate.
inline constexpr Format format{};

/// The candidate nearest to `name` by edit distance, or "" when none is near (about a third of the letters
/// may differ).
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

std::string format_fixed(double value, int digits);  // format_fixed(2.0 / 3, 2) is "0.67"
std::string human_bytes(std::uint64_t bytes);  // "512 B", "1.5 GiB"
std::string human_count(std::uint64_t count);  // "950", "134.5 M"
std::string human_duration(double seconds);    // "0.8 s", "42 s", "3 min 05 s", "2 h 07 min"

/// "512MiB", "4 GiB", "1e6", "100" as bytes; KiB MiB GiB TiB are powers of 1024, kB MB GB TB of 1000. False
/// when it is neither.
bool parse_bytes(std::string_view text, std::int64_t& bytes);
/// "90s", "500ms", "10 min", "2h" as seconds. False when it is none, or longer than 31 years.
bool parse_duration(std::string_view text, double& seconds);

std::vector<std::string> split(std::string_view text, char separator);
std::string join(const std::vector<std::string>& parts, std::string_view separator);
std::string_view trim(std::string_view text);
/// `text` with line breaks so that no line is longer than `width`; following lines start with `indent`
/// spaces.
std::string wrap(std::string_view text, std::size_t width, std::size_t indent);

}  // namespace sf
