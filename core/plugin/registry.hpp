// core/plugin/registry.hpp: the opened plugins of a run and their life: create and start in order, stop and
// destroy in reverse.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/plugin/backend_options.hpp"
#include "core/plugin/host_table.hpp"
#include "sf/plugin.h"

namespace sf {

/// "sf.algorithm/1" and so on: what a plugin of that kind must offer.
[[nodiscard]] const char* interface_of(std::uint32_t kind);

class PluginRegistry {
 public:
  struct Entry {
    std::string name, version, sha256;
    std::uint32_t kind = 0;
    const sf_plugin* plugin = nullptr;
    std::unique_ptr<HostTable> host;
    std::unique_ptr<BackendOptions> options;
    sf_instance* instance = nullptr;
    bool is_started = false;
  };

  PluginRegistry() = default;
  PluginRegistry(const PluginRegistry&) = delete;
  PluginRegistry& operator=(const PluginRegistry&) = delete;

  void add(Entry entry) { entries_.push_back(std::move(entry)); }

  /// Creates all, in order, and asks each for the interface of its kind. Problems: plugin/create-failed,
  /// plugin/no-interface. Stops at the first failure; close() is still to be called.
  bool create(Diagnostics& problems);
  /// Starts all, in order. Problem: plugin/start-failed.
  bool start(Diagnostics& problems);
  /// plugin/option-unclaimed, once all are started.
  void check_claims(Diagnostics& problems) const;
  /// plugin/option-no-effect, once the stack is built.
  void check_effects(Diagnostics& problems) const;
  /// Stops what was started (a failed start included) and destroys what was created, in reverse. A failing
  /// stop is logged. Once is enough.
  void close();

  [[nodiscard]] const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

}  // namespace sf
