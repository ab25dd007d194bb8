#include "plugins/sharding/fsdp/frozen_tables.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "plugins/sharding/fsdp/storage.hpp"

namespace sf::fsdp {
namespace {

constexpr int64_t kTableAlignment = 256;  // bytes: what the device's allocator gives, so that kernels see what they are used to

int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

FrozenTables::FrozenTables(const std::vector<at::Tensor>& tables, Comm& comm) : comm_(comm) {
  at::NoGradGuard no_grad;
  int64_t place = 0;
  for (const at::Tensor& table : tables) {
    if (!table.defined() || std::any_of(tables_.begin(), tables_.end(), [&](const Table& known) {
          return known.storage.unsafeGetStorageImpl() == table.storage().unsafeGetStorageImpl();
        })) {
      continue;
    }
    tables_.push_back({.storage = table.storage(), .place = place, .bytes = static_cast<int64_t>(table.storage().nbytes())});
    place += round_up(tables_.back().bytes, kTableAlignment);
  }
  if (tables_.empty()) {
    return;
  }
  const int64_t part = round_up((place + comm.size() - 1) / comm.size(), kTableAlignment);
  whole_bytes_ = part * comm.size();
  part_ = at::zeros({part}, tables.front().options().dtype(at::kByte));
  const int64_t first = comm.rank() * part;
  for (const Table& table : tables_) {
    const int64_t begin = std::max(first, table.place), end = std::min(first + part, table.place + table.bytes);
    if (begin < end) {
      at::Tensor bytes = at::empty({0}, part_.options());
      bytes.set_(table.storage, 0, {table.bytes}, {1});
      part_.narrow(0, begin - first, end - begin).copy_(bytes.narrow(0, begin - table.place, end - begin));
    }
  }
  for (const Table& table : tables_) {
    release(table.storage);
  }
}

void FrozenTables::gather() {
  if (is_here_ || tables_.empty()) {
    return;
  }
  const at::Tensor whole = at::empty({whole_bytes_}, part_.options());
  comm_.all_gather(whole, part_, "frozen tables")->wait();
  for (const Table& table : tables_) {
    point_at(table.storage, whole, table.place, table.bytes);
  }
  is_here_ = true;
}

void FrozenTables::give_back() {
  if (is_here_) {
    for (const Table& table : tables_) {
      release(table.storage);
    }
    is_here_ = false;
  }
}

}  // namespace sf::fsdp
