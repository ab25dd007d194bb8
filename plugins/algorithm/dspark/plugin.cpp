#include "plugins/algorithm/dspark/dspark.hpp"
#include "sf/plugin.hpp"

namespace sf {
namespace {

MarkovHead markov_head(const std::string& name) {
  if (name == "gated") {
    return MarkovHead::kGated;
  }
  return name == "rnn" ? MarkovHead::kRnn : MarkovHead::kVanilla;
}

DsparkOptions read(const Options& options) {
  return {.num_anchors = options.get<int64_t>("training.num_anchors"),
          .loss_decay_gamma = options.get<double>("training.loss_decay_gamma"),
          .ce_loss_alpha = options.get<double>("training.dspark_ce_loss_alpha"),
          .l1_loss_alpha = options.get<double>("training.dspark_l1_loss_alpha"),
          .confidence_head_alpha = options.get<double>("training.dspark_confidence_head_alpha"),
          .objective_chunk_blocks = options.get<int64_t>("training.objective_chunk_blocks"),
          .schedule_threshold = options.get<double>("schedule_threshold"),
          .markov_rank = options.get<int64_t>("markov_rank"),
          .markov_head = markov_head(options.get<std::string>("markov_head_type")),
          .confidence_head = options.get<bool>("enable_confidence_head"),
          .confidence_with_markov = options.get<bool>("confidence_head_with_markov")};
}

class DsparkPlugin final {
 public:
  DsparkPlugin(const Host&, const Options& options) : algorithm_(read(options)) {}

  const void* get_interface(std::string_view id) {
    return id == kAlgorithmInterface ? static_cast<const void*>(static_cast<const Algorithm*>(&algorithm_))
           : id == kDrafterInterface ? static_cast<const void*>(static_cast<const Drafter*>(&algorithm_))
                                     : nullptr;
  }

 private:
  Dspark algorithm_;
};

}  // namespace
}  // namespace sf

SF_PLUGIN(sf::DsparkPlugin, SF_KIND_ALGORITHM, SF_TIER_TORCH_CXX)
