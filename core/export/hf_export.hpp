// core/export: a trained draft as a Hugging Face folder that serving engines load. In: tensors in host
// memory, config.json and the key contract that the algorithm states. Out: the folder, whole or not at all,
// or every reason why an engine would not read it. No LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "sf/json.hpp"

namespace sf {

/// A whole tensor, row-major and contiguous; borrowed for the call.
struct ExportTensor {
  std::string name;
  std::string dtype = "BF16";  // as safetensors writes it
  std::vector<int64_t> shape = {};
  const void* data = nullptr;
  uint64_t bytes = 0;
};

/// What an engine reads, as data: an export that differs loads without an error and means something else, so
/// it is never written.
struct KeyContract {
  struct Tensor {
    std::string name;
    std::vector<int64_t> shape = {};
    std::string dtype = {};  // of a tensor with a type of its own ("I64", "BOOL"); empty: the export's
  };
  std::vector<Tensor> tensors = {};           // these and no others
  std::vector<std::string> config_keys = {};  // "dflash_config.mask_token_id": must be there and not null
};

/// Every way in which config and tensors break the contract, one sentence each: keys missing, tensors
/// missing, surplus, of another shape or type than `dtype` ("BF16", "F32"), not finite; a config whose dtype
/// is not that of the tensors. Empty when an engine can read it.
[[nodiscard]] std::vector<std::string> contract_problems(const KeyContract& contract, const Json& config,
                                                         std::span<const ExportTensor> tensors,
                                                         const std::string& dtype);

struct HfExport {
  std::filesystem::path
      folder;  // made; an earlier export at this place is replaced, anything else, and an export with other files beside it, is refused
  KeyContract contract;
  Json config;  // config.json
  std::vector<ExportTensor> tensors;
  std::string dtype = "BF16";
  Json origin = Json::object();  // for export.json: run, step, scores, versions
};

/// Checks, then writes config.json, model.safetensors and export.json (origin, and the SHA-256 of both files)
/// to a temporary folder beside `folder`, syncs it and gives it its name in one move. Throws Error: kInternal
/// when the contract is broken (all problems in one message), kUsage when `folder` is something else,
/// kCheckpoint when the disk fails.
void write_hf_export(const HfExport& request);

}  // namespace sf
