#include "core/export/hf_export.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/format.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

namespace sf {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kRecordFile = "export.json";
constexpr const char* kRecordFormat = "sf-export";

// "a.b.c" in nested objects.
const Json* find_dotted(const Json& config, std::string_view dotted) {
  const Json* at = &config;
  for (const std::string& key : split(dotted, '.')) {
    at = at->find(key);
    if (at == nullptr) {
      return nullptr;
    }
  }
  return at;
}

// The first element that is not finite, or -1. Both types end in sign, exponent, fraction: all exponent bits
// set is Inf or NaN.
int64_t first_not_finite(const ExportTensor& tensor) {
  const auto find = [&]<class Bits>(Bits exponent) -> int64_t {
    for (uint64_t i = 0; i < tensor.bytes / sizeof(Bits); ++i) {
      Bits bits;
      std::memcpy(&bits, static_cast<const char*>(tensor.data) + i * sizeof(Bits), sizeof(Bits));
      if ((bits & exponent) == exponent) {
        return static_cast<int64_t>(i);
      }
    }
    return -1;
  };
  if (tensor.dtype == "BF16") {
    return find(uint16_t{0x7f80});
  }
  if (tensor.dtype == "F32") {
    return find(uint32_t{0x7f800000});
  }
  return -1;
}

std::string torch_name(const std::string& dtype) {
  return dtype == "BF16" ? "bfloat16" : dtype == "F32" ? "float32" : dtype == "F16" ? "float16" : dtype;
}

[[noreturn]] void fail_on_disk(const fs::path& path, int number) {
  const bool is_full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  throw Error(ExitCode::kCheckpoint,
              format("export: writing {}: {}", path, std::generic_category().message(number)),
              is_full ? "free some space on this disk, or choose another folder; nothing was changed there"
                      : "choose a folder that this user may write to; nothing was changed there");
}

// The whole file, header and tensors, synced; returns its checksum.
std::string write_safetensors(const fs::path& path, std::span<const ExportTensor> tensors) {
  std::vector<TensorSlice> slices;
  for (const ExportTensor& tensor : tensors) {
    slices.push_back({.name = tensor.name,
                      .dtype = tensor.dtype,
                      .global_shape = tensor.shape,
                      .data = tensor.data,
                      .bytes = tensor.bytes});
  }
  const RankFileLayout layout = lay_out_rank_file(slices);
  Sha256 sum;
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) {
    fail_on_disk(path, errno);
  }
  int failure = 0;
  const auto write_all = [&](const void* data, uint64_t bytes) {
    sum.add(std::span(static_cast<const std::byte*>(data), bytes));
    constexpr uint64_t kLargestWrite = uint64_t{1} << 30;  // write takes a little less than 2 GiB at most
    for (uint64_t done = 0; failure == 0 && done < bytes;) {
      const ssize_t got =
          write(file, static_cast<const char*>(data) + done, std::min(bytes - done, kLargestWrite));
      if (got >= 0) {
        done += static_cast<uint64_t>(got);
      } else if (errno != EINTR) {
        failure = errno;
      }
    }
  };
  write_all(layout.header.data(), layout.header.size());
  for (const size_t i : layout.order) {
    write_all(slices[i].data, slices[i].bytes);
  }
  if (failure == 0 && fsync(file) != 0) {
    failure = errno;
  }
  if (close(file) != 0 && failure == 0) {
    failure = errno;
  }
  if (failure != 0) {
    fail_on_disk(path, failure);
  }
  return sum.hex();
}

bool is_export(const fs::path& folder) {
  try {
    return fs::exists(folder / kRecordFile) &&
           Json::parse(read_file(folder / kRecordFile)).at("format").as_string() == kRecordFormat;
  } catch (const std::exception&) {
    return false;
  }
}

