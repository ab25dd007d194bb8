// sdk/testing: a host for tests of plugins, made of the trainer's own parts. plugin_test.hpp is what authors see; the other headers are not installed.
//
// lone_plugin.hpp: one plugin outside of a run: judged, its options resolved, opened, created, in the steps and with the code of sf-host. No LibTorch.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/data/plugin_services.hpp"
#include "core/plugin/backend_options.hpp"
#include "core/plugin/catalog.hpp"
#include "core/plugin/host_table.hpp"
#include "core/recipe/schema.hpp"
#include "sf/plugin.h"

namespace sf::testing {

/// A folder below the system's temporary one, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// A target to describe drafts for: 12 layers, 64 hidden units, 96 tokens. Writes its config.json to `folder`.
void write_tiny_target(const std::filesystem::path& folder);
inline constexpr std::int64_t kTinyVocab = 96, kTinyHidden = 64;

/// What a recipe makes of the plugin's options: `recipe` is TOML text, then `sets` ("key=value"), then the manifest's rules. Keys of the host may be set, too; the
/// target is the folder `target`, small drafts and float32 are the defaults here. Problems: those of a recipe and of rules.
[[nodiscard]] PlanValues values_of(const Manifest& manifest, const std::string& recipe, const std::vector<std::string>& sets,
                                   const std::filesystem::path& target, Diagnostics& problems);

/// A plugin's object, with `services`, then those in C of sf/services.h; without any when `services` can't be asked. Calls come in the order create, start, stop, destroy; the destructor makes up for what is missing.
class LonePlugin {
 public:
  LonePlugin(const PluginFile& file, const sf_plugin* entry, const PlanValues& values, HostServices services);
  ~LonePlugin();
  LonePlugin(const LonePlugin&) = delete;
  LonePlugin& operator=(const LonePlugin&) = delete;

  /// Each returns what the plugin returned; status() has its text then.
  std::int32_t create();
  std::int32_t start();
  std::int32_t stop();
  void destroy();
  /// Throws Error(kPlugin) with the plugin's text unless `code` is SF_OK.
  void require(std::int32_t code, const std::string& call) const;

  [[nodiscard]] const sf_plugin& entry() const { return *entry_; }
  [[nodiscard]] const sf_host* host() const { return host_.table(); }
  [[nodiscard]] sf_instance* instance() const { return instance_; }
  [[nodiscard]] const sf_status& status() const { return status_; }
  [[nodiscard]] const void* get_interface(const char* id) const { return entry_->get_interface(instance_, id); }
  [[nodiscard]] const BackendOptions& options() const { return *options_; }
  /// Keys of the manifest's own options that were never read.
  [[nodiscard]] std::vector<std::string> unread() const;

 private:
  const Manifest& manifest_;
  const sf_plugin* entry_;
  TemporaryFolder run_folder_;
  PluginServices services_;
  HostTable host_;
  std::unique_ptr<BackendOptions> options_;
  sf_instance* instance_ = nullptr;
  sf_status status_{};
  bool is_started_ = false;
};

}  // namespace sf::testing
