#include "plugins/algorithm/dspark/markov.hpp"

#include <ATen/ATen.h>

namespace sf {
namespace {

constexpr const char* kGate = "markov_head.gate_proj";
constexpr const char* kJoint = "markov_head.joint_proj";

// Block after block in one go, token after token: the state of a block starts at zero and passes to its next row.
at::Tensor rnn_bias(UnitContext& context, const MarkovRows& rows) {
  const int64_t r = rows.hidden_rh.size(0), x = rows.embedded_rx.size(1), c = rows.c, p = rows.p;
  // Cells without a row read row 0; what comes out of them is dropped again and sends no gradient.
  at::Tensor row_of_cell = at::zeros({c * p + 1}, rows.cell_r.options());
  row_of_cell.index_copy_(0, rows.cell_r, at::arange(r, rows.cell_r.options()));
  const at::Tensor input = at::cat({rows.embedded_rx, rows.hidden_rh}, 1).index_select(0, row_of_cell.narrow(0, 0, c * p)).view({c, p, -1});
  at::Tensor state = at::zeros({c, x}, rows.hidden_rh.options());
  std::vector<at::Tensor> out;
  for (int64_t k = 0; k < p; ++k) {
    const std::vector<at::Tensor> parts = context.linear(kJoint, at::cat({state, input.select(1, k)}, 1)).chunk(3, 1);
    const at::Tensor keep = at::sigmoid(parts[0]);
    state = at::add(at::mul(keep, state), at::mul(at::rsub(keep, 1), at::tanh(parts[1])));
    out.push_back(at::tanh(parts[2]));
  }
  const at::Tensor filler = at::zeros({1, x}, state.options());  // for rows that fill up
  const at::Tensor cells = at::cat({at::stack(out, 1).view({c * p, x}), filler}, 0);
  return cells.index_select(0, rows.cell_r);
}

}  // namespace

std::vector<ParameterSpec> markov_parameters(const DsparkConfig& config) {
  const int64_t h = config.layers.hidden_size, v = config.layers.vocab_size, x = config.markov_rank;
  const double std = config.layers.initializer_range;
  if (x == 0) {
    return {};
  }
  std::vector<ParameterSpec> list = {{.name = kMarkovEmbedding, .shape = {v, x}, .init = Init::normal, .init_std = std},
                                     {.name = kMarkovOutput, .shape = {v, x}, .init = Init::normal, .init_std = std}};
  const auto add_projection = [&](const std::string& name, int64_t out, int64_t in) {
    list.push_back({.name = name + ".weight", .shape = {out, in}, .init = Init::normal, .init_std = std});
    list.push_back({.name = name + ".bias", .shape = {out}, .init = Init::zeros});
  };
  if (config.markov_head == MarkovHead::kGated) {
    add_projection(kGate, x, h + x);
  } else if (config.markov_head == MarkovHead::kRnn) {
    add_projection(kJoint, 3 * x, 2 * x + h);
  }
  return list;
}

at::Tensor markov_bias(UnitContext& context, MarkovHead head, const MarkovRows& rows) {
  switch (head) {
    case MarkovHead::kVanilla: return rows.embedded_rx;
    case MarkovHead::kGated:
      return at::mul(at::sigmoid(context.linear(kGate, at::cat({rows.hidden_rh, rows.embedded_rx}, 1))), rows.embedded_rx);
    case MarkovHead::kRnn: return rnn_bias(context, rows);
  }
  return {};
}

}  // namespace sf
