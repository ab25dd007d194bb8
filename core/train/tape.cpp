#include "core/train/tape.hpp"

#include <fnmatch.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>

#include "core/base/error.hpp"
#include "core/kernels/float8_head.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/train/out_of_memory.hpp"
#include "sf/error.hpp"

namespace sf {
namespace {

constexpr int64_t kUnknownUses = std::numeric_limits<int64_t>::max();  // first micro-step: nothing is given back early

bool matches(const std::string& pattern, const std::string& name) { return ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0; }

// Inside a catch: the same failure with where it happened put before it.
[[noreturn]] void rethrow_within(const std::string& where, const char* advice) {
  try {
    throw;
  } catch (const Error& error) {
    throw error.within(where);
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) {
      throw out_of_memory(error, where, advice);
    }
    throw Error(ExitCode::kInternal, where + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw Error(ExitCode::kInternal, where + ": " + error.what());
  }
}

bool is_differentiable(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

}  // namespace

bool names_unit(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) { return matches(pattern, name); });
}

struct TapeRunner::UnitState {
  Unit* unit = nullptr;
  const UnitSpec* spec = nullptr;
  int64_t index = 0;
  bool recompute = false;
  bool captured = false;
  bool is_encoded = false;               // in this window, by the transforms
  std::vector<bool> lent;                // which parameters have no memory
  std::map<std::string, int64_t, std::less<>> by_name;
  std::vector<at::Tensor> leaves;        // whole parameters; trainable ones require grad
  std::vector<GradientSink> sinks;       // buffer undefined for frozen ones
  std::vector<bool> is_given;            // to the backend in this window, touched or not

  void clear_gradients() {
    for (size_t p = 0; p < sinks.size(); ++p) {
      if (sinks[p].touched || is_given[p]) {
        sinks[p].buffer.zero_();
      }
      sinks[p].touched = is_given[p] = false;
    }
  }
};

// What a unit sees while its forward runs.
class TapeRunner::Context final : public UnitContext {
 public:
  Context(UnitState& unit, Ops& ops, Phase phase, const Transforms* transforms) : unit_(unit), ops_(ops), phase_(phase), transforms_(transforms) {}

  // One that has lent its memory has sizes; LibTorch refuses to read its values.
  const at::Tensor& parameter(std::string_view name) override { return unit_.leaves[place(name)]; }

  at::Tensor linear(std::string_view name, const at::Tensor& x) override { return linears({name}, x).front(); }

  // Products of one call that the same hand computes go together.
  std::vector<at::Tensor> linears(std::initializer_list<std::string_view> names, const at::Tensor& x) override {
    struct Share {
      Transform* transform;   // null: the tape's own
      std::vector<LinearProduct> products;
      std::vector<size_t> at;
    };
    std::vector<Share> shares;
    size_t count = 0;
    for (const std::string_view name : names) {
      const std::string base(name);
      const int64_t weight = place(base + ".weight");
      const auto bias = unit_.by_name.find(base + ".bias");
      const bool has_bias = bias != unit_.by_name.end();
      const Transforms::Place* taken = transforms_ == nullptr || phase_ == Phase::evaluate ? nullptr : transforms_->find(unit_.index, name);
      Transform* transform = taken == nullptr ? nullptr : taken->transform;
      auto share = std::find_if(shares.begin(), shares.end(), [&](const Share& other) { return other.transform == transform; });
      if (share == shares.end()) {
        share = shares.insert(shares.end(), {transform, {}, {}});
      }
      share->products.push_back({.linear = taken == nullptr ? 0 : taken->linear,
                                 .weight_oi = unit_.leaves[weight],
                                 .bias_o = has_bias ? unit_.leaves[bias->second] : at::Tensor(),
                                 .weight_sink = sink(weight),
                                 .bias_sink = has_bias ? sink(bias->second) : nullptr});
      share->at.push_back(count++);
    }
    std::vector<at::Tensor> results(count);
    for (const Share& share : shares) {
      const std::vector<at::Tensor> made = share.transform != nullptr ? share.transform->linears(share.products, x) : sf::linears(share.products, x);
      SF_CHECK(made.size() == share.products.size(), "unit '{}' got {} products of {}", unit_.spec->name, made.size(), share.products.size());
      for (size_t i = 0; i < made.size(); ++i) {
        results[share.at[i]] = made[i];
      }
    }
    return results;
  }

