#include "plugins/sharding/fsdp2/slots.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "plugins/sharding/fsdp/storage.hpp"

namespace sf::fsdp {

int64_t Slots::slot_elements(const std::vector<Extent>& members) {
  int64_t elements = 0;
  for (const Extent& member : members) {
    elements += aligned(member.elements());
  }
  return elements;
}

Slots::Slots(std::vector<GroupParts> groups, const Placement& placement) : comm_(placement.comm) {
  const auto of_model = at::TensorOptions().device(placement.device).dtype(placement.dtype);
  int64_t largest = 0;
  for (const GroupParts& group : groups) {
    largest = std::max(largest, group.layout.elements());
  }
  gathered_ = at::zeros({largest}, of_model);
  if (largest > 0) {
    comm_->register_buffer(gathered_);
  }
  for (GroupParts& parts : groups) {
    Slot slot{.parts = std::move(parts), .memory = {}, .slot = static_cast<int64_t>(groups_.size()), .whole = {}, .from = {}, .to = {}};
    std::vector<int64_t> places;
    int64_t elements = 0;
    for (const auto& shape : slot.parts.shapes) {
      places.push_back(elements);
      elements += aligned(c10::multiply_integers(shape));
    }
    slot.memory = at::zeros({elements}, of_model);
    for (size_t m = 0; m < places.size(); ++m) {
      slot.whole.push_back(alias(slot.memory, places[m], slot.parts.shapes[m]));
    }
    for (const Piece& piece : slot.parts.layout.pieces) {
      slot.from.push_back(alias(gathered_, piece.place, {piece.count}));
      slot.to.push_back(alias(slot.memory, places[static_cast<size_t>(piece.member)] + piece.begin, {piece.count}));
    }
    groups_.push_back(std::move(slot));
  }
  holder_.assign(groups_.size(), -1);
}

void Slots::start(int64_t group) {
  const GroupParts& parts = groups_[static_cast<size_t>(group)].parts;
  if (parts.layout.part > 0) {
    work_ = comm_->all_gather(gathered_.narrow(0, 0, parts.layout.elements()), parts.part, parts.name);
  }
}

int64_t Slots::finish(int64_t group) {
  Slot& slot = groups_[static_cast<size_t>(group)];
  int64_t& holder = holder_[static_cast<size_t>(slot.slot)];
  const int64_t pushed_out = holder != group ? holder : -1;
  holder = group;
  if (work_ != nullptr) {
    work_->wait();
    work_.reset();
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView raw;  // and through aliases: the slots' own version counters never move
    at::_foreach_copy_(slot.to, slot.from);
  }
  return pushed_out;
}

void Slots::discard(int64_t) {
  if (work_ != nullptr) {
    work_->wait();
    work_.reset();
  }
}

void Slots::plan(const std::vector<std::vector<Span>>& spans) {
  const std::vector<int64_t> shared = share_slots(spans);
  const int64_t count = *std::max_element(shared.begin(), shared.end()) + 1;
  std::vector<int64_t> elements(static_cast<size_t>(count), 0);
  for (size_t group = 0; group < groups_.size(); ++group) {
    auto& most = elements[static_cast<size_t>(shared[group])];
    most = std::max(most, groups_[group].memory.numel());
  }
  // The first group of a slot that is large enough lends its memory.
  for (int64_t slot = 0; slot < count; ++slot) {
    at::Tensor memory;
    for (size_t group = 0; group < groups_.size() && !memory.defined(); ++group) {
      if (shared[group] == slot && groups_[group].memory.numel() == elements[static_cast<size_t>(slot)]) {
        memory = groups_[group].memory;
      }
    }
    for (size_t group = 0; group < groups_.size(); ++group) {
      Slot& moved = groups_[group];
      if (shared[group] == slot) {
        moved.slot = slot;
        if (!moved.memory.is_same(memory)) {
          const auto bytes = static_cast<int64_t>(moved.memory.nbytes());
          point_at(moved.memory.storage(), memory, 0, bytes);
          moved.memory = memory;
        }
      }
    }
  }
  holder_.assign(static_cast<size_t>(count), -1);
}

int64_t Slots::bytes() const {
  auto bytes = static_cast<int64_t>(gathered_.nbytes());
  std::vector<const void*> counted;
  for (const Slot& slot : groups_) {
    if (std::find(counted.begin(), counted.end(), slot.memory.unsafeGetTensorImpl()) == counted.end()) {
      counted.push_back(slot.memory.unsafeGetTensorImpl());
      bytes += static_cast<int64_t>(slot.memory.nbytes());
    }
  }
  return bytes;
}

Settings::WholeMemory Slots::memory(const std::vector<std::vector<Extent>>& groups, const std::vector<Layout>& layouts,
                                    const std::vector<std::vector<Span>>& spans, Mode mode, int64_t element_bytes) {
  Settings::WholeMemory memory;
  std::vector<int64_t> slots(groups.size());
  std::iota(slots.begin(), slots.end(), int64_t{0});
  if (mode == Mode::full_shard) {
    slots = share_slots(spans);
  }
  const int64_t count = groups.empty() ? 0 : *std::max_element(slots.begin(), slots.end()) + 1;
  std::vector<int64_t> most(static_cast<size_t>(count), 0);
  for (size_t group = 0; group < groups.size(); ++group) {
    const int64_t elements = slot_elements(groups[group]);
    memory.first += elements * element_bytes;
    most[static_cast<size_t>(slots[group])] = std::max(most[static_cast<size_t>(slots[group])], elements);
    memory.buffers = std::max(memory.buffers, layouts[group].elements() * element_bytes);
  }
  memory.later = std::accumulate(most.begin(), most.end(), int64_t{0}) * element_bytes;
  memory.detail = std::to_string(count) + " slots for " + std::to_string(groups.size()) + " groups";
  if (count < static_cast<int64_t>(groups.size())) {
    memory.detail += " (one for each in the first micro-step)";
  }
  return memory;
}

}  // namespace sf::fsdp
