#include "core/plan/resolve.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/recipe/recipe_reader.hpp"
#include "core/recipe/rules.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kPeersMost = 16;  // as in core/dist/comm_gpu.cpp

// device = "auto" becomes what was taken, with the reason as origin.
void choose_device(const Machine& machine, bool will_run, PlanValues& values, Diagnostics& problems) {
  auto found = values.find("device");
  if (found == values.end()) {
    return;
  }
  PlanValue& device = found->second;
  const auto wanted = std::get<std::string>(device.value);
  if (wanted == "auto") {
    device.value = std::string(machine.gpus > 0 ? "cuda" : "cpu");
    device.origin = machine.gpus > 0 ? format("auto: this machine has {} GPU{}", machine.gpus,
                                              machine.gpus == 1 ? "" : "s")
                                     : "auto: no GPU on this machine";
  } else if (wanted == "cuda" && machine.gpus == 0) {
    Diagnostic diagnostic{
        .id = "device/no-gpu",
        .message = "device = \"cuda\", but this machine has no NVIDIA GPU (there is no /dev/nvidia0)",
        .place = device.place,
        .fix = "run it on a machine with a GPU, or device = \"auto\""};
    if (will_run) {
      problems.error(diagnostic);
    } else {
      problems.warn(diagnostic);
    }
  }
}

// training.peer_copies = "auto" becomes what the run begins with. What a plan can't know, whether GPUs reach each other's memory, the ranks find out.
void choose_peer_copies(const PlanRanks& ranks, PlanValues& values) {
  const auto found = values.find("training.peer_copies"), device = values.find("device");
  if (found == values.end() || device == values.end() || std::get<std::string>(found->second.value) != "auto") {
    return;
  }
  std::string reason;
  if (ranks.count == 1) {
    reason = "there is one rank";
  } else if (std::get<std::string>(device->second.value) != "cuda") {
    reason = "ranks on the CPU";
  } else if (ranks.on_this_machine != ranks.count) {
    reason = format("{} of {} ranks are on this machine, and they take all of them", ranks.on_this_machine, ranks.count);
  } else if (ranks.count > kPeersMost) {
    reason = format("there are {} ranks, and they take at most {}", ranks.count, kPeersMost);
  }
  found->second.value = std::string(reason.empty() ? "on" : "off");
  found->second.is_set = false;  // not asked for: ranks that can't copy leave it to NCCL
  found->second.origin = "auto: " + (reason.empty() ? format("{} GPUs of one machine", ranks.count) : reason);
}

// Each rank of this machine computes on a GPU of its own. A launcher may show each of them one GPU only.
void check_devices(const Machine& machine, const ResolveRequest& request, const Plan& plan, Diagnostics& problems) {
  const auto device = plan.values.find("device");
  if (device == plan.values.end() || std::get<std::string>(device->second.value) != "cuda" || machine.gpus == 0 || machine.gpus >= request.ranks.on_this_machine) {
    return;
  }
  const Diagnostic diagnostic{.id = "device/too-few-gpus",
                              .message = format("{} ranks on this machine, and it has {} GPU{}", request.ranks.on_this_machine, machine.gpus, machine.gpus == 1 ? "" : "s"),
                              .place = device->second.place,
                              .why = "each rank computes on a GPU of its own",
                              .fix = "start at most as many ranks as there are GPUs, or device = \"cpu\""};
  if (request.will_run) {
    problems.error(diagnostic);
  } else {
    problems.warn(diagnostic);
  }
}

// Two names of one folder become the same name, so that rules see that it is one.
void take_as_one(const char* key, const char* other, PlanValues& values) {
  const auto first = values.find(key), second = values.find(other);
  if (first == values.end() || second == values.end()) {
    return;
  }
  const auto& path = std::get<std::string>(first->second.value);
  auto& alias = std::get<std::string>(second->second.value);
  std::error_code missing;  // then they are two
  if (!path.empty() && !alias.empty() && fs::equivalent(path, alias, missing)) {
    alias = path;
  }
}

const Manifest* manifest_of(const std::vector<Manifest>& all, const std::string& name) {
  for (const Manifest& one : all) {
    if (one.name == name) {
      return &one;
    }
  }
  return nullptr;
}

bool has_key(const std::vector<Option>& options, const std::string& key) {
  return std::any_of(options.begin(), options.end(), [&](const Option& option) { return option.key == key; });
}

// The recipe of one algorithm read for another.
void take_instead(const std::string& name, const Catalog& catalog, RawValues& raw) {
  auto found = raw.find("algorithm.name");
  const std::string own_name = found == raw.end() ? "" : found->second.node.string;
  if (own_name == name) {
    return;
  }
  const std::vector<Manifest> all = catalog.manifests();
  const Manifest* own = manifest_of(all, own_name);
  const Manifest* other = manifest_of(all, name);
  const auto provides_blocks = [](const Manifest* manifest) {
    return manifest != nullptr && std::count(manifest->provides.begin(), manifest->provides.end(), "draft-blocks") > 0;
  };
  const bool drafts_alike = provides_blocks(own) == provides_blocks(other);
  std::erase_if(raw, [&](const auto& entry) {
    const std::string& key = entry.first;
    if (key == "model.draft_model_config") {
      return true;
    }
    if (!drafts_alike && (key == "model.target_layer_ids" || key == "model.draft_num_hidden_layers" || key == "model.draft_block_size")) {
      return true;
    }
    return own != nullptr && has_key(own->options, key) && !has_key(host_manifest().options, key) &&
           (other == nullptr || !has_key(other->options, key));
  });
  raw["algorithm.name"] = raw_text(name, "--for");
}

