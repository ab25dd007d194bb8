#include "core/train/session.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <fstream>
#include <set>
#include <sstream>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/data/target_config.hpp"
#include "core/data/tokenizer_facts.hpp"
#include "core/data/weight_folder.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/ops.hpp"
#include "core/model/target_tables.hpp"
#include "core/model/tensor_view.hpp"
#include "core/plan/plan.hpp"
#include "core/recipe/rules.hpp"
#include "core/train/initialize.hpp"
#include "core/train/ranks.hpp"
#include "core/train/verbs.hpp"
#include "core/train/workload.hpp"

namespace sf {
namespace {

const void* interface_of(const EngineContext& context, uint32_t kind, const char* id, const char* slot) {
  for (const LoadedPlugin& plugin : context.plugins) {
    if (plugin.kind == kind) {
      const void* found = plugin.entry->get_interface(plugin.instance, id);
      if (found == nullptr) {
        throw Error(ExitCode::kPlugin, "plugin '" + plugin.name + "' offers no \"" + id + "\"", "rebuild it with this host's SDK");
      }
      return found;
    }
  }
  throw Error(ExitCode::kPlugin, std::string("no ") + slot + " plugin is loaded", "name one in the recipe");
}

int64_t status_bytes(const char* key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, std::string(key).size(), key) == 0) {
      return std::stoll(line.substr(std::string(key).size())) * 1024;
    }
  }
  return 0;
}

// Parameters that start as the target's table.
void copy_target_embedding(Session& session) {
  at::NoGradGuard no_grad;
  for (const UnitSpec& unit : session.description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      for (Shard& shard : session.sharding->shards()) {
        if (parameter.init == Init::target_embedding && shard.name == unit.prefix + parameter.name) {
          SF_CHECK(session.tables.embedding_vh.defined() && session.tables.embedding_vh.sizes().vec() == parameter.shape,
                   "'{}' starts as the target's embedding, but its shape is another", shard.name);
          shard.local.copy_(session.tables.embedding_vh.reshape({-1}).slice(0, shard.begin, shard.end).view(shard.local.sizes()));
        }
      }
    }
  }
}

// Rules that waited for the device: with its capability known they are decided.
void check_device_rules(const Plan& plan, at::Device device) {
  if (plan.device_rules.empty()) {
    return;
  }
  auto facts = plan.facts;
  facts["fact.device.sm"] = compute_capability(device);
  std::set<std::string> provided, names;
  for (const PlanPlugin& plugin : plan.stack) {
    provided.insert(plugin.provides.begin(), plugin.provides.end());
    names.insert(plugin.name);
  }
  Diagnostics problems;
  std::vector<std::string> undecided;
  check_rules(plan.device_rules, {plan.values, facts, provided, names}, problems, undecided);
  if (problems.has_errors()) {
    std::vector<Problem> found;
    for (const Diagnostic& one : problems.all()) {
      found.push_back({.id = one.id, .message = one.message, .place = "", .why = one.why, .fix = one.fix});
    }
    throw Error(ExitCode::kUsage, std::move(found));
  }
}

// Each padded length twice, as the first block's input wants no gradient and the others' do, and some to spare (rule K3).
int64_t shapes_at_most(const BatchShape& shape) { return 2 * std::max<int64_t>(1, static_cast<int64_t>(shape.lengths().size())) + 4; }

void tell_about_capture(const Session& session) {
  const int64_t blocks = session.runner->captured_units();
  if (blocks == 0) {
    throw Error(ExitCode::kUsage, "[K4] training.compile_blocks = true, but the draft has no block of its own: all its units are in the group root",
                "training.compile_blocks = false");
  }
  log_info("in effect: training.compile_blocks = true ({} blocks); the second micro-step of each shape is recorded", blocks);
}

}  // namespace

Algorithm& algorithm_of(const EngineContext& context) {
  return *static_cast<Algorithm*>(const_cast<void*>(interface_of(context, SF_KIND_ALGORITHM, kAlgorithmInterface, "algorithm")));
}

