#include "core/train/loaded_draft.hpp"

#include <ATen/ATen.h>

#include <set>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/data/safetensors.hpp"
#include "core/model/tensor_view.hpp"
#include "core/train/linear.hpp"

namespace sf {
namespace {

at::Tensor read_saved(const CheckpointReader& checkpoint, const std::string& name) {
  const SavedTensor& saved = checkpoint.tensor(name);
  const auto type = dtype_from_name(saved.dtype);
  SF_CHECK(type.has_value(), "unknown type {}", saved.dtype);
  at::Tensor tensor = at::empty(saved.shape, at::TensorOptions().dtype(scalar_type_of(*type)));
  checkpoint.read(name, {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
  return tensor;
}

void require_shape(const std::string& name, const at::Tensor& tensor, const std::vector<int64_t>& wanted, std::vector<std::string>& problems) {
  if (tensor.sizes().vec() != wanted) {
    problems.push_back(format("'{}' has shape {}, {} expected", name, tensor.sizes().vec(), wanted));
  }
}

void refuse(const std::string& source, const std::vector<std::string>& problems) {
  if (!problems.empty()) {
    throw Error(ExitCode::kCheckpoint, format("{}: weights and configuration disagree:\n  {}", source, join(problems, "\n  ")),
                "export the draft again; an engine would load what it knows by name and leave the rest as it is");
  }
}

}  // namespace

DraftWeights weights_of_checkpoint(const CheckpointReader& checkpoint, const Description& description) {
  DraftWeights weights;
  weights.source = checkpoint.folder().string();
  std::vector<std::string> problems;
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const std::string name = unit.prefix + parameter.name;
      at::Tensor tensor = read_saved(checkpoint, "weights/" + name);
      require_shape(name, tensor, parameter.shape, problems);
      weights.parameters.emplace(name, std::move(tensor));
    }
  }
  for (const BufferSpec& buffer : description.buffers) {
    at::Tensor tensor = read_saved(checkpoint, "buffers/" + buffer.name);
    require_shape(buffer.name, tensor, buffer.shape, problems);
    weights.buffers.emplace(buffer.name, std::move(tensor));
  }
  refuse(weights.source, problems);
  return weights;
}

DraftWeights weights_of_export(const std::filesystem::path& folder, const Description& description) {
  const std::filesystem::path path = folder / "model.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(path);
  DraftWeights weights;
  weights.source = path.string();
  std::vector<std::string> problems;
  std::set<std::string> unused;
  for (const TensorView& view : file.tensors()) unused.insert(view.name);
  const auto take = [&](const std::string& name, const std::vector<int64_t>& shape, std::map<std::string, at::Tensor>& into) {
    unused.erase(name);
    const TensorView* view = file.find(name);
    if (view == nullptr) {
      problems.push_back(format("'{}' {} is missing", name, shape));
      return;
    }
    at::Tensor tensor = as_tensor(*view).clone();
    require_shape(name, tensor, shape, problems);
    into.emplace(name, std::move(tensor));
  };
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) take(unit.prefix + parameter.name, parameter.shape, weights.parameters);
  }
  for (const BufferSpec& buffer : description.buffers) take(buffer.name, buffer.shape, weights.buffers);
  for (const std::string& name : unused) problems.push_back(format("'{}' is no tensor of this draft", name));
  refuse(weights.source, problems);
  return weights;
}

ModelFacts facts_of_export(const ModelFacts& facts, const std::filesystem::path& folder) {
  ModelFacts of_export;
  of_export.target_config_json = facts.target_config_json;
  of_export.draft_config_path = (folder / "config.json").string();
  of_export.draft_config_json = read_file(of_export.draft_config_path, ExitCode::kData);
  of_export.bfloat16 = facts.bfloat16;
  return of_export;
}

class LoadedDraft::Context final : public UnitContext {
 public:
  explicit Context(Ops& ops) : ops_(ops) {}

