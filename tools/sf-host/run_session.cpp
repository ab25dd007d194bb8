#include "tools/sf-host/run_session.hpp"

#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/plan/print.hpp"
#include "core/plugin/loader.hpp"
#include "core/recipe/recipe_reader.hpp"
#include "core/recipe/render.hpp"

#include <dlfcn.h>

#ifndef SF_TORCH_VARIANT
#define SF_TORCH_VARIANT ""
#endif

namespace sf {

namespace fs = std::filesystem;

void require_place_of_file(const std::string& flag, const fs::path& path) {
  std::error_code ignored;
  if (path.empty() || (!fs::is_directory(path, ignored) && fs::is_directory(fs::absolute(path).parent_path(), ignored))) {
    return;
  }
  throw Error(ExitCode::kUsage, format("{} {}: {}", flag, path, fs::is_directory(path, ignored) ? "is a folder" : "its folder does not exist"), "name a file in a folder that exists");
}

fs::path library_folder() {
  std::error_code ignored;
  fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  return program.parent_path().parent_path() / "lib" / "sf";
}

HostBuild host_build() {
  return this_host(SF_TORCH_VARIANT, library_folder() / "libsf_engine.so");
}

SearchRequest search_request(const Command& command) {
  const char* environment = std::getenv("SF_PLUGIN_PATH");
  return {.flag_folders = command.plugin_paths,
          .environment = environment != nullptr ? environment : "",
          .built_in = library_folder() / "plugins",
          .allowed_unsafe = command.unsafe_paths};
}

Engine& open_engine() {
  fs::path path = library_folder() / "libsf_engine.so";
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw Error(ExitCode::kInternal, format("this installation has no engine: \"{}\" does not exist", path),
                "build with SF_TORCH=ON, or install sf again");
  }
  // LibTorch's OpenMP reads this when it is loaded. Its threads would otherwise spin at every barrier, which on a machine
  // that others use too costs more than the work: capture went from 143 to 585 tokens/s on two busy cores.
  ::setenv("OMP_WAIT_POLICY", "passive", /*overwrite=*/0);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed
  if (library == nullptr) {
    throw Error(ExitCode::kInternal, format("the engine can't be opened: {}", dlerror()),
                "LibTorch moved or is not the one that this build was made with; build again");
  }
  auto* entry = reinterpret_cast<Engine* (*)()>(dlsym(library, "sf_engine_v1"));
  if (entry == nullptr) {
    throw Error(ExitCode::kInternal, format("\"{}\" has no sf_engine_v1", path),
                "it belongs to another version; build or install again");
  }
  return *entry();
}

namespace {

World find_world(const LaunchFlags& flags) {
  const Environment environment = process_environment();
  if (!flags.starts_ranks() || environment("SF_LAUNCHER")) {
    return world_from(environment);
  }
  const auto variables = environment_of_rank(flags, 0, "");
  World world = world_from([&](const char* name) -> std::optional<std::string> {
    for (const auto& [known, value] : variables) {
      if (known == name) {
        return value;
      }
    }
    return std::nullopt;
  });
  if (world.size > 1) {
    world.origin = flags.nnodes == 1 ? format("sf-host --nproc {}", flags.nproc)
                                     : format("sf-host --nproc {} --nnodes {} --node-rank {} --rendezvous {}", flags.nproc, flags.nnodes, flags.node_rank, flags.rendezvous);
  }
  return world;
}

}  // namespace

std::string plugin_help(const Command& command) {
  Diagnostics ignored;
  Catalog catalog(search_request(command), command.plugins, host_build(), ignored);
  RawValues raw = read_recipe(command.positional[0], ignored);
  apply_overrides(command.overrides, raw, ignored);
  std::string out;
  for (const Manifest& manifest : pick_stack(raw, catalog, ignored).manifests()) {
    if (!manifest.options.empty()) {
      out +=
          format("\nkeys of {} ({})\n{}", manifest.name, manifest.kind, options_help(manifest.options, 110));
    }
  }
  return out;
}

void print_problems(const Command& command, const Diagnostics& problems, ExitCode code) {
  if (command.json) {
    Json out = Json::object();
    out.set("problems", diagnostics_json(problems));
    out.set("exit_code", static_cast<int>(code));
    std::puts(out.dump(2).c_str());
    return;
  }
  std::string text = problems.text();
  if (code != ExitCode::kOk) {
    text += format("{} error{}.", problems.error_count(), problems.error_count() == 1 ? "" : "s");
  }
  std::fprintf(stderr, "%s\n", text.c_str());
}

RunSession::~RunSession() {
  close();
}

bool RunSession::refuse(const Diagnostics& problems, ExitCode code) {
  print_problems(command_, problems, code);
  code_ = code;
  return false;
}

