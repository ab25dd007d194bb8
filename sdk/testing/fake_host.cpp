// FakeHost: everything but tensors. The model's facts are texts and numbers.
#include <dlfcn.h>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/kernels/ops.hpp"
#include "core/plugin/loader.hpp"
#include "core/plugin/registry.hpp"
#include "sdk/testing/lone_plugin.hpp"
#include "sdk/testing/plugin_test.hpp"
#include "sdk/testing/tiny_facts.hpp"

namespace sf::testing {

namespace fs = std::filesystem;

namespace {

fs::path own_library() {
  Dl_info info{};
  SF_CHECK(dladdr(reinterpret_cast<void*>(&own_library), &info) != 0, "this library does not know its own path");
  return fs::canonical(info.dli_fname);
}

// What is wrong, as sf-host would print it.
void require(const Diagnostics& problems, ExitCode code) {
  if (problems.has_errors()) {
    throw Error(code, problems.text());
  }
}

}  // namespace

fs::path library_folder() { return own_library().parent_path(); }

HostServices tensor_services() {
  return {.find = [](std::string_view id) -> const void* { return id == kOpsService ? static_cast<const void*>(&cpu_ops()) : nullptr; },
          .stop_requested = {}};
}

ModelFacts facts_from(const PlanValues& values, const fs::path& target) {
  const auto get = [&]<class T>(const char* key, T) { return value_as<T>(values.at(key).value, key); };
  ModelFacts facts;
  facts.target_config_json = read_file(target / "config.json", ExitCode::kData);
  const fs::path draft = get("model.draft_model_config", fs::path());
  if (!draft.empty()) {
    facts.draft_config_json = read_file(draft, ExitCode::kData);
    facts.draft_config_path = draft.string();
  }
  facts.draft_num_hidden_layers = get("model.draft_num_hidden_layers", int64_t{});
  facts.draft_block_size = get("model.draft_block_size", int64_t{});
  facts.target_layer_ids = get("model.target_layer_ids", std::vector<int64_t>());
  facts.mask_token_id = get("model.mask_token_id", int64_t{});
  facts.rope_rounding = get("model.rope_rounding", std::string());
  facts.bfloat16 = false;   // this host computes in float32
  facts.static_shapes = get("training.static_shapes", bool{});
  return facts;
}

struct FakeHost::Parts {
  TemporaryFolder folder;
  PluginFile file;
  PlanValues values;
  std::vector<LogLine> log;
  std::unique_ptr<LonePlugin> plugin;
};

FakeHost::FakeHost(const Setup& setup) : parts_(std::make_unique<Parts>()) {
  redirect_log([log = &parts_->log](Level level, std::string_view text) { log->push_back({level, std::string(text)}); });
  set_log_level(Level::kTrace);
  write_tiny_target(parts_->folder.path() / "target");
  parts_->file = inspect_plugin(fs::canonical(setup.plugin), "test", this_host(SF_TORCH_VARIANT, own_library()));
  require(parts_->file.problems, ExitCode::kPlugin);
  Diagnostics problems;
  parts_->values = values_of(*parts_->file.manifest, setup.recipe, {}, parts_->folder.path() / "target", problems);
  require(problems, ExitCode::kUsage);
  const sf_plugin* entry = open_plugin(parts_->file, problems);
  check_copies(problems);
  require(problems, ExitCode::kPlugin);
  HostServices services = tensor_services();
  services.find = [ops = std::move(services.find), comm = setup.comm](std::string_view id) -> const void* {
    if (id == kCommService && comm == nullptr) {
      throw Error(ExitCode::kPlugin, "there are no collectives: this test has one process", "give Setup::comm");
    }
    return id == kCommService ? comm : ops(id);
  };
  parts_->plugin = std::make_unique<LonePlugin>(parts_->file, entry, parts_->values, services);
  parts_->plugin->require(parts_->plugin->create(), "create");
  (void)find_interface(interface_of(parts_->file.build->kind));
  if (setup.start) {
    parts_->plugin->require(parts_->plugin->start(), "start");
  }
}

FakeHost::~FakeHost() {
  parts_->plugin.reset();
  redirect_log({});
}

sf_instance* FakeHost::instance() const { return parts_->plugin->instance(); }

void FakeHost::stop() { parts_->plugin->require(parts_->plugin->stop(), "stop"); }

const std::vector<LogLine>& FakeHost::log() const { return parts_->log; }

std::vector<std::string> FakeHost::unread_options() const { return parts_->plugin->unread(); }

std::int64_t FakeHost::effect(const std::string& option) const { return parts_->plugin->options().effect(option); }

std::string FakeHost::folder() const { return parts_->folder.path().string(); }

ModelFacts FakeHost::model_facts() const { return facts_from(parts_->values, parts_->folder.path() / "target"); }

const void* FakeHost::find_interface(const char* id) const {
  const void* found = parts_->plugin->get_interface(id);
  if (found == nullptr) {
    throw Error(ExitCode::kPlugin, format("plugin \"{}\" offers no \"{}\"", parts_->file.name(), id), "its get_interface must return it");
  }
  return found;
}

}  // namespace sf::testing