std::vector<PlanPlugin> describe_stack(const Stack& stack) {
  std::vector<PlanPlugin> out;
  for (const StackMember& member : stack.members) {
    PlanPlugin plugin{
        .slot = member.slot, .name = member.name, .version = {}, .sha256 = {}, .path = {}, .provides = {}};
    if (member.file != nullptr) {
      plugin.version = member.file->manifest->version;
      plugin.sha256 = sha256_file(member.file->path, ExitCode::kPlugin);
      plugin.path = member.file->path;
      plugin.provides = member.file->manifest->provides;
    } else {
      plugin.version = SF_SDK_VERSION;
    }
    out.push_back(std::move(plugin));
  }
  return out;
}

}  // namespace

ExitCode exit_code_of(const Diagnostics& problems) {
  bool plugin = false;
  bool data = false;
  bool device = false;
  for (const Diagnostic& diagnostic : problems.all()) {
    if (diagnostic.severity != Severity::error) {
      continue;
    }
    if (diagnostic.id.starts_with("plugin/")) {
      plugin = true;
    } else if (diagnostic.id.starts_with("model/") || diagnostic.id.starts_with("data/")) {
      data = true;
    } else if (diagnostic.id.starts_with("device/")) {
      device = true;
    } else {
      return ExitCode::kUsage;
    }
  }
  return plugin ? ExitCode::kPlugin : data ? ExitCode::kData : device ? ExitCode::kDevice : ExitCode::kOk;
}

Resolution resolve(const ResolveRequest& request, const Catalog& catalog,
                   const Diagnostics& catalog_problems) {
  Resolution out;
  Diagnostics& problems = out.problems;
  problems.add_all(catalog_problems);

  RawValues raw = read_recipe(request.recipe, problems);
  if (problems.contains("recipe/not-readable") || problems.contains("recipe/syntax") ||
      problems.contains("recipe/include-cycle")) {
    out.code = exit_code_of(problems);
    return out;  // what follows would be noise
  }
  apply_overrides(request.overrides, raw, problems);
  if (!request.backend.empty()) {
    apply_backend_flag(request.backend, catalog, raw, problems);
  }
  if (!request.instead.empty()) {
    take_instead(request.instead, catalog, raw);
  }
  out.stack = pick_stack(raw, catalog, problems);
  std::vector<Manifest> manifests = out.stack.manifests();

  Schema schema;
  schema.add(host_manifest(), problems);
  for (const Manifest& manifest : manifests) {
    schema.add(manifest, problems);
  }
  Plan plan;
  plan.values = schema.resolve(raw, catalog.manifests(), !out.stack.is_complete, problems);

  Machine machine = request.machine.value_or(this_machine());
  choose_device(machine, request.will_run, plan.values, problems);
  auto device = plan.values.find("device");
  plan.facts = machine_facts(
      machine, device != plan.values.end() ? std::get<std::string>(device->second.value) : "cpu",
      request.torch_variant, request.ranks.count);
  plan.ranks = request.ranks;
  choose_peer_copies(plan.ranks, plan.values);
  check_devices(machine, request, plan, problems);
  if (auto target = plan.values.find("model.target_model_path"); target != plan.values.end()) {
    plan.facts.merge(
        model_facts(std::get<std::string>(target->second.value), target->second.place, problems));
  }
  if (auto draft = plan.values.find("model.draft_model_config"); draft != plan.values.end()) {
    check_draft_config(std::get<std::string>(draft->second.value), draft->second.place, problems);
  }

  take_as_one("data.hidden_states_path", "data.eval_hidden_states_path", plan.values);

  std::set<std::string> provided = out.stack.provided();
  provided.insert(host_manifest().provides.begin(), host_manifest().provides.end());
  std::set<std::string> names = out.stack.names();
  RuleInput input{plan.values, plan.facts, provided, names};
  bool values_are_whole = std::all_of(schema.options().begin(), schema.options().end(),
                                      [&](const Option& option) { return plan.has(option.key); });
  if (values_are_whole) {  // with a value missing its rules would speak about what isn't there
    check_rules(host_manifest().rules, input, problems, plan.undecided);
    for (const Manifest& manifest : manifests) {
      for (const Rule& rule : manifest.rules) {
        const std::size_t before = plan.undecided.size();
        check_rules({rule}, input, problems, plan.undecided);
        if (plan.undecided.size() > before && plan.undecided.back() == rule.id + ": needs fact.device.sm") {
          plan.device_rules.push_back(rule);
        }
      }
    }
  }
  check_capabilities(manifests, problems);
  if (!problems.has_errors()) {  // the rules say it better
    check_claims(manifests, catalog.manifests(), plan.values, problems);
  }

  out.code = exit_code_of(problems);
  if (problems.has_errors()) {
    return out;
  }
  plan.recipe = fs::absolute(request.recipe).lexically_normal();
  plan.stack = describe_stack(out.stack);
  plan.warnings = problems;
  plan.unsafe_paths = request.unsafe_paths;
  out.plan = std::move(plan);
  return out;
}

}  // namespace sf
