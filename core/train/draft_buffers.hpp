// core/train/draft_buffers.hpp: tensors of a draft that are not trained (its vocabulary), where they come from and how they are kept. A checkpoint's are
// taken with its weights (saved_run.hpp); these are the other ways.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/data/feature_store.hpp"
#include "core/train/session.hpp"

namespace sf {

/// Tokens at supervised positions of all samples, in the order in which they first appear; a sample's own tokens ascend.
[[nodiscard]] std::vector<TokenCount> count_supervised_tokens(const FeatureStore& features);

/// Gives the algorithm its buffers for a draft without a checkpoint: from the file that it names, or from what an earlier run made of the same samples,
/// or from counting. What was counted is kept below output_dir/.cache under a name that is a function of samples, sizes and tokenizer. Nothing to do
/// for an algorithm without buffers. Throws sf::Error (data) when a file can't be used.
void make_draft_buffers(const Session& session, const FeatureStore& features);

/// Weights have brought their buffers with them: a file that the recipe names has to hold the same. Throws Error(kUsage). One that is gone by now is no matter.
void compare_named_buffers(const Session& session, const std::string& source);

/// Checks names, shapes and types against the description and hands them over. `source` for messages.
void hand_over_buffers(const Session& session, const std::map<std::string, at::Tensor>& buffers, const std::string& source);

}  // namespace sf
