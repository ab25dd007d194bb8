#include "core/train/staging.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/plan/plan.hpp"

namespace sf {
namespace {

constexpr int64_t kBlockBytes = int64_t{64} << 20;       // a power of two: what the allocator of page-locked memory rounds to
constexpr int64_t kSmallRing = 4 * kBlockBytes;          // for a writer that training waits for anyway
constexpr int64_t kRingBlocks = 4;                       // one filled, one written, two between them
constexpr int64_t kAlignment = 64;                       // pieces begin at whole elements of any type, and at a cache line

int64_t rounded_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.detach().reshape({-1}).view(at::kByte); }

}  // namespace

bool writes_beside_training(const Plan& plan) {
  return std::any_of(plan.stack.begin(), plan.stack.end(), [](const PlanPlugin& plugin) {
    return plugin.slot == "checkpoint" && std::find(plugin.provides.begin(), plugin.provides.end(), "async-commit") != plugin.provides.end();
  });
}

StagingSize staging_size(const Plan& plan, int64_t snapshot_bytes) {
  const bool is_beside = writes_beside_training(plan);
  const int64_t wanted = plan.get<int64_t>("checkpoint.staging_bytes");
  const int64_t room = wanted > 0 ? wanted : is_beside ? snapshot_bytes : kSmallRing;
  StagingSize size;
  if (room >= snapshot_bytes) {
    size.bytes = snapshot_bytes;
    size.block_bytes = kBlockBytes;
    size.detail = is_beside ? "host memory, a whole snapshot: training goes on while it is written" : "host memory, a whole snapshot; training waits for the disk";
  } else {
    size.is_whole = false;
    size.block_bytes = std::min(kBlockBytes, std::max(kAlignment, room / kRingBlocks / kAlignment * kAlignment));
    size.bytes = size.block_bytes * std::max<int64_t>(1, room / size.block_bytes);
    size.detail = format("host memory, a ring that {} pass through: a save waits for the disk", human_bytes(static_cast<uint64_t>(snapshot_bytes)));
  }
  return size;
}

Staging::Staging(const std::vector<int64_t>& tensor_bytes, const StagingSize& size, at::Device device) : size_(size), device_(device) {
  int64_t place = 0;
  for (size_t i = 0; i < tensor_bytes.size(); ++i) {
    int64_t offset = 0;
    do {  // a tensor of nothing is a piece of nothing
      const int64_t left_in_block = size.block_bytes - place % size.block_bytes;
      const int64_t bytes = std::min(tensor_bytes[i] - offset, left_in_block);
      pieces_.push_back({.tensor = i, .offset = offset, .bytes = bytes, .block = place / size.block_bytes, .block_offset = place % size.block_bytes});
      offset += bytes;
      place += bytes;
    } while (offset < tensor_bytes[i]);
    place = rounded_up(place);
  }
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(device.is_cuda());
  const int64_t room = size.is_whole ? place : size.bytes;
  for (int64_t at = 0; at < std::max<int64_t>(room, 1); at += size.block_bytes) {
    blocks_.push_back(at::empty({std::min(size.block_bytes, std::max<int64_t>(room - at, 1))}, options));
    if (!device.is_cuda()) {
      blocks_.back().zero_();  // touched, as page-locked memory is by itself: the first save is as quick as the others
    }
  }
  size_.bytes = std::max<int64_t>(room, 1);
  lent_.assign(blocks_.size(), 0);
  if (device.is_cuda()) {
    copies_ = std::make_unique<c10::Stream>(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false));
    arrived_ = std::make_unique<c10::Event>(device.type());
    held_from_ = std::make_unique<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    held_to_ = std::make_unique<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  }
}

Staging::~Staging() {
  if (is_under_way_ && arrived_) {
    arrived_->synchronize();  // the device still writes here
  }
}

char* Staging::place_of(const Piece& piece) {
  return static_cast<char*>(blocks_[slot_of(piece.block)].mutable_data_ptr()) + piece.block_offset;
}

