// core/checkpoint/writer_sync.hpp: the built-in checkpoint writer. It writes each piece when it gets it and
// syncs in finish: simple, and the oracle that other writers are compared with.
#pragma once

#include <memory>

#include "sf/checkpoint.h"

namespace sf {

/// A checkpoint writer and the instance that its functions want; borrowed from a plugin or from a SyncWriter.
struct CheckpointWriter {
  const sf_checkpoint_writer* functions = nullptr;
  sf_instance* instance = nullptr;
};

class SyncWriter {
 public:
  SyncWriter();
  ~SyncWriter();
  SyncWriter(const SyncWriter&) = delete;
  SyncWriter& operator=(const SyncWriter&) = delete;

  [[nodiscard]] CheckpointWriter writer() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace sf