  at::Tensor gradient_buffer(std::string_view name) override {
    GradientSink* found = sink(place(name));
    if (found == nullptr || !at::GradMode::is_enabled()) {
      return {};
    }
    found->touch();
    return found->buffer;
  }

  bool has(std::string_view name) const override { return unit_.by_name.find(name) != unit_.by_name.end(); }
  Ops& ops() override { return ops_; }
  Phase phase() const override { return phase_; }

 private:
  int64_t place(std::string_view name) const {
    const auto found = unit_.by_name.find(name);
    SF_CHECK(found != unit_.by_name.end(), "unit '{}' asks for parameter '{}', which describe() does not list", unit_.spec->name,
             std::string(name));
    return found->second;
  }
  GradientSink* sink(int64_t index) { return unit_.sinks[index].buffer.defined() ? &unit_.sinks[index] : nullptr; }

  UnitState& unit_;
  Ops& ops_;
  Phase phase_;
  const Transforms* transforms_;
};

TapeRunner::TapeRunner(std::vector<Unit*> units, const std::vector<UnitSpec>& specs, Sharding& sharding, Ops& ops,
                       Placement placement, Options options)
    : sharding_(sharding), ops_(ops), placement_(placement), options_(std::move(options)) {
  SF_CHECK(units.size() == specs.size(), "{} units for {} descriptions", units.size(), specs.size());
  const auto on_device = at::TensorOptions().device(placement_.device);
  for (size_t i = 0; i < specs.size(); ++i) {
    auto state = std::make_unique<UnitState>();
    state->unit = units[i];
    state->spec = &specs[i];
    state->index = static_cast<int64_t>(i);
    state->recompute = names_unit(options_.recompute, specs[i].name);
    state->captured = options_.recorder != nullptr && specs[i].shard_group != "root";
    for (size_t p = 0; p < specs[i].parameters.size(); ++p) {
      const ParameterSpec& parameter = specs[i].parameters[p];
      state->by_name.emplace(parameter.name, static_cast<int64_t>(p));
      GradientSink sink;
      if (parameter.trainable) {
        sink.buffer = at::zeros(parameter.shape, on_device.dtype(options_.gradient_dtype));
      }
      state->sinks.push_back(std::move(sink));
    }
    state->is_given.assign(state->sinks.size(), false);
    units_.push_back(std::move(state));
  }
  for (const std::string& pattern : options_.recompute) {
    if (std::none_of(specs.begin(), specs.end(), [&](const UnitSpec& spec) { return matches(pattern, spec.name); })) {
      std::string names;
      for (const UnitSpec& spec : specs) {
        names += (names.empty() ? "" : ", ") + spec.name;
      }
      throw Error(ExitCode::kUsage, "training.recompute: \"" + pattern + "\" matches no unit", "the units are: " + names);
    }
  }
  if (options_.recorder != nullptr) {
    capture_ = std::make_unique<BlockCapture>(*options_.recorder, options_.capture);
  }
  used_.assign(units_.size(), 0);
  seed_ = at::ones({}, on_device.dtype(at::kFloat));
  loss_sum_ = at::zeros({}, on_device.dtype(at::kFloat));
}

TapeRunner::~TapeRunner() = default;

std::string TapeRunner::where(int64_t unit, int64_t use, const char* phase) const {
  return (options_.plugin.empty() ? "" : "plugin \"" + options_.plugin + "\", ") + "unit '" + units_[unit]->spec->name + "', use " + std::to_string(use) + ", " + phase;
}

