#include "sdk/draft/block_rows.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "sf/error.hpp"

namespace sf::draft {
namespace {

struct Block {
  int64_t sequence, slot, anchor;
  int64_t last_supervised;  // j
};

template <class T>
at::Tensor tensor_of(const std::vector<T>& values, at::ScalarType type) {
  return at::tensor(at::ArrayRef<T>(values), at::TensorOptions().dtype(type));
}

}  // namespace

std::vector<int64_t> valid_anchors(const at::Tensor& loss_mask_s) {
  const at::Tensor mask = loss_mask_s.to(at::kFloat).contiguous();
  const float* supervised = mask.data_ptr<float>();
  std::vector<int64_t> valid;
  for (int64_t t = 0; t + 1 < mask.numel(); ++t) {
    if (supervised[t] > 0.5f && supervised[t + 1] > 0.5f) {
      valid.push_back(t);
    }
  }
  return valid;
}

std::vector<int64_t> choose_anchors(std::vector<int64_t> valid, const std::vector<uint64_t>& draws, int64_t count) {
  if (static_cast<int64_t>(valid.size()) > count) {
    const auto before = [&](int64_t a, int64_t b) {
      const uint64_t x = draws[static_cast<size_t>(a)], y = draws[static_cast<size_t>(b)];
      return x != y ? x < y : a < b;
    };
    std::nth_element(valid.begin(), valid.begin() + count, valid.end(), before);
    valid.resize(static_cast<size_t>(count));
    std::sort(valid.begin(), valid.end());
  }
  return valid;
}

BlockRows collect_block_rows(const at::Tensor& input_ids_bs, const at::Tensor& loss_mask_bs, const at::Tensor& anchors_bw,
                             const at::Tensor& keep_bw, const BlockRowsOptions& options) {
  const int64_t b = input_ids_bs.size(0), s = input_ids_bs.size(1), w = anchors_bw.size(1), j = options.block_size, p = j - 1;
  const at::Tensor ids_tensor = input_ids_bs.contiguous();
  const at::Tensor mask_tensor = loss_mask_bs.to(at::kFloat).contiguous();
  const auto ids = ids_tensor.accessor<int64_t, 2>();
  const auto mask = mask_tensor.accessor<float, 2>();
  const auto anchors = anchors_bw.accessor<int64_t, 2>();
  const auto keep = keep_bw.accessor<bool, 2>();
  const auto weight = [&](const Block& block, int64_t slot) {
    const int64_t position = block.anchor + slot;
    return position < s ? mask[block.sequence][position] : 0.0f;
  };
  const auto token = [&](const Block& block, int64_t slot) { return ids[block.sequence][std::min(block.anchor + slot, s - 1)]; };

  std::vector<Block> blocks;
  for (int64_t sequence = 0; sequence < b; ++sequence) {
    for (int64_t slot = 0; slot < w; ++slot) {
      if (!keep[sequence][slot]) {
        continue;
      }
      Block block{sequence, slot, anchors[sequence][slot], 0};
      if (block.anchor < 0 || block.anchor >= s) {
        throw Error(ExitCode::kInternal, "anchor " + std::to_string(block.anchor) + " lies outside " + std::to_string(s) + " tokens");
      }
      for (int64_t k = 1; k < j; ++k) {
        if (weight(block, k) > 0) {
          block.last_supervised = k;
        }
      }
      if (block.last_supervised > 0) {
        blocks.push_back(block);
      }
    }
  }
  const auto round_up = [](int64_t n, int64_t multiple) { return std::max<int64_t>(1, (n + multiple - 1) / multiple) * multiple; };
  const int64_t live = static_cast<int64_t>(blocks.size());
  const int64_t c = options.whole_blocks ? round_up(live, options.multiple) : std::max<int64_t>(1, live);

  std::vector<int64_t> index, label, predecessor, slots, cell, block_index, sequences, anchor_token, grid_label(static_cast<size_t>(c * p), 0);
  std::vector<float> row_mask, grid_mask(static_cast<size_t>(c * p), 0);
  for (int64_t i = 0; i < c; ++i) {
    const Block block = i < live ? blocks[static_cast<size_t>(i)] : Block{0, 0, 0, 0};
    block_index.push_back(block.sequence * w + block.slot);
    sequences.push_back(block.sequence);
    anchor_token.push_back(i < live ? token(block, 0) : 0);
    const int64_t last = options.whole_blocks ? p : block.last_supervised;
    for (int64_t k = 1; k <= p; ++k) {
      const auto place = static_cast<size_t>(i * p + k - 1);
      if (i < live) {
        grid_mask[place] = weight(block, k);
        grid_label[place] = token(block, k);
      }
      if (k <= last) {
        index.push_back((block.sequence * w + block.slot) * j + k);
        label.push_back(grid_label[place]);
        predecessor.push_back(i < live ? token(block, k - 1) : 0);
        row_mask.push_back(grid_mask[place]);
        slots.push_back(k);
        cell.push_back(static_cast<int64_t>(place));
      }
    }
  }
  if (!options.whole_blocks) {
    const int64_t rows = round_up(static_cast<int64_t>(index.size()), options.multiple);
    index.resize(static_cast<size_t>(rows), 0);
    label.resize(static_cast<size_t>(rows), 0);
    predecessor.resize(static_cast<size_t>(rows), 0);
    row_mask.resize(static_cast<size_t>(rows), 0);
    slots.resize(static_cast<size_t>(rows), 1);
    cell.resize(static_cast<size_t>(rows), c * p);
  }
  return {.index_r = tensor_of(index, at::kLong),
          .label_r = tensor_of(label, at::kLong),
          .predecessor_r = tensor_of(predecessor, at::kLong),
          .mask_r = tensor_of(row_mask, at::kFloat),
          .slot_r = tensor_of(slots, at::kLong),
          .cell_r = tensor_of(cell, at::kLong),
          .block_c = tensor_of(block_index, at::kLong),
          .sequence_c = tensor_of(sequences, at::kLong),
          .mask_cp = tensor_of(grid_mask, at::kFloat).view({c, p}),
          .label_cp = tensor_of(grid_label, at::kLong).view({c, p}),
          .anchor_token_c = tensor_of(anchor_token, at::kLong)};
}

at::Tensor to_grid(const at::Tensor& values_r, const at::Tensor& cell_r, int64_t c, int64_t p) {
  at::Tensor flat = at::zeros({c * p + 1}, values_r.options());
  flat.index_copy_(0, cell_r, values_r);
  return flat.narrow(0, 0, c * p).view({c, p});
}

}  // namespace sf::draft
