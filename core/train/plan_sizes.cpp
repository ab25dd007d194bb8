// What a run will take, before anything is allocated: from shapes alone. And whether that much is there.
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/kernels/float8_head.hpp"
#include "core/kernels/slow_paths.hpp"
#include "core/plan/plan.hpp"
#include "core/train/session.hpp"
#include "core/train/staging.hpp"
#include "core/train/verbs.hpp"
#include "sf/json.hpp"

namespace sf {
namespace {

int64_t elements(const ParameterSpec& parameter) {
  int64_t count = 1;
  for (const int64_t extent : parameter.shape) {
    count *= extent;
  }
  return count;
}

// Without static shapes a block starts at a token that has another one after it, so a sample has room for max_length - 1.
int64_t slots_of_sample(const Plan& plan, const Description& description) {
  const int64_t slots =
      description.slots > 0 ? description.slots : std::min(description.slots_at_most, plan.get<int64_t>("data.max_length") - 1);
  return std::max<int64_t>(1, slots);
}

bool is_on_gpu(const Plan& plan) { return plan.has("device") && plan.get<std::string>("device") == "cuda"; }

// What the blocks keep of each row until backward, and what one of them needs beside that.
struct BlockColumns {
  int64_t kept = 0, recomputed = 0, widest = 0, hidden = 0;
};

BlockColumns block_columns(const Description& description, const std::vector<std::string>& recompute) {
  BlockColumns found;
  for (const UnitSpec& unit : description.units) {
    if (unit.shard_group == "root") {
      continue;
    }
    int64_t columns = unit.saved_columns, last_rows = 0;
    for (const ParameterSpec& parameter : unit.parameters) {
      if (parameter.shape.size() == 2) {
        columns += unit.saved_columns > 0 ? 0 : parameter.shape[0] + parameter.shape[1];  // a product keeps its input, and its output is kept by what follows
        found.widest = std::max(found.widest, parameter.shape[0]);
        last_rows = parameter.shape[0];
      }
    }
    found.hidden = std::max(found.hidden, last_rows);
    if (names_unit(recompute, unit.name)) {
      found.kept += last_rows;  // its output is the next one's input
      found.recomputed = std::max(found.recomputed, columns);
    } else {
      found.kept += columns;
    }
  }
  return found;
}

}  // namespace

namespace {

// Weights that come encoded have no place among the whole parameters; what each rank sends of their groups lies in a payload of its own.
void count_codec(const Description& description, const Sharding& sharding, const Transforms& transforms, int64_t ranks, at::ScalarType dtype, ShardingMemory& held) {
  std::vector<UnitSpec> plain = description.units;
  std::map<std::string, std::pair<int64_t, int64_t>> groups;  // elements that are carried, and others
  for (const Transforms::Member& member : transforms.members()) {
    const bool is_gathered = member.transform->memory().is_gathered;
    for (size_t l = 0; l < member.taken.size(); ++l) {
      const LinearSpec& linear = transforms.linears()[l];
      if (is_gathered && member.taken[l]) {
        plain[static_cast<size_t>(linear.unit_index)].parameters[static_cast<size_t>(linear.parameter)].shape = {0, linear.inputs};
        groups[linear.shard_group].first += linear.inputs * linear.outputs;
      }
    }
  }
  if (groups.empty()) {
    return;
  }
  held.whole = sharding.memory(plain, ranks, dtype).whole;
  for (const UnitSpec& unit : plain) {
    if (const auto group = groups.find(unit.shard_group); group != groups.end()) {
      for (const ParameterSpec& parameter : unit.parameters) {
        group->second.second += elements(parameter);
      }
    }
  }
  for (const auto& [name, sizes] : groups) {
    held.buffers += (sizes.first + sizes.second * static_cast<int64_t>(c10::elementSize(dtype))) / ranks;
  }
}

// What the other ranks' parts of a reduction are copied to: of the largest group.
int64_t copied_parts(const Plan& plan, const Description& description, int64_t ranks, int64_t element) {
  std::map<std::string, int64_t> groups;
  int64_t largest = 0;
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      groups[unit.shard_group] += parameter.trainable ? elements(parameter) : 0;
    }
    largest = std::max(largest, groups[unit.shard_group]);
  }
  const bool is_wide = plan.get<std::string>("backend.sharding") == "fsdp2" ? plan.get<std::string>("training.reduce_dtype") == "float32" : element == 4;
  return largest * (ranks - 1) / ranks * (is_wide ? 4 : 2);
}

}  // namespace

