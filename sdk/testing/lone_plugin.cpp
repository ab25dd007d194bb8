#include "sdk/testing/lone_plugin.hpp"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <system_error>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/plan/facts.hpp"
#include "core/recipe/recipe_reader.hpp"
#include "core/recipe/rules.hpp"

namespace sf::testing {

namespace fs = std::filesystem;

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (fs::temp_directory_path() / "sf-plugin-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw Error(ExitCode::kInternal, format("can't make a folder in {}", fs::temp_directory_path()), "set TMPDIR to a folder that you can write");
  }
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void write_tiny_target(const fs::path& folder) {
  fs::create_directories(folder);
  atomic_write(folder / "config.json", format(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": {}, "vocab_size": {}, )", kTinyHidden, kTinyVocab) +
                                           R"("intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
 "max_position_embeddings": 512, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": false})");
}

PlanValues values_of(const Manifest& manifest, const std::string& recipe, const std::vector<std::string>& sets, const fs::path& target, Diagnostics& problems) {
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(manifest, problems);
  RawValues raw;
  apply_overrides({"model.target_model_path=" + toml_quoted(target.string()), "algorithm.name=" + toml_quoted(manifest.name), "device=\"cpu\"",
                   "model.torch_dtype=\"float32\"", format("model.mask_token_id={}", kTinyVocab - 1), "model.draft_num_hidden_layers=1"},
                  raw, problems);
  if (manifest.kind == "algorithm" && std::find(manifest.provides.begin(), manifest.provides.end(), "draft-blocks") != manifest.provides.end()) {
    apply_overrides({"model.draft_block_size=4"}, raw, problems);
  }
  if (!recipe.empty()) {
    const TemporaryFolder folder;
    atomic_write(folder.path() / "recipe.toml", recipe);
    for (auto& [key, value] : read_recipe(folder.path() / "recipe.toml", problems)) {
      raw[key] = value;
    }
  }
  apply_overrides(sets, raw, problems);
  PlanValues values = schema.resolve(raw, {manifest}, false, problems);
  if (problems.has_errors()) {
    return values;
  }
  Facts facts = machine_facts(Machine{.gpus = 0, .processors = 1}, "cpu", "", 1);
  facts.merge(model_facts(target, {}, problems));
  std::set<std::string> provided(manifest.provides.begin(), manifest.provides.end());
  provided.insert(host_manifest().provides.begin(), host_manifest().provides.end());
  if (manifest.kind == "transform") {
    provided.insert({"stable-parameters", "gather-codec"});   // of the backend that trials run over, and of who calls a codec here
  }
  const std::set<std::string> names = {manifest.name};
  std::vector<std::string> undecided;
  check_rules(manifest.rules, RuleInput{values, facts, provided, names}, problems, undecided);
  return values;
}

namespace {

HostServices with_own(HostServices services, const PluginServices& own) {
  if (services.find) {
    services.find = [outer = std::move(services.find), &own](std::string_view id) {
      const void* found = outer(id);
      return found != nullptr ? found : own.find(id);
    };
  }
  return services;
}

}  // namespace

LonePlugin::LonePlugin(const PluginFile& file, const sf_plugin* entry, const PlanValues& values, HostServices services)
    : manifest_(*file.manifest), entry_(entry), services_(file.name(), 1, run_folder_.path()), host_(file.name(), with_own(std::move(services), services_)), options_(std::make_unique<BackendOptions>(*file.manifest, values)) {
  status_.struct_size = sizeof(sf_status);
}

LonePlugin::~LonePlugin() {
  if (is_started_) {
    (void)stop();
  }
  destroy();
}

std::int32_t LonePlugin::create() {
  status_ = {.struct_size = sizeof(sf_status), .code = SF_OK, .what = {}, .hint = {}};
  const std::int32_t code = entry_->create(host_.table(), options_->table(), &instance_, &status_);
  if (code != SF_OK) {
    instance_ = nullptr;
  }
  return code;
}

std::int32_t LonePlugin::start() {
  status_ = {.struct_size = sizeof(sf_status), .code = SF_OK, .what = {}, .hint = {}};
  is_started_ = true;  // stop may be called after a failed start
  return entry_->start(instance_, &status_);
}

std::int32_t LonePlugin::stop() {
  status_ = {.struct_size = sizeof(sf_status), .code = SF_OK, .what = {}, .hint = {}};
  is_started_ = false;
  return entry_->stop(instance_, &status_);
}

void LonePlugin::destroy() {
  if (instance_ != nullptr) {
    entry_->destroy(instance_);
    instance_ = nullptr;
  }
}

void LonePlugin::require(std::int32_t code, const std::string& call) const {
  if (code != SF_OK) {
    throw Error(ExitCode::kPlugin, format("plugin \"{}\" failed in {}: {}", manifest_.name, call, status_.what[0] != 0 ? status_.what : format("code {}", code).c_str()),
                status_.hint);
  }
}

std::vector<std::string> LonePlugin::unread() const {
  std::vector<std::string> out;
  for (const Option& option : manifest_.options) {
    if (!options_->is_claimed(option.name)) {
      out.push_back(option.key);
    }
  }
  return out;
}

}  // namespace sf::testing
