#include "core/train/batch.hpp"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "core/base/error.hpp"

namespace sf {
namespace {

// The sample's number of block slots: the length of its slot fields.
int64_t slots_of(const Sample& sample, const Description& description) {
  int64_t slots = 0;
  for (const BatchField& field : description.fields) {
    if (field.axis == Axis::slots) {
      slots = std::max(slots, sample.tensors.at(field.name).size(0));
    }
  }
  return slots;
}

}  // namespace

std::vector<int64_t> BatchShape::lengths() const {
  if (!is_static) {
    return {};
  }
  std::vector<int64_t> all = buckets;
  if (all.empty() || all.back() < max_tokens) {
    all.push_back(max_tokens);
  }
  return all;
}

int64_t BatchShape::padded_tokens(int64_t tokens) const {
  if (!is_static) {
    return tokens;
  }
  for (const int64_t length : lengths()) {
    if (length >= tokens) {
      return length;
    }
  }
  throw Error(ExitCode::kData, format("a sample of {} tokens is longer than the largest static length, {}", tokens, max_tokens),
              "raise data.max_length");
}

BatchFields::BatchFields(const Description& description, const Sample& prototype)
    : static_slots_(description.slots), prototype_tokens_(prototype.tokens), prototype_slots_(slots_of(prototype, description)),
      prototype_index_(prototype.index) {
  std::vector<BatchField> wanted;
  for (const FeatureRead& read : description.reads) {
    const bool has = prototype.tensors.count(read.name) != 0;
    if (!read.optional || has) {
      wanted.push_back({.name = read.name, .axis = Axis::tokens, .pad_value = 0});
    }
    if (read.optional) {
      (has ? optional_ : missing_).push_back(read.name);
    }
  }
  wanted.insert(wanted.end(), description.fields.begin(), description.fields.end());
  for (const BatchField& field : wanted) {
    const auto found = prototype.tensors.find(field.name);
    SF_CHECK(found != prototype.tensors.end(), "a prepared sample lacks '{}', which describe() promises", field.name);
    const at::Tensor& tensor = found->second;
    const size_t skip = field.axis == Axis::none ? 0 : 1;
    SF_CHECK(static_cast<size_t>(tensor.dim()) >= skip, "field '{}' has no axis to pad", field.name);
    fields_.push_back({.what = field, .dtype = tensor.scalar_type(),
                       .trailing = std::vector<int64_t>(tensor.sizes().begin() + skip, tensor.sizes().end())});
  }
}

Batch BatchFields::stack(const std::vector<std::optional<Sample>>& rows, const BatchShape& shape) const {
  Batch batch;
  batch.rows = static_cast<int64_t>(rows.size());
  int64_t longest = 0, widest = 0;
  for (const auto& row : rows) {
    batch.sample_indices.push_back(row ? row->index : -1);
    if (!row) {
      continue;
    }
    longest = std::max(longest, row->tokens);
    for (const auto& [names, has] : {std::pair(&optional_, true), std::pair(&missing_, false)}) {
      for (const std::string& name : *names) {
        if ((row->tensors.count(name) != 0) != has) {
          throw Error(ExitCode::kData,
                      format("sample {} {} the optional feature '{}', but sample {} {}", row->index, has ? "lacks" : "has", name, prototype_index_,
                             has ? "has it" : "does not"),
                      "optional features are in all samples or in none: capture the features again, or take that one out");
        }
      }
    }
    for (const Field& field : fields_) {
      if (field.what.axis == Axis::slots) {
        widest = std::max(widest, row->tensors.at(field.what.name).size(0));
      }
    }
  }
  const bool all_dead = std::all_of(rows.begin(), rows.end(), [](const auto& row) { return !row; });
  batch.tokens = shape.padded_tokens(all_dead ? prototype_tokens_ : longest);
  batch.slots = shape.is_static ? static_slots_ : all_dead ? prototype_slots_ : widest;

  for (const Field& field : fields_) {
    std::vector<int64_t> sizes = {batch.rows};
    if (field.what.axis != Axis::none) {
      sizes.push_back(field.what.axis == Axis::tokens ? batch.tokens : batch.slots);
    }
    sizes.insert(sizes.end(), field.trailing.begin(), field.trailing.end());
    at::Tensor stacked = at::empty(sizes, at::TensorOptions().dtype(field.dtype).pinned_memory(shape.is_pinned));
    for (size_t row = 0; row < rows.size(); ++row) {
      at::Tensor target = stacked.select(0, static_cast<int64_t>(row));
      if (!rows[row]) {
        target.fill_(field.what.pad_value);
        continue;
      }
      const at::Tensor& tensor = rows[row]->tensors.at(field.what.name);
      if (field.what.axis != Axis::none) {
        SF_CHECK(tensor.size(0) <= target.size(0), "field '{}' of sample {} has {} entries, the batch holds {}", field.what.name,
                 rows[row]->index, tensor.size(0), target.size(0));
        target.narrow(0, tensor.size(0), target.size(0) - tensor.size(0)).fill_(field.what.pad_value);
        target = target.narrow(0, 0, tensor.size(0));
      }
      target.copy_(tensor);
    }
    batch.tensors.emplace(field.what.name, std::move(stacked));
  }
  return batch;
}

Batch to_device(const Batch& batch, const Description& description, at::Device device, at::ScalarType dtype) {
  Batch moved = batch;
  for (auto& [name, tensor] : moved.tensors) {
    if (device.is_cuda() && tensor.is_cpu() && !tensor.is_pinned()) {
      tensor = tensor.pin_memory();
    }
    tensor = tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true);
  }
  for (const FeatureRead& read : description.reads) {
    const auto found = moved.tensors.find(read.name);
    if (found != moved.tensors.end() && found->second.is_floating_point()) {
      found->second = found->second.to(dtype);
    }
  }
  return moved;
}

DeviceFeed::DeviceFeed(const Description& description, at::Device device, at::ScalarType dtype)
    : description_(description), device_(device), dtype_(dtype) {
  if (device.is_cuda()) {
    copies_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  }
}

void DeviceFeed::send(const Batch& batch) {
  if (!copies_) {
    sent_.push_back({to_device(batch, description_, device_, dtype_), nullptr});
    return;
  }
  const c10::StreamGuard here(*copies_);
  Sent sent{to_device(batch, description_, device_, dtype_), std::make_shared<c10::Event>(device_.type())};
  sent.arrived->record(*copies_);
  sent_.push_back(std::move(sent));
}

Batch DeviceFeed::take() {
  SF_CHECK(!sent_.empty(), "a batch was taken that nobody sent");
  Sent sent = std::move(sent_.front());
  sent_.pop_front();
  if (sent.arrived) {
    const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    sent.arrived->block(current);
    for (auto& [name, tensor] : sent.batch.tensors) {
      tensor.record_stream(current);  // its memory belongs to the copying stream
    }
  }
  return std::move(sent.batch);
}

}  // namespace sf
