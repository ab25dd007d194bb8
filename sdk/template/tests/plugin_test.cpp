// Both plugins in the fake host of Sf::plugin_test: judged, resolved, opened, created and started as sf-host does it, then run over the real tape on a tiny
// target with random weights. A second is enough.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

#include "sdk/testing/plugin_test.hpp"
#include "sf/algorithm.hpp"
#include "sf/tracker.h"

namespace {

int failed = 0;

void expect(bool is_so, const std::string& what) {
  std::cout << (is_so ? "ok      " : "FAILED  ") << what << "\n";
  failed += is_so ? 0 : 1;
}

void it_learns() {
  sf::testing::FakeHost host({.plugin = MY_DRAFT, .recipe = "[plugin.my_draft]\ntokens = 2\nwidth = 32\n"});
  sf::testing::TinyRun run(host, {.learning_rate = 1e-2});
  const sf::testing::TinyOutcome before = run.evaluate();
  for (int step = 0; step < 40; ++step) {
    run.train();
  }
  const sf::testing::TinyOutcome after = run.evaluate();
  expect(after.loss < before.loss - 0.3, "40 steps lower the loss from " + std::to_string(before.loss) + " to " + std::to_string(after.loss));
  expect(after.metrics.at("acceptance_length") >= 1, "the acceptance length is reported");
  expect(run.dead().loss == 0, "a batch without samples weighs nothing");
  expect(host.unread_options().empty(), "every option is read");
}

void its_options_are_checked() {
  std::string told;
  try {
    sf::testing::FakeHost({.plugin = MY_DRAFT, .recipe = "[plugin.my_draft]\nwidth = 12\n"});
  } catch (const sf::Error& error) {
    told = error.what();
  }
  expect(told.find("my_draft/width") != std::string::npos, "a width of 12 is refused by the manifest's rule");
}

void the_tracker_writes_what_it_gets() {
  sf::testing::FakeHost host({.plugin = MY_TRACKER, .recipe = "[plugin.my_tracker]\nonly = [\"loss\"]\n"});
  const std::string folder = host.folder();
  const auto& tracker = host.get_interface<const sf_tracker>(SF_TRACKER);
  const sf_tracked_run run{sizeof run, 0, "run", folder.c_str(), "", 1, 2};
  const sf_figure loss{sizeof loss, 0, "loss", 2.5}, other{sizeof other, 0, "lr", 0.1};
  const sf_figure* figures[] = {&loss, &other, nullptr};
  sf_status status{};
  const bool is_fine = tracker.begin(host.instance(), &run, &status) == SF_OK && tracker.record(host.instance(), 1, figures, &status) == SF_OK &&
                       tracker.finish(host.instance(), &status) == SF_OK;
  std::string line;
  std::getline(std::ifstream(folder + "/my_tracker.csv") >> std::ws, line);
  expect(is_fine && line == "1,loss,2.5", "one figure of two is in the file: " + line);
}

}  // namespace

int main() {
  it_learns();
  its_options_are_checked();
  the_tracker_writes_what_it_gets();
  return failed == 0 ? 0 : 1;
}
