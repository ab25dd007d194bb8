#include "plugins/sharding/fsdp2/slots.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "plugins/sharding/fsdp/storage.hpp"
#include "sf/error.hpp"

namespace sf::fsdp {
namespace {

constexpr int64_t kPayloadAlignment = 16;  // bytes

}  // namespace

int64_t Slots::slot_elements(const std::vector<Extent>& members) {
  int64_t elements = 0;
  for (const Extent& member : members) {
    elements += aligned(member.elements());
  }
  return elements;
}

Slots::Slots(std::vector<GroupParts> groups, const Placement& placement, GatherCodec* codec)
    : comm_(placement.comm), codec_(codec), of_model_(at::TensorOptions().device(placement.device).dtype(placement.dtype)) {
  for (const GroupParts& group : groups) {
    largest_ = std::max(largest_, group.layout.elements());
  }
  if (codec_ != nullptr || !comm_->gathers_straight()) {
    make_buffer();
  }
  for (GroupParts& parts : groups) {
    Slot slot{.parts = std::move(parts), .memory = {}, .slot = static_cast<int64_t>(groups_.size()), .whole = {}, .runs = {}, .from = {}, .to = {}};
    const auto carries = [&](size_t member) {
      const auto& [unit, parameter] = slot.parts.ids[member];
      return codec_ != nullptr && codec_->carries(unit, parameter);
    };
    std::vector<int64_t> places;
    int64_t elements = 0, carried = 0;
    for (size_t m = 0; m < slot.parts.shapes.size(); ++m) {
      int64_t& end = carries(m) ? carried : elements;
      places.push_back(end);
      end += aligned(c10::multiply_integers(slot.parts.shapes[m]));
    }
    slot.memory = at::zeros({elements}, of_model_);
    slot.whole_carried = at::empty({carried}, of_model_);
    for (size_t m = 0; m < places.size(); ++m) {
      slot.whole.push_back(alias(carries(m) ? slot.whole_carried : slot.memory, places[m], slot.parts.shapes[m]));
    }
    for (const Piece& piece : slot.parts.layout.pieces) {
      const auto member = static_cast<size_t>(piece.member);
      slot.runs.push_back({.memory = alias(carries(member) ? slot.whole_carried : slot.memory, places[member] + piece.begin, {piece.count}), .place = piece.place});
    }
    if (carried > 0) {
      release(slot.whole_carried.storage());
      plan_payload(slot, comm_->rank());
      comm_->register_buffer(slot.payload);
    }
    groups_.push_back(std::move(slot));
  }
  holder_.assign(groups_.size(), -1);
}

void Slots::make_buffer() {
  gathered_ = at::zeros({largest_}, of_model_);
  if (largest_ > 0) {
    comm_->register_buffer(gathered_);
  }
}

// Places begin at multiples of 16 bytes, as parts of a group do.
void Slots::plan_payload(Slot& slot, int64_t rank) {
  const GroupParts& parts = slot.parts;
  const auto ranks = parts.layout.ranks;
  const auto element = static_cast<int64_t>(gathered_.element_size());
  const auto padded = [](int64_t bytes) { return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment; };
  const auto members = static_cast<int64_t>(parts.shapes.size());
  const auto rows_of = [&](int64_t member) { return parts.shapes[static_cast<size_t>(member)].empty() ? int64_t{1} : parts.shapes[static_cast<size_t>(member)][0]; };
  const auto each = [&](int64_t member) { return (rows_of(member) + ranks - 1) / ranks; };
  const auto is_carried = [&](int64_t member) {
    const auto& [unit, parameter] = parts.ids[static_cast<size_t>(member)];
    return codec_->carries(unit, parameter);
  };
  std::vector<int64_t> place(static_cast<size_t>(members), 0), row_bytes(static_cast<size_t>(members), 0);
  int64_t end = 0;
  for (const bool wanted : {false, true}) {
    for (int64_t m = 0; m < members; ++m) {
      if (is_carried(m) == wanted) {
        const auto& [unit, parameter] = parts.ids[static_cast<size_t>(m)];
        const int64_t columns = c10::multiply_integers(parts.shapes[static_cast<size_t>(m)]) / std::max<int64_t>(1, rows_of(m));
        row_bytes[static_cast<size_t>(m)] = wanted ? codec_->row_bytes(unit, parameter) : columns * element;
        place[static_cast<size_t>(m)] = end;
        end += padded(each(m) * row_bytes[static_cast<size_t>(m)]);
      }
    }
    slot.plain_bytes = wanted ? slot.plain_bytes : end;
  }
  if (ranks * end > static_cast<int64_t>(gathered_.nbytes())) {
    throw Error(ExitCode::kInternal, "group '" + parts.name + "': an encoded gather of " + std::to_string(ranks * end) + " bytes is larger than the largest plain one, " +
                                         std::to_string(gathered_.nbytes()));
  }
  slot.payload = at::zeros({end}, gathered_.options().dtype(at::kByte));
  const at::Tensor payload_elements = slot.payload.view(gathered_.scalar_type()), gathered_bytes = gathered_.view(at::kByte);

  const std::vector<Own> own = own_of(parts.layout, members, rank);
  for (const Piece& piece : parts.layout.pieces) {
    const auto m = static_cast<size_t>(piece.member);
    const int64_t of_rank = piece.place / parts.layout.part;
    if (is_carried(piece.member)) {
      continue;
    }
    if (of_rank == rank) {
      slot.plain_part.push_back(alias(parts.part, piece.place - rank * parts.layout.part, {piece.count}));
      slot.plain_payload.push_back(alias(payload_elements, place[m] / element, {piece.count}));
    }
    slot.from_payload.push_back(alias(gathered_, (of_rank * end + place[m]) / element, {piece.count}));
    slot.from_plain.push_back(alias(gathered_, (of_rank * slot.plain_bytes + place[m]) / element, {piece.count}));
    slot.to_plain.push_back(slot.runs[static_cast<size_t>(&piece - parts.layout.pieces.data())].memory);
  }
  for (int64_t member = 0; member < members; ++member) {
    if (!is_carried(member)) {
      continue;
    }
    const auto m = static_cast<size_t>(member);
    const int64_t rows = rows_of(member), columns = c10::multiply_integers(parts.shapes[m]) / std::max<int64_t>(1, rows), most = each(member);
    const auto range = [&](int64_t r) { return std::pair(std::min(r * most, rows), std::min((r + 1) * most, rows)); };
    const auto [first, last] = range(rank);
    Carried carried{.id = parts.ids[m], .part = parts.part.narrow(0, own[m].place, (last - first) * columns).view({last - first, columns}),
                    .own = slot.payload.narrow(0, place[m], (last - first) * row_bytes[m]).view({last - first, row_bytes[m]}), .rows = {}, .row_begin = {}};
    for (int64_t r = 0; r < ranks; ++r) {
      const auto [begin, stop] = range(r);
      carried.rows.push_back(gathered_bytes.narrow(0, r * end + place[m], (stop - begin) * row_bytes[m]).view({stop - begin, row_bytes[m]}));
      carried.row_begin.push_back(begin);
    }
    slot.carried.push_back(std::move(carried));
  }
}

void Slots::begin_window() {
  is_evaluating_ = false;
  std::map<std::pair<int64_t, int64_t>, at::Tensor> parts;  // units and parameters in their order
  for (Slot& slot : groups_) {
    slot.is_encoded = slot.is_decoded = false;
    for (const Carried& carried : slot.carried) {
      parts.emplace(carried.id, carried.part);
    }
  }
  if (parts.empty()) {
    return;
  }
  std::vector<at::Tensor> ordered;
  for (const auto& [id, part] : parts) {
    ordered.push_back(part);
  }
  at::NoGradGuard no_grad;
  const at::Tensor magnitudes = codec_->magnitudes(ordered);
  comm_->all_reduce(magnitudes, Reduction::max, "weight magnitudes")->wait();
  codec_->set_magnitudes(magnitudes);
}

void Slots::encode(Slot& slot) {
  at::NoGradGuard no_grad;
  if (!slot.plain_part.empty()) {
    at::_foreach_copy_(slot.plain_payload, slot.plain_part);
  }
  for (const Carried& carried : slot.carried) {
    codec_->encode(carried.id.first, carried.id.second, carried.part, carried.own);
  }
  slot.is_encoded = true;
}

void Slots::start(int64_t group) {
  Slot& slot = groups_[static_cast<size_t>(group)];
  const GroupParts& parts = slot.parts;
  if (is_coded(slot)) {
    if (!slot.is_encoded) {
      encode(slot);
    }
    // What was decoded serves for the whole window; what is given back in between is the rest.
    const int64_t bytes = slot.is_decoded ? slot.plain_bytes : slot.payload.numel();
    if (bytes > 0) {
      work_ = comm_->all_gather(gathered_.view(at::kByte).narrow(0, 0, parts.layout.ranks * bytes), slot.payload.narrow(0, 0, bytes), parts.name);
    }
    return;
  }
  if (slot.whole_carried.numel() > 0 && slot.whole_carried.storage().nbytes() == 0) {
    const at::Tensor memory = at::empty({slot.whole_carried.numel()}, slot.whole_carried.options());
    point_at(slot.whole_carried.storage(), memory, 0, static_cast<int64_t>(memory.nbytes()));
  }
  if (parts.layout.part == 0) {
    return;
  }
  const int64_t holder = holder_[static_cast<size_t>(slot.slot)];
  comes_straight_ = holder < 0 || holder == group;
  if (!gathered_.defined() && !(comes_straight_ && comm_->gathers_straight())) {
    make_buffer();
  }
  const at::Tensor buffer = gathered_.defined() ? gathered_.narrow(0, 0, parts.layout.elements()) : at::Tensor();
  work_ = comes_straight_ ? comm_->all_gather_to(slot.runs, buffer, parts.part, parts.name) : comm_->all_gather(buffer, parts.part, parts.name);
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
    if (is_coded(slot)) {
      if (!slot.to_plain.empty()) {
        at::_foreach_copy_(slot.to_plain, slot.is_decoded ? slot.from_plain : slot.from_payload);
      }
    } else if (!comes_straight_) {
      if (slot.from.empty()) {
        for (const PartRun& run : slot.runs) {
          slot.from.push_back(alias(gathered_, run.place, {run.memory.numel()}));
          slot.to.push_back(run.memory);
        }
      }
      at::_foreach_copy_(slot.to, slot.from);
    }
  }
  if (is_coded(slot) && !slot.is_decoded) {
    for (const Carried& carried : slot.carried) {
      for (size_t rank = 0; rank < carried.rows.size(); ++rank) {
        if (carried.rows[rank].size(0) > 0) {
          codec_->decode(carried.id.first, carried.id.second, carried.row_begin[rank], carried.rows[rank]);
        }
      }
      codec_->decoded(carried.id.first, carried.id.second);
    }
    slot.is_decoded = true;
  }
  return pushed_out;
}

