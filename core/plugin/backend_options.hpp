// core/plugin/backend_options.hpp: the options that one plugin receives: resolved, typed, valid, each with a
// claim (it was read) and an effect count. Built once from the plan. An option that the user set and nobody
// read, or that had no effect, ends the run.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/recipe/manifest.hpp"
#include "core/recipe/schema.hpp"
#include "sf/plugin.h"

namespace sf {

class BackendOptions {
 public:
  /// `values` has every option of the manifest, and every one of the host's that it claims.
  BackendOptions(const Manifest& manifest, const PlanValues& values);
  BackendOptions(const BackendOptions&) = delete;
  BackendOptions& operator=(const BackendOptions&) = delete;

  /// For the plugin; valid as long as this object.
  [[nodiscard]] const sf_options* table() const { return &table_; }

  /// plugin/option-unclaimed for each option that was set and never read.
  void check_claims(Diagnostics& problems) const;
  /// plugin/option-no-effect for each that was set to something else than its default and for which only zeros were reported.
  void check_effects(Diagnostics& problems) const;

  /// "training.shard_frozen_tables = true (2)" for each option that differs from its default and had an effect: how many things it changed.
  [[nodiscard]] std::vector<std::string> in_effect() const;

  /// Names that the plugin asked for and its manifest lacks, or has with another type.
  [[nodiscard]] const std::vector<std::string>& misread() const { return misread_; }

  [[nodiscard]] bool is_claimed(const std::string& name) const;
  /// -1: nothing was reported.
  [[nodiscard]] std::int64_t effect(const std::string& name) const;

 private:
  struct Entry {
    std::string key;
    PlanValue value;
    bool is_default = false;
    bool is_claimed = false;
    std::int64_t effect = -1;
    std::vector<const char*> texts;  // what `list` points to
    sf_list list{};
  };

  template <class T>
  static const T* claim(void* self, const char* name);

  std::string plugin_;
  std::map<std::string, Entry> entries_;  // by the manifest's name
  std::vector<std::string> misread_;
  sf_options table_{};
};

}  // namespace sf
