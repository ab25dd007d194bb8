// sdk/check: sf-plugin-check, which looks at one plugin file and runs it in small trials. Each trial is a process with a time limit, so a crash or a hang is
// a result. What needs no tensors is in the program itself; checks over tensors are in libsf_plugin_test.so, which is opened for plugins of tier torch_cxx.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/plugin/catalog.hpp"
#include "core/plugin/elf_file.hpp"
#include "core/plugin/host_table.hpp"
#include "core/recipe/schema.hpp"
#include "sf/plugin.h"

namespace sf::check {

enum class Verdict { passed, failed, skipped };

struct Outcome {
  Verdict verdict = Verdict::passed;
  std::string text;   // what is wrong, why it was skipped, or a remark
};
[[nodiscard]] inline Outcome passed(std::string remark = "") { return {Verdict::passed, std::move(remark)}; }
[[nodiscard]] inline Outcome failed(std::string text) { return {Verdict::failed, std::move(text)}; }
[[nodiscard]] inline Outcome skipped(std::string text) { return {Verdict::skipped, std::move(text)}; }

/// The plugin that is looked at.
struct Candidate {
  PluginFile file;                       // judged; problems included
  std::vector<std::string> sets;         // --set: keys of the plugin and of the host, for every trial
  std::filesystem::path target;          // a tiny one, config.json alone
  HostServices services;                 // with "sf.ops/1" for plugins of tier torch_cxx
  const sf_plugin* entry = nullptr;      // opened; null in static checks

  [[nodiscard]] const Manifest& manifest() const { return *file.manifest; }
  /// Resolved options with `more` after `sets`. Throws Error(kUsage) with all problems.
  [[nodiscard]] PlanValues values(const std::vector<std::string>& more = {}) const;
};

struct Check {
  std::string id;        // "life/create"
  std::string sentence;  // what holds when it passes
  std::function<Outcome(const Candidate&)> run;   // a thrown exception is a failure with its text
  bool exits = false;    // the trial's process leaves through exit(), with static destructors, and not at once
};

[[nodiscard]] std::vector<Check> static_checks();
[[nodiscard]] std::vector<Check> life_checks();
/// Of the kinds without tensors.
[[nodiscard]] std::vector<Check> writer_checks();
[[nodiscard]] std::vector<Check> tracker_checks();

/// In libsf_plugin_test.so: tensor_checks.hpp.
class TensorChecks {
 public:
  [[nodiscard]] virtual std::vector<Check> checks(std::uint32_t kind) const = 0;
  [[nodiscard]] virtual HostServices services() const = 0;

 protected:
  ~TensorChecks() = default;
};

}  // namespace sf::check

/// The one C symbol of libsf_plugin_test.so that the program looks for; lives as long as the process.
extern "C" const sf::check::TensorChecks* sf_tensor_checks_v1();
