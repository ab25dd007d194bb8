#include "plugins/sharding/fsdp1/flat_buffers.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "plugins/sharding/fsdp/storage.hpp"

namespace sf::fsdp {

FlatBuffers::FlatBuffers(std::vector<GroupParts> groups, const Placement& placement) : comm_(placement.comm) {
  for (GroupParts& parts : groups) {
    Buffer buffer{.parts = std::move(parts), .flat = {}, .whole = {}};
    buffer.flat = at::empty({buffer.parts.layout.elements()}, at::TensorOptions().device(placement.device).dtype(placement.dtype));
    std::vector<int64_t> places(buffer.parts.shapes.size(), 0);
    for (const Piece& piece : buffer.parts.layout.pieces) {
      places[static_cast<size_t>(piece.member)] = piece.place;
    }
    for (size_t m = 0; m < places.size(); ++m) {
      buffer.whole.push_back(alias(buffer.flat, places[m], buffer.parts.shapes[m]));
    }
    release(buffer.flat.storage());
    groups_.push_back(std::move(buffer));
  }
}

void FlatBuffers::start(int64_t group) {
  Buffer& buffer = groups_[static_cast<size_t>(group)];
  const int64_t elements = buffer.parts.layout.elements();
  if (elements > 0) {
    const at::Tensor memory = at::empty({elements}, buffer.flat.options());
    point_at(buffer.flat.storage(), memory, 0, static_cast<int64_t>(memory.nbytes()));
    // A gather beside the flat tensor's own version counter, which saved tensors of the views don't share.
    work_ = comm_->all_gather(memory, buffer.parts.part, buffer.parts.name);
  }
}

int64_t FlatBuffers::finish(int64_t) {
  if (work_ != nullptr) {
    work_->wait();
    work_.reset();
  }
  return -1;
}

void FlatBuffers::discard(int64_t group) {
  finish(group);
  give_back(group);
}

void FlatBuffers::give_back(int64_t group) { release(groups_[static_cast<size_t>(group)].flat.storage()); }

int64_t FlatBuffers::bytes() const {
  int64_t bytes = 0;
  for (const Buffer& buffer : groups_) {
    bytes += static_cast<int64_t>(buffer.flat.storage().nbytes());
  }
  return bytes;
}

Settings::WholeMemory FlatBuffers::memory(const std::vector<std::vector<Extent>>& groups, const std::vector<Layout>& layouts,
                                          const std::vector<std::vector<Span>>& spans, Mode mode, int64_t element_bytes) {
  Settings::WholeMemory memory;
  int64_t last = 0;
  for (size_t group = 0; group < groups.size(); ++group) {
    memory.first += layouts[group].elements() * element_bytes;
    for (const Span& span : spans[group]) {
      last = std::max(last, span.last);
    }
  }
  memory.later = memory.first;
  memory.detail = "a flat buffer for each of " + std::to_string(groups.size()) + " groups while it is in use";
  if (mode == Mode::full_shard) {
    // At each use: what is whole, and what is being gathered for the next one.
    memory.later = 0;
    for (int64_t position = 0; position <= last; ++position) {
      int64_t now = 0;
      for (size_t group = 0; group < groups.size(); ++group) {
        const bool is_needed = std::any_of(spans[group].begin(), spans[group].end(),
                                           [&](const Span& span) { return span.first - 1 <= position && position <= span.last; });
        now += is_needed ? layouts[group].elements() * element_bytes : 0;
      }
      memory.later = std::max(memory.later, now);
    }
    memory.detail += " (all of them in the first micro-step)";
  }
  return memory;
}

}  // namespace sf::fsdp
