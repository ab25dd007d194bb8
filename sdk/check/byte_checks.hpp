// sdk/check/byte_checks.hpp: what checks of checkpoint writers and trackers share.
#pragma once

#include "sdk/check/check.hpp"
#include "sdk/testing/lone_plugin.hpp"

#include <signal.h>
#include <sys/resource.h>

namespace sf::check {

inline sf_status empty_status() {
  sf_status status{};
  status.struct_size = sizeof(sf_status);
  return status;
}

/// A plugin that is created and started, and stopped and destroyed at the end.
struct Started {
  sf::testing::LonePlugin plugin;
  explicit Started(const Candidate& candidate) : plugin(candidate.file, candidate.entry, candidate.values(), candidate.services) {
    plugin.require(plugin.create(), "create");
    plugin.require(plugin.start(), "start");
  }
};

/// Files can't grow beyond `bytes` while this lives; a write then fails as on a full disk.
class SmallDisk {
 public:
  explicit SmallDisk(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SmallDisk() { setrlimit(RLIMIT_FSIZE, &before_); }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

 private:
  rlimit before_{};
};

}  // namespace sf::check
