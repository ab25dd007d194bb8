#include "core/train/capture.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/train/out_of_memory.hpp"
#include "sf/error.hpp"

namespace sf {
namespace {

// Of a weight that has lent its memory (TapeRunner::lend_weights) none is asked for: no graph reads it.
const void* address_of(const at::Tensor& parameter) {
  const char* const memory = static_cast<const char*>(parameter.storage().data());
  return memory == nullptr ? nullptr : memory + parameter.storage_offset() * static_cast<int64_t>(parameter.element_size());
}

using Clock = std::chrono::steady_clock;
using Nodes = std::vector<std::shared_ptr<ValueNode>>;

/// A tensor's place and form, without a hold on its memory: that belongs to the graphs' pool.
struct Fixed {
  void* address = nullptr;
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  bool is_defined = false;

  static Fixed of(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return {};
    }
    return {.address = const_cast<void*>(tensor.const_data_ptr()), .sizes = tensor.sizes().vec(), .strides = tensor.strides().vec(),
            .options = tensor.options().requires_grad(false), .is_defined = true};
  }
  [[nodiscard]] at::Tensor tensor() const {
    if (!is_defined) {
      return {};
    }
    return at::for_blob(address, sizes).strides(strides).options(options).target_device(options.device()).make_tensor();
  }
};

std::string signature_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "none";
  }
  return format("{} {} {}{}", c10::toString(tensor.scalar_type()), tensor.sizes().vec(), tensor.strides().vec(), tensor.requires_grad() ? " with gradient" : "");
}

std::vector<std::string> signatures_of(const Nodes& nodes) {
  std::vector<std::string> found;
  for (const auto& node : nodes) {
    found.push_back(signature_of(node->tensor));
  }
  return found;
}

std::string shapes_of(const Nodes& nodes) {
  std::string text;
  for (const auto& node : nodes) {
    if (node->tensor.defined() && node->tensor.dim() > 2) {
      text += format("{}{}", text.empty() ? "" : ", ", node->tensor.sizes().vec());
    }
  }
  return text;
}

template <class Body>
auto recorded(const std::string& name, Body&& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) {
      throw;
    }
    throw Error(ExitCode::kInternal, "unit '" + name + "' can't be recorded as a CUDA graph: " + error.what_without_backtrace(),
                "training.compile_blocks = false runs it step by step; a block that is recorded may not read from the device or look at values on the host");
  }
}

}  // namespace

struct BlockCapture::Use {
  int64_t unit = 0, use = 0;
  std::vector<std::string> signature;
  std::vector<const void*> parameters;         // addresses

  struct Source {
    int64_t use = -1, output = -1;             // of an earlier use, or
    size_t fixed = 0;                          // of a fixed input, which is filled before
  };
  std::vector<Source> sources;                 // by input
  std::vector<at::Tensor> leaves;              // by input; the same tensor for the same value
  std::vector<at::Tensor> wanted;              // leaves that want a gradient, each once
  std::vector<at::Tensor> graph_outputs;       // between the recording of forward and that of backward
  std::vector<Fixed> outputs;
  std::vector<bool> is_differentiable;
  std::unique_ptr<RecordedGraph> forward, backward;

  std::vector<bool> has_gradient;              // by output
  std::vector<at::Tensor> gradients;           // by output, at the addresses that backward reads
  std::vector<bool> is_copied;                 // by output: the gradient is copied there, else it must already be there
  std::vector<Fixed> found;                    // by wanted input
  std::vector<size_t> touched;                 // sinks
};

struct BlockCapture::Program {
  enum class State { warm, to_record, ready };
  State state = State::warm;
  std::vector<std::unique_ptr<Use>> uses;
  std::vector<at::Tensor> fixed_inputs;
  std::map<std::string, at::Tensor> fixed_gradients;   // by signature: backwards follow each other, so they share
  std::string shapes;
};

BlockCapture::BlockCapture(GraphRecorder& recorder, Options options) : recorder_(recorder), options_(options) {}
BlockCapture::~BlockCapture() = default;

void BlockCapture::begin_micro_step() {
  mode_ = Mode::undecided;
  current_ = nullptr;
  next_ = 0;
  made_.clear();
  copied_.clear();
  held_.clear();
  gradients_made_.clear();
}

void BlockCapture::abandon() {
  if (current_ != nullptr && mode_ != Mode::replay) {
    std::erase_if(programs_, [this](const auto& program) { return program.get() == current_; });
  }
  begin_micro_step();
}