// What replacing the folder would take with it and did not make: a model card, a tokenizer, a repository.
std::vector<std::string> strangers_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name != kRecordFile && name != kConfigFile && name != kWeightsFile) {
      names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

std::vector<std::string> contract_problems(const KeyContract& contract, const Json& config,
                                           std::span<const ExportTensor> tensors, const std::string& dtype) {
  std::vector<std::string> problems;
  for (const std::string& key : contract.config_keys) {
    const Json* found = find_dotted(config, key);
    if (found == nullptr || found->is_null()) {
      problems.push_back(format("config.json: \"{}\" is {}, and the engine reads it", key,
                                found == nullptr ? "missing" : "null"));
    }
  }
  for (const char* key : {"dtype", "torch_dtype"}) {
    const Json* stated = config.find(key);
    if (stated != nullptr && !(stated->is_string() && stated->as_string() == torch_name(dtype))) {
      problems.push_back(format("config.json: \"{}\" is {}, and the tensors are {}", key, stated->dump(),
                                torch_name(dtype)));
    }
  }
  std::map<std::string, const KeyContract::Tensor*> missing;
  for (const KeyContract::Tensor& tensor : contract.tensors) {
    missing[tensor.name] = &tensor;
  }
  for (const ExportTensor& tensor : tensors) {
    const auto wanted = missing.find(tensor.name);
    if (wanted == missing.end()) {
      problems.push_back(format("tensor \"{}\" {} is not one that the engine knows, or is there twice",
                                tensor.name, tensor.shape));
      continue;
    }
    if (wanted->second->shape != tensor.shape) {
      problems.push_back(format("tensor \"{}\" has shape {}, expected {}", tensor.name, tensor.shape,
                                wanted->second->shape));
    }
    const std::string& expected = wanted->second->dtype.empty() ? dtype : wanted->second->dtype;
    if (tensor.dtype != expected) {
      problems.push_back(format("tensor \"{}\" is {}, expected {}", tensor.name, tensor.dtype, expected));
    }
    if (const int64_t place = first_not_finite(tensor); place >= 0) {
      problems.push_back(format("tensor \"{}\" is not finite at element {}", tensor.name, place));
    }
    missing.erase(wanted);
  }
  for (const auto& [name, tensor] : missing) {
    problems.push_back(format("tensor \"{}\" {} is missing", name, tensor->shape));
  }
  return problems;
}

void write_hf_export(const HfExport& request) {
  const std::vector<std::string> problems =
      contract_problems(request.contract, request.config, request.tensors, request.dtype);
  if (!problems.empty()) {
    throw Error(
        ExitCode::kInternal,
        format("export: {} {} with the engine's key contract, nothing was written:\n  {}", problems.size(),
               problems.size() == 1 ? "conflict" : "conflicts", join(problems, "\n  ")),
        "an engine would load this without an error and draft nonsense; is the algorithm plugin of another "
        "version than the checkpoint?");
  }
  fs::path folder = fs::absolute(request.folder).lexically_normal();
  if (!folder.has_filename()) {
    folder = folder.parent_path();
  }
  const bool exists = fs::exists(fs::symlink_status(folder));
  const bool is_empty_folder = exists && fs::is_directory(folder) && fs::is_empty(folder);
  if (exists && !is_empty_folder && !is_export(folder)) {
    throw Error(ExitCode::kUsage,
                format("export: {} exists and is not an export of this program (no {})", folder, kRecordFile),
                "choose another folder, or remove it");
  }
  if (const std::vector<std::string> strangers = exists && !is_empty_folder ? strangers_in(folder) : std::vector<std::string>(); !strangers.empty()) {
    throw Error(ExitCode::kUsage, format("export: {} holds an earlier export and, besides, {}; a new export takes the folder's place, and they would be gone", folder, join(strangers, ", ")),
                "move them elsewhere, or choose another folder");
  }
  const fs::path partial = folder.parent_path() / (".partial-" + folder.filename().string());
  try {
    fs::remove_all(partial);
    fs::create_directories(partial);
    const std::string config_text = request.config.dump(2) + "\n";
    const std::string tensors_sum = write_safetensors(partial / kWeightsFile, request.tensors);
    atomic_write(partial / kConfigFile, config_text, ExitCode::kCheckpoint);
    const Json record = Json::object(
        {{"format", kRecordFormat},
         {"version", 1},
         {"files", Json::object({{kConfigFile, sha256(config_text)}, {kWeightsFile, tensors_sum}})},
         {"origin", request.origin}});
    atomic_write(partial / kRecordFile, record.dump(2) + "\n", ExitCode::kCheckpoint);
    if (exists && !is_empty_folder) {
      if (renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) != 0) {
        fs::remove_all(folder);  // a file system that can't exchange names
        fs::rename(partial, folder);
      }
    } else {
      fs::rename(partial, folder);  // takes the place of an empty folder too
    }
    sync_path(folder.parent_path(), ExitCode::kCheckpoint);
    fs::remove_all(partial);
  } catch (const fs::filesystem_error& error) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);
    fail_on_disk(error.path1(), error.code().value());
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);
    throw;
  }
}

}  // namespace sf
