// core/train/out_of_memory.hpp: LibTorch ran out of memory: how that is recognised, and what can be turned where it happened.
#pragma once

#include <string>

#include "sf/error.hpp"

namespace c10 {
class Error;
}

namespace sf {

/// On a GPU it is a kind of its own; the allocator of main memory throws the general kind.
[[nodiscard]] bool is_out_of_memory(const c10::Error& error);

/// Error(device) for it. `where` stands before what LibTorch says; empty: nothing does.
[[nodiscard]] Error out_of_memory(const c10::Error& error, const std::string& where, const char* advice);

namespace less_memory {
inline constexpr const char* kTraining =
    "lower training.batch_size, training.num_anchors or data.max_length, or set training.recompute = [\"block.*\"]; sf-host plan shows what takes the memory";
inline constexpr const char* kEvaluating = "lower training.batch_size, which is how many samples are evaluated at once, or data.max_length";
inline constexpr const char* kCapturing = "lower data.capture_batch_size or data.max_length";
inline constexpr const char* kExporting = "export with --no-check, which reads the weights and nothing else, or lower data.max_length, the length of the samples that are replayed";
inline constexpr const char* kGenerating =
    "lower --batch-size or --max-new-tokens: each sequence keeps keys and values of its prompt and of all new tokens; or leave the longest prompts out";
inline constexpr const char* kSpeculating =
    "lower --batch-size, --max-new-tokens or --draft-tokens: each sequence keeps keys and values of its prompt and of all new tokens, for the target and for each draft; or compare fewer "
    "drafts at a time";
}  // namespace less_memory

}  // namespace sf