void TapeRunner::begin_window(const at::Tensor& seed, const StepInfo& step) {
  SF_CHECK(tape_.empty(), "a window begins while a micro-step of the last one is open");
  if (options_.transforms != nullptr) {
    options_.transforms->begin_window();
  }
  seed_ = seed.to(placement_.device, at::kFloat);
  step_ = step;
  phase_ = Phase::forward;
  loss_sum_ = at::zeros({}, loss_sum_.options());
  metrics_.clear();
  sharding_.begin_window();
  for (auto& unit : units_) {  // last: whatever read gradients is behind us now
    unit->is_encoded = false;
    unit->clear_gradients();
  }
}

void TapeRunner::begin_micro_step() {
  SF_CHECK(tape_.empty(), "a micro-step begins while another is open");
  finish_evaluated();
  places_.clear();
  losses_.clear();
  order_.clear();
  std::fill(used_.begin(), used_.end(), 0);
  if (capture_ != nullptr) {
    capture_->begin_micro_step();
  }
}

void TapeRunner::begin_evaluation(const StepInfo& step) {
  SF_CHECK(tape_.empty(), "an evaluation begins while a micro-step is open");
  phase_ = Phase::evaluate;
  step_ = step;
  seed_ = at::ones({}, loss_sum_.options());
  loss_sum_ = at::zeros({}, loss_sum_.options());
  metrics_.clear();
  order_.clear();
  sharding_.begin_evaluation();
}

void TapeRunner::end_evaluation() {
  finish_evaluated();
  if (const at::Tensor compared = take_float8_head_report(); compared.defined()) {
    add_metric("fp8/head/argmax_agreement", compared[1], compared[0]);
    add_metric("fp8/head/nll_difference", compared[2], compared[0]);
  }
  sharding_.end_evaluation();
  phase_ = Phase::forward;
}

// The evaluated batch before this one, if any, had the same units in the same order.
void TapeRunner::finish_evaluated() {
  if (phase_ == Phase::evaluate && !order_.empty()) {
    const bool is_first = order_evaluate_.empty();
    check_order(order_evaluate_, "evaluation");
    planned_evaluate_ = used_;
    order_.clear();
    if (is_first) {
      sharding_.plan(Phase::evaluate, order_evaluate_);
    }
  }
}

int64_t TapeRunner::uses_left(const std::vector<int64_t>& planned, int64_t unit) const {
  return planned.empty() ? kUnknownUses : std::max<int64_t>(1, planned[unit] - used_[unit]);
}

TapeValue TapeRunner::constant(const at::Tensor& tensor) {
  SF_CHECK(tensor.defined(), "a constant has no tensor");
  if (tensor.requires_grad()) {
    throw Error(ExitCode::kInternal, "a tensor that requires grad was given as a constant, so its gradient would be lost",
                "pass the TapeValue that the runner returned, or detach what really is constant");
  }
  auto node = std::make_shared<ValueNode>();
  node->tensor = tensor;
  return TapeValue(std::move(node));
}

void TapeRunner::take_leaves(UnitState& unit) {
  if (unit.leaves.empty()) {
    for (size_t p = 0; p < unit.spec->parameters.size(); ++p) {
      at::Tensor leaf = sharding_.whole(unit.index, static_cast<int64_t>(p)).detach();
      unit.leaves.push_back(leaf.requires_grad_(unit.spec->parameters[p].trainable));
    }
  }
}

// Once in a window, when the parameters are whole: before whatever records or replays a graph of the unit.
void TapeRunner::encode_weights(UnitState& unit) {
  if (options_.transforms != nullptr && !unit.is_encoded && options_.transforms->wants_weights(unit.index)) {
    take_leaves(unit);
    at::NoGradGuard no_grad;
    options_.transforms->encode_weights(unit.index, unit.leaves);
    unit.is_encoded = true;
    if (options_.lends_weights) {
      lend_weights(unit);
    }
  }
}

