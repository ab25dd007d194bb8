#include "core/plugin/registry.hpp"

#include "core/base/log.hpp"
#include "core/base/text.hpp"

namespace sf {
namespace {

sf_status empty_status() {
  sf_status status{};
  status.struct_size = sizeof(sf_status);
  return status;
}

std::string text_of(const sf_status& status, std::int32_t code) {
  return status.what[0] != 0 ? status.what : format("it returned code {} without a text", code);
}

}  // namespace

const char* interface_of(std::uint32_t kind) {
  switch (kind) {
    case SF_KIND_SHARDING:
      return "sf.sharding/1";
    case SF_KIND_TRANSFORM:
      return "sf.transform/1";
    case SF_KIND_ALGORITHM:
      return "sf.algorithm/1";
    case SF_KIND_CHECKPOINT:
      return "sf.checkpoint-writer/1";
    default:
      return "sf.tracker/1";
  }
}

bool PluginRegistry::create(Diagnostics& problems) {
  for (Entry& entry : entries_) {
    sf_status status = empty_status();
    std::int32_t code =
        entry.plugin->create(entry.host->table(), entry.options->table(), &entry.instance, &status);
    if (code != SF_OK || entry.instance == nullptr) {
      entry.instance = nullptr;
      problems.error(
          {.id = "plugin/create-failed",
           .message = format("plugin \"{}\" can't be created: {}", entry.name, text_of(status, code)),
           .fix = status.hint});
      return false;
    }
    const char* id = interface_of(entry.kind);
    if (entry.plugin->get_interface(entry.instance, id) == nullptr) {
      problems.error(
          {.id = "plugin/no-interface",
           .message = format("plugin \"{}\" offers no \"{}\", which its kind needs", entry.name, id),
           .fix = "its get_interface must return it; until 1.0, rebuild it with this host's SDK"});
      return false;
    }
  }
  return true;
}

bool PluginRegistry::start(Diagnostics& problems) {
  for (Entry& entry : entries_) {
    sf_status status = empty_status();
    entry.is_started = true;  // stop may be called after a failed start
    std::int32_t code = entry.plugin->start(entry.instance, &status);
    if (code != SF_OK) {
      problems.error({.id = "plugin/start-failed",
                      .message = format("plugin \"{}\" can't start: {}", entry.name, text_of(status, code)),
                      .fix = status.hint});
      return false;
    }
  }
  return true;
}

void PluginRegistry::check_claims(Diagnostics& problems) const {
  for (const Entry& entry : entries_) {
    entry.options->check_claims(problems);
  }
}

void PluginRegistry::check_effects(Diagnostics& problems) const {
  for (const Entry& entry : entries_) {
    entry.options->check_effects(problems);
  }
}

void PluginRegistry::close() {
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (entry->is_started) {
      sf_status status = empty_status();
      std::int32_t code = entry->plugin->stop(entry->instance, &status);
      if (code != SF_OK) {
        log_error("plugin '{}' failed to stop: {}", entry->name, text_of(status, code));
      }
      entry->is_started = false;
    }
  }
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (entry->instance != nullptr) {
      entry->plugin->destroy(entry->instance);
      entry->instance = nullptr;
    }
  }
}

}  // namespace sf
