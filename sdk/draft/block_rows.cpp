#include "sdk/draft/block_rows.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "sf/error.hpp"

namespace sf::draft {
namespace {

struct Block {
  int64_t sequence, slot, anchor;
  int64_t last_supervised;  // k
};

struct Row {
  int64_t index, label, predecessor, state;
  float mask;
  int64_t slot, cell;
};

template <class T>
at::Tensor tensor_of(const std::vector<T>& values, at::ScalarType type) {
  return at::tensor(at::ArrayRef<T>(values), at::TensorOptions().dtype(type));
}

// One number of each row.
template <class T>
at::Tensor column_of(const std::vector<Row>& rows, T Row::*member, at::ScalarType type) {
  std::vector<T> values;
  values.reserve(rows.size());
  for (const Row& row : rows) {
    values.push_back(row.*member);
  }
  return tensor_of(values, type);
}

// One read and one write for each row of x: a gradient by index_add is three times that, row after row.
struct TakeRows : torch::autograd::Function<TakeRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x_nh, const at::Tensor& index_r) {
    context->save_for_backward({index_r});
    context->saved_data["rows"] = x_nh.size(0);
    return x_nh.index_select(0, index_r);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const at::Tensor index_r = context->get_saved_variables()[0];
    const int64_t r = index_r.size(0), n = context->saved_data["rows"].toInt();
    at::Tensor reader_n = at::full({n}, r, index_r.options());
    reader_n.scatter_reduce_(0, index_r, at::arange(r, index_r.options()), "amin");
    at::Tensor gradient_nh = gradients[0].index_select(0, reader_n.clamp_max(r - 1));
    gradient_nh.masked_fill_(at::eq(reader_n, r).unsqueeze(1), 0);
    return {gradient_nh, at::Tensor()};
  }
};

}  // namespace

at::Tensor take_rows(const at::Tensor& x_nh, const at::Tensor& index_r) { return TakeRows::apply(x_nh, index_r); }

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
  const int64_t b = input_ids_bs.size(0), s = input_ids_bs.size(1), w = anchors_bw.size(1), j = options.block_size, p = options.drafted();
  if (options.whole_blocks && options.by_position) {
    throw Error(ExitCode::kInternal, "rows of whole blocks stand block after block");
  }
  const at::Tensor ids_tensor = input_ids_bs.contiguous();
  const at::Tensor mask_tensor = loss_mask_bs.to(at::kFloat).contiguous();
  const auto ids = ids_tensor.accessor<int64_t, 2>();
  const auto mask = mask_tensor.accessor<float, 2>();
  const auto anchors = anchors_bw.accessor<int64_t, 2>();
  const auto keep = keep_bw.accessor<bool, 2>();
  const auto weight = [&](const Block& block, int64_t k) {
    const int64_t position = block.anchor + k;
    return position < s ? mask[block.sequence][position] : 0.0f;
  };
  const auto token = [&](const Block& block, int64_t k) { return ids[block.sequence][std::min(block.anchor + k, s - 1)]; };

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
      for (int64_t k = 1; k <= p; ++k) {
        if (options.until_gap ? weight(block, k) > 0.5f : weight(block, k) > 0) {
          block.last_supervised = k;
        } else if (options.until_gap) {
          break;
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
  const int64_t first = options.known_row_drafts ? 0 : 1;  // row that drafts the first token

  std::vector<Row> rows;
  std::vector<int64_t> block_index, sequences, anchor_token, grid_label(static_cast<size_t>(c * p), 0);
  std::vector<float> grid_mask(static_cast<size_t>(c * p), 0);
  for (int64_t i = 0; i < c; ++i) {
    const Block block = i < live ? blocks[static_cast<size_t>(i)] : Block{0, 0, 0, 0};
    block_index.push_back(block.sequence * w + block.slot);
    sequences.push_back(block.sequence);
    anchor_token.push_back(i < live ? token(block, 0) : 0);
    const int64_t last = options.whole_blocks ? p : block.last_supervised;
    for (int64_t k = 1; k <= p; ++k) {
      const auto place = static_cast<size_t>(i * p + k - 1);
      if (i < live) {
        grid_mask[place] = options.until_gap ? (k <= block.last_supervised ? 1.0f : 0.0f) : weight(block, k);
        grid_label[place] = token(block, k);
      }
      if (k <= last) {
        rows.push_back({.index = (block.sequence * w + block.slot) * j + first + k - 1,
                        .label = grid_label[place],
                        .predecessor = i < live ? token(block, k - 1) : 0,
                        .state = block.sequence * s + std::min(block.anchor + k - 1, s - 1),
                        .mask = grid_mask[place],
                        .slot = k,
                        .cell = static_cast<int64_t>(place)});
      }
    }
  }
  if (options.by_position) {
    std::stable_sort(rows.begin(), rows.end(), [](const Row& x, const Row& y) { return x.state < y.state; });
  }
  if (!options.whole_blocks) {
    const Row filler{.index = 0, .label = 0, .predecessor = 0, .state = rows.empty() ? 0 : rows.back().state, .mask = 0, .slot = 1, .cell = c * p};
    rows.resize(static_cast<size_t>(round_up(static_cast<int64_t>(rows.size()), options.multiple)), filler);
  }
  return {.index_r = column_of(rows, &Row::index, at::kLong),
          .label_r = column_of(rows, &Row::label, at::kLong),
          .predecessor_r = column_of(rows, &Row::predecessor, at::kLong),
          .state_r = column_of(rows, &Row::state, at::kLong),
          .mask_r = column_of(rows, &Row::mask, at::kFloat),
          .slot_r = column_of(rows, &Row::slot, at::kLong),
          .cell_r = column_of(rows, &Row::cell, at::kLong),
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

TeacherPlaces teacher_places(const at::Tensor& state_r, int64_t chunk_rows, int64_t multiple) {
  const int64_t r = state_r.numel();
  const int64_t* state = state_r.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> lists;
  std::vector<int64_t> index;
  for (int64_t row = 0; row < r; ++row) {
    if (row % chunk_rows == 0) {
      lists.emplace_back();
    }
    std::vector<int64_t>& list = lists.back();
    if (list.empty() || list.back() != state[row]) {
      list.push_back(state[row]);
    }
    index.push_back(static_cast<int64_t>(list.size()) - 1);
  }
  size_t longest = 1;
  for (const std::vector<int64_t>& list : lists) {
    longest = std::max(longest, list.size());
  }
  const int64_t t = (static_cast<int64_t>(longest) + multiple - 1) / multiple * multiple;
  std::vector<int64_t> places;
  for (std::vector<int64_t>& list : lists) {
    list.resize(static_cast<size_t>(t), list.back());
    places.insert(places.end(), list.begin(), list.end());
  }
  return {tensor_of(places, at::kLong).view({static_cast<int64_t>(lists.size()), t}), tensor_of(index, at::kLong)};
}

}  // namespace sf::draft