// Only memory that is the parameter's own, whole and nothing else: what a sharding backend gathers to is its affair.
void TapeRunner::lend_weights(UnitState& unit) {
  if (owned_.empty()) {
    for (const Shard& shard : sharding_.shards()) {
      owned_.insert(shard.local.storage().unsafeGetStorageImpl());
    }
  }
  unit.lent.resize(unit.leaves.size(), false);
  for (size_t p = 0; p < unit.leaves.size(); ++p) {
    const at::Tensor& leaf = unit.leaves[p];
    c10::StorageImpl* const memory = leaf.storage().unsafeGetStorageImpl();
    if (leaf.scalar_type() == at::kBFloat16 && owned_.contains(memory) && memory->nbytes() == leaf.nbytes() && options_.transforms->replaces(unit.index, static_cast<int64_t>(p))) {
      memory->set_data_ptr_noswap(at::DataPtr(nullptr, memory->device()));
      memory->set_nbytes(size_t{0});
      unit.lent[p] = true;
    }
  }
}

bool TapeRunner::take_weights_back() {
  bool any = false;
  for (const auto& unit : units_) {
    for (size_t p = 0; p < unit->lent.size(); ++p) {
      if (unit->lent[p]) {
        const at::Tensor& leaf = unit->leaves[p];
        const at::Tensor fresh = at::empty(leaf.sizes(), leaf.options().requires_grad(false));
        c10::StorageImpl* const memory = leaf.storage().unsafeGetStorageImpl();
        memory->set_data_ptr_noswap(fresh.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, memory->device())));
        memory->set_nbytes(leaf.nbytes());
        unit->lent[p] = false;
        any = true;
      }
    }
  }
  return any;
}

std::vector<at::Tensor> TapeRunner::forward(UnitState& unit, int64_t use, const std::vector<at::Tensor>& inputs) {
  std::vector<int64_t> versions;
  for (const at::Tensor& input : inputs) {
    versions.push_back(static_cast<int64_t>(input._version()));
  }
  take_leaves(unit);
  Context context(unit, ops_, phase_, options_.transforms);
  forget_magnitudes();  // of what ran outside a unit, or was cut short by an error
  std::vector<at::Tensor> outputs = unit.unit->forward(context, inputs);
  forget_magnitudes();
  for (size_t i = 0; i < inputs.size(); ++i) {
    SF_CHECK(static_cast<int64_t>(inputs[i]._version()) == versions[i],
             "unit '{}' (use {}) wrote to its input {}; inputs are shared with other units", unit.spec->name, use, i);
  }
  return outputs;
}