void Slots::discard(int64_t group) {
  if (work_ != nullptr) {
    work_->wait();
    work_.reset();
  }
  give_back(group);
}

// The slot keeps its memory; what the codec carries has some for an evaluation's use alone.
void Slots::give_back(int64_t group) {
  Slot& slot = groups_[static_cast<size_t>(group)];
  int64_t& holder = holder_[static_cast<size_t>(slot.slot)];
  holder = holder == group ? -1 : holder;
  if (slot.whole_carried.numel() > 0 && slot.whole_carried.storage().nbytes() > 0) {
    release(slot.whole_carried.storage());
  }
}

void Slots::plan(const std::vector<std::vector<Span>>& spans) {
  const std::vector<int64_t> shared = share_slots(gathered_.defined() ? spans : with_gathers(spans));
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
  auto bytes = gathered_.defined() ? static_cast<int64_t>(gathered_.nbytes()) : int64_t{0};
  std::vector<const void*> counted;
  for (const Slot& slot : groups_) {
    if (std::find(counted.begin(), counted.end(), slot.memory.unsafeGetTensorImpl()) == counted.end()) {
      counted.push_back(slot.memory.unsafeGetTensorImpl());
      bytes += static_cast<int64_t>(slot.memory.nbytes());
    }
    bytes += static_cast<int64_t>(slot.whole_carried.storage().nbytes());
    bytes += slot.payload.defined() ? static_cast<int64_t>(slot.payload.nbytes()) : 0;
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
