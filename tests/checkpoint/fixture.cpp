#include "tests/checkpoint/fixture.hpp"

#include "core/base/text.hpp"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include <dlfcn.h>

namespace sf::test {
namespace fs = std::filesystem;

TempFolder::TempFolder() {
  std::string pattern = (fs::temp_directory_path() / "sf-checkpoint-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw std::runtime_error("mkdtemp failed");
  }
  path_ = pattern;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

SmallRun::SmallRun(int64_t step_, int64_t rows) : step(step_), counter(step_) {
  for (int64_t i = 0; i < rows * 3; ++i) {
    weights.push_back(static_cast<float>(step + i));
    moments.push_back(static_cast<uint16_t>(step + i));
  }
}

std::vector<TensorSlice> SmallRun::tensors() const {
  const int64_t rows = static_cast<int64_t>(weights.size()) / 3;
  return {{.name = "moments/fc",
           .dtype = "BF16",
           .global_shape = {rows, 3},
           .data = moments.data(),
           .bytes = moments.size() * 2},
          {.name = "weights/fc",
           .dtype = "F32",
           .global_shape = {rows, 3},
           .data = weights.data(),
           .bytes = weights.size() * 4},
          {.name = "counter", .dtype = "I64", .global_shape = {}, .data = &counter, .bytes = 8}};
}

RunState SmallRun::state() const {
  RunState out;
  out.run_id = "small";
  out.step = step;
  out.position = step * 4;
  out.epoch = step / 10;
  out.seed = 0xfedcba9876543210;
  out.total_steps = 100;
  out.schedule = "cosine";
  out.recipe = "run_id = \"small\"\n";
  out.draft_config = "{}";
  out.target_fingerprint = "t";
  out.features_fingerprint = "f";
  out.versions = {{"sf", "0.1.0"}};
  out.plugins = {{"single", "0.1.0", "aa"}};
  out.fixed = {{"training.batch_size", "4"}};
  out.progress.set("loss_sum", 0.1);
  return out;
}

CheckpointSaver::Request SmallRun::request() const {
  return {.state = state(),
          .tensors = tensors(),
          .texts = {{"recipe.toml", "run_id = \"small\"\n"}},
          .keep_alive = nullptr};
}

AsyncPlugin::AsyncPlugin(int64_t threads, int64_t bandwidth) : values_{{"threads", threads}, {"bandwidth", bandwidth}} {
  void* library = dlopen(SF_BUILD_DIR "/lib/sf/plugins/async_ckpt.so", RTLD_NOW | RTLD_LOCAL);  // never closed
  if (library == nullptr) {
    throw std::runtime_error(dlerror());
  }
  plugin_ = reinterpret_cast<const sf_plugin* (*)()>(dlsym(library, "sf_plugin_entry_v1"))();
  options_.struct_size = sizeof options_;
  options_.ctx = &values_;
  options_.get_int = [](void* values, const char* name, int64_t* out) -> int32_t {
    *out = static_cast<std::map<std::string, int64_t>*>(values)->at(name);
    return SF_OK;
  };
  options_.report_effect = [](void*, const char*, int64_t) -> int32_t { return SF_OK; };
  host_.struct_size = sizeof host_;
  host_.log = [](void*, const sf_instance*, int32_t, const char*, int32_t, const char*) {};
  sf_status status{};
  status.struct_size = sizeof status;
  if (plugin_->create(&host_, &options_, &instance_, &status) != SF_OK || plugin_->start(instance_, &status) != SF_OK) {
    throw std::runtime_error(status.what);
  }
}

AsyncPlugin::~AsyncPlugin() {
  sf_status status{};
  status.struct_size = sizeof status;
  plugin_->stop(instance_, &status);
  plugin_->destroy(instance_);
}

CheckpointWriter AsyncPlugin::writer() const {
  return {static_cast<const sf_checkpoint_writer*>(plugin_->get_interface(instance_, SF_CHECKPOINT_WRITER)), instance_};
}

bool holds_its_step(const CheckpointReader& reader, int64_t rows) {
  const SmallRun expected(reader.index().step, rows);
  std::vector<float> weights(expected.weights.size());
  std::vector<uint16_t> moments(expected.moments.size());
  int64_t counter = -1;
  reader.read("weights/fc", std::as_writable_bytes(std::span(weights)));
  reader.read("moments/fc", std::as_writable_bytes(std::span(moments)));
  reader.read("counter", std::as_writable_bytes(std::span(&counter, 1)));
  return weights == expected.weights && moments == expected.moments && counter == expected.step &&
         reader.state().step == expected.step && reader.state().to_json() == expected.state().to_json();
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace sf::test
