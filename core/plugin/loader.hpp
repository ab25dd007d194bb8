// core/plugin/loader.hpp: opens a plugin that the catalog has accepted (checks 12 to 15). The only place
// where libraries of plugins are opened; they are never closed.
#pragma once

#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/plugin/catalog.hpp"
#include "sf/plugin.h"

namespace sf {

/// Opens the file (all symbols at once, local to the process) and calls its entry. Null and
/// plugin/open-failed, plugin/no-entry or plugin/entry-disagrees when that fails. On the main thread, before
/// others exist.
[[nodiscard]] const sf_plugin* open_plugin(const PluginFile& file, Diagnostics& problems);

/// Looks once, when all are open, for a second copy of a library of which a process may have one:
/// plugin/second-copy.
void check_copies(Diagnostics& problems);

/// The same over the text of a /proc/PID/maps.
void check_copies_in(const std::string& maps, Diagnostics& problems);

}  // namespace sf