bool RunSession::plan(bool will_run) {
  if (command_.positional.size() != 1) {
    throw Error(ExitCode::kUsage,
                format("{} takes one recipe, found {} arguments", command_.verb, command_.positional.size()),
                format("sf-host {} recipe.toml; sf-host {} --help says more", command_.verb, command_.verb));
  }
  Diagnostics problems;
  catalog_ = std::make_unique<Catalog>(search_request(command_), command_.plugins, host_build(), problems);
  if (command_.verb == "train" || command_.verb == "plan" || command_.verb == "bench") {
    world_ = find_world(command_.launch);
  }
  ResolveRequest request{.recipe = command_.positional[0],
                         .overrides = command_.overrides,
                         .backend = command_.backend,
                         .unsafe_paths = command_.unsafe_paths,
                         .instead = instead_,
                         .will_run = will_run,
                         .machine = {},
                         .torch_variant = SF_TORCH_VARIANT,
                         .ranks = {.count = world_.size, .on_this_machine = world_.local_size, .origin = world_.origin}};
  resolution_ = resolve(request, *catalog_, problems);
  if (!resolution_->plan) {
    return refuse(resolution_->problems, resolution_->code);
  }
  return true;
}

bool RunSession::open(bool start) {
  bool shows_plan = command_.verb == "train" || command_.verb == "plan";  // these print the warnings with it
  if (!shows_plan && !command_.json) {
    std::fputs(resolved().warnings.text().c_str(), stderr);
  }
  engine_ = &open_engine();
  Diagnostics problems;
  const fs::path run_folder = resolved().get<fs::path>("output_dir") / resolved().get<std::string>("run_id");
  const auto seed = static_cast<std::uint64_t>(resolved().get<std::int64_t>("training.seed"));
  for (const StackMember& member : resolution_->stack.members) {
    if (member.file == nullptr) {
      continue;
    }
    const sf_plugin* entry = open_plugin(*member.file, problems);
    if (entry == nullptr) {
      continue;  // tell about all of them
    }
    const PluginServices* own = services_.emplace_back(std::make_unique<PluginServices>(member.name, seed, run_folder)).get();
    HostServices services{.find =
                              [this, own](std::string_view id) {
                                const void* found = own->find(id);
                                return found != nullptr ? found : engine_->service(id);
                              },
                          .stop_requested = is_stop_requested};
    std::string sha256;
    for (const PlanPlugin& plugin : resolved().stack) {
      sha256 = plugin.name == member.name ? plugin.sha256 : sha256;
    }
    registry_.add({.name = member.name,
                   .version = member.file->manifest->version,
                   .sha256 = sha256,
                   .kind = member.file->build->kind,
                   .plugin = entry,
                   .host = std::make_unique<HostTable>(member.name, services),
                   .options = std::make_unique<BackendOptions>(*member.file->manifest, resolved().values)});
  }
  check_copies(problems);
  if (problems.has_errors() || !registry_.create(problems) || (start && !registry_.start(problems))) {
    return refuse(problems, ExitCode::kPlugin);
  }
  if (start) {
    registry_.check_claims(problems);
    if (problems.has_errors()) {
      return refuse(problems, ExitCode::kPlugin);
    }
  }
  context_.plan = &resolved();
  if (!world_.is_lead() && !is_logged(Level::kDebug)) {
    set_log_level(Level::kWarn);
  }
  context_.world = world_;
  context_.leave = leave;
  if (world_.is_lead() || !world_.folder.empty()) {  // sf-host's launcher names the rank before each line
    context_.log = [](Level level, std::string_view text) { log_line(level, text); };
  } else {
    context_.log = [rank = world_.rank](Level level, std::string_view text) { log_line(level, format("[rank {}] {}", rank, text)); };
  }
  context_.stop_requested = is_stop_requested;
  context_.check_effects = [this] {
    Diagnostics without_effect;
    registry_.check_effects(without_effect);
    if (without_effect.has_errors()) {
      (void)refuse(without_effect, ExitCode::kPlugin);
      throw RefusedRun(code_);
    }
    if (std::exchange(tells_effects_, false) && world_.is_lead()) {
      for (const PluginRegistry::Entry& entry : registry_.entries()) {
        const std::vector<std::string> options = entry.options->in_effect();
        if (!options.empty()) {
          log_info("in effect, with how many things each changed: {}", join(options, ", "));
        }
      }
    }
  };
  for (const PluginRegistry::Entry& entry : registry_.entries()) {
    LoadedPlugin plugin;
    plugin.name = entry.name;
    plugin.version = entry.version;
    plugin.sha256 = entry.sha256;
    plugin.kind = entry.kind;
    plugin.entry = entry.plugin;
    plugin.instance = entry.instance;
    context_.plugins.push_back(std::move(plugin));
  }
  return true;
}

void RunSession::close() {
  registry_.close();
}

}  // namespace sf
