#include "core/base/text.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "core/base/error.hpp"

namespace sf {

void fail_check(const char* file, int line, const std::string& text) {
  std::string_view name = file;
  name = name.substr(name.rfind('/') + 1);
  throw Error(ExitCode::kInternal, format("internal: {}:{}: {}", name, line, text),
              "this is a mistake in the program, please report it with the recipe");
}

std::string to_text(std::string_view value) {
  return std::string(value);
}
std::string to_text(bool value) {
  return value ? "true" : "false";
}
std::string to_text(std::int64_t value) {
  return std::to_string(value);
}
std::string to_text(std::uint64_t value) {
  return std::to_string(value);
}

std::string to_text(double value) {
  if (!std::isfinite(value)) {
    return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  }
  if (value == std::trunc(value) && std::abs(value) < 1e15) {
    return std::to_string(static_cast<std::int64_t>(value));
  }
  std::array<char, 32> buffer{};
  auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), result.ptr};
}

std::string format_texts(std::string_view pattern, std::initializer_list<std::string> texts) {
  std::string out;
  std::size_t from = 0;
  for (const std::string& text : texts) {
    std::size_t at = pattern.find("{}", from);
    if (at == std::string_view::npos) {
      out += pattern.substr(from);
      out += " " + text;
      from = pattern.size();
      continue;
    }
    out += pattern.substr(from, at - from);
    out += text;
    from = at + 2;
  }
  out += pattern.substr(from);
  return out;
}

namespace {

// Edit distance with exchange of neighbours as one step, since that is how people mistype.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  std::vector<std::size_t> next(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    next[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      next[j] = std::min({row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        next[j] = std::min(next[j], before[j - 2] + 1);
      }
    }
    before.swap(row);
    row.swap(next);
  }
  return row[b.size()];
}

// Number and unit of "12.5 MiB".
bool split_number(std::string_view text, double& number, std::string_view& unit) {
  text = trim(text);
  auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc() || !std::isfinite(number) || number < 0) {
    return false;
  }
  unit = trim(text.substr(static_cast<std::size_t>(result.ptr - text.data())));
  return true;
}

}  // namespace

std::string format_fixed(double value, int digits) {
  std::array<char, 512> buffer{};  // the largest double has 309 digits before the point
  int length = std::snprintf(buffer.data(), buffer.size(), "%.*f", digits, value);
  return {buffer.data(), std::min(static_cast<std::size_t>(length), buffer.size() - 1)};
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(1, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    std::size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {  // 1023.95 would be printed as 1024.0
    value /= 1024;
    ++unit;
  }
  return format_fixed(value, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

std::string human_count(std::uint64_t count) {
  constexpr std::array<const char*, 5> kUnits = {"", " k", " M", " G", " T"};
  double value = static_cast<double>(count);
  std::size_t unit = 0;
  while (value >= 999.95 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return format_fixed(value, unit == 0 ? 0 : 1) + kUnits[unit];
}

std::string human_duration(double seconds) {
  if (!(seconds >= 0 && seconds < 1e15)) {  // none of ours; and beyond what the numbers below hold
    return "unknown";
  }
  if (seconds < 9.95) {
    return format_fixed(seconds, 1) + " s";
  }
  auto whole = static_cast<std::int64_t>(std::llround(seconds));
  auto two = [](std::int64_t value) { return (value < 10 ? "0" : "") + std::to_string(value); };
  if (whole < 60) {
    return std::to_string(whole) + " s";
  }
  if (whole < 3600) {
    return std::to_string(whole / 60) + " min " + two(whole % 60) + " s";
  }
  return std::to_string(whole / 3600) + " h " + two(whole % 3600 / 60) + " min";
}

bool parse_bytes(std::string_view text, std::int64_t& bytes) {
  struct Unit {
    std::string_view name;
    double factor;
  };
  constexpr std::array<Unit, 10> kUnits = {{{"", 1},
                                            {"B", 1},
                                            {"KiB", 1024.0},
                                            {"MiB", 1048576.0},
                                            {"GiB", 1073741824.0},
                                            {"TiB", 1099511627776.0},
                                            {"kB", 1e3},
                                            {"MB", 1e6},
                                            {"GB", 1e9},
                                            {"TB", 1e12}}};
  double number = 0;
  std::string_view unit;
  if (!split_number(text, number, unit)) {
    return false;
  }
  for (const Unit& known : kUnits) {
    if (unit == known.name && number * known.factor < 9e18) {
      bytes = std::llround(number * known.factor);
      return true;
    }
  }
  return false;
}

bool parse_duration(std::string_view text, double& seconds) {
  constexpr double kLongestSeconds = 1e9;  // 31 years: what is longer would overflow a clock's nanoseconds before long
  double number = 0;
  std::string_view unit;
  if (!split_number(text, number, unit)) {
    return false;
  }
  double factor = unit == "ms" ? 1e-3 : unit == "s" ? 1 : unit == "min" ? 60 : unit == "h" ? 3600 : 0;
  seconds = number * factor;
  return factor > 0 && seconds <= kLongestSeconds;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::size_t from = 0;
  for (std::size_t at = text.find(separator); at != std::string_view::npos; at = text.find(separator, from)) {
    parts.emplace_back(text.substr(from, at - from));
    from = at + 1;
  }
  parts.emplace_back(text.substr(from));
  return parts;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    out += (i == 0 ? std::string_view() : separator);
    out += parts[i];
  }
  return out;
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) {
    return {};
  }
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

std::string wrap(std::string_view text, std::size_t width, std::size_t indent) {
  std::string out;
  std::size_t column = 0;
  for (const std::string& word : split(text, ' ')) {
    if (word.empty()) {
      continue;
    }
    if (column > 0 && indent + column + 1 + word.size() > width) {
      out += "\n" + std::string(indent, ' ');
      column = 0;
    } else if (column > 0) {
      out += " ";
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

}  // namespace sf
