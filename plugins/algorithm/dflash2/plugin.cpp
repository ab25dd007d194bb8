#include "plugins/algorithm/dflash2/dflash.hpp"
#include "sf/plugin.hpp"

namespace sf {
namespace {

LossType loss_type(const std::string& name) {
  if (name == "dpace") {
    return LossType::kDpace;
  }
  if (name == "dpace-cumulative-confidence-only") {
    return LossType::kDpaceConfidence;
  }
  return name == "dpace-continuation-value-only" ? LossType::kDpaceContinuation : LossType::kDflash;
}

draft::Lk lk_kind(const std::string& name) {
  if (name == "alpha") {
    return draft::Lk::alpha;
  }
  if (name == "lambda") {
    return draft::Lk::lambda;
  }
  return name == "tv" ? draft::Lk::total_variation : draft::Lk::none;
}

DflashOptions read(const Options& options) {
  const DflashOptions unset;
  const auto or_default = [&](const char* name, int64_t value) {
    const int64_t given = options.get<int64_t>(name);
    return given > 0 ? given : value;
  };
  return {.num_anchors = options.get<int64_t>("training.num_anchors"),
          .loss_decay_gamma = options.get<double>("training.loss_decay_gamma"),
          .loss_type = loss_type(options.get<std::string>("training.loss_type")),
          .dpace_alpha = options.get<double>("training.dpace_alpha"),
          .dpace_per_sequence = options.get<std::string>("dpace_normalization") == "per_sequence",
          .lk = lk_kind(options.get<std::string>("training.lk_loss_type")),
          .kl_scale = options.get<double>("training.kl_scale"),
          .kl_decay = options.get<double>("training.kl_decay"),
          .objective_chunk_blocks = options.get<int64_t>("training.objective_chunk_blocks"),
          .selector_loss_alpha = options.get<double>("training.dflash2_selector_loss_alpha"),
          .selector_warmup_ratio = options.get<double>("training.dflash2_selector_warmup_ratio"),
          .selector_ramp_ratio = options.get<double>("training.dflash2_selector_ramp_ratio"),
          .selector_stop_gradient = options.get<bool>("training.dflash2_selector_stop_gradient"),
          .insert_gold = options.get<std::string>("algorithm.selector_policy") == "insert_gold",
          .dflash2 = options.get<std::string>("architecture") != "dflash",
          .conv_kernel_size = or_default("conv_kernel_size", unset.conv_kernel_size),
          .conv_group_size = or_default("conv_group_size", unset.conv_group_size),
          .selector_rank = or_default("selector_rank", unset.selector_rank),
          .selector_top_k = or_default("selector_top_k", unset.selector_top_k)};
}

class DflashPlugin final {
 public:
  DflashPlugin(const Host&, const Options& options) : algorithm_(read(options)) {}

  const void* get_interface(std::string_view id) {
    return id == kAlgorithmInterface ? static_cast<const void*>(static_cast<const Algorithm*>(&algorithm_))
           : id == kDrafterInterface ? static_cast<const void*>(static_cast<const Drafter*>(&algorithm_))
                                     : nullptr;
  }

 private:
  Dflash algorithm_;
};

}  // namespace
}  // namespace sf

SF_PLUGIN(sf::DflashPlugin, SF_KIND_ALGORITHM, SF_TIER_TORCH_CXX)
