#include "plugins/algorithm/eagle3/eagle3.hpp"
#include "sf/plugin.hpp"

#include <filesystem>

namespace sf {
namespace {

DistillLoss loss_of(const std::string& name) {
  return name == "alpha" ? DistillLoss::alpha : name == "lambda" ? DistillLoss::lambda : DistillLoss::kl;
}

Eagle3Options read(const Options& options) {
  const bool is_compact = options.get<bool>("training.compact_teacher");
  const auto columns = options.get<int64_t>("training.compact_teacher_chunk_size");
  return {.ttt_length = options.get<int64_t>("training.ttt_length"),
          .loss = loss_of(options.get<std::string>("training.lk_loss_type")),
          .kl_scale = options.get<double>("training.kl_scale"),
          .kl_decay = options.get<double>("training.kl_decay"),
          .objective_chunk_rows = options.get<int64_t>("training.objective_chunk_rows"),
          .teacher_chunk_columns = is_compact ? columns : 0,
          .train_embedding = options.get<bool>("train_embedding"),
          .vocab_mapping_path = options.get<std::string>("model.vocab_mapping_path"),
          .draft_vocab_size = options.get<int64_t>("draft_vocab_size"),
          .eagle31 = options.get<std::string>("architecture") == "eagle3.1"};
}

class Eagle3Plugin final {
 public:
  Eagle3Plugin(const Host&, const Options& options) : algorithm_(read(options)) {}

  const void* get_interface(std::string_view id) {
    return id == kAlgorithmInterface ? static_cast<const void*>(static_cast<const Algorithm*>(&algorithm_))
           : id == kDrafterInterface ? static_cast<const void*>(static_cast<const Drafter*>(&algorithm_))
                                     : nullptr;
  }

 private:
  Eagle3 algorithm_;
};

}  // namespace
}  // namespace sf

SF_PLUGIN(sf::Eagle3Plugin, SF_KIND_ALGORITHM, SF_TIER_TORCH_CXX)