std::vector<TapeValue> TapeRunner::run(int64_t index, const std::vector<TapeValue>& inputs) {
  SF_CHECK(index >= 0 && index < static_cast<int64_t>(units_.size()), "there is no unit {}", index);
  UnitState& unit = *units_[index];
  const bool evaluating = phase_ == Phase::evaluate;
  const int64_t use_number = used_[index];

  Use use{.unit = index, .use = use_number, .inputs = {}, .outputs = {}, .graph_outputs = {}, .recompute = unit.recompute};
  std::vector<at::Tensor> tensors;
  for (const TapeValue& input : inputs) {
    SF_CHECK(static_cast<bool>(input), "unit '{}' got an empty value", unit.spec->name);
    const auto& node = input.node();
    if (node->place >= 0 && !evaluating) {
      SF_CHECK(node->place < static_cast<int64_t>(places_.size()) && places_[node->place].node.lock() == node,
               "unit '{}' got a value of another micro-step", unit.spec->name);
    }
    // A constant, or an output without gradient, must not have grown a graph since.
    SF_CHECK(!node->tensor.requires_grad() || node->place >= 0, "unit '{}' got a constant that requires grad", unit.spec->name);
    tensors.push_back(node->tensor);
    use.inputs.push_back(node);
  }

  std::vector<TapeValue> values;
  try {
    const int64_t left = uses_left(evaluating ? planned_evaluate_ : planned_forward_, index);
    sharding_.before_use(index, phase_, left);
    if (!evaluating) {
      encode_weights(unit);
    }
    std::vector<at::Tensor> outputs;
    std::vector<bool> is_differentiable_output;
    if (!evaluating && unit.captured && !capture_->is_eager(captured_unit(unit, use_number), use.inputs)) {
      BlockCapture::Made made = capture_->forward(captured_unit(unit, use_number), use.inputs);
      outputs = std::move(made.outputs);
      is_differentiable_output = std::move(made.is_differentiable);
      use.captured = made.place;
    } else {
      at::AutoGradMode record(!evaluating && !unit.recompute);
      outputs = forward(unit, use_number, tensors);
    }
    sharding_.after_use(index, phase_, left);
    ++used_[index];
    order_.push_back(index);

    // Under recompute nothing is recorded yet; a floating output counts as differentiable when something it may depend on is.
    const bool has_differentiable_source =
        std::any_of(tensors.begin(), tensors.end(), is_differentiable) ||
        std::any_of(unit.leaves.begin(), unit.leaves.end(), is_differentiable);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const at::Tensor& output = outputs[i];
      auto node = std::make_shared<ValueNode>();
      const bool differentiable =
          use.captured >= 0 ? static_cast<bool>(is_differentiable_output[i])
                            : !evaluating && output.defined() &&
                                  (unit.recompute ? has_differentiable_source && output.is_floating_point() : output.requires_grad());
      node->tensor = output.defined() ? output.detach() : output;
      if (differentiable) {
        node->tensor.requires_grad_(true);
        node->place = static_cast<int64_t>(places_.size());
        places_.push_back({.node = node, .consumers = 0, .gradient = {}});
      }
      use.outputs.push_back(node);
      values.emplace_back(node);
    }
    if (!evaluating) {
      if (use.captured >= 0) {
        capture_->note_outputs(use.captured, use.outputs);
      } else if (!unit.recompute) {
        use.graph_outputs = std::move(outputs);
      }
      std::vector<int64_t> counted;
      for (const auto& node : use.inputs) {
        if (node->place >= 0 && std::find(counted.begin(), counted.end(), node->place) == counted.end()) {
          ++places_[node->place].consumers;
          counted.push_back(node->place);
        }
      }
      tape_.push_back(std::move(use));
    }
  } catch (...) {
    abandon();
    rethrow_within(where(index, use_number, evaluating ? "evaluating" : "forward"), evaluating ? less_memory::kEvaluating : less_memory::kTraining);
  }
  return values;
}

void TapeRunner::add_loss(const TapeValue& numerator) {
  const at::Tensor& tensor = numerator.tensor();
  SF_CHECK(tensor.dim() == 0 && tensor.scalar_type() == at::kFloat, "a loss is a scalar float32, found {} dimensions of type {}",
           tensor.dim(), c10::toString(tensor.scalar_type()));
  loss_sum_.add_(tensor.detach());
  if (phase_ != Phase::evaluate && numerator.node()->place >= 0) {
    losses_.push_back(numerator.node()->place);
  }
}

void TapeRunner::add_metric(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator) {
  SF_CHECK(numerator.sizes() == denominator.sizes(), "metric '{}': numerator and denominator differ in shape", std::string(name));
  add_sum(name, numerator, denominator);
}

void TapeRunner::add_count(std::string_view name, const at::Tensor& count) { add_sum(name, count, at::Tensor()); }

void TapeRunner::add_sum(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator) {
  SF_CHECK(numerator.dim() <= 1, "metric '{}' has {} dimensions, expected a scalar or [p]", std::string(name), numerator.dim());
  const auto as_double = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.detach().to(loss_sum_.device(), at::kDouble) : at::Tensor();
  };
  const auto [entry, is_new] = metrics_.try_emplace(std::string(name));
  MetricSum& sum = entry->second;
  if (is_new) {
    sum = {as_double(numerator).clone(), denominator.defined() ? as_double(denominator).clone() : at::Tensor()};
    return;
  }
  SF_CHECK(sum.numerator.sizes() == numerator.sizes() && sum.denominator.defined() == denominator.defined(),
           "metric '{}' changes its shape, or is a count here and a ratio there", std::string(name));
  sum.numerator.add_(as_double(numerator));
  if (denominator.defined()) {
    sum.denominator.add_(as_double(denominator));
  }
}

