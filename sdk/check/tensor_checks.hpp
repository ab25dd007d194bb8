// sdk/check/tensor_checks.hpp: the parts of libsf_plugin_test.so's checks, one file for each kind of plugin.
#pragma once

#include <memory>
#include <vector>

#include "sdk/check/check.hpp"
#include "sdk/testing/lone_plugin.hpp"
#include "sdk/testing/plugin_test.hpp"
#include "sdk/testing/tiny_facts.hpp"

namespace sf::check {

[[nodiscard]] std::vector<Check> algorithm_checks();   // tensor_checks.cpp
[[nodiscard]] std::vector<Check> algorithm_faults();   // algorithm_faults.cpp
[[nodiscard]] std::vector<Check> sharding_checks();    // sharding_checks.cpp
[[nodiscard]] std::vector<Check> transform_checks();   // transform_checks.cpp

/// A started algorithm over the tiny model.
struct Tiny {
  sf::testing::LonePlugin plugin;
  Algorithm& algorithm;
  ModelFacts facts;
  std::unique_ptr<sf::testing::TinyRun> run;

  explicit Tiny(const Candidate& candidate, const sf::testing::TinySetup& setup = {})
      : plugin(candidate.file, candidate.entry, candidate.values(), candidate.services), algorithm(started(plugin)),
        facts(sf::testing::facts_from(candidate.values(), candidate.target)), run(std::make_unique<sf::testing::TinyRun>(algorithm, facts, setup)) {}
  sf::testing::TinyRun* operator->() const { return run.get(); }

  static Algorithm& started(sf::testing::LonePlugin& plugin) {
    plugin.require(plugin.create(), "create");
    plugin.require(plugin.start(), "start");
    return *static_cast<Algorithm*>(const_cast<void*>(plugin.get_interface(kAlgorithmInterface)));
  }
};

}  // namespace sf::check