BlockCapture::Program& BlockCapture::decide(const std::vector<std::string>& signature, const CapturedUnit& unit) {
  for (const auto& program : programs_) {
    if (program->uses.front()->unit == unit.unit && program->uses.front()->signature == signature) {
      mode_ = program->state == Program::State::to_record ? Mode::record : Mode::replay;
      return *program;
    }
  }
  if (static_cast<int64_t>(programs_.size()) >= options_.shapes_at_most) {
    throw Error(ExitCode::kUsage,
                format("[K3] training.compile_blocks: unit '{}' meets shape number {}, and {} are recorded at most", *unit.name, programs_.size() + 1,
                       options_.shapes_at_most),
                options_.static_shapes ? "the limit is 2 x (number of padded lengths) + 4: name the lengths in training.static_shape_buckets"
                                       : "training.static_shapes = true pads every batch to data.max_length or to a bucket; or training.compile_blocks = false");
  }
  programs_.push_back(std::make_unique<Program>());
  mode_ = Mode::eager;
  return *programs_.back();
}

bool BlockCapture::is_eager(const CapturedUnit& unit, const Nodes& inputs) {
  std::vector<std::string> signature = signatures_of(inputs);
  if (mode_ == Mode::undecided) {
    current_ = &decide(signature, unit);
    if (mode_ == Mode::eager) {
      current_->shapes = shapes_of(inputs);
    } else if (mode_ == Mode::record) {
      recorder_.make_room();  // what the eager micro-step took is cached, and can't serve the pool
    }
  }
  if (mode_ == Mode::eager) {
    auto use = std::make_unique<Use>();
    use->unit = unit.unit;
    use->use = unit.use;
    use->signature = std::move(signature);
    current_->uses.push_back(std::move(use));
    return true;
  }
  const bool is_known = next_ < current_->uses.size() && current_->uses[next_]->unit == unit.unit && current_->uses[next_]->use == unit.use &&
                        current_->uses[next_]->signature == signature;
  if (!is_known) {
    throw Error(ExitCode::kInternal, format("use {} of unit '{}' has other inputs than in earlier micro-steps whose first block had the same", unit.use, *unit.name),
                "training.compile_blocks replays what it has recorded: a micro-step's shapes must all follow from those of its first block");
  }
  return false;
}

// The leaves that a recorded use reads, at addresses that stay. Fixed inputs are filled.
std::vector<at::Tensor> BlockCapture::inputs_of(Use& use, const Nodes& nodes) {
  at::NoGradGuard no_grad;
  std::map<const ValueNode*, at::Tensor> leaf_of;
  for (const auto& node : nodes) {
    Use::Source source;
    at::Tensor there;
    if (const auto made = made_.find(node.get()); made != made_.end()) {
      source.use = made->second.use;
      source.output = made->second.output;
      there = current_->uses[static_cast<size_t>(source.use)]->outputs[static_cast<size_t>(source.output)].tensor();
    } else {
      const auto [copied, is_new] = copied_.emplace(node.get(), current_->fixed_inputs.size());
      if (is_new) {
        held_.emplace(copied->second, node);
        current_->fixed_inputs.push_back(node->tensor.detach().clone());  // keeps the strides of a dense tensor
      }
      source.fixed = copied->second;
      there = Fixed::of(current_->fixed_inputs[source.fixed]).tensor();
    }
    use.sources.push_back(source);
    auto [leaf, is_first] = leaf_of.emplace(node.get(), there);
    if (is_first && node->tensor.requires_grad()) {
      leaf->second.requires_grad_(true);
      use.wanted.push_back(leaf->second);
    }
    use.leaves.push_back(leaf->second);
  }
  return use.leaves;
}

// Before a replay: every value is where the graph reads it.
void BlockCapture::fill_inputs(const Use& use, const CapturedUnit& unit, const Nodes& nodes) {
  at::NoGradGuard no_grad;
  SF_CHECK(use.parameters.size() == unit.parameters->size(), "unit '{}': {} parameters, {} when it was recorded", *unit.name, unit.parameters->size(),
           use.parameters.size());
  for (size_t p = 0; p < use.parameters.size(); ++p) {
    SF_CHECK(address_of((*unit.parameters)[p]) == use.parameters[p], "unit '{}': parameter {} has moved since its graph was recorded", *unit.name, p);
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Use::Source& source = use.sources[i];
    if (source.use >= 0) {
      const auto made = made_.find(nodes[i].get());
      SF_CHECK(made != made_.end() && made->second.use == source.use && made->second.output == source.output,
               "unit '{}': input {} comes from elsewhere than when its graph was recorded", *unit.name, i);
      continue;
    }
    const auto held = held_.find(source.fixed);
    if (held == held_.end()) {
      current_->fixed_inputs[source.fixed].copy_(nodes[i]->tensor, /*non_blocking=*/true);
      held_.emplace(source.fixed, nodes[i]);
    } else {
      SF_CHECK(held->second == nodes[i], "unit '{}': input {} is not the value that it was when its graph was recorded", *unit.name, i);
    }
  }
}