// Summed in tape order as autograd would; with more than two consumers in float32, rounded once when the producer takes it.
void TapeRunner::add_gradient(const ValueNode& node, const at::Tensor& gradient) {
  Place& place = places_[node.place];
  const bool wide = place.consumers > 2 && gradient.scalar_type() != at::kDouble;
  const at::Tensor term = wide ? gradient.to(at::kFloat) : gradient;
  place.gradient = place.gradient.defined() ? at::add(place.gradient, term) : term;
}

// Gradients of `wanted_inputs`, undefined for those that have none; the parameters' are added to their buffers.
std::vector<at::Tensor> TapeRunner::differentiate(UnitState& unit, const std::vector<at::Tensor>& graph_outputs, const std::vector<at::Tensor>& output_gradients,
                                                  const std::vector<at::Tensor>& wanted_inputs) {
  std::vector<at::Tensor> outputs, gradients;
  for (size_t i = 0; i < graph_outputs.size(); ++i) {
    if (output_gradients[i].defined() && is_differentiable(graph_outputs[i])) {
      outputs.push_back(graph_outputs[i]);
      gradients.push_back(output_gradients[i].to(graph_outputs[i].scalar_type()));
    }
  }
  std::vector<at::Tensor> wanted = wanted_inputs;
  std::vector<size_t> wanted_parameters;
  for (size_t p = 0; p < unit.leaves.size(); ++p) {
    if (unit.leaves[p].requires_grad()) {
      wanted.push_back(unit.leaves[p]);
      wanted_parameters.push_back(p);
    }
  }
  if (outputs.empty() || wanted.empty()) {
    return {};
  }
  forget_magnitudes();
  std::vector<at::Tensor> found = torch::autograd::grad(outputs, wanted, gradients, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
  forget_magnitudes();
  for (size_t i = 0; i < wanted_parameters.size(); ++i) {
    const at::Tensor& gradient = found[wanted_inputs.size() + i];
    if (gradient.defined()) {
      GradientSink& sink = unit.sinks[wanted_parameters[i]];
      sink.buffer.add_(gradient);
      sink.touch();
    }
  }
  found.resize(wanted_inputs.size());
  return found;
}

CapturedUnit TapeRunner::captured_unit(UnitState& unit, int64_t use) {
  return {.unit = unit.index,
          .use = use,
          .name = &unit.spec->name,
          .recompute = unit.recompute,
          .parameters = &unit.leaves,
          .sinks = &unit.sinks,
          .forward = [this, &unit, use](const std::vector<at::Tensor>& inputs) { return forward(unit, use, inputs); },
          .differentiate = [this, &unit](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients,
                                         const std::vector<at::Tensor>& wanted) { return differentiate(unit, outputs, gradients, wanted); }};
}

int64_t TapeRunner::captured_units() const {
  return std::count_if(units_.begin(), units_.end(), [](const auto& unit) { return unit->captured; });
}

void TapeRunner::backward_use(Use& use, int64_t left, bool boundary) {
  UnitState& unit = *units_[use.unit];
  sharding_.before_use(use.unit, Phase::backward, left);

  std::vector<at::Tensor> output_gradients(use.outputs.size());
  bool any = false;
  for (size_t i = 0; i < use.outputs.size(); ++i) {
    const auto& node = use.outputs[i];
    if (node->place >= 0 && places_[node->place].gradient.defined()) {
      output_gradients[i] = std::move(places_[node->place].gradient);
      places_[node->place].gradient = at::Tensor();
      any = true;
    }
  }
  // Inputs that want a gradient, each once.
  std::vector<at::Tensor> wanted;
  std::vector<std::shared_ptr<ValueNode>> wanted_nodes;
  for (const auto& node : use.inputs) {
    if (node->place >= 0 && std::find(wanted_nodes.begin(), wanted_nodes.end(), node) == wanted_nodes.end()) {
      wanted.push_back(node->tensor);
      wanted_nodes.push_back(node);
    }
  }
  std::vector<at::Tensor> found;
  if (use.captured >= 0) {
    found = capture_->backward(use.captured, captured_unit(unit, use.use), output_gradients);
  } else if (any) {
    std::vector<at::Tensor> graph_outputs = std::move(use.graph_outputs);
    if (use.recompute) {
      std::vector<at::Tensor> tensors;
      for (const auto& node : use.inputs) {
        tensors.push_back(node->tensor);
      }
      at::AutoGradMode record(true);
      graph_outputs = forward(unit, use.use, tensors);
    }
    found = differentiate(unit, graph_outputs, output_gradients, wanted);
  }
  output_gradients.clear();
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i].defined()) {
      add_gradient(*wanted_nodes[i], found[i]);
    }
  }
  sharding_.after_use(use.unit, Phase::backward, left);
  if (boundary && left == 1) {
    sharding_.reduce(use.unit, gradients_of(unit));
  }
}

