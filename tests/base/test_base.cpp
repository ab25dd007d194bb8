#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include <unistd.h>

#include "core/base/diagnostics.hpp"
#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/html.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"

using namespace sf;

// As std has it for std::string from g++ 13 on: a function format that every call with a Text finds by the argument's namespace.
namespace elsewhere {
struct Text {
  operator std::string_view() const { return "text"; }
};
template <class... Values>
std::string format(std::string_view, Values&&...) {
  return "elsewhere";
}
}  // namespace elsewhere

TEST_CASE("text: format is ours, whatever functions of that name the namespaces of its arguments have") {
  elsewhere::Text text;
  CHECK(format("a {}", text) == "a text");
  CHECK(format("a {}", std::string("text")) == "a text");
}

TEST_CASE("text: format puts values of every kind into their places") {
  CHECK(format("{} of {}, {}", 3, 8u, true) == "3 of 8, true");
  CHECK(format("{}", 0.5) == "0.5");
  CHECK(format("{}", 1e-4) == "1e-04");
  CHECK(format("{}", std::vector<int>{4, 512}) == "[4, 512]");
  CHECK(format("{}", std::filesystem::path("/a/b")) == "/a/b");
  CHECK(format("no place", 1) == "no place 1");
  CHECK(format("{} {}", 1) == "1 {}");
  CHECK(to_text(std::numeric_limits<double>::quiet_NaN()) == "nan");
}

TEST_CASE("text: a misspelt name finds its neighbour, a foreign one finds none") {
  std::vector<std::string> names = {"reshard_after_forward", "gather", "fsdp2"};
  CHECK(did_you_mean("reshard_after_foward", names) == "reshard_after_forward");
  CHECK(did_you_mean("gahter", names) == "gather");
  CHECK(did_you_mean("fsdp3", names) == "fsdp2");
  CHECK(did_you_mean("checkpoint", names).empty());
  CHECK(did_you_mean("x", {}).empty());
}

TEST_CASE("text: sizes and durations are written for people") {
  CHECK(human_bytes(512) == "512 B");
  CHECK(human_bytes(1536) == "1.5 KiB");
  CHECK(human_bytes(1048575) == "1.0 MiB");
  CHECK(human_bytes(3ull << 30) == "3.0 GiB");
  CHECK(human_count(134515008) == "134.5 M");
  CHECK(human_duration(0.84) == "0.8 s");
  CHECK(human_duration(42.4) == "42 s");
  CHECK(human_duration(185) == "3 min 05 s");
  CHECK(human_duration(7620) == "2 h 07 min");
  CHECK(human_duration(-1) == "unknown");
  CHECK(human_duration(1e300) == "unknown");
}

TEST_CASE("text: bytes and durations are read with their units and refused without sense") {
  std::int64_t bytes = 0;
  CHECK((parse_bytes("512MiB", bytes) && bytes == 536870912));
  CHECK((parse_bytes("1.5 GB", bytes) && bytes == 1500000000));
  CHECK((parse_bytes("42", bytes) && bytes == 42));
  CHECK_FALSE(parse_bytes("12 parsecs", bytes));
  CHECK_FALSE(parse_bytes("-1MiB", bytes));
  CHECK_FALSE(parse_bytes("MiB", bytes));
  double seconds = 0;
  CHECK((parse_duration("90s", seconds) && seconds == 90));
  CHECK((parse_duration("1.5h", seconds) && seconds == 5400));
  CHECK_FALSE(parse_duration("90", seconds));
  CHECK((parse_duration("1e9 s", seconds) && seconds == 1e9));
  CHECK_FALSE(parse_duration("1e300 h", seconds));  // no clock holds it
}

TEST_CASE("text: wrapping keeps words whole and lines short") {
  CHECK(wrap("one two three four", 9, 0) == "one two\nthree\nfour");
  CHECK(wrap("aaaa bbbb", 10, 3) == "aaaa\n   bbbb");
}

TEST_CASE("error: a failed check names file, line and values") {
  try {
    int b = 3;
    SF_CHECK(b == 4, "b is {}", b);
    FAIL("SF_CHECK did not throw");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kInternal);
    CHECK(std::string(error.what()).find("test_base.cpp:") != std::string::npos);
    CHECK(std::string(error.what()).find(": b is 3") != std::string::npos);
  }
  SF_CHECK(true, "never shown");
}

TEST_CASE("error: context goes before the text and keeps code and hint") {
  Error inner(ExitCode::kCheckpoint, "no space left on device", "free some");
  Error outer = inner.within("saving step 40");
  CHECK(std::string(outer.what()) == "saving step 40: no space left on device");
  CHECK(outer.code() == ExitCode::kCheckpoint);
  CHECK(outer.hint() == "free some");
}

TEST_CASE("diagnostics: all problems are shown with place, note, why and fix, in order") {
  Diagnostics problems;
  problems.error({.id = "recipe/unknown-key",
                  .message = "unknown option \"gahter\" in [plugin.fp8]",
                  .place = {"qwen3.toml", 14, 1},
                  .note = "did you mean \"gather\"?"});
  problems.warn({.id = "K1",
                 .message = "shapes change",
                 .why = "each is captured again",
                 .fix = "training.static_shapes = true"});
  CHECK(problems.text() ==
        "error[recipe/unknown-key] qwen3.toml:14:1: unknown option \"gahter\" in [plugin.fp8]\n"
        "  did you mean \"gather\"?\n"
        "warning[K1] shapes change\n"
        "  why:  each is captured again\n"
        "  fix:  training.static_shapes = true\n");
  CHECK(problems.error_count() == 1);
  CHECK(problems.contains("K1"));
  CHECK_FALSE(problems.contains("K2"));

  Diagnostics sum;
  sum.add_all(problems);
  CHECK(sum.has_errors());
  CHECK(sum.all().size() == 2);
}

TEST_CASE("html: what means something in a page stands there as text") {
  CHECK(escaped_html("a < b && \"c\" > d") == "a &lt; b &amp;&amp; &quot;c&quot; &gt; d");
  CHECK(escaped_html("") == "");
}

TEST_CASE("log: a redirected log gets finished lines at or above the level") {
  std::vector<std::string> lines;
  redirect_log([&](Level level, std::string_view line) {
    lines.push_back(to_text(static_cast<std::int64_t>(level)) + " " + std::string(line));
  });
  log_info("step {}", 12);
  log_debug("not shown");
  set_log_level(Level::kDebug);
  log_debug("shown");
  set_log_level(Level::kInfo);
  redirect_log({});
  CHECK(lines == std::vector<std::string>{"2 step 12", "1 shown"});
}

TEST_CASE("log: a line on stderr is the time, the level and the text") {
  const std::filesystem::path file = std::filesystem::temp_directory_path() / ("sf-log-" + std::to_string(getpid()));
  flush_log();
  const int kept = dup(STDERR_FILENO);
  FILE* opened = fopen(file.c_str(), "w");
  REQUIRE(opened != nullptr);
  dup2(fileno(opened), STDERR_FILENO);
  log_info("step {}/{}", 3, 8);
  log_warn("'{}' is odd", "name");
  log_debug("not shown");
  flush_log();
  dup2(kept, STDERR_FILENO);
  close(kept);
  fclose(opened);
  const std::string text = read_file(file);
  std::filesystem::remove(file);
  const std::regex expected("[0-2][0-9]:[0-5][0-9]:[0-6][0-9] info step 3/8\n[0-2][0-9]:[0-5][0-9]:[0-6][0-9] warning 'name' is odd\n");
  CHECK_MESSAGE(std::regex_match(text, expected), text);
}
