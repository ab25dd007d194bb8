// plugins/sharding/fsdp/frozen_tables.hpp: the target's embedding and head, cut over the ranks while no window or evaluation is open. The tensors that
// the algorithm holds stay the same objects; their memory comes and goes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "sf/comm.hpp"

namespace sf::fsdp {

class FrozenTables {
 public:
  /// Keeps this rank's part of all tables together and gives their memory back. Tables over the same storage count once.
  FrozenTables(const std::vector<at::Tensor>& tables, Comm& comm);

  [[nodiscard]] int64_t count() const { return static_cast<int64_t>(tables_.size()); }
  /// The current stream has whole tables: one gather, none when they are here.
  void gather();
  void give_back();
  /// Of the part, always held.
  [[nodiscard]] int64_t bytes() const { return static_cast<int64_t>(part_.nbytes()); }

 private:
  struct Table {
    at::Storage storage;
    int64_t place = 0, bytes = 0;
  };
  std::vector<Table> tables_;
  Comm& comm_;
  at::Tensor part_;             // bytes
  int64_t whole_bytes_ = 0;
  bool is_here_ = false;
};

}  // namespace sf::fsdp
