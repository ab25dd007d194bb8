// core/train/export_check.hpp: does an exported folder, by itself, draft what the checkpoint's draft drafts? Read as engines read it (core/export/engine_view.hpp),
// built anew from it alone, and both set to the same recorded features.
#pragma once

#include <filesystem>

#include "core/checkpoint/reader.hpp"
#include "core/train/session.hpp"

namespace sf {

struct ExportCheckRequest {
  const EngineContext* context = nullptr;
  const CheckpointReader* checkpoint = nullptr;
  std::filesystem::path folder;
  std::filesystem::path features;   // empty: the recipe's held-out ones, else its training ones; without any nothing is replayed
};

/// {"fine": bool, "problems": [...], "replayed": {...} or null, "per_position": [...], "acceptance_length", "serve": {...}}. The algorithm is described and bound
/// anew, twice. Without the target's tables nothing is replayed.
[[nodiscard]] Json check_export(const ExportCheckRequest& request);

}  // namespace sf
