// The area between the device and the checkpoint writer. Under a second on the CPU; one case wants a GPU.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <unistd.h>

#include <filesystem>
#include <memory>

#include "core/checkpoint/reader.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/save.hpp"
#include "core/plan/plan.hpp"
#include "core/train/staging.hpp"
#include "sf/error.hpp"
#include "tests/kernels/gpu.hpp"

using namespace sf;
namespace fs = std::filesystem;

namespace {

struct Scratch {
  fs::path path = fs::temp_directory_path() / ("sf-staging-" + std::to_string(::getpid()));
  Scratch() { fs::create_directories(path); }
  ~Scratch() { fs::remove_all(path); }
};

Plan plan_of(int64_t staging_bytes, bool beside) {
  Plan plan;
  plan.values["checkpoint.staging_bytes"].value = staging_bytes;
  plan.stack.push_back({.slot = "checkpoint", .name = beside ? "async_ckpt" : "sync", .provides = beside ? std::vector<std::string>{"async-commit"} : std::vector<std::string>{}});
  return plan;
}

struct Tensors {
  std::vector<TensorSlice> slices;
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> bytes;
  int64_t all = 0;

  void add(const std::string& name, const at::Tensor& tensor, const char* dtype) {
    slices.push_back({.name = name, .dtype = dtype, .global_shape = tensor.sizes().vec(), .bytes = tensor.nbytes()});
    tensors.push_back(tensor);
    bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
    all += bytes.back();
  }
};

Tensors some_tensors() {
  Tensors out;
  out.add("weights/a", at::arange(3 * 1001, at::kFloat).view({3, 1001}).to(at::kBFloat16), "BF16");
  out.add("exp_avg/a", at::arange(3 * 1001, at::kFloat).view({3, 1001}), "F32");
  out.add("count", at::full({}, 7, at::kLong), "I64");
  out.add("buffers/t2d", at::arange(333).remainder(2).to(at::kBool), "BOOL");
  return out;
}

bool holds(const CheckpointReader& reader, const Tensors& expected) {
  for (size_t i = 0; i < expected.slices.size(); ++i) {
    at::Tensor found = at::empty_like(expected.tensors[i]);
    reader.read(expected.slices[i].name, {static_cast<std::byte*>(found.data_ptr()), found.nbytes()});
    if (!at::equal(found, expected.tensors[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("staging: its size is a whole snapshot for a writer that works beside training, a ring when there is less room, and said so") {
  const int64_t gib = int64_t{1} << 30;
  CHECK(staging_size(plan_of(0, true), 3 * gib).bytes == 3 * gib);
  CHECK(staging_size(plan_of(0, true), 3 * gib).is_whole);
  CHECK(staging_size(plan_of(0, false), 3 * gib).bytes == gib / 4);
  CHECK_FALSE(staging_size(plan_of(0, false), 3 * gib).is_whole);
  CHECK(staging_size(plan_of(0, false), 1000).is_whole);
  const StagingSize ring = staging_size(plan_of(gib, true), 3 * gib);
  CHECK(ring.bytes == gib);
  CHECK(ring.detail.find("a save waits for the disk") != std::string::npos);
  const StagingSize tiny = staging_size(plan_of(1, true), 3 * gib);
  CHECK(tiny.bytes > 0);
  CHECK_FALSE(tiny.is_whole);
}

TEST_CASE("staging: a snapshot arrives whole through an area of any size") {
  Scratch scratch;
  int64_t step = 0;
  for (const int64_t room : {0, 64, 1000, 4096, 1 << 20}) {
    CAPTURE(room);
    const Tensors tensors = some_tensors();
    const auto staging = std::make_shared<Staging>(tensors.bytes, staging_size(plan_of(room, true), tensors.all), at::kCPU);
    SyncWriter writer;
    CheckpointSaver saver(scratch.path, writer.writer());
    for (int repeat = 0; repeat < 2; ++repeat) {  // the area is used again
      ++step;
      staging->take(tensors.tensors);
      saver.start({.state = {.run_id = "r", .step = step}, .tensors = tensors.slices, .source = staging});
      (void)saver.wait();
      CHECK(holds(*open_checkpoint(scratch.path, "auto"), tensors));
      CHECK(open_checkpoint(scratch.path, "auto")->index().step == step);
    }
  }
}

TEST_CASE("rule A4: host tensors are copied, so what changes while a snapshot is written is not in it") {
  Scratch scratch;
  Tensors tensors = some_tensors();
  Tensors before = some_tensors();
  const auto staging = std::make_shared<Staging>(tensors.bytes, staging_size(plan_of(0, true), tensors.all), at::kCPU);
  REQUIRE(staging->is_whole());
  staging->take(tensors.tensors);
  staging->hold_updates();
  CHECK(staging->held_seconds() >= 0);
  for (at::Tensor& tensor : tensors.tensors) {
    tensor.zero_();
  }
  SyncWriter writer;
  CheckpointSaver saver(scratch.path, writer.writer());
  saver.start({.state = {.run_id = "r", .step = 1}, .tensors = tensors.slices, .source = staging});
  (void)saver.wait();
  CHECK(holds(*open_checkpoint(scratch.path, "auto"), before));
}

TEST_CASE("staging: on the CPU training goes on while copies are made, and what changes the tensors waits for them") {
  Scratch scratch;
  Tensors tensors, before;
  for (int i = 0; i < 4; ++i) {
    tensors.add("weights/" + std::to_string(i), at::arange(8'000'000, at::kFloat) + i, "F32");
    before.add("weights/" + std::to_string(i), tensors.tensors.back().clone(), "F32");
  }
  const auto staging = std::make_shared<Staging>(tensors.bytes, staging_size(plan_of(0, true), tensors.all), at::kCPU);
  SyncWriter writer;
  CheckpointSaver saver(scratch.path, writer.writer());
  for (const int64_t step : {1, 2, 3}) {
    staging->take(tensors.tensors);
    CHECK_FALSE(staging->is_ready());  // 128 MB take some milliseconds
    staging->hold_updates();
    CHECK(staging->is_ready());
    for (size_t i = 0; i < 4; ++i) {
      tensors.tensors[i].add_(1);
    }
    saver.start({.state = {.run_id = "r", .step = step}, .tensors = tensors.slices, .source = staging});
    (void)saver.wait();
    CHECK(holds(*open_checkpoint(scratch.path, "auto"), before));
    CHECK(staging->held_seconds() > 0);
    for (size_t i = 0; i < 4; ++i) {
      before.tensors[i].add_(1);
    }
  }
}

TEST_CASE("staging: on a GPU the host goes on while copies are made, and what changes the tensors waits for them on the device") {
  if (!test::has_gpu()) {
    return;
  }
  Scratch scratch;
  const at::Device gpu(at::kCUDA, 0);
  for (const int64_t room : {int64_t{0}, int64_t{200} << 20}) {  // whole, and a ring
    CAPTURE(room);
    Tensors tensors, before;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor values = at::arange(40'000'000, at::TensorOptions().dtype(at::kFloat).device(gpu)) + i;
      tensors.add("weights/" + std::to_string(i), values, "F32");
      before.add("weights/" + std::to_string(i), values.cpu(), "F32");
    }
    const auto staging = std::make_shared<Staging>(tensors.bytes, staging_size(plan_of(room, true), tensors.all), gpu);
    SyncWriter writer;
    CheckpointSaver saver(scratch.path / std::to_string(room), writer.writer());
    for (const int64_t step : {1, 2}) {
      staging->take(tensors.tensors);
      if (staging->is_whole()) {
        CHECK_FALSE(staging->is_ready());  // 480 MB over the bus take some milliseconds
        staging->hold_updates();
        for (at::Tensor& tensor : tensors.tensors) {
          tensor.add_(1);
        }
      }
      saver.start({.state = {.run_id = "r", .step = step}, .tensors = tensors.slices, .source = staging});
      (void)saver.wait();
      CHECK(holds(*open_checkpoint(scratch.path / std::to_string(room), "auto"), before));
      if (staging->is_whole()) {
        CHECK(staging->held_seconds() > 0);
        for (at::Tensor& tensor : before.tensors) {
          tensor.add_(1);
        }
      }
    }
  }
}
