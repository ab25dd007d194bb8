#include "core/plugin/host_table.hpp"

#include <algorithm>
#include <utility>

#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "sf/plugin.hpp"

namespace sf {

HostTable::HostTable(std::string plugin, HostServices services)
    : plugin_(std::move(plugin)), services_(std::move(services)) {
  table_.struct_size = sizeof(sf_host);
  table_.abi_major = SF_ABI_MAJOR;
  table_.abi_minor = SF_ABI_MINOR;
  table_.ctx = this;
  table_.log = [](void* ctx, const sf_instance*, std::int32_t level, const char* file, std::int32_t line,
                  const char* text) {
    guard(nullptr, [&] {
      const auto& self = *static_cast<HostTable*>(ctx);
      auto known =
          static_cast<Level>(std::clamp(level, std::int32_t{SF_LOG_TRACE}, std::int32_t{SF_LOG_ERROR}));
      if (known == Level::kInfo || known == Level::kWarn) {
        log_at(known, "{}: {}", self.plugin_, text);
      } else {  // who looks at these wants the place too
        std::string_view name = file;
        log_at(known, "{}: {} ({}:{})", self.plugin_, text, name.substr(name.rfind('/') + 1), line);
      }
    });
  };
  table_.stop_requested = [](void* ctx) -> std::int32_t {
    const auto& self = *static_cast<HostTable*>(ctx);
    return self.services_.stop_requested && self.services_.stop_requested() ? 1 : 0;
  };
  table_.get_service = [](void* ctx, const char* id, sf_status* status) -> const void* {
    const auto& self = *static_cast<HostTable*>(ctx);
    const void* found = nullptr;
    std::int32_t code =
        guard(status, [&] { found = self.services_.find ? self.services_.find(id) : nullptr; });
    if (code == SF_OK && found == nullptr) {
      set_status(status, SF_NOT_FOUND, format("this host has no service \"{}\"", id));
    }
    return found;
  };
}

}  // namespace sf