std::vector<SizeLine> plan_sizes(const Plan& plan, const Description& description, const Sharding* sharding, const Transforms* transforms) {
  const ModelFacts facts = model_facts(plan);
  const int64_t element = facts.bfloat16 ? 2 : 4;
  const int64_t gradient_element = plan.get<std::string>("training.grad_accum_dtype") == "bfloat16" ? 2 : 4;
  const bool on_gpu = is_on_gpu(plan);

  const int64_t batch_rows = plan.get<int64_t>("training.batch_size"), tokens = plan.get<int64_t>("data.max_length");
  const int64_t uses = std::max<int64_t>(1, description.rows_per_token);  // of a block in a micro-step
  const int64_t rows_of_sample =
      description.rows_per_token > 0 ? description.rows_per_token * tokens : slots_of_sample(plan, description) * std::max<int64_t>(1, description.rows_per_slot);
  const int64_t draft_rows = batch_rows * rows_of_sample;
  const auto recompute = plan.get<std::vector<std::string>>("training.recompute");
  int64_t parameters = 0, trainable = 0;
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      parameters += elements(parameter);
      trainable += parameter.trainable ? elements(parameter) : 0;
    }
  }

  const auto world = plan.facts.find("fact.world_size");
  const int64_t ranks = world == plan.facts.end() ? 1 : std::get<int64_t>(world->second);
  ShardingMemory held{.weights = parameters * element, .trainable_elements = trainable};
  if (sharding != nullptr) {
    const at::ScalarType dtype = facts.bfloat16 ? at::kBFloat16 : at::kFloat;
    held = sharding->memory(description.units, ranks, dtype);
    if (ranks > 1 && transforms != nullptr && held.whole > 0) {
      count_codec(description, *sharding, *transforms, ranks, dtype, held);
    }
  }
  const bool copies_parts = ranks > 1 && held.whole > 0 && on_gpu && plan.has("training.peer_copies") && plan.get<std::string>("training.peer_copies") == "on";
  if (copies_parts) {
    held.buffers += copied_parts(plan, description, ranks, element);
  }

  const Json target = Json::parse(facts.target_config_json, "config.json");
  const Json* nested = target.find("text_config");
  const Json& text = nested != nullptr ? *nested : target;
  const int64_t vocab = text.find("padded_vocab_size") ? text.at("padded_vocab_size").as_int() : text.at("vocab_size").as_int();
  const int64_t hidden = text.at("hidden_size").as_int();
  const Json* tie = text.find("tie_word_embeddings");
  const bool tied = tie != nullptr && tie->is_bool() && tie->as_bool();
  const int64_t tables = (description.needs_embedding ? 1 : 0) + (description.needs_head && !(tied && description.needs_embedding) ? 1 : 0);

  int64_t feature_columns = 0;
  for (const FeatureRead& read : description.reads) {
    feature_columns += read.optional ? 0 : read.columns;
  }
  const BlockColumns columns = block_columns(description, recompute);
  const std::string type = facts.bfloat16 ? "bfloat16" : "float32";
  const auto count = [](int64_t n) { return human_count(static_cast<uint64_t>(n)); };
  const int64_t batches = on_gpu ? 2 : 1;  // one in use, one on its way
  std::vector<SizeLine> lines = {
      {"weights", held.weights, count(parameters) + " parameters, " + type + (held.detail.empty() ? "" : ", " + held.detail)},
      {"gradient buffers", trainable * gradient_element, count(trainable) + " trainable" + (ranks > 1 ? ", whole on every rank until the window ends" : "")},
      {"optimizer", held.trainable_elements * (facts.bfloat16 ? 12 : 8),
       facts.bfloat16 ? "float32 masters and two moments" : "two float32 moments"},
      {"frozen tables", tables * vocab * hidden * element,
       format("{} x [{}, {}]{}{}", tables, vocab, hidden, tied ? ", tied" : "",
              held.shards_tables ? format(", within a window; 1/{} of it is kept always", ranks) : std::string())},
      {"features of a batch", batches * batch_rows * tokens * feature_columns * element, format("{} x [{}, {}, {}]", batches, batch_rows, tokens, feature_columns)},
      {"activations (estimate)", draft_rows * columns.kept * element,
       format("{} draft rows{}", draft_rows, recompute.empty() ? ", without recompute" : ", with recompute")},
  };
  if (plan.has("training.compile_blocks") && plan.get<bool>("training.compile_blocks")) {
    lines.push_back({"inputs of recorded blocks", 2 * draft_rows / uses * columns.hidden * element, "copies at fixed addresses, and one gradient"});
  }
  if (description.needs_head) {
    const int64_t width = description.head_columns > 0 ? description.head_columns : vocab;
    if (description.rows_per_token > 0) {
      lines.push_back({"teacher's logits", batch_rows * tokens * width * element, format("{} rows x {}", batch_rows * tokens, count(width))});
    }
    // The objective has its logits while all blocks keep theirs; the last block's backward has the gradients of its widest products. Never both.
    const int64_t head_rows = description.head_rows_at_most > 0 ? std::min(description.head_rows_at_most, draft_rows) : draft_rows;
    const int64_t head = head_rows * width * (on_gpu ? 2 * element : facts.bfloat16 ? 12 : 8);  // logits and a teacher's, or what they are wide
    const int64_t backward = draft_rows / uses * (3 * columns.widest + columns.recomputed) * element;
    lines.push_back({"work (at most)", std::max(head, backward),
                     head > backward ? format("logits of {} rows x {}", head_rows, count(width)) : format("gradients of a block, {} rows", draft_rows / uses)});
  }
  if (held.whole > 0) {
    lines.insert(lines.begin() + 1, {"whole parameters", held.whole, "while their group is in use"});
  }
  if (held.buffers > 0) {
    lines.insert(lines.begin() + (held.whole > 0 ? 2 : 1), {"communication buffers", held.buffers, std::string("gathers, reductions, this rank's gradients") + (copies_parts ? ", parts of other ranks" : "")});
  }
  if (transforms != nullptr) {
    for (const Transforms::Member& member : transforms->members()) {
      const TransformMemory kept = member.transform->memory();
      if (on_gpu && ranks == 1 && facts.bfloat16 && held.whole == 0) {
        lines.front().bytes -= kept.replaced_elements * element;
        lines.front().detail += ", without those that " + member.name + " replaces within a window";
      }
      lines.push_back({"weights of " + member.name, kept.weights, kept.detail + ": " + join(transforms->taken_text(member), "; ")});
    }
  }
  if (const int64_t bytes = description.needs_head ? float8_head_bytes(vocab, hidden) : 0; bytes > 0) {
    lines.push_back({"head in float8", bytes, format("[{}, {}] and transposed, a scale for each row", vocab, hidden)});
  }
  const StagingSize staging = staging_size(plan, held.weights + held.trainable_elements * (facts.bfloat16 ? 12 : 8));
  const bool is_host_apart = plan.get<std::string>("device") == "cuda";
  if (!is_host_apart) {
    lines.push_back({"checkpoint staging", staging.bytes, staging.detail});
  }
  int64_t total = 0;
  for (const SizeLine& line : lines) {
    total += line.bytes;
  }
  if (is_host_apart) {
    lines.push_back({"checkpoint staging", staging.bytes, "page-locked " + staging.detail + "; not in the total"});
  }
  lines.push_back({"total (estimate)", total, ranks > 1 ? "on each rank" : "per process"});
  return lines;
}