BlockCapture::Made BlockCapture::forward(const CapturedUnit& unit, const Nodes& nodes) {
  const size_t place = next_++;
  Use& use = *current_->uses[place];
  Made result;
  result.place = static_cast<int64_t>(place);
  if (mode_ == Mode::replay) {
    fill_inputs(use, unit, nodes);
    use.forward->replay();
    ++replays_;
    for (const Fixed& output : use.outputs) {
      result.outputs.push_back(output.tensor());
    }
    result.is_differentiable = use.is_differentiable;
    return result;
  }

  const auto start = Clock::now();
  (void)inputs_of(use, nodes);
  for (const at::Tensor& parameter : *unit.parameters) {
    use.parameters.push_back(address_of(parameter));
  }
  const bool has_source = !use.wanted.empty() || std::any_of(unit.parameters->begin(), unit.parameters->end(), [](const at::Tensor& p) { return p.requires_grad(); });
  const auto body = [&use, run = unit.forward, recompute = unit.recompute]() -> std::vector<at::Tensor> {
    at::AutoGradMode record(!recompute);
    std::vector<at::Tensor> outputs = run(use.leaves), detached;
    for (const at::Tensor& output : outputs) {
      detached.push_back(output.defined() ? output.detach() : output);
    }
    use.graph_outputs = recompute ? std::vector<at::Tensor>() : std::move(outputs);
    return detached;
  };
  use.forward = recorded(*unit.name, [&] { return recorder_.record(body, result.outputs); });
  for (size_t i = 0; i < result.outputs.size(); ++i) {
    use.outputs.push_back(Fixed::of(result.outputs[i]));
    use.is_differentiable.push_back(result.outputs[i].defined() && (unit.recompute ? has_source && result.outputs[i].is_floating_point()
                                                                                    : use.graph_outputs[i].requires_grad()));
  }
  result.is_differentiable = use.is_differentiable;
  milliseconds_ += std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  return result;
}

void BlockCapture::note_outputs(int64_t place, const Nodes& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    made_[outputs[i].get()] = {.use = place, .output = static_cast<int64_t>(i)};
  }
}

at::Tensor BlockCapture::fixed_gradient(const at::Tensor& like_output) {
  at::Tensor& shared = current_->fixed_gradients[signature_of(like_output)];
  if (!shared.defined()) {
    shared = at::empty_like(like_output);
  }
  return shared;
}