void Staging::copy(const Piece& piece) {
  if (piece.bytes == 0) {  // and perhaps of no address
    return;
  }
  const at::Tensor& tensor = tensors_[piece.tensor];
  if (tensor.is_cpu()) {
    std::memcpy(place_of(piece), static_cast<const char*>(tensor.const_data_ptr()) + piece.offset, static_cast<size_t>(piece.bytes));
  } else {
    blocks_[slot_of(piece.block)].narrow(0, piece.block_offset, piece.bytes).copy_(bytes_of(tensor).narrow(0, piece.offset, piece.bytes), /*non_blocking=*/true);
  }
}

void Staging::take(std::vector<at::Tensor> tensors) {
  at::NoGradGuard no_grad;
  tensors_ = std::move(tensors);
  for (const Piece& piece : pieces_) {
    SF_CHECK(piece.tensor < tensors_.size() && tensors_[piece.tensor].is_contiguous() &&
                 piece.offset + piece.bytes <= static_cast<int64_t>(tensors_[piece.tensor].nbytes()),
             "tensor {} of a snapshot is not what was announced", piece.tensor);
  }
  if (!size_.is_whole) {
    return;
  }
  is_under_way_ = true;
  if (!copies_) {
    host_held_seconds_ = 0;
    host_copies_ = std::async(std::launch::async, [this] {
      for (const Piece& piece : pieces_) {
        copy(piece);
      }
    });
    return;
  }
  // Behind the step that was enqueued before, and before anything that changes the tensors: hold_updates.
  c10::Event step_done(device_.type());
  step_done.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  step_done.block(*copies_);
  const c10::StreamGuard here(*copies_);
  for (const at::Tensor& tensor : tensors_) {
    if (tensor.is_cuda()) {
      tensor.record_stream(*copies_);  // a weight may lend its memory in the next window
    }
  }
  for (const Piece& piece : pieces_) {
    copy(piece);
  }
  arrived_->record(*copies_);
}

void Staging::hold_updates() {
  if (!is_under_way_) {
    return;
  }
  is_under_way_ = false;
  if (!copies_) {
    const auto start = std::chrono::steady_clock::now();
    host_copies_.wait();
    host_held_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return;
  }
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  held_from_->record(current);
  arrived_->block(current);
  held_to_->record(current);
  was_held_ = true;
}

double Staging::held_seconds() const {
  if (!copies_) {
    return host_held_seconds_;
  }
  return was_held_ && held_to_->query() ? held_from_->elapsedTime(*held_to_) * 1e-3 : 0.0;
}

bool Staging::is_ready() {
  if (!size_.is_whole) {
    return true;
  }
  return copies_ ? arrived_->query() : host_copies_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void Staging::wait_for_slot(int64_t slot) {
  std::unique_lock lock(mutex_);
  given_back_.wait(lock, [&] { return lent_[static_cast<size_t>(slot)] == 0; });
}

void Staging::hand_over(const std::function<void(TensorPiece)>& put) {
  at::NoGradGuard no_grad;
  if (size_.is_whole) {
    copies_ ? arrived_->synchronize() : host_copies_.wait();
  }
  for (size_t first = 0; first < pieces_.size();) {
    size_t last = first;
    while (last < pieces_.size() && pieces_[last].block == pieces_[first].block) {
      ++last;
    }
    const size_t slot = slot_of(pieces_[first].block);
    if (!size_.is_whole) {
      wait_for_slot(static_cast<int64_t>(slot));
      if (copies_) {
        c10::Event step_done(device_.type());
        step_done.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
        step_done.block(*copies_);
        const c10::StreamGuard here(*copies_);
        for (size_t i = first; i < last; ++i) {
          copy(pieces_[i]);
        }
        arrived_->record(*copies_);
        arrived_->synchronize();
      } else {
        for (size_t i = first; i < last; ++i) {
          copy(pieces_[i]);
        }
      }
    }
    for (size_t i = first; i < last; ++i) {
      {
        const std::lock_guard lock(mutex_);
        ++lent_[slot];
      }
      const auto give_back = [this, slot] {
        const std::lock_guard lock(mutex_);
        --lent_[slot];
        given_back_.notify_all();
      };
      put({.tensor = pieces_[i].tensor, .offset = static_cast<uint64_t>(pieces_[i].offset), .data = place_of(pieces_[i]),
           .bytes = static_cast<uint64_t>(pieces_[i].bytes), .given_back = give_back});
    }
    first = last;
  }
}

}  // namespace sf