namespace {

std::string gibibytes(int64_t bytes) { return human_bytes(static_cast<uint64_t>(std::max<int64_t>(0, bytes))); }

// One thing changed at a time, to the largest value that fits.
std::vector<std::string> what_would_fit(const Plan& plan, const Description& description, const Sharding* sharding, const Transforms* transforms,
                                         int64_t available) {
  std::vector<std::string> fits;
  const auto needed = [&](const Plan& other, const Description& described) { return plan_sizes(other, described, sharding, transforms).back().bytes; };
  const auto offer = [&](const std::string& what, int64_t bytes) { fits.push_back(format("{} ({})", what, gibibytes(bytes))); };
  const auto with = [&](const char* key, Value value) {
    Plan other = plan;
    other.values.at(key).value = std::move(value);
    return other;
  };
  for (int64_t batch = plan.get<int64_t>("training.batch_size") / 2; batch >= 1; batch /= 2) {
    if (const int64_t bytes = needed(with("training.batch_size", batch), description); bytes <= available) {
      offer(format("training.batch_size = {}", batch), bytes);
      break;
    }
  }
  if (plan.has("training.num_anchors")) {
    Description other = description;
    for (int64_t anchors = plan.get<int64_t>("training.num_anchors") / 2; anchors >= 1; anchors /= 2) {
      other.slots = description.slots > 0 ? anchors : 0;
      other.slots_at_most = anchors;
      if (const int64_t bytes = needed(plan, other); bytes <= available) {
        offer(format("training.num_anchors = {}", anchors), bytes);
        break;
      }
    }
  }
  for (const char* key : {"training.objective_chunk_blocks", "training.objective_chunk_rows"}) {
    if (!plan.has(key) || description.head_rows_at_most <= 0) {
      continue;
    }
    const int64_t chunk = plan.get<int64_t>(key);
    for (int64_t smaller = chunk / 2; smaller >= 1; smaller /= 2) {
      Description other = description;
      other.head_rows_at_most = std::max<int64_t>(1, description.head_rows_at_most * smaller / std::max<int64_t>(1, chunk));
      if (const int64_t bytes = needed(plan, other); bytes <= available) {
        offer(format("{} = {}", key, smaller), bytes);
        break;
      }
    }
  }
  if (plan.get<std::vector<std::string>>("training.recompute").empty()) {
    std::vector<std::string> blocks;
    for (const UnitSpec& unit : description.units) {
      if (unit.shard_group != "root") {
        blocks.push_back(unit.name);
      }
    }
    const bool are_numbered = !blocks.empty() && std::all_of(blocks.begin(), blocks.end(), [](const std::string& name) { return name.starts_with("block."); });
    if (are_numbered) {
      blocks = {"block.*"};
    }
    if (const int64_t bytes = blocks.empty() ? available + 1 : needed(with("training.recompute", blocks), description); bytes <= available) {
      offer(format("training.recompute = [\"{}\"]", join(blocks, "\", \"")), bytes);
    }
  }
  for (int64_t tokens = plan.get<int64_t>("data.max_length") / 2; tokens >= 128; tokens /= 2) {
    if (const int64_t bytes = needed(with("data.max_length", tokens), description); bytes <= available) {
      offer(format("data.max_length = {}", tokens), bytes);
      break;
    }
  }
  return fits;
}

int64_t first_number(const char* path, const char* key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) {
      const std::string rest = line.substr(std::string(key).size());
      const size_t digit = rest.find_first_of("0123456789");
      return digit == std::string::npos ? -1 : std::stoll(rest.substr(digit));
    }
  }
  return -1;
}

}  // namespace