  void add(const std::string& name, at::Tensor tensor) { parameters_.emplace(name, std::move(tensor)); }
  const at::Tensor& parameter(std::string_view name) override {
    const auto found = parameters_.find(name);
    SF_CHECK(found != parameters_.end(), "a unit asks for parameter '{}', which describe() does not list", std::string(name));
    return found->second;
  }
  at::Tensor linear(std::string_view name, const at::Tensor& x) override {
    const std::string base(name);
    const auto bias = parameters_.find(base + ".bias");
    return sf::linear(x, parameter(base + ".weight"), bias == parameters_.end() ? at::Tensor() : bias->second, nullptr, nullptr);
  }
  at::Tensor gradient_buffer(std::string_view) override { return {}; }
  bool has(std::string_view name) const override { return parameters_.find(name) != parameters_.end(); }
  Ops& ops() override { return ops_; }
  Phase phase() const override { return Phase::evaluate; }

 private:
  std::map<std::string, at::Tensor, std::less<>> parameters_;
  Ops& ops_;
};

LoadedDraft::LoadedDraft(Algorithm& algorithm, const Description& description, const DraftWeights& weights, at::ScalarType dtype, at::Device device,
                         Ops& ops) {
  for (size_t i = 0; i < description.units.size(); ++i) {
    const UnitSpec& spec = description.units[i];
    units_.push_back(&algorithm.unit(static_cast<int64_t>(i)));
    contexts_.push_back(std::make_unique<Context>(ops));
    for (const ParameterSpec& parameter : spec.parameters) {
      contexts_.back()->add(parameter.name, weights.parameters.at(spec.prefix + parameter.name).to(device, dtype).contiguous());
    }
  }
  if (!description.buffers.empty()) {
    algorithm.set_buffers(weights.buffers, weights.source);
  }
}

LoadedDraft::~LoadedDraft() = default;

std::vector<at::Tensor> LoadedDraft::run(int64_t index, const std::vector<at::Tensor>& inputs) {
  const at::NoGradGuard no_grad;
  return units_.at(static_cast<size_t>(index))->forward(*contexts_.at(static_cast<size_t>(index)), inputs);
}

UnitContext& LoadedDraft::context(int64_t index) { return *contexts_.at(static_cast<size_t>(index)); }

EvaluationRunner::EvaluationRunner(LoadedDraft& draft, at::Device device)
    : draft_(draft), seed_(at::ones({}, at::TensorOptions().dtype(at::kFloat).device(device))) {
  step_.wants_details = true;
}

std::vector<TapeValue> EvaluationRunner::run(int64_t index, const std::vector<TapeValue>& inputs) {
  std::vector<at::Tensor> tensors;
  for (const TapeValue& input : inputs) tensors.push_back(input.tensor());
  std::vector<TapeValue> values;
  for (const at::Tensor& output : draft_.run(index, tensors)) values.push_back(constant(output));
  return values;
}

TapeValue EvaluationRunner::constant(const at::Tensor& tensor) { return TapeValue(std::make_shared<ValueNode>(ValueNode{.tensor = tensor})); }

void EvaluationRunner::add_loss(const TapeValue& numerator) { add_count("loss", numerator.tensor()); }

void EvaluationRunner::add_metric(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator) {
  auto& [above, below] = sums_[std::string(name)];
  above = above.defined() ? above + numerator.to(at::kDouble) : numerator.to(at::kDouble);
  if (denominator.defined()) {
    below = below.defined() ? below + denominator.to(at::kDouble) : denominator.to(at::kDouble);
  }
}

void EvaluationRunner::add_count(std::string_view name, const at::Tensor& count) { add_metric(name, count, at::Tensor()); }

double EvaluationRunner::numerator(const std::string& name) const {
  const auto found = sums_.find(name);
  SF_CHECK(found != sums_.end(), "the algorithm reports no {}", name);
  return found->second.first.item<double>();
}

double EvaluationRunner::denominator(const std::string& name) const {
  const auto found = sums_.find(name);
  SF_CHECK(found != sums_.end() && found->second.second.defined(), "the algorithm reports no {}", name);
  return found->second.second.item<double>();
}

}  // namespace sf