std::vector<at::Tensor> BlockCapture::backward(int64_t place, const CapturedUnit& unit, const std::vector<at::Tensor>& gradients) {
  at::NoGradGuard no_grad;
  Use& use = *current_->uses[static_cast<size_t>(place)];
  std::vector<bool> has_gradient;
  for (size_t i = 0; i < gradients.size(); ++i) {
    has_gradient.push_back(gradients[i].defined() && use.is_differentiable[i]);
  }
  const bool has_any = std::find(has_gradient.begin(), has_gradient.end(), true) != has_gradient.end();
  std::vector<at::Tensor> found;
  if (mode_ == Mode::replay) {
    SF_CHECK(has_gradient == use.has_gradient, "unit '{}', use {}: other outputs have gradients than when its graph was recorded", *unit.name, use.use);
    if (!has_any) {
      return std::vector<at::Tensor>(use.wanted.size());
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (has_gradient[i] && use.is_copied[i]) {
        use.gradients[i].copy_(gradients[i]);
      } else if (has_gradient[i]) {
        SF_CHECK(gradients[i].const_data_ptr() == use.gradients[i].const_data_ptr(), "unit '{}', use {}: the gradient of output {} lies elsewhere than when its graph was recorded",
                 *unit.name, use.use, i);
      }
    }
    use.backward->replay();
    ++replays_;
    for (const size_t sink : use.touched) {
      (*unit.sinks)[sink].touch();
    }
    for (const Fixed& one : use.found) {
      found.push_back(one.tensor());
    }
    return found;
  }

  const auto start = Clock::now();
  use.has_gradient = has_gradient;
  if (!has_any) {
    use.graph_outputs.clear();
    return std::vector<at::Tensor>(use.wanted.size());
  }
  use.gradients.assign(gradients.size(), at::Tensor());
  use.is_copied.assign(gradients.size(), false);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!has_gradient[i]) {
      continue;
    }
    const Fixed& output = use.outputs[i];
    const at::Tensor like = output.tensor();
    const bool stays = gradients_made_.count(gradients[i].const_data_ptr()) > 0 && gradients[i].scalar_type() == like.scalar_type();
    if (stays) {
      use.gradients[i] = Fixed::of(gradients[i]).tensor();
    } else {
      use.is_copied[i] = true;
      // Two outputs of one use with the same form need a place each.
      const at::Tensor shared = fixed_gradient(like);
      const bool is_taken = std::any_of(use.gradients.begin(), use.gradients.end(), [&](const at::Tensor& taken) { return taken.defined() && taken.is_same(shared); });
      use.gradients[i] = is_taken ? at::empty_like(like) : shared;
      use.gradients[i].copy_(gradients[i]);
    }
  }

  std::vector<bool> touched_before, touched_ever;
  for (GradientSink& sink : *unit.sinks) {
    touched_before.push_back(sink.touched);
    touched_ever.push_back(sink.ever_touched);
    sink.touched = false;
  }
  const auto body = [&use, run = unit.forward, differentiate = unit.differentiate, recompute = unit.recompute]() -> std::vector<at::Tensor> {
    std::vector<at::Tensor> outputs = std::move(use.graph_outputs);
    use.graph_outputs.clear();
    if (recompute) {
      at::AutoGradMode record(true);
      outputs = run(use.leaves);
    }
    std::vector<at::Tensor> given;
    for (size_t i = 0; i < outputs.size(); ++i) {
      given.push_back(use.has_gradient[i] ? use.gradients[i] : at::Tensor());
    }
    std::vector<at::Tensor> made = differentiate(outputs, given, use.wanted);
    for (at::Tensor& one : made) {
      const bool is_given = one.defined() && std::any_of(given.begin(), given.end(), [&](const at::Tensor& gradient) {
                              return gradient.defined() && gradient.storage().data() == one.storage().data();
                            });
      if (is_given) {
        one = one.clone();  // the next backward's gradient is copied to that place
      }
    }
    return made;
  };
  use.backward = recorded(*unit.name, [&] { return recorder_.record(body, found); });
  for (size_t i = 0; i < unit.sinks->size(); ++i) {
    GradientSink& sink = (*unit.sinks)[i];
    if (sink.touched) {
      use.touched.push_back(i);
    }
    sink.touched = sink.touched || touched_before[i];
    sink.ever_touched = sink.ever_touched || touched_ever[i];
  }
  for (const at::Tensor& one : found) {
    use.found.push_back(Fixed::of(one));
    if (one.defined()) {
      gradients_made_.insert(one.const_data_ptr());
    }
  }
  milliseconds_ += std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  return found;
}

void BlockCapture::end_micro_step() {
  if (current_ == nullptr) {
    return;
  }
  if (mode_ == Mode::eager) {
    current_->state = Program::State::to_record;
  } else {
    SF_CHECK(next_ == current_->uses.size(), "a micro-step had {} uses of recorded blocks, and {} when they were recorded", next_, current_->uses.size());
    if (mode_ == Mode::record) {
      current_->state = Program::State::ready;
      const Counts now = counts();
      log_info("compile_blocks: {} uses of blocks recorded for {}; in all {} CUDA graphs of {} shapes, {} ms, {}", current_->uses.size(), current_->shapes,
               now.graphs, now.shapes, static_cast<int64_t>(now.milliseconds), human_bytes(static_cast<uint64_t>(now.bytes)));
    }
  }
  begin_micro_step();
}

BlockCapture::Counts BlockCapture::counts() const {
  Counts counts;
  for (const auto& program : programs_) {
    counts.shapes += program->state == Program::State::ready ? 1 : 0;
    for (const auto& use : program->uses) {
      counts.uses += use->forward != nullptr ? 1 : 0;
      counts.graphs += (use->forward != nullptr ? 1 : 0) + (use->backward != nullptr ? 1 : 0);
    }
  }
  counts.replays = replays_;
  counts.bytes = recorder_.bytes();
  counts.milliseconds = milliseconds_;
  return counts;
}

}  // namespace sf
