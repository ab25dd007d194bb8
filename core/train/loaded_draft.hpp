// core/train/loaded_draft.hpp: a draft out of a checkpoint or an exported folder, whole in memory and without anything that training needs: its units run as they
// are, for decoding (sf/drafter.hpp) and for the metrics of an evaluation.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/checkpoint/reader.hpp"
#include "core/train/tape.hpp"
#include "sf/algorithm.hpp"
#include "sf/drafter.hpp"

namespace sf {

struct DraftWeights {
  std::map<std::string, at::Tensor> parameters;  // by full name, on the CPU, in the type that they are kept in
  std::map<std::string, at::Tensor> buffers;
  std::string source;                            // for messages
};

/// Every parameter and buffer of the description. Throws sf::Error (checkpoint).
[[nodiscard]] DraftWeights weights_of_checkpoint(const CheckpointReader& checkpoint, const Description& description);
/// The same from model.safetensors of an export. Throws sf::Error (checkpoint) with all names that are missing, misshapen or nobody's.
[[nodiscard]] DraftWeights weights_of_export(const std::filesystem::path& folder, const Description& description);

/// The plan's facts with an exported configuration in the place of everything that the recipe says about the draft.
[[nodiscard]] ModelFacts facts_of_export(const ModelFacts& facts, const std::filesystem::path& folder);

class LoadedDraft final : public DraftUnits {
 public:
  /// `algorithm` has been described (`description` is what it said) and bound. Buffers are handed to it here.
  LoadedDraft(Algorithm& algorithm, const Description& description, const DraftWeights& weights, at::ScalarType dtype, at::Device device, Ops& ops);
  ~LoadedDraft();
  LoadedDraft(const LoadedDraft&) = delete;
  LoadedDraft& operator=(const LoadedDraft&) = delete;

  std::vector<at::Tensor> run(int64_t index, const std::vector<at::Tensor>& inputs) override;
  UnitContext& context(int64_t index) override;

 private:
  class Context;
  std::vector<Unit*> units_;
  std::vector<std::unique_ptr<Context>> contexts_;
};

/// Algorithm::micro_step over a loaded draft: evaluation without tape, gradients or backend. Metrics add up until the end.
class EvaluationRunner final : public Runner {
 public:
  EvaluationRunner(LoadedDraft& draft, at::Device device);

  std::vector<TapeValue> run(int64_t index, const std::vector<TapeValue>& inputs) override;
  TapeValue constant(const at::Tensor& tensor) override;
  void add_loss(const TapeValue& numerator) override;
  void add_metric(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator) override;
  void add_count(std::string_view name, const at::Tensor& count) override;
  const at::Tensor& seed() const override { return seed_; }
  Phase phase() const override { return Phase::evaluate; }
  const StepInfo& step() const override { return step_; }

  /// Sums so far. Throws Error(kInternal) when the algorithm did not report `name`.
  [[nodiscard]] double numerator(const std::string& name) const;
  [[nodiscard]] double denominator(const std::string& name) const;

 private:
  LoadedDraft& draft_;
  at::Tensor seed_;
  StepInfo step_;
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> sums_;
};

}  // namespace sf
