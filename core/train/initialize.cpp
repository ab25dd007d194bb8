#include "core/train/initialize.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/data/philox.hpp"

namespace sf {
namespace {

// Elements `begin` .. of a parameter, standard normal times `std`: Box-Muller over pairs, so a slice needs no neighbours but its pair.
void fill_normal(float* out, int64_t begin, int64_t count, const PhiloxStream& draws, double std) {
  const auto fill = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const uint64_t element = static_cast<uint64_t>(begin + i);
      const uint64_t pair = element / 2;
      const uint64_t bits = draws.bits(0, pair >> 32, pair & 0xFFFFFFFF);
      const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
      const double v = static_cast<double>(bits & 0xFFFFFFFF) * 0x1p-32;
      const double radius = std::sqrt(-2.0 * std::log(u)), angle = 2.0 * std::numbers::pi * v;
      out[i] = static_cast<float>(std * radius * (element % 2 == 0 ? std::cos(angle) : std::sin(angle)));
    }
  };
  // Threads of our own: LibTorch's loops run on one thread in code compiled without OpenMP, and a billion weights take a minute there.
  constexpr int64_t kLeast = int64_t{1} << 18;
  const int64_t parts = std::clamp<int64_t>(count / kLeast, 1, std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (int64_t part = 1; part < parts; ++part) {
    threads.emplace_back(fill, count * part / parts, count * (part + 1) / parts);
  }
  fill(0, count / parts);
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

void initialize_weights(const std::vector<UnitSpec>& units, std::vector<Shard>& shards, uint64_t seed) {
  std::map<std::string, const ParameterSpec*> specs;
  for (const UnitSpec& unit : units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      specs.emplace(unit.prefix + parameter.name, &parameter);
    }
  }
  for (Shard& shard : shards) {
    const auto found = specs.find(shard.name);
    SF_CHECK(found != specs.end(), "the backend made a shard '{}' that describe() does not list", shard.name);
    const ParameterSpec& spec = *found->second;
    const int64_t count = shard.end - shard.begin;
    at::Tensor values = at::zeros({count}, at::TensorOptions().dtype(at::kFloat));
    switch (spec.init) {
      case Init::zeros: break;
      case Init::ones: values.fill_(1.0); break;
      case Init::normal:
        fill_normal(values.data_ptr<float>(), shard.begin, count, PhiloxStream(seed, "initialize/" + shard.name), spec.init_std);
        break;
      case Init::target_embedding: continue;  // by the caller, who has the table
      case Init::first_tap: {
        // 1 where the last index but one is 0: the first columns of every block of taps x columns elements.
        SF_CHECK(spec.shape.size() >= 2, "'{}' has no last dimension but one", shard.name);
        const int64_t columns = spec.shape.back(), block = columns * spec.shape[spec.shape.size() - 2];
        float* out = values.data_ptr<float>();
        for (int64_t i = 0; i < count; ++i) {
          out[i] = (shard.begin + i) % block < columns ? 1.0f : 0.0f;
        }
        break;
      }
    }
    at::NoGradGuard no_grad;
    shard.local.copy_(values.view(shard.local.sizes()));
  }
}

}  // namespace sf
