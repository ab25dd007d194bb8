// plugins/algorithm/dspark/dspark.hpp: DSpark as an algorithm: what is read, what is drawn, the micro-step, the export.
//
// A block drafts one token more than DFlash's of the same size: the known token's row drafts, too.
//
// Shapes: b batch · s context tokens · w block slots · j tokens of a block · r rows for the head
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "plugins/algorithm/dspark/dspark_config.hpp"
#include "plugins/algorithm/dspark/dspark_options.hpp"
#include "sdk/draft/block_backbone.hpp"
#include "sf/algorithm.hpp"
#include "sf/drafter.hpp"

namespace sf {

class Dspark final : public Algorithm, public Drafter {
 public:
  explicit Dspark(const DsparkOptions& options) : options_(options) {}

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

  [[nodiscard]] const DsparkConfig& config() const { return config_; }

 private:
  DsparkOptions options_;
  DsparkConfig config_;
  Description description_;
  draft::BlockBackbone backbone_;
  std::vector<std::unique_ptr<Unit>> units_;
};

}  // namespace sf
