#include "core/train/saved_run.hpp"

#include <ATen/ATen.h>

#include <set>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/model/tensor_view.hpp"
#include "core/plan/plan.hpp"
#include "core/recipe/rules.hpp"
#include "core/train/draft_buffers.hpp"

namespace sf {
namespace {

std::string display(const std::vector<std::string>& sentences) {
  std::string text;
  for (const std::string& sentence : sentences) {
    text += (text.empty() ? "" : "; ") + sentence;
  }
  return text;
}

// What one optimizer step takes, so that equal texts mean the same training: how the algorithm pools says what may be shared out in another way.
std::string window_text(const Session& session) {
  const int64_t ranks = session.rank_count();
  const int64_t batch = session.plan->get<int64_t>("training.batch_size"), micro_steps = session.plan->get<int64_t>("training.accumulation_steps");
  switch (session.description.pooling) {
    case Pooling::window: return format("{} samples", ranks * micro_steps * batch);
    case Pooling::micro: return format("{} micro-steps of {} samples", micro_steps, ranks * batch);
    case Pooling::mean: return format("{} batches of {} samples", ranks * micro_steps, batch);
  }
  return "";
}

// The state that describes the run as it is configured now; what it has done comes from `progress`.
RunState describe_run(const Session& session, const RunProgress& progress, const FeatureStore& features) {
  const Plan& plan = *session.plan;
  RunState state;
  state.run_id = plan.get<std::string>("run_id");
  state.step = progress.update;
  state.position = progress.stream_position;
  state.epoch = progress.epoch;
  state.seed = session.seed;
  state.total_steps = progress.updates_total;
  state.schedule = plan.get<std::string>("training.lr_scheduler");
  state.recipe = plan.recipe_text();
  state.draft_config = session.description.draft_config_json;
  state.target_fingerprint = session.target_fingerprint;
  state.features_fingerprint = features.fingerprint();
  state.versions = {{"sf", SF_SDK_VERSION}, {"libtorch", SF_TORCH_VARIANT}, {"compiler", __VERSION__}};
  for (const LoadedPlugin& plugin : session.context->plugins) {
    state.plugins.push_back({.name = plugin.name, .version = plugin.version, .sha256 = plugin.sha256});
  }
  state.layout = {.sharding = plan.get<std::string>("backend.sharding"), .ranks = session.rank_count(), .window = window_text(session)};
  for (const auto& [key, value] : plan.values) {
    if (value.is_fixed) {
      state.fixed[key] = toml_text(value.value);
    }
  }
  for (const auto& [key, value] : session.description.fixed) {
    state.fixed["draft." + key] = value;
  }
  return state;
}

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The tensors of a shard under their names in a checkpoint.
std::vector<NamedTensor> tensors_of(const Shard& shard, const ShardState* state) {
  std::vector<NamedTensor> tensors = {{"weights/" + shard.name, shard.local}};
  if (state != nullptr) {
    if (!state->master.is_same(shard.local)) {
      tensors.push_back({"master/" + shard.name, state->master});
    }
    tensors.push_back({"exp_avg/" + shard.name, state->exp_avg});
    tensors.push_back({"exp_avg_sq/" + shard.name, state->exp_avg_sq});
  }
  return tensors;
}

std::vector<const ShardState*> states_by_shard(const std::vector<Shard>& shards, AdamW& optimizer) {
  std::vector<const ShardState*> found(shards.size(), nullptr);
  for (const ShardState& state : optimizer.states()) {
    found[state.shard] = &state;
  }
  return found;
}

// The updates that each trained parameter has had: the same on all ranks. One read of the device for all of them.
Json update_counts(const std::vector<Shard>& shards, AdamW& optimizer) {
  Json counts = Json::object();
  std::vector<at::Tensor> steps;
  for (const ShardState& state : optimizer.states()) {
    steps.push_back(state.steps);
  }
  const at::Tensor counts_s = steps.empty() ? at::Tensor() : at::stack(steps).to(at::kCPU, at::kLong);
  int64_t next = 0;
  for (const ShardState& state : optimizer.states()) {
    counts.set(shards[state.shard].name, counts_s.const_data_ptr<int64_t>()[next++]);
  }
  return counts;
}

// Where this rank's part of a parameter begins in a checkpoint: a row of the tensor, or an element of it.
std::vector<int64_t> start_of(const Shard& shard, const at::Tensor& local) {
  std::vector<int64_t> start(static_cast<size_t>(local.dim()), 0);
  if (local.dim() > 0 && shard.begin > 0) {
    start[0] = shard.begin / std::max<int64_t>(1, c10::multiply_integers(local.sizes().slice(1)));
  }
  return start;
}

void add_tensor(SnapshotTensors& found, const std::string& name, const std::vector<int64_t>& global_shape, std::vector<int64_t> start,
                const at::Tensor& tensor) {
  const at::Tensor live = tensor.detach().contiguous();
  found.tensors.push_back(live);
  found.slices.push_back({.name = name,
                          .dtype = dtype_name(dtype_of(live.scalar_type())),
                          .global_shape = global_shape,
                          .start = std::move(start),
                          .shape = live.sizes().vec(),
                          .data = nullptr,
                          .bytes = live.nbytes()});
}

// The tensors that this rank holds and no other rank saves.
SnapshotTensors shard_tensors(const std::vector<Shard>& shards, AdamW& optimizer) {
  SnapshotTensors found;
  const auto states = states_by_shard(shards, optimizer);
  for (size_t i = 0; i < shards.size(); ++i) {
    const bool holds_some = shards[i].is_saved && shards[i].begin < shards[i].end;
    for (const NamedTensor& named : holds_some ? tensors_of(shards[i], states[i]) : std::vector<NamedTensor>()) {
      add_tensor(found, named.name, shards[i].global_shape, start_of(shards[i], named.tensor), named.tensor);
    }
  }
  return found;
}

void read_into(const CheckpointReader& checkpoint, const std::string& name, const Shard& shard, const at::Tensor& into) {
  const SavedTensor& saved = checkpoint.tensor(name);
  const char* wanted = dtype_name(dtype_of(into.scalar_type()));
  if (saved.shape != shard.global_shape || saved.dtype != wanted) {
    throw Error(ExitCode::kCheckpoint,
                checkpoint.folder().string() + ": '" + name + "' is " + saved.dtype + " " + shape_text(saved.shape) + ", this run has " +
                    wanted + " " + shape_text(shard.global_shape),
                "take the recipe that is saved in the checkpoint");
  }
  at::Tensor host = at::empty(into.sizes(), into.options().device(at::kCPU));
  checkpoint.read_range(name, {static_cast<std::byte*>(host.data_ptr()), host.nbytes()}, shard.begin, shard.end);
  at::NoGradGuard no_grad;
  into.copy_(host);
}

// Weights alone, in this run's type: of a float32 run they come from the masters where the checkpoint has these.
void read_weights(const CheckpointReader& checkpoint, const Shard& shard) {
  const std::string wanted = dtype_name(dtype_of(shard.local.scalar_type())), master = "master/" + shard.name;
  const bool has_better = wanted == "F32" && checkpoint.index().tensors.contains(master);
  const std::string name = has_better ? master : "weights/" + shard.name;
  const SavedTensor& saved = checkpoint.tensor(name);
  const auto type = dtype_from_name(saved.dtype);
  if (saved.dtype == wanted || saved.shape != shard.global_shape || !type || !is_floating(*type)) {
    read_into(checkpoint, name, shard, shard.local);
    return;
  }
  const at::Tensor host = at::empty(shard.local.sizes(), at::TensorOptions().dtype(scalar_type_of(*type)));
  checkpoint.read_range(name, {static_cast<std::byte*>(host.data_ptr()), host.nbytes()}, shard.begin, shard.end);
  at::NoGradGuard no_grad;
  shard.local.copy_(host);
}

// Tensors that are not trained; the weights mean nothing without them.
void restore_buffers(const CheckpointReader& checkpoint, const Session& session) {
  std::map<std::string, at::Tensor> buffers;
  for (const BufferSpec& wanted : session.description.buffers) {
    const SavedTensor& saved = checkpoint.tensor("buffers/" + wanted.name);
    const auto type = dtype_from_name(saved.dtype);
    SF_CHECK(type.has_value(), "unknown type {}", saved.dtype);
    at::Tensor tensor = at::empty(saved.shape, at::TensorOptions().dtype(scalar_type_of(*type)));
    checkpoint.read("buffers/" + wanted.name, {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    buffers.emplace(wanted.name, std::move(tensor));
  }
  if (!buffers.empty()) {
    hand_over_buffers(session, buffers, checkpoint.folder().string());
  }
}

void refuse_unused(const std::set<std::string>& names, const std::filesystem::path& folder) {
  if (!names.empty()) {
    throw Error(ExitCode::kCheckpoint,
                format("{}: {} tensors have no place in this run's draft, the first is '{}'", folder, names.size(), *names.begin()),
                "start from a draft with the same configuration");
  }
}

}  // namespace

SavedTensors copy_to_host(const std::vector<Shard>& shards, AdamW& optimizer) {
  SavedTensors saved;
  SnapshotTensors live = shard_tensors(shards, optimizer);
  auto kept = std::make_shared<std::vector<at::Tensor>>();
  for (size_t i = 0; i < live.slices.size(); ++i) {
    kept->push_back(live.tensors[i].to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
    live.slices[i].data = kept->back().const_data_ptr();
  }
  saved.slices = std::move(live.slices);
  saved.update_counts = update_counts(shards, optimizer);
  saved.keep_alive = std::move(kept);
  return saved;
}

void read_tensors(const CheckpointReader& checkpoint, std::vector<Shard>& shards, AdamW& optimizer) {
  const auto states = states_by_shard(shards, optimizer);
  const Json& update_counts = checkpoint.state().progress.at("update_counts");
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const NamedTensor& named : tensors_of(shards[i], states[i])) {
      read_into(checkpoint, named.name, shards[i], named.tensor);
    }
    if (states[i] != nullptr) {
      at::Tensor steps = states[i]->steps;
      steps.fill_(static_cast<double>(update_counts.at(shards[i].name).as_int()));
    }
  }
}

std::vector<int64_t> SnapshotTensors::bytes() const {
  std::vector<int64_t> out;
  for (const TensorSlice& slice : slices) {
    out.push_back(static_cast<int64_t>(slice.bytes));
  }
  return out;
}

SnapshotTensors snapshot_tensors(const Session& session, AdamW& optimizer) {
  SnapshotTensors found = shard_tensors(session.sharding->shards(), optimizer);
  if (session.rank() == 0) {  // the same on every rank; the first one saves them
    for (const auto& [name, tensor] : session.algorithm->buffers()) {
      add_tensor(found, "buffers/" + name, tensor.sizes().vec(), {}, tensor);
    }
  }
  return found;
}

CheckpointSaver::Request snapshot(const Session& session, AdamW& optimizer, const RunProgress& progress, const FeatureStore& features,
                                  const std::shared_ptr<Staging>& staging) {
  CheckpointSaver::Request request;
  request.state = describe_run(session, progress, features);
  request.state.progress.set("update_counts", update_counts(session.sharding->shards(), optimizer));
  SnapshotTensors live = snapshot_tensors(session, optimizer);
  request.tensors = std::move(live.slices);
  request.source = staging;
  request.texts = {{.name = "recipe.toml", .text = request.state.recipe}, {.name = "draft_config.json", .text = request.state.draft_config}};
  staging->take(std::move(live.tensors));
  return request;
}

RunProgress restore(const CheckpointReader& checkpoint, Session& session, AdamW& optimizer, const FeatureStore& features,
                    int64_t updates_total) {
  const RunState& saved = checkpoint.state();
  if (saved.layout.sharding.empty()) {
    log_info("{}", run_rule("A8", {{"folder", checkpoint.folder().string()}}).message);
  }
  RunProgress progress{.update = saved.step, .updates_total = updates_total, .stream_position = saved.position, .epoch = saved.epoch};
  const Continuation continuation = compare_runs(saved, describe_run(session, progress, features));
  for (const std::string& warning : session.is_lead() ? continuation.warnings : std::vector<std::string>()) {  // the same on all ranks
    log_warn("resuming {}: {}", checkpoint.folder().filename().string(), warning);
  }
  if (!continuation.errors.empty()) {
    throw Error(ExitCode::kCheckpoint, "can't go on from " + checkpoint.folder().string() + ": " + display(continuation.errors),
                "use the same recipe and features, or start anew from its weights with --init-from " + checkpoint.folder().string());
  }
  restore_buffers(checkpoint, session);
  read_tensors(checkpoint, session.sharding->shards(), optimizer);
  return progress;
}

void restore_weights(const CheckpointReader& checkpoint, Session& session) {
  std::set<std::string> unused;
  for (const auto& [name, tensor] : checkpoint.index().tensors) {
    if (name.starts_with("weights/")) {
      unused.insert(name);
    }
  }
  for (Shard& shard : session.sharding->shards()) {
    read_weights(checkpoint, shard);
    unused.erase("weights/" + shard.name);
  }
  refuse_unused(unused, checkpoint.folder());
  restore_buffers(checkpoint, session);
}

std::filesystem::path restore_weights_from(const std::filesystem::path& folder, Session& session) {
  const std::filesystem::path exported = folder / "model.safetensors";
  if (!std::filesystem::exists(exported)) {
    const auto checkpoint = open_checkpoint(folder, folder.string());
    if (!checkpoint) {
      throw Error(ExitCode::kCheckpoint, "--init-from " + folder.string() + " holds neither a complete checkpoint nor an exported draft",
                  "name a step's folder, a run's folder, or a folder that sf-host export made");
    }
    restore_weights(*checkpoint, session);
    return checkpoint->folder();
  }
  const SafetensorsFile file = SafetensorsFile::open(exported);
  std::set<std::string> unused;
  for (const TensorView& view : file.tensors()) {
    unused.insert(view.name);
  }
  at::NoGradGuard no_grad;
  for (Shard& shard : session.sharding->shards()) {
    if (!unused.contains(shard.name)) {
      throw Error(ExitCode::kCheckpoint, format("{}: there is no tensor '{}' among {}, which this run's draft has", exported, shard.name, file.tensors().size()),
                  "start from a draft of the same architecture; its config.json says which one it is");
    }
    const TensorView& view = file.at(shard.name);
    if (view.shape != shard.global_shape) {
      throw Error(ExitCode::kCheckpoint, exported.string() + ": '" + shard.name + "' is " + shape_text(view.shape) + ", this run has " +
                                             shape_text(shard.global_shape),
                  "start from a draft of the same shape");
    }
    shard.local.copy_(as_tensor(view).reshape({-1}).slice(0, shard.begin, shard.end).view(shard.local.sizes()));
    unused.erase(shard.name);
  }
  std::map<std::string, at::Tensor> buffers;
  for (const BufferSpec& wanted : session.description.buffers) {
    buffers.emplace(wanted.name, as_tensor(file.at(wanted.name)).clone());
    unused.erase(wanted.name);
  }
  if (!buffers.empty()) {
    hand_over_buffers(session, buffers, exported.string());
  }
  refuse_unused(unused, folder);
  return folder;
}

void require_same_draft(const CheckpointReader& checkpoint, const std::string& draft_config_json) {
  if (checkpoint.state().draft_config != draft_config_json) {
    throw Error(ExitCode::kCheckpoint, checkpoint.folder().string() + " was trained with another draft configuration than this recipe's",
                "use the recipe that is saved in it: " + (checkpoint.folder() / "recipe.toml").string());
  }
}

}  // namespace sf
