// plugins/algorithm/dflash2/dflash.hpp: DFlash and DFlash2 as an algorithm: what is read, what is drawn, the micro-step, the export.
//
// Shapes: b batch · s context tokens · w block slots · j tokens of a block · q = w*j draft rows · h hidden · r rows for the head
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "plugins/algorithm/dflash2/dflash_config.hpp"
#include "plugins/algorithm/dflash2/dflash_options.hpp"
#include "plugins/algorithm/dflash2/objective_unit.hpp"
#include "sdk/draft/block_backbone.hpp"
#include "sf/algorithm.hpp"
#include "sf/drafter.hpp"

namespace sf {

class Dflash final : public Algorithm, public Drafter {
 public:
  explicit Dflash(const DflashOptions& options) : options_(options) {}

  Description describe(const ModelFacts& facts) override;
  Unit& unit(int64_t index) override { return *units_.at(static_cast<size_t>(index)); }
  void bind(const TargetTables& tables, Ops& ops) override;
  std::string prepare(Sample& sample, const SampleContext& context) override;
  void finish(Batch& batch) override;
  double weigh(const Batch& batch) const override;
  void micro_step(Runner& runner, const Batch& batch) override;
  ExportSpec export_spec() const override;
  // Decoding: drafting.cpp.
  std::vector<std::string> reads() const override;
  int64_t drafted_tokens_at_most() const override;
  void remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const override;
  DraftAnswer propose(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const override;

  [[nodiscard]] const DflashConfig& config() const { return config_; }

 private:
  void add_weights(Batch& batch, at::Tensor mask_r, const at::Tensor& slot_r, const at::Tensor& mask_cp, const at::Tensor& sequence_c) const;

  DflashOptions options_;
  DflashConfig config_;
  Description description_;
  draft::BlockBackbone backbone_;
  std::vector<std::unique_ptr<Unit>> units_;
  ObjectiveUnit* objective_ = nullptr;  // of units_
};

}  // namespace sf
