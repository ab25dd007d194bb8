#include "core/train/draft_buffers.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/data/torch_file.hpp"
#include "core/model/tensor_view.hpp"
#include "core/plan/plan.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCacheFolder = ".cache";

std::map<std::string, at::Tensor> wanted_of(const std::vector<TensorView>& views, const Description& description) {
  std::map<std::string, at::Tensor> found;
  for (const BufferSpec& wanted : description.buffers) {
    for (const TensorView& view : views) {
      if (view.name == wanted.name) {
        found.emplace(wanted.name, as_tensor(view).clone());
      }
    }
  }
  return found;
}

std::map<std::string, at::Tensor> read_buffers(const fs::path& path, const Description& description) {
  if (!fs::is_regular_file(path)) {
    throw Error(ExitCode::kData, path.string() + ": there is no such file", "correct model.vocab_mapping_path");
  }
  if (path.extension() == ".safetensors") {
    return wanted_of(SafetensorsFile::open(path).tensors(), description);
  }
  return wanted_of(TorchFile::open(path).tensors(), description);
}

// Everything that the buffers are made from.
fs::path cache_path(const Session& session, const FeatureStore& features) {
  Sha256 sum;
  sum.add(format("buffers 1;{};{};{};", features.fingerprint(), session.batch_shape.max_tokens, session.description.wants_token_counts));
  for (const BufferSpec& buffer : session.description.buffers) {
    sum.add(format("{} {} {};", buffer.name, buffer.shape, c10::toString(buffer.dtype)));
  }
  for (const LoadedPlugin& plugin : session.context->plugins) {
    if (plugin.kind == SF_KIND_ALGORITHM) {
      sum.add(plugin.name + ";");
    }
  }
  const fs::path tokenizer = session.plan->get<fs::path>("model.target_model_path") / "tokenizer.json";
  sum.add(fs::is_regular_file(tokenizer) ? sha256_file(tokenizer) : std::string("no tokenizer"));
  return session.plan->get<fs::path>("output_dir") / kCacheFolder / ("draft-buffers-" + sum.hex().substr(0, 16) + ".safetensors");
}

// A cache that can't be read or written costs a count, nothing more.
bool take_cached(const Session& session, const fs::path& path) {
  if (!fs::is_regular_file(path)) {
    return false;
  }
  try {
    hand_over_buffers(session, read_buffers(path, session.description), path.string());
    return true;
  } catch (const Error& error) {
    log_warn("{} is damaged and made again: {}", path, error.what());
    return false;
  }
}

void keep(const Session& session, const fs::path& path) {
  try {
    fs::create_directories(path.parent_path());
    std::vector<TensorView> views;
    for (const auto& [name, tensor] : session.algorithm->buffers()) {
      views.push_back(as_view(name, tensor.contiguous()));
    }
    write_safetensors(path, views);
  } catch (const std::exception& error) {
    log_warn("{} is not kept: {}", path, error.what());
  }
}

}  // namespace

std::vector<TokenCount> count_supervised_tokens(const FeatureStore& features) {
  std::vector<TokenCount> counts;
  std::unordered_map<int64_t, size_t> places;
  for (int64_t i = 0; i < features.size(); ++i) {
    const TokenSample sample = features.sample_tokens(i);
    std::vector<int64_t> tokens;
    for (size_t t = 0; t < sample.input_ids.size(); ++t) {
      if (sample.loss_mask[t] != 0) {
        tokens.push_back(sample.input_ids[t]);
      }
    }
    std::sort(tokens.begin(), tokens.end());
    for (const int64_t token : tokens) {
      const auto [place, is_new] = places.emplace(token, counts.size());
      if (is_new) {
        counts.push_back({.token = token, .count = 0});
      }
      ++counts[place->second].count;
    }
  }
  return counts;
}

void hand_over_buffers(const Session& session, const std::map<std::string, at::Tensor>& buffers, const std::string& source) {
  for (const BufferSpec& wanted : session.description.buffers) {
    const auto found = buffers.find(wanted.name);
    if (found == buffers.end()) {
      throw Error(ExitCode::kData, source + ": there is no '" + wanted.name + "'", "name a file that belongs to this draft");
    }
    if (found->second.sizes().vec() != wanted.shape) {
      throw Error(ExitCode::kData, format("{}: '{}' has shape {}, this draft's is {}", source, wanted.name, found->second.sizes().vec(), wanted.shape),
                  "the mapping belongs to another vocabulary size: correct the draft's draft_vocab_size, or name another file");
    }
  }
  session.algorithm->set_buffers(buffers, source);
}

void compare_named_buffers(const Session& session, const std::string& source) {
  const fs::path path = session.description.buffers_file;
  std::error_code gone;  // a checkpoint needs it no more
  if (path.empty() || !fs::is_regular_file(path, gone)) {
    return;
  }
  const auto named = read_buffers(path, session.description), own = session.algorithm->buffers();
  for (const auto& [name, tensor] : own) {
    const auto found = named.find(name);
    if (found == named.end() || found->second.sizes() != tensor.sizes() || !at::equal(found->second.to(tensor.scalar_type()), tensor)) {
      throw Error(ExitCode::kUsage, format("model.vocab_mapping_path names {}, and the weights of {} were trained for another vocabulary ('{}' differs)", path, source, name),
                  "leave model.vocab_mapping_path out: the vocabulary comes with the weights; for another one start anew");
    }
  }
}

void make_draft_buffers(const Session& session, const FeatureStore& features) {
  const Description& description = session.description;
  if (!description.buffers_file.empty()) {
    hand_over_buffers(session, read_buffers(description.buffers_file, description), description.buffers_file);
    return;
  }
  if (!description.wants_token_counts) {
    return;
  }
  const fs::path path = cache_path(session, features);
  if (take_cached(session, path)) {
    log_info("draft vocabulary from {}", path);
    return;
  }
  const Remark remark = session.algorithm->set_token_counts(count_supervised_tokens(features));
  remark.is_warning ? log_warn("{}", remark.text) : log_info("{}", remark.text);
  keep(session, path);
}

}  // namespace sf
