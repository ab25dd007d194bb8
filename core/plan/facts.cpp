#include "core/plan/facts.hpp"

#include <algorithm>
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

// What no decoder can be without, and what contradicts itself. Each becomes one diagnostic that names the file.
void check_decoder(const Json& decoder, const Facts& facts, const fs::path& path, const Place& place, Diagnostics& problems) {
  const auto complain = [&](const std::string& text) {
    problems.error({.id = "model/bad-config",
                    .message = format("the target's {}: {}", path, text),
                    .place = place,
                    .fix = "download the target's config.json again"});
  };
  const auto number = [&](const char* name) -> std::int64_t {  // 0: not there, or complained about already
    const auto found = facts.find(format("model.{}", name));
    const auto* value = found == facts.end() ? nullptr : std::get_if<std::int64_t>(&found->second);
    return value == nullptr ? 0 : *value;
  };
  for (const char* name : {"hidden_size", "num_hidden_layers"}) {
    if (const Json* value = decoder.find(name); value == nullptr || value->is_null()) {
      complain(format("{} is missing", name));
    }
  }
  const std::int64_t heads = number("num_attention_heads");
  const std::int64_t kv_heads = number("num_key_value_heads");
  if (heads > 0 && kv_heads > 0 && heads % kv_heads != 0) {
    complain(format("num_attention_heads is {}, expected a multiple of num_key_value_heads, {}", heads, kv_heads));
  }
  if (number("head_dim") == 0 && heads > 0 && number("hidden_size") % heads != 0) {
    complain(format("hidden_size is {}, expected a multiple of num_attention_heads, {}, as there is no head_dim", number("hidden_size"), heads));
  }
  if (number("head_dim") % 2 != 0) {
    complain(format("head_dim is {}, expected an even number: rotary positions turn pairs", number("head_dim")));
  }
  for (const char* name : {"pad_token_id", "eos_token_id", "unk_token_id"}) {
    const Json* value = decoder.find(name);
    const auto is_id = [](const Json& id) { return id.is_int() && id.as_int() >= -1; };
    if (value == nullptr || value->is_null() || is_id(*value)) {
      continue;
    }
    if (!value->is_array() || !std::all_of(value->items().begin(), value->items().end(), is_id)) {
      complain(format("{} is {}, expected the id of a token or a list of them", name, value->dump()));
    }
  }
  if (const Json* eps = decoder.find("rms_norm_eps"); eps != nullptr && !eps->is_null()) {
    if (!eps->is_number() || !(eps->as_double() > 0)) {
      complain(format("rms_norm_eps is {}, expected a positive number", eps->dump()));
    }
  }
}

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

Facts machine_facts(const Machine& machine, const std::string& device, const std::string& torch_variant,
                    std::int64_t ranks) {
  Facts out;
  out["fact.world_size"] = ranks;
  out["fact.shard_degree"] = ranks;
  out["fact.device.kind"] = device;
  if (device != "cuda") {
    out["fact.device.sm"] = 0;   // of a GPU the engine asks the driver
  }
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
  if (!config.is_object()) {
    problems.error({.id = "model/bad-config",
                    .message = format("the target's {} holds {}, expected an object", path, config.kind_name()),
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
           .message = format("the target's {}: {} is {}, expected a positive integer", path, name, value->dump()),
           .place = place,
           .fix = "download the target's config.json again"});
      continue;
    }
    out[format("model.{}", name)] = value->as_int();
  }
  if (const Json* type = decoder.find("model_type"); type != nullptr && type->is_string()) {
    out["model.model_type"] = type->as_string();
  }
  check_decoder(decoder, out, path, place, problems);
  return out;
}

void check_draft_config(const fs::path& path, const Place& place, Diagnostics& problems) {
  if (path.empty()) {
    return;
  }
  std::string what;
  try {
    const Json config = Json::parse(read_file(path, ExitCode::kUsage), path.string());
    what = config.is_object() ? "" : format("{} holds {}, expected an object", path, config.kind_name());
  } catch (const std::exception& error) {
    what = error.what();
  }
  if (!what.empty()) {
    problems.error({.id = "recipe/bad-draft-config",
                    .message = "model.draft_model_config: " + what,
                    .place = place,
                    .fix = "name the config.json of a draft, or leave the key out: the algorithm then makes one from the target's"});
  }
}

}  // namespace sf