Sharding& sharding_of(const EngineContext& context) {
  return *static_cast<Sharding*>(const_cast<void*>(interface_of(context, SF_KIND_SHARDING, kShardingInterface, "sharding")));
}

std::unique_ptr<Transforms> transforms_of(const EngineContext& context, const std::vector<UnitSpec>& units, std::vector<std::unique_ptr<NamedTransform>>& calls) {
  std::vector<Transforms::Member> members;
  for (const LoadedPlugin& plugin : context.plugins) {
    if (plugin.kind == SF_KIND_TRANSFORM) {
      const void* found = plugin.entry->get_interface(plugin.instance, kTransformInterface);
      SF_CHECK(found != nullptr, "transform \"{}\" was created without its interface", plugin.name);
      calls.push_back(std::make_unique<NamedTransform>(*static_cast<Transform*>(const_cast<void*>(found)), plugin.name));
      members.push_back({.name = plugin.name, .transform = calls.back().get()});
    }
  }
  return members.empty() ? nullptr : std::make_unique<Transforms>(std::move(members), units);
}

ModelFacts model_facts(const Plan& plan) {
  ModelFacts facts;
  facts.target_config_json = read_file(plan.get<std::filesystem::path>("model.target_model_path") / "config.json", ExitCode::kData);
  const auto draft = plan.get<std::filesystem::path>("model.draft_model_config");
  if (!draft.empty()) {
    facts.draft_config_json = read_file(draft, ExitCode::kData);
    facts.draft_config_path = draft.string();
  }
  facts.draft_num_hidden_layers = plan.get<int64_t>("model.draft_num_hidden_layers");
  facts.draft_block_size = plan.get<int64_t>("model.draft_block_size");
  facts.target_layer_ids = plan.get<std::vector<int64_t>>("model.target_layer_ids");
  facts.mask_token_id = plan.get<int64_t>("model.mask_token_id");
  // A tokenizer file of some megabytes is only read when nobody has named the token.
  if (facts.mask_token_id < 0 && !names_mask_token(facts.draft_config_json)) {
    const TokenizerFacts tokenizer = read_tokenizer_facts(plan.get<std::filesystem::path>("model.target_model_path"));
    facts.tokenizer_tokens = tokenizer.tokens;
    facts.tokenizer_mask_token_id = tokenizer.mask_token_id;
  }
  facts.rope_rounding = plan.get<std::string>("model.rope_rounding");
  facts.bfloat16 = plan.get<std::string>("model.torch_dtype") == "bfloat16";
  facts.static_shapes = plan.get<bool>("training.static_shapes");
  return facts;
}

at::Device open_device(const std::string& name, const World& world) {
  if (name == "cpu") {
    return at::Device(at::kCPU);
  }
  // LibTorch's CUDA half is opened only here: a run on the CPU starts without it.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw Error(ExitCode::kDevice, std::string("device = \"cuda\", but LibTorch's CUDA library can't be opened: ") + dlerror(),
                "run tools/setup, or set device = \"cpu\"");
  }
  const auto* cuda = c10::impl::device_guard_impl_registry[static_cast<size_t>(at::kCUDA)].load();
  const int count = cuda == nullptr ? 0 : cuda->deviceCount();
  if (count == 0) {
    throw Error(ExitCode::kDevice, "device = \"cuda\", but this machine has no GPU that LibTorch can use",
                "set device = \"cpu\", or check the driver with nvidia-smi");
  }
  if (count < world.local_size && count != 1) {
    throw Error(ExitCode::kDevice, format("{} ranks on this machine, and LibTorch sees {} GPUs", world.local_size, count),
                "each rank computes on a GPU of its own: start fewer, or look at CUDA_VISIBLE_DEVICES");
  }
  at::globalContext().lazyInitDevice(at::kCUDA);
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(count == 1 ? 0 : world.local_rank));
  cuda->setDevice(device);
  open_engine_cuda();
  return device;
}

