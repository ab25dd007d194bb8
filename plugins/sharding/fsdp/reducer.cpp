#include "plugins/sharding/fsdp/reducer.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

namespace sf::fsdp {

Reducer::Reducer(std::vector<Group> groups, Options options) : groups_(std::move(groups)), options_(options) {
  const auto wire = at::TensorOptions().device(options_.device).dtype(options_.dtype);
  int64_t largest = 0, reducing = 0;
  for (const Group& group : groups_) {
    largest = std::max(largest, group.layout.elements());
    reducing += group.layout.part > 0 ? 1 : 0;
    const int64_t part = options_.replicate ? 0 : group.layout.part;
    reduced_.push_back(at::zeros({part}, wire.dtype(at::kFloat)));
  }
  const int64_t count = std::min(options_.max_inputs, reducing);  // more than one for each group could never fill
  for (int64_t i = 0; i < count; ++i) {
    inputs_.push_back(at::zeros({largest}, wire));
    options_.comm->register_buffer(inputs_.back());
  }
}

void Reducer::reduce(int64_t group, const std::vector<at::Tensor>& gradients) {
  const Layout& layout = groups_[static_cast<size_t>(group)].layout;
  if (layout.part == 0) {
    return;
  }
  at::NoGradGuard no_grad;
  while (static_cast<int64_t>(in_flight_.size()) >= buffers()) {
    finish_oldest();
  }
  const at::Tensor input = inputs_[static_cast<size_t>(next_input_)].narrow(0, 0, layout.elements());
  next_input_ = (next_input_ + 1) % buffers();

  // This rank's own share is added where it lies, if all of it is there in float32; what the others take is packed for them.
  const int64_t own_begin = options_.replicate ? layout.elements() : options_.comm->rank() * layout.part, own_end = own_begin + layout.part;
  const auto own_of_piece = [&](const Piece& piece) {  // the range of it that is this rank's; a flat layout's pieces may reach into several parts
    const int64_t begin = std::clamp(own_begin, piece.place, piece.place + piece.count), end = std::clamp(own_end, piece.place, piece.place + piece.count);
    return std::pair(begin - piece.place, end - piece.place);
  };
  const bool is_added_where_it_lies = std::all_of(layout.pieces.begin(), layout.pieces.end(), [&](const Piece& piece) {
    const at::Tensor& gradient = gradients[static_cast<size_t>(piece.member)];
    const auto [begin, end] = own_of_piece(piece);
    return begin == end || (gradient.defined() && gradient.scalar_type() == at::kFloat);
  });
  std::vector<PartRun> own;
  std::vector<at::Tensor> from, to, zeros;
  for (const Run& gap : layout.gaps) {
    zeros.push_back(input.narrow(0, gap.place, gap.count));
  }
  for (const Piece& piece : layout.pieces) {
    const at::Tensor place = input.narrow(0, piece.place, piece.count);
    const at::Tensor& gradient = gradients[static_cast<size_t>(piece.member)];
    if (!gradient.defined()) {
      zeros.push_back(place);
      continue;
    }
    const at::Tensor values = gradient.view({-1}).narrow(0, piece.begin, piece.count);
    const auto [begin, end] = is_added_where_it_lies ? own_of_piece(piece) : std::pair<int64_t, int64_t>(0, 0);
    if (begin < end) {
      own.push_back({.memory = values.narrow(0, begin, end - begin), .place = piece.place + begin});
    }
    for (const auto& [first, last] : {std::pair<int64_t, int64_t>(0, begin), std::pair<int64_t, int64_t>(end, piece.count)}) {
      if (first < last) {
        from.push_back(values.narrow(0, first, last - first));
        to.push_back(place.narrow(0, first, last - first));
      }
    }
  }
  if (!zeros.empty()) {
    at::_foreach_zero_(zeros);
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  const std::string& label = groups_[static_cast<size_t>(group)].name;
  InFlight reduction{.group = group, .input = input, .gradients = gradients, .work = nullptr};
  if (options_.replicate) {
    reduction.work = options_.comm->all_reduce(input, Reduction::sum, label, options_.channel);
  } else {
    reduction.work = own.empty() ? options_.comm->reduce_scatter(reduced_[static_cast<size_t>(group)], input, label, options_.channel)
                                 : options_.comm->reduce_scatter_from(own, reduced_[static_cast<size_t>(group)], input, label, options_.channel);
  }
  in_flight_.push_back(std::move(reduction));
}

void Reducer::finish_oldest() {
  InFlight oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  oldest.work->wait();
  if (options_.replicate) {
    std::vector<at::Tensor> from, to;
    for (const Piece& piece : groups_[static_cast<size_t>(oldest.group)].layout.pieces) {
      const at::Tensor& gradient = oldest.gradients[static_cast<size_t>(piece.member)];
      if (gradient.defined()) {
        to.push_back(gradient.view({-1}).narrow(0, piece.begin, piece.count));
        from.push_back(oldest.input.narrow(0, piece.place, piece.count));
      }
    }
    if (!to.empty()) {
      at::_foreach_copy_(to, from);
    }
  }
}

void Reducer::drain() {
  at::NoGradGuard no_grad;
  while (!in_flight_.empty()) {
    finish_oldest();
  }
}

void Reducer::abandon() {
  while (!in_flight_.empty()) {
    const InFlight given_up = std::move(in_flight_.front());
    in_flight_.pop_front();
    try {
      given_up.work->wait();
    } catch (const std::logic_error&) {  // a mistake of ours
      throw;
    } catch (const std::exception&) {  // the window is lost already; whoever communicates next learns of what is wrong with the ranks
    }
  }
}

int64_t Reducer::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& input : inputs_) {
    bytes += static_cast<int64_t>(input.nbytes());
  }
  for (const at::Tensor& reduced : reduced_) {
    bytes += static_cast<int64_t>(reduced.nbytes());
  }
  return bytes;
}

}  // namespace sf::fsdp
