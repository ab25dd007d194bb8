// tools/sf-host/launcher.hpp: `sf-host train --nproc N`: starts this machine's ranks as children and ends when they have ended.
#pragma once

#include "core/base/error.hpp"
#include "core/dist/world.hpp"

namespace sf {

/// Is this process to start ranks, and not one of them? Throws Error(kUsage) when another launcher has made it a rank already.
[[nodiscard]] bool is_launcher(const LaunchFlags& flags);

/// Runs this program again with the same words, once for each rank of this node. Rank 0 has this terminal; lines of the others come with
/// "[rank N] " before them. A signal goes to all ranks, which finish their window and save. When one rank fails the others end, too: on their
/// own account first, killed after a while. No rank outlives this process. Returns what the ranks ended with; throws Error(kCommunication)
/// when a rank died without a word and rank 0 could not tell.
ExitCode launch_ranks(const LaunchFlags& flags);

}  // namespace sf