int64_t compute_capability(at::Device device) {
  using Attribute = int (*)(int*, int, int);
  constexpr int kMajor = 75, kMinor = 76;   // CUdevice_attribute
  auto* driver = device.is_cuda() ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) : nullptr;
  const auto attribute = driver == nullptr ? nullptr : reinterpret_cast<Attribute>(dlsym(driver, "cuDeviceGetAttribute"));
  int major = 0, minor = 0;
  if (attribute == nullptr || attribute(&major, kMajor, device.index()) != 0 || attribute(&minor, kMinor, device.index()) != 0) {
    return 0;
  }
  return 10 * major + minor;
}

MemoryUse memory_use(at::Device device) {
  if (device.is_cpu()) {
    return {.now = status_bytes("VmRSS:"), .peak = status_bytes("VmHWM:")};
  }
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto& all = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  const auto& reserved = stats.reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {.now = all.current, .peak = all.peak, .reserved_peak = reserved.peak};
}

void reset_memory_peak(at::Device device) {
  if (!device.is_cpu()) {
    c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
  }
}

std::unique_ptr<Session> open_session(const EngineContext& context, Ranks* ranks, FlopCount* flops) {
  auto session = std::make_unique<Session>();
  const Plan& plan = *context.plan;
  const auto target_folder = plan.get<std::filesystem::path>("model.target_model_path");
  session->context = &context;
  session->plan = &plan;
  session->algorithm_calls = std::make_unique<NamedAlgorithm>(algorithm_of(context), plan.get<std::string>("algorithm.name"));
  session->sharding_calls = std::make_unique<NamedSharding>(sharding_of(context), plan.get<std::string>("backend.sharding"));
  session->algorithm = session->algorithm_calls.get();
  session->sharding = session->sharding_calls.get();
  session->ops = &cpu_ops();
  session->seed = static_cast<uint64_t>(plan.get<int64_t>("training.seed"));
  session->run_folder = plan.get<std::filesystem::path>("output_dir") / plan.get<std::string>("run_id");
  session->batch_shape = {.max_tokens = plan.get<int64_t>("data.max_length"),
                          .is_static = plan.get<bool>("training.static_shapes"),
                          .buckets = plan.get<std::vector<int64_t>>("training.static_shape_buckets")};
  session->description = session->algorithm->describe(model_facts(plan));

  session->placement.device = open_device(plan.get<std::string>("device"), context.world);
  session->batch_shape.is_pinned = session->placement.device.is_cuda();
  if (ranks != nullptr) {   // what a verb of one process computes is what an export is served with
    check_device_rules(plan, session->placement.device);
    session->transforms = transforms_of(context, session->description.units, session->transform_calls);
    require_memory(plan, session->description, session->sharding, session->transforms.get(), available_memory(session->placement.device),
                   session->placement.device.is_cpu() ? context.world.local_size : 1);
    if (plan.get<bool>("training.compile_blocks")) {
      session->recorder = open_graph_recorder(session->placement.device);
    }
  }
  if (ranks != nullptr && ranks->group != nullptr) {
    ranks->comm = open_comm(*ranks->group, session->placement.device,
                            plan.get<std::string>("training.peer_copies") != "on" ? PeerCopying::off
                            : plan.at("training.peer_copies").is_set              ? PeerCopying::required
                                                                                  : PeerCopying::if_possible);
    session->ranks = ranks->group.get();
    session->placement.comm = ranks->comm.get();
  }
  session->placement.dtype = plan.get<std::string>("model.torch_dtype") == "bfloat16" ? at::kBFloat16 : at::kFloat;
  if (session->transforms != nullptr) {
    session->transforms->build(session->placement.device, session->placement.dtype, *session->ops);
    if (GatherCodec* codec = session->transforms->codec(); codec != nullptr) {
      session->sharding->take_codec(*codec);
    }
  }
  session->sharding->build(session->description.units, session->placement);
  initialize_weights(session->description.units, session->sharding->shards(), session->seed);

  if (context.random_tables) {
    const TargetConfig target = target_config(read_model_config(target_folder), (target_folder / "config.json").string());
    session->target_fingerprint = kRandomTarget;
    session->tables = random_tables(session->description, {.vocab = target.vocab_size, .hidden = target.hidden_size, .seed = session->seed},
                                    session->placement.dtype, session->placement.device);
  } else {
    session->target_fingerprint = target_fingerprint(read_model_config(target_folder), WeightFolder::open(target_folder));
    session->tables = load_target_tables({.folder = target_folder,
                                          .embedding_key = plan.get<std::string>("model.embedding_key"),
                                          .lm_head_key = plan.get<std::string>("model.lm_head_key"),
                                          .dtype = session->placement.dtype,
                                          .device = session->placement.device,
                                          .embedding = session->description.needs_embedding,
                                          .head = session->description.needs_head});
  }
  copy_target_embedding(*session);
  session->algorithm->bind(session->tables, *session->ops);
  session->sharding->take_tables({session->tables.embedding_vh, session->tables.head_vh});

  std::vector<Unit*> units;
  for (size_t i = 0; i < session->description.units.size(); ++i) {
    Unit& unit = session->algorithm->unit(static_cast<int64_t>(i));
    units.push_back(flops != nullptr ? &flops->counted(unit) : &unit);
  }
  session->runner = std::make_unique<TapeRunner>(
      std::move(units), session->description.units, *session->sharding, *session->ops, session->placement,
      TapeRunner::Options{
          .gradient_dtype = plan.get<std::string>("training.grad_accum_dtype") == "bfloat16" ? at::kBFloat16 : at::kFloat,
          .recompute = plan.get<std::vector<std::string>>("training.recompute"),
          .recorder = session->recorder.get(),
          .capture = {.shapes_at_most = shapes_at_most(session->batch_shape), .static_shapes = session->batch_shape.is_static},
          .transforms = session->transforms.get(),
          .lends_weights = session->placement.device.is_cuda() && session->placement.comm == nullptr && ranks != nullptr,
          .plugin = plan.get<std::string>("algorithm.name")});
  if (session->recorder != nullptr) {
    tell_about_capture(*session);
  }
  if (session->transforms != nullptr && session->is_lead()) {
    for (const Transforms::Member& member : session->transforms->members()) {
      log_info("in effect: {} computes {}", member.name, join(session->transforms->taken_text(member), "; "));
    }
  }
  if (context.check_effects) {
    context.check_effects();
  }
  return session;
}