// Which parameters have a gradient must not depend on what this rank's samples touched: others add theirs to it, and all ranks update the same parameters. A
// buffer that nothing touched is zeros. Only in one process is an idle parameter left out when it has none; with several, touched_by_any() tells.
std::vector<at::Tensor> TapeRunner::gradients_of(UnitState& unit) const {
  std::vector<at::Tensor> gradients;
  for (size_t p = 0; p < unit.sinks.size(); ++p) {
    const GradientSink& sink = unit.sinks[p];
    const bool is_left_out = unit.spec->parameters[p].idle && !sink.touched && placement_.comm == nullptr;
    gradients.push_back(is_left_out ? at::Tensor() : sink.buffer);
    unit.is_given[p] = !is_left_out && sink.buffer.defined();  // the backend may write the ranks' sum into it
  }
  return gradients;
}

std::vector<at::Tensor> TapeRunner::touched_by_any() const {
  if (placement_.comm == nullptr) {
    return {};
  }
  std::vector<float> touched;
  std::vector<at::Tensor> found;
  std::vector<size_t> places;
  for (const auto& unit : units_) {
    for (size_t p = 0; p < unit->sinks.size(); ++p) {
      if (unit->spec->parameters[p].trainable && unit->spec->parameters[p].idle) {
        touched.push_back(unit->sinks[p].touched ? 1.0f : 0.0f);
        places.push_back(found.size());
      }
      found.emplace_back();
    }
  }
  if (!touched.empty()) {
    at::Tensor flags = at::tensor(touched, at::TensorOptions().dtype(at::kFloat));
    if (placement_.device.is_cuda()) {
      flags = flags.pin_memory().to(placement_.device, /*non_blocking=*/true);  // from pageable memory the host would wait
    }
    placement_.comm->all_reduce(flags, Reduction::max, "idle parameters")->wait();
    flags = flags > 0;
    for (size_t i = 0; i < places.size(); ++i) {
      found[places[i]] = flags[static_cast<int64_t>(i)];
    }
  }
  return found;
}

