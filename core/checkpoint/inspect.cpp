#include "core/checkpoint/inspect.hpp"

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/presence.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <system_error>

namespace sf {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kElementsAtOnce = int64_t{1} << 20;

int64_t elements_of(const SavedTensor& tensor) {
  return std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
}

std::string type_and_shape(const SavedTensor& tensor) { return format("{} {}", tensor.dtype, tensor.shape); }

// The part of a name before its first slash: "exp_avg".
std::string kind_of(const std::string& name) { return name.substr(0, name.find('/')); }

double float_at(const std::byte* data, std::string_view dtype, int64_t index) {
  if (dtype == "F32") {
    float value = 0;
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  if (dtype == "BF16") {
    uint16_t bits = 0;
    std::memcpy(&bits, data + index * 2, 2);
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
  return 0;
}

// Bit for bit; sizes in numbers where they are floats.
TensorDifference compare_values(const std::string& name, const SavedTensor& tensor, const CheckpointReader& first, const CheckpointReader& second) {
  TensorDifference out{.name = name, .what = {}, .elements = elements_of(tensor)};
  const auto size = static_cast<int64_t>(dtype_bytes(tensor.dtype));
  std::vector<std::byte> a, b;
  double sum = 0;
  for (int64_t begin = 0; begin < out.elements; begin += kElementsAtOnce) {
    const int64_t count = std::min(kElementsAtOnce, out.elements - begin);
    a.resize(static_cast<size_t>(count * size));
    b.resize(a.size());
    first.read_range(name, a, begin, begin + count);
    second.read_range(name, b, begin, begin + count);
    for (int64_t i = 0; i < count; ++i) {
      if (std::memcmp(a.data() + i * size, b.data() + i * size, static_cast<size_t>(size)) != 0) {
        ++out.differing;
        const double apart = std::abs(float_at(a.data(), tensor.dtype, i) - float_at(b.data(), tensor.dtype, i));
        out.largest = std::max(out.largest, apart);
        sum += apart;
      }
    }
  }
  out.mean = out.elements > 0 ? sum / static_cast<double>(out.elements) : 0;
  if (out.differing > 0) {
    out.what = format("{} of {} numbers differ, by {} at most and {} on average", out.differing, out.elements, out.largest, out.mean);
  }
  return out;
}

std::map<std::string, std::string> values_of(const RunState& state) {
  std::map<std::string, std::string> out = state.fixed;
  out["run_id"] = state.run_id;
  out["step"] = to_text(state.step);
  out["position"] = to_text(state.position);
  out["epoch"] = to_text(state.epoch);
  out["seed"] = to_text(state.seed);
  out["total_steps"] = to_text(state.total_steps);
  out["schedule"] = state.schedule;
  out["target"] = state.target_fingerprint;
  out["features"] = state.features_fingerprint;
  out["layout.sharding"] = state.layout.sharding;
  out["layout.ranks"] = to_text(state.layout.ranks);
  out["layout.window"] = state.layout.window;
  for (const auto& [name, version] : state.versions) {
    out["version of " + name] = version;
  }
  for (const PluginStamp& plugin : state.plugins) {
    out["plugin " + plugin.name] = format("{} ({})", plugin.version, plugin.sha256.substr(0, 12));
  }
  return out;
}

void compare_texts(const std::string& what, const std::string& a, const std::string& b, std::vector<std::string>& out) {
  const std::vector<std::string> first = split(a, '\n'), second = split(b, '\n');
  const std::set<std::string> in_first(first.begin(), first.end()), in_second(second.begin(), second.end());
  for (const std::string& line : first) {
    if (!in_second.contains(line)) {
      out.push_back(format("{}, only in the first: {}", what, line));
    }
  }
  for (const std::string& line : second) {
    if (!in_first.contains(line)) {
      out.push_back(format("{}, only in the second: {}", what, line));
    }
  }
}

uint64_t bytes_of(const CheckpointIndex& index) {
  uint64_t bytes = 0;
  for (const auto& [name, file] : index.files) {
    bytes += file.bytes;
  }
  return bytes;
}

const char* text_of(FoundCheckpoint::State state) {
  switch (state) {
    case FoundCheckpoint::State::complete: return "complete";
    case FoundCheckpoint::State::unfinished: return "unfinished";
    case FoundCheckpoint::State::damaged: return "damaged";
  }
  return "";
}

}  // namespace

std::vector<ListedCheckpoint> list_run(const fs::path& run_folder, CheckpointReader::Verify verify) {
  if (!fs::is_directory(run_folder)) {
    throw Error(ExitCode::kCheckpoint, format("{} is not a folder", run_folder), "name a run's folder (output_dir/run_id), or a recipe");
  }
  if (is_there(run_folder / kMarkerFile)) {
    const fs::path step_folder = fs::canonical(run_folder);
    throw Error(ExitCode::kCheckpoint, format("{} is one checkpoint, not a run", run_folder), format("its run is {}", step_folder.parent_path()));
  }
  std::error_code ignored;
  const fs::path latest = fs::read_symlink(run_folder / "latest", ignored);
  const std::optional<BestRecord> best = read_best(run_folder);
  std::vector<ListedCheckpoint> out;
  for (FoundCheckpoint& found : list_checkpoints(run_folder, verify)) {
    ListedCheckpoint listed{.found = std::move(found)};
    listed.is_latest = latest.filename() == listed.found.folder.filename();
    listed.is_best = best && best->step == listed.found.step && listed.found.state != FoundCheckpoint::State::unfinished;
    if (listed.found.state == FoundCheckpoint::State::complete) {
      try {
        const CheckpointReader reader = CheckpointReader::open(listed.found.folder, CheckpointReader::Verify::sizes);
        listed.bytes = bytes_of(reader.index());
        listed.position = reader.state().position;
        listed.ranks = reader.index().world_size;
        listed.sharding = reader.state().layout.sharding;
      } catch (const Error&) {
        if (!is_there(listed.found.folder)) {  // a run that goes on has removed it meanwhile
          continue;
        }
        throw;
      }
    }
    out.push_back(std::move(listed));
  }
  return out;
}

Json to_json(const ListedCheckpoint& listed) {
  Json json = Json::object();
  json.set("folder", listed.found.folder.string()).set("step", listed.found.step).set("state", text_of(listed.found.state));
  if (!listed.found.why.empty()) {
    json.set("why", listed.found.why);
  }
  if (listed.found.state == FoundCheckpoint::State::complete) {
    json.set("bytes", listed.bytes).set("position", listed.position).set("ranks", listed.ranks).set("sharding", listed.sharding);
  }
  return json.set("latest", listed.is_latest).set("best", listed.is_best);
}

Json describe_checkpoint(const CheckpointReader& reader) {
  const RunState& state = reader.state();
  Json json = Json::object();
  json.set("folder", reader.folder().string()).set("step", state.step).set("run_id", state.run_id);
  json.set("position", state.position).set("epoch", state.epoch).set("seed", to_text(state.seed));
  json.set("schedule", state.schedule).set("total_steps", state.total_steps);
  json.set("sharding", state.layout.sharding).set("ranks", static_cast<int64_t>(reader.index().world_size)).set("window", state.layout.window);
  json.set("target_fingerprint", state.target_fingerprint).set("features_fingerprint", state.features_fingerprint);
  Json versions = Json::object();
  for (const auto& [name, version] : state.versions) {
    versions.set(name, version);
  }
  Json plugins = Json::array();
  for (const PluginStamp& plugin : state.plugins) {
    plugins.push_back(Json::object({{"name", plugin.name}, {"version", plugin.version}, {"sha256", plugin.sha256}}));
  }
  json.set("versions", std::move(versions)).set("plugins", std::move(plugins));
  struct Kind {
    int64_t tensors = 0, elements = 0;
    uint64_t bytes = 0;
    std::set<std::string> dtypes;
  };
  std::map<std::string, Kind> kinds;
  for (const auto& [name, tensor] : reader.index().tensors) {
    Kind& kind = kinds[kind_of(name)];
    ++kind.tensors;
    kind.elements += elements_of(tensor);
    kind.bytes += static_cast<uint64_t>(elements_of(tensor)) * dtype_bytes(tensor.dtype);
    kind.dtypes.insert(tensor.dtype);
  }
  Json by_kind = Json::object();
  for (const auto& [name, kind] : kinds) {
    by_kind.set(name, Json::object({{"tensors", kind.tensors},
                                    {"elements", kind.elements},
                                    {"bytes", kind.bytes},
                                    {"dtype", join(std::vector<std::string>(kind.dtypes.begin(), kind.dtypes.end()), ", ")}}));
  }
  Json files = Json::object();
  for (const auto& [name, file] : reader.index().files) {
    files.set(name, file.bytes);
  }
  Json fixed = Json::object();
  for (const auto& [key, value] : state.fixed) {
    fixed.set(key, value);
  }
  return json.set("bytes", bytes_of(reader.index())).set("tensors", std::move(by_kind)).set("files", std::move(files)).set("fixed", std::move(fixed));
}

CheckpointDifference compare_checkpoints(const CheckpointReader& first, const CheckpointReader& second) {
  CheckpointDifference out;
  std::map<std::string, std::string> a = values_of(first.state()), b = values_of(second.state());
  std::set<std::string> keys;
  for (const auto& values : {a, b}) {
    for (const auto& [key, value] : values) {
      keys.insert(key);
    }
  }
  for (const std::string& key : keys) {
    if (a[key] != b[key]) {
      out.values.push_back(format("{}: {} and {}", key, a[key].empty() ? "nothing" : a[key], b[key].empty() ? "nothing" : b[key]));
    }
  }
  compare_texts("recipe", first.state().recipe, second.state().recipe, out.values);
  if (first.state().draft_config != second.state().draft_config) {
    out.values.emplace_back("the draft's configuration differs");
  }
  const auto& in_first = first.index().tensors;
  const auto& in_second = second.index().tensors;
  for (const auto& [name, tensor] : in_first) {
    const auto other = in_second.find(name);
    if (other == in_second.end()) {
      out.tensors.push_back({.name = name, .what = "only in the first: " + type_and_shape(tensor)});
    } else if (tensor.dtype != other->second.dtype || tensor.shape != other->second.shape) {
      out.tensors.push_back({.name = name, .what = format("{} and {}", type_and_shape(tensor), type_and_shape(other->second))});
    } else if (TensorDifference difference = compare_values(name, tensor, first, second); difference.differing > 0) {
      out.tensors.push_back(std::move(difference));
    } else {
      ++out.equal_tensors;
    }
  }
  for (const auto& [name, tensor] : in_second) {
    if (!in_first.contains(name)) {
      out.tensors.push_back({.name = name, .what = "only in the second: " + type_and_shape(tensor)});
    }
  }
  return out;
}

std::vector<FoundCheckpoint> prunable(const fs::path& run_folder, const RetentionPolicy& policy, bool damaged) {
  std::vector<FoundCheckpoint> out;
  std::vector<int64_t> whole;
  const std::vector<FoundCheckpoint> all = list_checkpoints(run_folder, CheckpointReader::Verify::checksums);
  for (const FoundCheckpoint& found : all) {
    if (found.state == FoundCheckpoint::State::complete) {
      whole.push_back(found.step);
    }
  }
  const std::optional<BestRecord> best = read_best(run_folder);
  const std::vector<int64_t> superfluous = superfluous_steps(whole, policy, best ? std::optional(best->step) : std::nullopt, std::nullopt);
  for (const FoundCheckpoint& found : all) {
    const bool is_whole = found.state == FoundCheckpoint::State::complete;
    if (is_whole ? std::find(superfluous.begin(), superfluous.end(), found.step) != superfluous.end() : damaged && !whole.empty()) {
      out.push_back(found);
    }
  }
  return out;
}

}  // namespace sf
