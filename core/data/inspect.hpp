// core/data/inspect.hpp
//
// What a folder or file of data holds, in one line, after everything in it was read and checked: for `sf-host
// doctor`. Most faults of data never crash a run, they spoil it; this is where they are looked for. Each
// function throws sf::Error (data) with what is wrong.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "core/data/weight_folder.hpp"

namespace sf {

/// "llama, 30 layers, hidden size 576, 49152 tokens, tied embeddings, BF16, 134.5 M parameters; capture can
/// run it"
[[nodiscard]] std::string inspect_target(const std::filesystem::path& folder, const TargetTableKeys& keys);

/// "462 samples, 46.1 k tokens, 34.2 k supervised (74 %), longest 180; 3 without two neighbouring supervised
/// tokens". Refuses a file without anything to train on. `vocab_size` and `max_length` as in TokenLimits.
[[nodiscard]] std::string inspect_tokens(const std::filesystem::path& path, int64_t vocab_size,
                                         int64_t max_length);

struct FeatureInspection {
  std::filesystem::path folder;
  int64_t vocab_size = 0;
  int64_t max_length = 0;
  std::string target_fingerprint;  // empty: not compared
  std::string named_by;            // the key that names the folder, for an advice
};

/// Reads every record and every checksum: "462 records, 46.1 k tokens, hidden_states 2880 (BF16, layers [1,
/// 8, 14, 20, 27]); whole". A finished capture, or a folder of .ckpt files.
[[nodiscard]] std::string inspect_features(const FeatureInspection& what);

}  // namespace sf
