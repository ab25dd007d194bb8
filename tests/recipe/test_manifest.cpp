#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "core/base/file.hpp"
#include "core/recipe/manifest.hpp"

using namespace sf;

namespace {

std::string problems_of(const std::string& text) {
  Diagnostics problems;
  std::optional<Manifest> manifest = parse_manifest(text, "plugin.toml inside x.so", problems);
  CHECK(manifest.has_value() == !problems.has_errors());
  return problems.text();
}

const std::string kHead =
    "[plugin]\nname = \"fp8\"\nversion = \"0.3.1\"\nkind = \"transform\"\nsummary = \"float8\"\n";

}  // namespace

TEST_CASE("manifest: a rule of the phase run has texts and no condition that is judged beforehand") {
  CHECK(problems_of(kHead + "[[rules]]\nid = \"fp8/late\"\nphase = \"run\"\nmessage = \"m\"\nfix = \"f\"\n").empty());
  CHECK(problems_of(kHead + "[[rules]]\nid = \"fp8/late\"\nphase = \"later\"\nmessage = \"m\"\nfix = \"f\"\n").find("only \"run\" is known") != std::string::npos);
  CHECK(problems_of(kHead + "[[rules]]\nid = \"fp8/late\"\nphase = \"run\"\nwarn = true\nmessage = \"m\"\nfix = \"f\"\n").find("exactly one of") != std::string::npos);
}

TEST_CASE("manifest: the host's own is well formed and every option has help") {
  const Manifest& host = host_manifest();
  CHECK(host.options.size() > 40);
  for (const Option& option : host.options) {
    CHECK_MESSAGE(!option.help.empty(), option.key);
    CHECK_MESSAGE(option.key == option.name, option.key);
    CHECK_MESSAGE(option.help.find('\n') == std::string::npos, option.key);
    CHECK_MESSAGE((option.help.back() != '.' && option.help[0] >= 'a'),
                  "help is a sentence in lower case without a period: " << option.key);
  }
  CHECK(host.moved.size() >= 5);
}

