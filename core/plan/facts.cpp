#include "core/plan/facts.hpp"

#include <array>
#include <system_error>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "sf/json.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

constexpr std::array<const char*, 8> kNumbers = {
    "hidden_size",         "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",          "vocab_size",        "max_position_embeddings"};

}  // namespace

Machine this_machine() {
  Machine out;
  std::error_code ignored;
  while (fs::exists(format("/dev/nvidia{}", out.gpus), ignored)) {
    ++out.gpus;
  }
  out.processors = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
  return out;
}

Facts machine_facts(const Machine& machine, const std::string& device, const std::string& torch_variant) {
  Facts out;
  out["fact.world_size"] = std::int64_t{1};
  out["fact.shard_degree"] = std::int64_t{1};
  out["fact.device.kind"] = device;
  out["fact.device.count"] = device == "cuda" ? machine.gpus : 1;
  out["fact.processors"] = machine.processors;
  if (!torch_variant.empty()) {
    out["fact.torch.version"] = torch_variant;
  }
  return out;
}

Facts model_facts(const fs::path& folder, const Place& place, Diagnostics& problems) {
  Facts out;
  fs::path path = folder / "config.json";
  Json config;
  try {
    std::error_code ignored;
    if (!fs::exists(path, ignored)) {
      problems.error(
          {.id = "model/no-config",
           .message = fs::is_directory(folder, ignored)
                          ? format("the target's folder \"{}\" has no config.json", folder)
                          : format("there is no target folder \"{}\"", folder),
           .place = place,
           .fix = "model.target_model_path names a Hugging Face folder: config.json and safetensors"});
      return out;
    }
    config = Json::parse(read_file(path), path.string());
  } catch (const std::exception& error) {
    problems.error({.id = "model/bad-config",
                    .message = error.what(),
                    .place = place,
                    .fix = "download the target's config.json again"});
    return out;
  }
  const Json* inner = config.find("text_config");
  const Json& decoder = inner != nullptr && inner->is_object() ? *inner : config;
  for (const char* name : kNumbers) {
    const Json* value = decoder.find(name);
    if (value == nullptr || value->is_null()) {
      continue;
    }
    if (!value->is_int() || value->as_int() <= 0) {
      problems.error(
          {.id = "model/bad-config",
           .message = format("{}: {} is {}, expected a positive integer", path, name, value->dump()),
           .place = place,
           .fix = "download the target's config.json again"});
      continue;
    }
    out[format("model.{}", name)] = value->as_int();
  }
  if (const Json* type = decoder.find("model_type"); type != nullptr && type->is_string()) {
    out["model.model_type"] = type->as_string();
  }
  return out;
}

}  // namespace sf