std::unique_ptr<FeatureStore> open_features(const Session& session, const std::filesystem::path& path, const std::string& key) {
  if (path.empty()) {
    throw Error(ExitCode::kUsage, key + " is not set", "name a folder that sf-host capture made, or one with the reference's .ckpt files");
  }
  FeatureNeeds needs;
  for (const FeatureRead& read : session.description.reads) {
    if (read.columns > 0) {
      needs.features.push_back({.key = read.name, .width = read.columns, .optional = read.optional, .layer_ids = read.layer_ids,
                                .last_state = read.last_state});
    }
  }
  const at::Tensor& table = session.tables.embedding_vh.defined() ? session.tables.embedding_vh : session.tables.head_vh;
  needs.vocab_size = table.defined() ? table.size(0) : 0;
  needs.max_length = session.batch_shape.max_tokens;
  needs.target_fingerprint = session.target_fingerprint;
  needs.named_by = key;
  needs.verify_checksums = session.plan->get<bool>("data.verify_checksums");
  return FeatureStore::open(path, needs);
}

SampleSource sample_source(const FeatureStore& store) {
  return {.size = store.size(), .read = [&store](int64_t index) {
            Sample sample;
            sample.index = index;
            for (const TensorView& view : store.record(index)) {
              sample.tensors.emplace(view.name, as_tensor(view));
            }
            sample.tokens = sample.tensors.at("input_ids").size(0);
            return sample;
          }};
}

}  // namespace sf