void TapeRunner::backward(bool boundary) {
  SF_CHECK(phase_ == Phase::forward, "backward while evaluating");
  check_order(order_forward_, "forward");
  phase_ = Phase::backward;
  for (const int64_t place : losses_) {
    if (const auto node = places_[place].node.lock()) {
      add_gradient(*node, at::ones({}, loss_sum_.options()));
    }
  }
  std::vector<int64_t> left = used_;
  while (!tape_.empty()) {
    Use& use = tape_.back();
    const int64_t unit = use.unit, number = use.use;   // the tape is gone once it is abandoned
    try {
      backward_use(use, left[use.unit]--, boundary);
    } catch (...) {
      abandon();
      rethrow_within(where(unit, number, "backward"), less_memory::kTraining);
    }
    tape_.pop_back();
  }
  if (boundary) {
    // A unit that the algorithm did not call at all still takes part in the reduction.
    for (size_t i = 0; i < units_.size(); ++i) {
      if (used_[i] == 0) {
        sharding_.reduce(static_cast<int64_t>(i), gradients_of(*units_[i]));
      }
    }
  }
  if (planned_forward_.empty()) {
    sharding_.plan(Phase::forward, order_forward_);
  }
  planned_forward_ = used_;
  places_.clear();
  losses_.clear();
  phase_ = Phase::forward;
  if (capture_ != nullptr) {
    capture_->end_micro_step();
  }
}

void TapeRunner::check_order(std::vector<int64_t>& known, const char* phase) {
  if (known.empty()) {
    known = order_;
    return;
  }
  if (known != order_) {
    abandon();
    throw Error(ExitCode::kInternal,
                std::string("the order of units changed between micro-steps (") + phase + "): " + std::to_string(known.size()) +
                    " uses before, " + std::to_string(order_.size()) + " now",
                "an algorithm's micro_step must call the same units whatever the batch holds; use dead rows instead of skipping");
  }
}

// After a failure: no half window may reach the optimizer.
void TapeRunner::abandon() {
  sharding_.abandon();
  if (capture_ != nullptr) {
    capture_->abandon();
  }
  tape_.clear();
  places_.clear();
  losses_.clear();
  order_.clear();
  std::fill(used_.begin(), used_.end(), 0);
  phase_ = Phase::forward;
  for (auto& unit : units_) {
    unit->clear_gradients();
  }
}

void TapeRunner::pool_sums(Comm& comm) {
  std::vector<at::Tensor*> sums;
  for (auto& [name, sum] : metrics_) {
    sums.push_back(&sum.numerator);
    if (sum.denominator.defined()) {
      sums.push_back(&sum.denominator);
    }
  }
  std::vector<at::Tensor> flat = {loss_sum_.to(at::kDouble).view({-1})};
  for (const at::Tensor* sum : sums) {
    flat.push_back(sum->view({-1}));
  }
  const at::Tensor all = at::cat(flat);
  comm.all_reduce(all, Reduction::sum, "loss and metrics")->wait();
  loss_sum_ = all[0].to(at::kFloat);
  int64_t at = 1;
  for (at::Tensor* sum : sums) {
    *sum = all.slice(0, at, at + sum->numel()).view(sum->sizes());
    at += sum->numel();
  }
}

std::string TapeRunner::metric_names() const {
  std::string text;
  for (const auto& [name, sum] : metrics_) {
    text += format("{}{}{} ", name, sum.numerator.sizes().vec(), sum.denominator.defined() ? "/" : "");
  }
  return text;
}

std::vector<std::string> TapeRunner::never_touched() const {
  std::vector<std::string> names;
  for (const auto& unit : units_) {
    for (size_t p = 0; p < unit->sinks.size(); ++p) {
      const ParameterSpec& parameter = unit->spec->parameters[p];
      if (parameter.trainable && !parameter.idle && !unit->sinks[p].ever_touched) {
        names.push_back(unit->spec->prefix + parameter.name);
      }
    }
  }
  return names;
}

uint64_t TapeRunner::order_hash() const {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a over unit names, so that it means the same on every rank
  for (const int64_t index : order_forward_) {
    for (const char c : units_[index]->spec->name + "\n") {
      hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    }
  }
  return hash;
}

int64_t TapeRunner::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& unit : units_) {
    for (const GradientSink& sink : unit->sinks) {
      bytes += sink.buffer.defined() ? static_cast<int64_t>(sink.buffer.nbytes()) : 0;
    }
  }
  return bytes;
}

}  // namespace sf