TEST_CASE("manifest: options get their full key, a dotted name is its own key") {
  Diagnostics problems;
  auto manifest =
      parse_manifest(kHead +
                         "[options.gather]\ntype = \"bool\"\ndefault = false\nhelp = \"gather in "
                         "float8\"\nresume = \"fixed\"\n"
                         "[options.\"training.num_anchors\"]\ntype = \"int\"\ndefault = 512\nrange = [1, "
                         "4096]\nunit = \"anchors\"\nhelp = \"anchors of a sample\"\n",
                     "m", problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  CHECK(manifest->options[0].key == "plugin.fp8.gather");
  CHECK(manifest->options[0].is_fixed);
  CHECK(manifest->options[1].key == "training.num_anchors");
  CHECK(manifest->options[1].high == 4096);
  CHECK(std::get<std::int64_t>(*manifest->options[1].default_value) == 512);
}

TEST_CASE("manifest: every mistake is found, with line and column") {
  CHECK(problems_of("x = 1\n") ==
        "error[plugin/bad-manifest] plugin.toml inside x.so:1:1: there is no [plugin] table\n");
  CHECK(problems_of(kHead + "[options.a]\ntype = \"bool\"\ndefualt = true\nhelp = \"x\"\n") ==
        "error[plugin/bad-manifest] plugin.toml inside x.so:8:1: unknown key \"defualt\"\n"
        "  did you mean \"default\"?\n"
        "error[plugin/bad-manifest] plugin.toml inside x.so:6:10: option a must have either \"default\" or "
        "required = true\n");
  CHECK(problems_of(kHead + "[options.a]\ntype = \"int\"\ndefault = 9\nrange = [1, 8]\nhelp = \"x\"\n")
            .find("the default of option a is 9, expected 1 to 8") != std::string::npos);
  CHECK(problems_of(kHead + "[options.a]\ntype = \"number\"\n").find("has no known \"type\"") !=
        std::string::npos);
  CHECK(problems_of(kHead + "[options.a]\ntype = \"bool\"\ndefault = true\n").find("option a has no help") !=
        std::string::npos);
  CHECK(problems_of(kHead + "[options.a]\ntype = \"choice\"\ndefault = \"x\"\nhelp = \"x\"\n")
            .find("belong together") != std::string::npos);
  CHECK(problems_of(kHead + "a = [1").find("not valid TOML") != std::string::npos);
  for (const char* letter : {"\u00e9", "\u0416", "\u3001", "\u3042", "\ufe7f"}) {   // TOML++ takes some for impossible outside of strings
    CHECK(problems_of(kHead + letter + " = 1\n").find("not valid TOML") != std::string::npos);
    CHECK(problems_of(kHead + "a = " + letter + "\n").find("not valid TOML") != std::string::npos);
    CHECK(problems_of(kHead + "a = 1 " + letter + "\n").find("not valid TOML") != std::string::npos);
  }
}

TEST_CASE("manifest: rules are complete and test an option as its type allows") {
  std::string option = kHead + "[options.gather]\ntype = \"bool\"\ndefault = false\nhelp = \"x\"\n";
  auto rule = [&](const std::string& body) {
    return problems_of(option + "[[rules]]\nid = \"fp8/x\"\nmessage = \"m\"\nfix = \"f\"\n" + body);
  };
  CHECK(rule("when = [{ option = \"gather\", is = true }]\nrequire = [{ provided = \"gather-codec\" }]\n")
            .empty());
  CHECK(rule("when = [{ option = \"gahter\", is = true }]\nreject = true\n")
            .find("which this manifest lacks") != std::string::npos);
  CHECK(rule("when = [{ option = \"gather\", at_least = 1 }]\nreject = true\n")
            .find("in a way that its type does not have") != std::string::npos);
  CHECK(rule("when = [{ option = \"gather\", is = true, is_not = false }]\nreject = true\n")
            .find("one subject") != std::string::npos);
  CHECK(rule("reject = true\nwarn = true\n").find("exactly one of") != std::string::npos);
  CHECK(problems_of(option + "[[rules]]\nid = \"a\"\nreject = true\n").find("needs id, message and fix") !=
        std::string::npos);
  std::string twice = "[[rules]]\nid = \"a\"\nmessage = \"m\"\nfix = \"f\"\nreject = true\n";
  CHECK(problems_of(option + twice + twice).find("two rules have the id") != std::string::npos);
}

TEST_CASE("manifest: what an algorithm reads is listed, and a misspelt field is found") {
  Diagnostics problems;
  auto manifest = parse_manifest(kHead +
                                     "[[reads]]\nname = \"hidden_states\"\ndtype = \"bf16\"\nshape = "
                                     "[\"tokens\", \"3 * model.hidden_size\"]\nhelp = \"layers\"\n",
                                 "m", problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  CHECK(manifest->reads[0].shape == std::vector<std::string>{"tokens", "3 * model.hidden_size"});
  CHECK(problems_of(kHead + "[[reads]]\nname = \"x\"\ndtype = \"bf16\"\nshpe = []\nhelp = \"y\"\n")
            .find("did you mean \"shape\"?") != std::string::npos);
}

TEST_CASE("manifest: a pattern is a regular expression for texts, with a form in words") {
  const std::string text = kHead + "[options.a]\ntype = \"string\"\ndefault = \"x\"\nhelp = \"x\"\n";
  CHECK(problems_of(text + "pattern = \"[a-z]+\"\nform = \"letters\"\n").empty());
  CHECK(problems_of(text + "pattern = \"[0-9]+\"\nform = \"digits\"\n").find("the default of option a is \"x\", expected digits") !=
        std::string::npos);
  CHECK(problems_of(text + "pattern = \"[a-z]+\"\n").find("belong together") != std::string::npos);
  CHECK(problems_of(text + "pattern = \"[a-z\"\nform = \"letters\"\n").find("is no ECMAScript regular expression") != std::string::npos);
  CHECK(problems_of(kHead + "[options.a]\ntype = \"int\"\ndefault = 1\nhelp = \"x\"\npattern = \"1\"\nform = \"one\"\n")
            .find("is for the types string and strings") != std::string::npos);
  Diagnostics problems;
  auto list = parse_manifest(kHead + "[options.a]\ntype = \"strings\"\ndefault = []\nhelp = \"x\"\npattern = \"[a-z]+\"\nform = \"letters\"\n", "m",
                             problems);
  REQUIRE(list);
  TomlNode node;
  Diagnostics ignored;
  REQUIRE(parse_toml("v = [\"ab\", \"a1\"]", "t", node, ignored, "x"));
  CHECK(read_value(*node.find("v"), list->options[0]).id == "recipe/bad-form");
}

TEST_CASE("manifest: choices on a type without choices are a mistake of the manifest and nothing worse") {
  CHECK(problems_of(kHead + "[options.a]\ntype = \"int\"\ndefault = 1\nhelp = \"x\"\nchoices = [\"x\"]\n").find("belong together") !=
        std::string::npos);
}

TEST_CASE("manifest: no flipped bit or changed word makes the reader fail in another way than by refusing") {
  const std::string good = read_file(std::string(SF_TEST_DATA) + "/../core/recipe/host.toml");
  const char* const kWords[] = {"int", "bool", "strings", "ints", "choice", "bytes", "duration", "path", "[1]", "nan", "-1", "true", "\"\"", "{}", "@x"};
  std::uint32_t state = 4711;
  const auto next = [&](std::size_t below) {
    state = state * 1664525 + 1013904223;
    return (state >> 8) % below;
  };
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    std::string text = good;
    if (round % 2 == 0) {
      for (int flip = 0; flip < 3; ++flip) {
        text[next(text.size())] ^= static_cast<char>(1 << next(8));
      }
    } else {  // the right side of a line becomes something else
      std::size_t at = text.find(" = ", next(text.size() - 200));
      if (at != std::string::npos) {
        text.replace(at + 3, text.find('\n', at) - at - 3, kWords[next(std::size(kWords))]);
      }
    }
    Diagnostics problems;
    CHECK_NOTHROW(refused += parse_manifest(text, "m", problems).has_value() ? 0 : 1);
  }
  CHECK(refused > 50);
}