AvailableMemory available_memory(at::Device device) {
  if (!device.is_cpu()) {
    const auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    return {.bytes = static_cast<int64_t>(free), .what = format("{} are free of the GPU's {}", gibibytes(static_cast<int64_t>(free)), gibibytes(static_cast<int64_t>(total)))};
  }
  const int64_t kilobytes = first_number("/proc/meminfo", "MemAvailable:");
  int64_t bytes = kilobytes < 0 ? -1 : kilobytes * 1024;
  if (const int64_t limit = first_number("/sys/fs/cgroup/memory.max", ""); limit > 0 && (bytes < 0 || limit < bytes)) {
    bytes = limit;  // "max" has no digit
  }
  return {.bytes = bytes, .what = format("{} are available on this machine", gibibytes(bytes))};
}

void require_memory(const Plan& plan, const Description& description, const Sharding* sharding, const Transforms* transforms, const AvailableMemory& available, int64_t processes) {
  if (available.bytes < 0) {
    return;  // nobody can say
  }
  const int64_t each = available.bytes / std::max<int64_t>(1, processes);
  const int64_t needed = plan_sizes(plan, description, sharding, transforms).back().bytes;
  if (needed <= each) {
    return;
  }
  const std::string what = format("the run needs about {}{}, and {}", gibibytes(needed), processes > 1 ? format(" on each of {} ranks", processes) : "", available.what);
  // On the CPU the estimate knows less: what the twins of the kernels need is counted roughly.
  if (!is_on_gpu(plan) && static_cast<double>(needed) < 1.25 * static_cast<double>(each)) {
    log_warn("{}: it may run out of memory", what);
    return;
  }
  const std::vector<std::string> fits = what_would_fit(plan, description, sharding, transforms, each);
  throw Error(ExitCode::kDevice, what,
              fits.empty() ? "nothing smaller of batch, anchors or length makes room: sf-host plan shows what takes it; a smaller draft, or fsdp2 over more GPUs"
                           : "any one of these would fit: " + join(fits, "; "));
}

std::vector<std::string> slow_paths(const Plan& plan, const Description& description) {
  std::vector<std::string> found;
  if (!is_on_gpu(plan)) {
    return found;
  }
  const Json config = Json::parse(description.draft_config_json, "the draft's configuration");
  const auto number = [&](const char* name, int64_t otherwise) {
    const Json* value = config.find(name);
    return value != nullptr && value->is_int() ? value->as_int() : otherwise;
  };
  const auto fixed = [&](const char* name) {
    const auto value = description.fixed.find(name);
    return value == description.fixed.end() ? int64_t{0} : std::stoll(value->second);
  };
  const bool is_bfloat16 = plan.get<std::string>("model.torch_dtype") == "bfloat16";
  const int64_t heads = number("num_attention_heads", 1), head_dim = number("head_dim", number("hidden_size", 0) / std::max<int64_t>(1, heads));
  const auto add = [&](const char* operation, const char* why) {
    if (why != nullptr) {
      found.push_back(format("{} runs as LibTorch operations: {}", operation, why));
    }
  };
  add(description.rows_per_token > 0 ? "unroll_attention" : "block_attention", slow_attention(is_bfloat16, head_dim));
  add("head_norm_rope", slow_head_norm_rope(head_dim, head_dim / 2));
  if (const int64_t group = fixed("dflash2_conv_group_size"); group > 0) {
    add("grouped_convolution", slow_grouped_convolution(fixed("dflash2_conv_kernel_size"), group));
  }
  add("head_objective", slow_head_objective(fixed("dflash2_selector_top_k")));
  return found;
}

}  // namespace sf
