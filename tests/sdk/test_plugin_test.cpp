// Sf::plugin_test as an author uses it; the template's own test has the rest.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <stdexcept>
#include <string>

#include "sdk/testing/plugin_test.hpp"

using namespace sf;
using namespace sf::testing;

namespace {

std::string plugin(const char* name) {
  std::string path = SF_BUILD_DIR "/tests/plugins/";
  path += name;
  return path;
}

const std::string kFake = plugin("host/fake_effect.so");

std::string refusal(const FakeHost::Setup& setup) {
  try {
    FakeHost host(setup);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("plugin_test: options come from TOML through the real resolver, and reads and effects are seen") {
  FakeHost host({.plugin = kFake, .recipe = "[plugin.fake_effect]\nat_build = 5\n"});
  CHECK(host.unread_options() == std::vector<std::string>{"plugin.fake_effect.unread"});
  CHECK(host.effect("at_build") == -1);
  host.get_interface<Sharding>(kShardingInterface).build({}, {});
  CHECK(host.effect("at_build") == 5);
  CHECK_THROWS_AS((void)host.get_interface<int>("sf.nothing/1"), Error);
  host.stop();
}

TEST_CASE("plugin_test: what sf-host would refuse is thrown with the same words") {
  CHECK(refusal({.plugin = kFake, .recipe = "[plugin.fake_effect]\nat_biuld = 5\n"}).find("did you mean \"at_build\"") != std::string::npos);
  CHECK(refusal({.plugin = kFake, .recipe = "[plugin.fake_effect]\nat_build = 500\n"}).find("error[recipe/out-of-range]") == 0);
  CHECK(refusal({.plugin = plugin("bad/fake_no_note.so")}).find("error[plugin/no-note]") == 0);
  const std::string ok = plugin("good/fake_ok.so");
  CHECK(refusal({.plugin = ok, .recipe = "[plugin.fake_ok]\nfail_in = \"start\"\n"}) == "plugin \"fake_ok\" failed in start: told to fail in start");
}

TEST_CASE("plugin_test: log lines are kept, with the plugin's name") {
  FakeHost host({.plugin = plugin("good/fake_ok.so")});
  REQUIRE(host.log().size() == 1);
  CHECK(host.log()[0].text == "fake_ok: created");
  CHECK(host.log()[0].level == Level::kInfo);
}

TEST_CASE("plugin_test: ranks have collectives, and a failing rank's error is thrown") {
  run_ranks(3, [](Comm& comm) {
    const at::Tensor x = at::full({4}, static_cast<double>(comm.rank() + 1), at::kFloat);
    comm.all_reduce(x, Reduction::sum, "x")->wait();
    if (!at::equal(x, at::full({4}, 6.0, at::kFloat))) {
      throw std::logic_error("1 + 2 + 3 is something else");
    }
  });
  CHECK_THROWS_WITH_AS(run_ranks(2,
                                 [](Comm& comm) {
                                   if (comm.rank() == 1) {
                                     throw std::runtime_error("on purpose");
                                   }
                                   const at::Tensor x = at::ones({4});
                                   comm.all_reduce(x, Reduction::sum, "x")->wait();
                                 }),
                       "on purpose", std::exception);
}

TEST_CASE("plugin_test: services reach the plugin; collectives only when the test has some") {
  const std::string draft = plugin("host/fake_draft.so");
  const auto said = [](const FakeHost& host, const std::string& text) {
    for (const LogLine& line : host.log()) {
      if (line.text.find(text) != std::string::npos) {
        return true;
      }
    }
    return false;
  };
  FakeHost alone({.plugin = draft});
  const TinyRun run(alone);
  CHECK(said(alone, "the host does not offer sf.comm/1: there are no collectives: this test has one process"));
  alone.stop();
  bool is_told = false;
  run_ranks(1, [&](Comm& comm) {
    FakeHost host({.plugin = draft, .comm = &comm});
    const TinyRun one(host);
    is_told = said(host, "fake_draft: 1 ranks, their sum is 1");
  });
  CHECK(is_told);
}
