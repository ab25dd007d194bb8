// core/plugin/host_table.hpp: the sf_host that one plugin gets: log lines with its name, the stop flag,
// services by id.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "sf/plugin.h"

namespace sf {

struct HostServices {
  std::function<const void*(std::string_view id)> find = {};  // null: no service
  std::function<bool()> stop_requested = {};
};

class HostTable {
 public:
  HostTable(std::string plugin, HostServices services);
  HostTable(const HostTable&) = delete;
  HostTable& operator=(const HostTable&) = delete;

  /// For the plugin; valid as long as this object.
  [[nodiscard]] const sf_host* table() const { return &table_; }

 private:
  std::string plugin_;
  HostServices services_;
  sf_host table_{};
};

}  // namespace sf
