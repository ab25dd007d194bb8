#include "core/checkpoint/format.hpp"

#include "core/base/error.hpp"
#include "core/base/text.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <set>

namespace sf {
namespace {

constexpr size_t kHeaderAlignment = 64;  // a cache line: mapped tensors start aligned for any vector load
constexpr std::string_view kStepPrefix = "step-";

int64_t elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Places in a tensor are computed without a look at overflow, so what is read has none: an axis without elements counts as one, as the others are multiplied all the
// same.
constexpr int64_t kElementsMax = int64_t{1} << 58;
constexpr size_t kAxesMax = 64;
constexpr int64_t kRanksMax = 1 << 20;

std::vector<int64_t> shape_of(const Json& json, const std::string& name) {
  std::vector<int64_t> out;
  int64_t product = 1;
  for (const Json& item : json.items()) {
    const int64_t extent = item.as_int();
    if (extent < 0 || __builtin_mul_overflow(product, std::max<int64_t>(extent, 1), &product) || product > kElementsMax || out.size() == kAxesMax) {
      throw JsonError(format("\"{}\" has an impossible shape: extent {} at axis {}", name, extent, out.size()));
    }
    out.push_back(extent);
  }
  return out;
}

// Of a slice: a place in each axis, or one among all elements.
std::vector<int64_t> start_of(const Json& json, const std::string& name, const std::vector<int64_t>& tensor_shape) {
  std::vector<int64_t> out;
  for (const Json& item : json.items()) {
    const int64_t place = item.as_int();
    if (place < 0 || place > kElementsMax) {
      throw JsonError(format("a slice of \"{}\" begins at the impossible place {}", name, place));
    }
    out.push_back(place);
  }
  for (size_t axis = 0; out.size() == tensor_shape.size() && axis < out.size(); ++axis) {
    if (out[axis] > tensor_shape[axis]) {
      throw JsonError(format("a slice of \"{}\" begins at {}, outside of its shape {}", name, out, tensor_shape));
    }
  }
  return out;
}

// Of steps, samples and the like.
int64_t count_of(const Json& json) {
  constexpr int64_t kMost = int64_t{1} << 53;
  const int64_t count = json.as_int();
  if (count < 0 || count > kMost) {
    throw JsonError(format("{} is no number of steps or samples", count));
  }
  return count;
}

uint64_t size_of(const Json& json) {
  const int64_t value = json.as_int();
  if (value < 0) {
    throw JsonError(format("{} is negative", value));
  }
  return static_cast<uint64_t>(value);
}

Json texts_of(const std::map<std::string, std::string>& map) {
  Json out = Json::object();
  for (const auto& [key, value] : map) {
    out.set(key, value);
  }
  return out;
}

std::map<std::string, std::string> map_of(const Json& json) {
  std::map<std::string, std::string> out;
  for (const auto& [key, value] : json.entries()) {
    out[key] = value.as_string();
  }
  return out;
}

// Whether two slices of a tensor share an element. A box with gaps is never beside a run of elements (is_inside).
bool overlap(const SavedSlice& a, const SavedSlice& b, const std::vector<int64_t>& tensor_shape) {
  const auto a_range = range_of(a, tensor_shape), b_range = range_of(b, tensor_shape);
  if (a_range && b_range) {
    return a_range->begin < b_range->end && b_range->begin < a_range->end;
  }
  for (size_t i = 0; i < a.shape.size(); ++i) {
    if (a.start[i] >= b.start[i] + b.shape[i] || b.start[i] >= a.start[i] + a.shape[i]) {
      return false;
    }
  }
  return true;
}

bool is_run(const SavedSlice& slice, const std::vector<int64_t>& tensor_shape) {
  return slice.shape.size() == 1 && tensor_shape.size() != 1;
}

// Within the tensor, with the right number of bytes.
bool is_inside(const SavedSlice& slice, const SavedTensor& tensor) {
  if (slice.start.size() != slice.shape.size() ||
      slice.bytes != static_cast<uint64_t>(elements(slice.shape)) * dtype_bytes(tensor.dtype)) {
    return false;
  }
  if (is_run(slice, tensor.shape)) {
    return slice.start[0] >= 0 && slice.shape[0] >= 0 && slice.shape[0] <= elements(tensor.shape) - slice.start[0] &&
           std::all_of(tensor.slices.begin(), tensor.slices.end(),
                       [&](const SavedSlice& other) { return range_of(other, tensor.shape).has_value(); });
  }
  if (slice.shape.size() != tensor.shape.size()) {
    return false;
  }
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    if (slice.start[axis] < 0 || slice.shape[axis] < 0 || slice.shape[axis] > tensor.shape[axis] - slice.start[axis]) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::optional<ElementRange> range_of(const SavedSlice& slice, const std::vector<int64_t>& tensor_shape) {
  if (slice.start.size() != slice.shape.size()) {
    return std::nullopt;
  }
  if (is_run(slice, tensor_shape)) {
    return ElementRange{slice.start[0], slice.start[0] + slice.shape[0]};
  }
  if (slice.shape.size() != tensor_shape.size()) {
    return std::nullopt;
  }
  // Whole from some axis on, one index before it.
  int64_t begin = 0, count = 1;
  bool is_whole = true;
  for (size_t axis = tensor_shape.size(); axis-- > 0;) {
    if (!is_whole && slice.shape[axis] != 1) {
      return elements(slice.shape) == 0 ? std::optional(ElementRange{}) : std::nullopt;
    }
    is_whole = is_whole && slice.start[axis] == 0 && slice.shape[axis] == tensor_shape[axis];
    count *= slice.shape[axis];
  }
  for (size_t axis = 0; axis < tensor_shape.size(); ++axis) {
    begin = begin * tensor_shape[axis] + slice.start[axis];
  }
  return ElementRange{begin, begin + count};
}

std::string step_folder_name(int64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "step-%08lld", static_cast<long long>(step));
  return text;
}

std::optional<int64_t> step_of_folder_name(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) {
    return std::nullopt;
  }
  name.remove_prefix(kStepPrefix.size());
  if (name.size() < 8 || name.size() > 18 ||
      !std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    return std::nullopt;
  }
  return std::stoll(std::string(name));
}

std::string rank_file_name(int rank) {
  char text[40];
  std::snprintf(text, sizeof text, "rank%05d.safetensors", rank);
  return text;
}

uint64_t dtype_bytes(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "BF16" || dtype == "F16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "U8" || dtype == "I8" || dtype == "BOOL" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 1;
  return 0;
}

void CheckpointIndex::merge(const CheckpointIndex& other) {
  SF_CHECK(step == other.step, "merging the indexes of steps {} and {}", step, other.step);
  for (const auto& [name, file] : other.files) {
    SF_CHECK(files.emplace(name, file).second, "two ranks wrote {}", name);
  }
  for (const auto& [name, tensor] : other.tensors) {
    auto [mine, added] = tensors.emplace(name, tensor);
    if (!added) {
      SF_CHECK(mine->second.dtype == tensor.dtype && mine->second.shape == tensor.shape,
               "ranks disagree about {}: {} {} and {} {}", name, mine->second.dtype, mine->second.shape,
               tensor.dtype, tensor.shape);
      mine->second.slices.insert(mine->second.slices.end(), tensor.slices.begin(), tensor.slices.end());
    }
  }
}

void CheckpointIndex::check_cover() const {
  for (const auto& [name, tensor] : tensors) {
    int64_t covered = 0;
    for (size_t i = 0; i < tensor.slices.size(); ++i) {
      const SavedSlice& slice = tensor.slices[i];
      const auto file = files.find(slice.file);
      if (!is_inside(slice, tensor) || file == files.end() || slice.offset + slice.bytes > file->second.bytes) {
        throw Error(ExitCode::kCheckpoint,
                    format("slice {} of \"{}\" does not fit its tensor or its file", i, name));
      }
      covered += elements(slice.shape);
      for (size_t k = 0; k < i; ++k) {
        if (elements(slice.shape) > 0 && elements(tensor.slices[k].shape) > 0 &&
            overlap(slice, tensor.slices[k], tensor.shape)) {
          throw Error(ExitCode::kCheckpoint, format("slices {} and {} of \"{}\" overlap", k, i, name));
        }
      }
    }
    if (covered != elements(tensor.shape)) {
      throw Error(
          ExitCode::kCheckpoint,
          format("the slices of \"{}\" hold {} of {} elements", name, covered, elements(tensor.shape)),
          "the file of a rank is missing");
    }
  }
}

Json CheckpointIndex::to_json() const {
  Json out = Json::object({{"format", "sf-checkpoint"},
                           {"version", kCheckpointVersion},
                           {"step", step},
                           {"world_size", world_size}});
  Json files_json = Json::object();
  for (const auto& [name, file] : files) {
    Json entry = Json::object({{"bytes", file.bytes}});
    if (file.header_bytes != 0) {
      entry.set("header_bytes", file.header_bytes);
    }
    files_json.set(name, entry.set("sha256", file.sha256));
  }
  Json tensors_json = Json::object();
  for (const auto& [name, tensor] : tensors) {
    Json slices = Json::array();
    for (const SavedSlice& slice : tensor.slices) {
      slices.push_back(Json::object({{"file", slice.file},
                                     {"offset", slice.offset},
                                     {"bytes", slice.bytes},
                                     {"start", Json::array_of(slice.start)},
                                     {"shape", Json::array_of(slice.shape)},
                                     {"sha256", slice.sha256}}));
    }
    tensors_json.set(
        name,
        Json::object({{"dtype", tensor.dtype}, {"shape", Json::array_of(tensor.shape)}, {"slices", slices}}));
  }
  return out.set("files", files_json).set("tensors", tensors_json);
}

CheckpointIndex CheckpointIndex::from_json(const Json& json, const std::string& source) {
  CheckpointIndex out = part_from_json(json, source);
  out.check_cover();
  return out;
}

CheckpointIndex CheckpointIndex::part_from_json(const Json& json, const std::string& source) {
  try {
    if (json.at("format").as_string() != "sf-checkpoint") {
      throw Error(ExitCode::kCheckpoint, format("{}: format \"{}\", expected \"sf-checkpoint\"", source,
                                                json.at("format").as_string()));
    }
    if (json.at("version").as_int() > kCheckpointVersion) {
      throw Error(ExitCode::kCheckpoint,
                  format("{}: version {}, this program reads up to {}", source, json.at("version").as_int(),
                         kCheckpointVersion),
                  "resume with the version that wrote it, or a newer one");
    }
    CheckpointIndex out;
    out.step = count_of(json.at("step"));
    const int64_t ranks = json.at("world_size").as_int();
    if (ranks < 1 || ranks > kRanksMax) {
      throw JsonError(format("world_size is {}", ranks));
    }
    out.world_size = static_cast<int>(ranks);
    for (const auto& [name, entry] : json.at("files").entries()) {
      if (name.empty() || name.find('/') != std::string::npos) {
        throw Error(ExitCode::kCheckpoint,
                    format("{}: file name \"{}\" leaves the checkpoint's folder", source, name));
      }
      const Json* header = entry.find("header_bytes");
      out.files[name] = {.bytes = size_of(entry.at("bytes")),
                         .header_bytes = header != nullptr ? size_of(*header) : 0,
                         .sha256 = entry.at("sha256").as_string()};
    }
    for (const auto& [name, entry] : json.at("tensors").entries()) {
      SavedTensor& tensor = out.tensors[name];
      tensor.dtype = entry.at("dtype").as_string();
      if (dtype_bytes(tensor.dtype) == 0) {
        throw JsonError(format("\"{}\" has the unknown type \"{}\"", name, tensor.dtype));
      }
      tensor.shape = shape_of(entry.at("shape"), name);
      for (const Json& slice : entry.at("slices").items()) {
        tensor.slices.push_back({.file = slice.at("file").as_string(),
                                 .offset = size_of(slice.at("offset")),
                                 .bytes = size_of(slice.at("bytes")),
                                 .start = start_of(slice.at("start"), name, tensor.shape),
                                 .shape = shape_of(slice.at("shape"), name),
                                 .sha256 = slice.at("sha256").as_string()});
      }
    }
    return out;
  } catch (const JsonError& error) {
    throw Error(ExitCode::kCheckpoint, format("{} is not a checkpoint's index: {}", source, error.what()));
  }
}

bool is_run_of_elements(const TensorSlice& slice) {
  const std::vector<int64_t> shape = slice.shape.empty() ? slice.global_shape : slice.shape;
  const SavedSlice saved{.file = {}, .bytes = slice.bytes,
                         .start = slice.start.empty() ? std::vector<int64_t>(shape.size(), 0) : slice.start, .shape = shape, .sha256 = {}};
  return range_of(saved, slice.global_shape).has_value();
}

RankFileLayout lay_out_rank_file(std::span<const TensorSlice> tensors, bool data_comes_later) {
  std::set<std::string_view> names;
  for (const TensorSlice& tensor : tensors) {
    const std::vector<int64_t>& shape = tensor.shape.empty() ? tensor.global_shape : tensor.shape;
    SF_CHECK(!tensor.name.empty() && tensor.name != "__metadata__" && names.insert(tensor.name).second,
             "tensor name \"{}\" is empty or there twice", tensor.name);
    SF_CHECK(dtype_bytes(tensor.dtype) != 0, "{}: unknown dtype \"{}\"", tensor.name, tensor.dtype);
    SF_CHECK((shape.size() == tensor.global_shape.size() || shape.size() == 1) &&
                 (tensor.start.empty() || tensor.start.size() == shape.size()),
             "{}: slice {} of a tensor {}", tensor.name, shape, tensor.global_shape);
    SF_CHECK(static_cast<uint64_t>(elements(shape)) * dtype_bytes(tensor.dtype) == tensor.bytes,
             "{}: {} bytes for {} {}", tensor.name, tensor.bytes, tensor.dtype, shape);
    SF_CHECK(tensor.data != nullptr || tensor.bytes == 0 || data_comes_later, "{}: no data", tensor.name);
  }
  RankFileLayout out;
  out.order.resize(tensors.size());
  std::iota(out.order.begin(), out.order.end(), size_t{0});
  std::stable_sort(out.order.begin(), out.order.end(), [&](size_t a, size_t b) {
    return dtype_bytes(tensors[a].dtype) > dtype_bytes(tensors[b].dtype);
  });
  Json header = Json::object({{"__metadata__", Json::object({{"format", "pt"}})}});
  uint64_t offset = 0;
  out.offsets.resize(tensors.size());
  for (const size_t i : out.order) {
    const TensorSlice& tensor = tensors[i];
    header.set(tensor.name,
               Json::object(
                   {{"dtype", tensor.dtype},
                    {"shape", Json::array_of(tensor.shape.empty() ? tensor.global_shape : tensor.shape)},
                    {"data_offsets", Json::array_of(std::vector<uint64_t>{offset, offset + tensor.bytes})}}));
    out.offsets[i] = offset;
    offset += tensor.bytes;
  }
  std::string text = header.dump();
  const size_t padded = (8 + text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment;
  text.resize(padded - 8, ' ');
  const uint64_t length = text.size();
  out.header.resize(8);
  std::memcpy(out.header.data(), &length, 8);  // little endian, as the format wants and as this machine is
  out.header += text;
  for (uint64_t& place : out.offsets) {
    place += out.header.size();
  }
  out.bytes = out.header.size() + offset;
  return out;
}

Json RunState::to_json() const {
  Json plugins_json = Json::array();
  for (const PluginStamp& plugin : plugins) {
    plugins_json.push_back(
        Json::object({{"name", plugin.name}, {"version", plugin.version}, {"sha256", plugin.sha256}}));
  }
  return Json::object({{"run_id", run_id},
                       {"step", step},
                       {"position", position},
                       {"epoch", epoch},
                       {"seed", std::to_string(seed)},  // text: all 64 bits, whatever reads it
                       {"total_steps", total_steps},
                       {"schedule", schedule},
                       {"target_fingerprint", target_fingerprint},
                       {"features_fingerprint", features_fingerprint},
                       {"versions", texts_of(versions)},
                       {"plugins", plugins_json},
                       {"layout", Json::object({{"sharding", layout.sharding}, {"ranks", layout.ranks}, {"window", layout.window}})},
                       {"fixed", texts_of(fixed)},
                       {"progress", progress},
                       {"draft_config", draft_config},
                       {"recipe", recipe}});
}

RunState RunState::from_json(const Json& json, const std::string& source) {
  try {
    RunState out;
    out.run_id = json.at("run_id").as_string();
    out.step = count_of(json.at("step"));
    out.position = count_of(json.at("position"));
    out.epoch = count_of(json.at("epoch"));
    const std::string& seed = json.at("seed").as_string();
    if (const auto [end, error] = std::from_chars(seed.data(), seed.data() + seed.size(), out.seed); error != std::errc() || end != seed.data() + seed.size()) {
      throw Error(ExitCode::kCheckpoint, format("{}: the seed is not a number", source));
    }
    out.total_steps = count_of(json.at("total_steps"));
    out.schedule = json.at("schedule").as_string();
    out.recipe = json.at("recipe").as_string();
    out.draft_config = json.at("draft_config").as_string();
    out.target_fingerprint = json.at("target_fingerprint").as_string();
    out.features_fingerprint = json.at("features_fingerprint").as_string();
    out.versions = map_of(json.at("versions"));
    for (const Json& plugin : json.at("plugins").items()) {
      out.plugins.push_back(
          {plugin.at("name").as_string(), plugin.at("version").as_string(), plugin.at("sha256").as_string()});
    }
    if (const Json* layout = json.find("layout")) {  // checkpoints of earlier versions have none
      out.layout = {.sharding = layout->at("sharding").as_string(), .ranks = layout->at("ranks").as_int(), .window = layout->at("window").as_string()};
    }
    out.fixed = map_of(json.at("fixed"));
    out.progress = json.at("progress");
    return out;
  } catch (const JsonError& error) {
    throw Error(ExitCode::kCheckpoint, format("{} is not the state of a run: {}", source, error.what()));
  }
}

namespace {

// "section.key" -> value of each line in the text of a resolved recipe, without the comments that say where values are from.
std::map<std::string, std::string> recipe_values(const std::string& recipe) {
  std::map<std::string, std::string> values;
  std::string section;
  for (const std::string& line : split(recipe, '\n')) {
    const size_t equals = line.find('=');
    if (line.starts_with("[")) {
      section = line.substr(1, line.rfind(']') - 1) + ".";
    } else if (equals != std::string::npos) {
      const std::string_view value = std::string_view(line).substr(equals + 1);
      values[section + std::string(trim(line.substr(0, equals)))] = trim(value.substr(0, value.rfind("  # ")));
    }
  }
  return values;
}

// What may change within a run, and nobody should change unawares: some keys of [training], and options of a plugin that was and is part of it. Fixed ones are refused.
std::vector<std::string> told_changes(const RunState& saved, const RunState& now) {
  const std::map<std::string, std::string> before = recipe_values(saved.recipe), after = recipe_values(now.recipe);
  std::set<std::string> keys = {"training.learning_rate", "training.warmup_ratio", "training.weight_decay", "training.max_grad_norm", "training.reduce_dtype", "training.grad_accum_dtype"};
  const auto is_part = [](const RunState& run, std::string_view key) {
    return std::any_of(run.plugins.begin(), run.plugins.end(), [&](const PluginStamp& plugin) { return key.starts_with("plugin." + plugin.name + "."); });
  };
  for (const auto* values : {&before, &after}) {
    for (const auto& [key, value] : *values) {
      if (is_part(saved, key) && is_part(now, key)) {
        keys.insert(key);
      }
    }
  }
  const auto value_in = [](const std::map<std::string, std::string>& values, const std::string& key) {  // a resolved recipe leaves out what is empty
    const auto found = values.find(key);
    return found == values.end() ? std::string("empty") : found->second;
  };
  std::vector<std::string> told;
  for (const std::string& key : keys) {
    const std::string was = value_in(before, key), is = value_in(after, key);
    if (was != is && !saved.fixed.contains(key) && !now.fixed.contains(key)) {
      told.push_back(format("{} was {} and is {}: the run goes on with that, and not as it would have", key, was, is));
    }
  }
  return told;
}

}  // namespace

Continuation compare_runs(const RunState& saved, const RunState& now) {
  Continuation out;
  const auto differ = [&](std::string_view what, const auto& before, const auto& after,
                          std::string_view why) {
    if (!(before == after)) {
      out.errors.push_back(format("{}: the checkpoint has {}, this run {} ({})", what, before, after, why));
    }
  };
  differ("seed", saved.seed, now.seed, "samples would come in another order");
  differ("features", saved.features_fingerprint, now.features_fingerprint,
         "the run would go on with other samples");
  differ("target", saved.target_fingerprint, now.target_fingerprint,
         "embedding and head would be another model's");
  differ("schedule", saved.schedule, now.schedule, "the learning rate would jump");
  differ("length of the schedule", saved.total_steps, now.total_steps,
         format("the learning rate would jump; training.max_steps and training.num_epochs may change when the schedule keeps its length: "
                "--set training.total_steps={}",
                saved.total_steps));
  // Other ranks may share a window out in another way, as long as it is the same window.
  const std::set<std::string> of_a_window = {"training.batch_size", "training.accumulation_steps"};
  const bool same_window = !saved.layout.window.empty() && saved.layout.window == now.layout.window;
  for (const auto& [key, before] : saved.fixed) {
    const auto after = now.fixed.find(key);
    if (same_window && saved.layout.ranks != now.layout.ranks && of_a_window.contains(key)) {
      continue;
    }
    differ(key, before, after != now.fixed.end() ? after->second : std::string("nothing"),
           "it may not change within a run");
  }
  for (const auto& [key, after] : now.fixed) {
    if (!saved.fixed.contains(key)) {
      out.errors.push_back(format(
          "{}: the checkpoint does not say, this run has {} (it may not change within a run)", key, after));
    }
  }
  if (!saved.layout.window.empty() && !same_window) {
    out.warnings.push_back(format("an optimizer step took {} on {} ranks, and takes {} on {} now: the run goes on with every sample once, but not as it would "
                                  "have; training.batch_size and training.accumulation_steps can keep it as it was",
                                  saved.layout.window, saved.layout.ranks, now.layout.window, now.layout.ranks));
  }
  const std::vector<std::string> changes = told_changes(saved, now);
  out.warnings.insert(out.warnings.end(), changes.begin(), changes.end());
  for (const auto& [key, before] : saved.versions) {
    const auto after = now.versions.find(key);
    if (after != now.versions.end() && after->second != before) {
      out.warnings.push_back(
          format("{}: the checkpoint was written with {}, this is {}", key, before, after->second));
    }
  }
  for (const PluginStamp& plugin : now.plugins) {
    const auto before = std::find_if(saved.plugins.begin(), saved.plugins.end(),
                                     [&](const PluginStamp& p) { return p.name == plugin.name; });
    if (before == saved.plugins.end()) {
      out.warnings.push_back(
          format("plugin '{}' was not part of the run that wrote the checkpoint", plugin.name));
    } else if (before->sha256 != plugin.sha256) {
      out.warnings.push_back(
          format("plugin '{}' is another build than the one that wrote the checkpoint (version {}, now {})",
                 plugin.name, before->version, plugin.version));
    }
  }
  for (const PluginStamp& plugin : saved.plugins) {  // one that was forgotten on the command line changes what is computed
    if (std::none_of(now.plugins.begin(), now.plugins.end(), [&](const PluginStamp& p) { return p.name == plugin.name; })) {
      out.warnings.push_back(format("plugin '{}' was part of the run that wrote the checkpoint, and is not part of this one", plugin.name));
    }
  }
  return out;
}

}  // namespace sf
