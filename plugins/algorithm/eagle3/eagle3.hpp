// plugins/algorithm/eagle3/eagle3.hpp: EAGLE3 and EAGLE3.1 as an algorithm: a one-layer draft that reads three layers of the target, then its own output,
// for `ttt_length` uses, each learning the target's distribution over the draft's tokens.
//
// Units: "fusion" once, then for each use "midlayer" (with the keys and values of the uses before it) and "objective"; before them "embedding" once
// when it is trained.
//
// Shapes: b batch · s tokens · r positions · v target vocabulary · w draft vocabulary
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plugins/algorithm/eagle3/eagle3_config.hpp"
#include "plugins/algorithm/eagle3/eagle3_options.hpp"
#include "sf/algorithm.hpp"
#include "sf/drafter.hpp"

namespace sf {

inline constexpr double kUseDecay = 0.8;  // weight of use k in the loss is kUseDecay^k; a constant of the method

class Eagle3 final : public Algorithm, public Drafter {
 public:
  explicit Eagle3(Eagle3Options options) : options_(std::move(options)) {}

  Description describe(const ModelFacts& facts) override;
  Unit& unit(int64_t index) override { return *units_.at(static_cast<size_t>(index)); }
  void bind(const TargetTables& tables, Ops& ops) override;
  Remark set_token_counts(const std::vector<TokenCount>& counts) override;
  void set_buffers(const std::map<std::string, at::Tensor>& buffers, const std::string& source) override;
  std::map<std::string, at::Tensor> buffers() const override;
  std::string prepare(Sample& sample, const SampleContext& context) override;
  void finish(Batch& batch) override;
  double weigh(const Batch& batch) const override;
  void micro_step(Runner& runner, const Batch& batch) override;
  ExportSpec export_spec() const override;
  void derive_metrics(std::map<std::string, double>& metrics) const override;
  // Decoding: drafting.cpp.
  std::vector<std::string> reads() const override;
  int64_t drafted_tokens_at_most() const override;
  void remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const override;
  DraftAnswer propose(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const override;

  [[nodiscard]] const Eagle3Config& config() const { return config_; }

 private:
  void keep_tokens(const std::vector<int64_t>& tokens);
  at::Tensor embedded(DraftUnits& units, const at::Tensor& ids) const;

  Eagle3Options options_;
  Eagle3Config config_;
  Description description_;
  std::vector<std::unique_ptr<Unit>> units_;
  TargetTables tables_;
  Ops* ops_ = nullptr;
  at::Tensor inverse_frequencies_;            // float32, on the training device, as the three below
  at::Tensor kept_w_;                         // int64, the draft's tokens, ascending; undefined before they are known
  at::Tensor is_kept_v_;                      // bool
  at::Tensor kept_host_w_;                    // kept_w_ on the CPU
};

}  // namespace sf
