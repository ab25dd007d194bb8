#include "core/data/weight_folder.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <algorithm>
#include <charconv>
#include <set>

namespace sf {

namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";

// What wrapped models put where a plain decoder has "model.".
constexpr const char* kDecoderPrefixes[] = {"model.",       "model.language_model.", "language_model.model.",
                                            "model.text_model.", "language_model.",  ""};

std::vector<std::filesystem::path> safetensors_files(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors" && entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

WeightFolder WeightFolder::open(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder)) {
    throw Error(ExitCode::kData, format("{}: there is no such folder", folder),
                "name a Hugging Face model folder (config.json and *.safetensors)");
  }
  WeightFolder result;
  result.folder_ = folder;
  const std::filesystem::path index_path = folder / kIndexName;
  std::map<std::string, std::string> promised;  // tensor -> file
  std::vector<std::filesystem::path> paths;
  if (std::filesystem::is_regular_file(index_path)) {
    try {
      const Json index = Json::parse(read_file(index_path), index_path.string());
      std::set<std::string> shards;
      for (const auto& [name, file] : index.at("weight_map").entries()) {
        promised[name] = file.as_string();
        if (file.as_string().find('/') != std::string::npos) {
          throw Error(ExitCode::kData,
                      format("{}: '{}' lies outside the folder", index_path, file.as_string()));
        }
        shards.insert(file.as_string());
      }
      for (const std::string& shard : shards) paths.push_back(folder / shard);
    } catch (const JsonError& error) {
      throw Error(ExitCode::kData, error.line() > 0 ? error.what() : format("{}: {}", index_path, error.what()),
                  "fetch the model again");
    }
    std::string missing;
    for (const std::filesystem::path& path : paths) {
      if (!std::filesystem::is_regular_file(path))
        missing += (missing.empty() ? "" : ", ") + path.filename().string();
    }
    if (!missing.empty()) {
      throw Error(ExitCode::kData, format("{}: shards of {} are missing: {}", folder, kIndexName, missing),
                  "fetch the whole model");
    }
  } else if (std::filesystem::is_regular_file(folder / "model.safetensors")) {
    paths.push_back(folder / "model.safetensors");
  } else {
    paths = safetensors_files(folder);
    if (paths.size() != 1) {
      throw Error(ExitCode::kData,
                  format("{}: there is no model.safetensors and no {}, but {} other *.safetensors files",
                         folder, kIndexName, paths.size()),
                  "name a Hugging Face model folder with its weights as safetensors");
    }
  }

  for (const std::filesystem::path& path : paths) result.files_.push_back(SafetensorsFile::open(path));
  for (const SafetensorsFile& file : result.files_) {
    for (const TensorView& tensor : file.tensors()) {
      const auto place = promised.find(tensor.name);
      if (!promised.empty() && (place == promised.end() || place->second != file.path().filename())) continue;
      result.tensors_[tensor.name] = &tensor;
    }
  }
  for (const auto& [name, file] : promised) {
    if (result.tensors_.find(name) == result.tensors_.end()) {
      throw Error(ExitCode::kData,
                  format("{}: '{}' should be in {} as {} says, but is not", folder, name, file, kIndexName),
                  "fetch the whole model again");
    }
  }
  return result;
}

std::vector<std::string> WeightFolder::names() const {
  std::vector<std::string> result;
  for (const auto& [name, tensor] : tensors_) result.push_back(name);
  return result;
}

const TensorView* WeightFolder::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

const TensorView* WeightFolder::find_in_decoder(std::string_view name) const {
  if (const TensorView* tensor = find(name)) return tensor;
  static constexpr std::string_view kModel = "model.";
  if (name.starts_with(kModel)) {
    const std::string rest(name.substr(kModel.size()));
    for (const char* prefix : kDecoderPrefixes) {
      if (const TensorView* tensor = find(prefix + rest)) return tensor;
    }
  } else {
    for (const char* prefix : {"language_model.", "model.language_model.", "model."}) {
      if (const TensorView* tensor = find(prefix + std::string(name))) return tensor;
    }
  }
  return nullptr;
}

TargetTableViews find_target_tables(const WeightFolder& weights, const TargetConfig& config,
                                    const TargetTableKeys& keys) {
  const auto table = [&](const std::string& key, const char* option, const char* what) {
    const TensorView* view = weights.find_in_decoder(key);
    if (view == nullptr) {
      const std::string near = did_you_mean(key, weights.names());
      throw Error(ExitCode::kData, format("{}: the target has no {} '{}'", weights.folder(), what, key),
                  format("name its tensor with {}{}", option,
                         near.empty() ? "" : format("; did you mean '{}'?", near)));
    }
    const std::vector<int64_t> expected{config.vocab_size, config.hidden_size};
    if (view->shape != expected) {
      throw Error(ExitCode::kData,
                  format("{}: '{}' has shape {}, but config.json says {} (vocab_size, hidden_size)",
                         weights.folder(), view->name, view->shape, expected),
                  "configuration and weights are of different models, or padded_vocab_size is missing");
    }
    if (!is_floating(view->dtype)) {
      throw Error(ExitCode::kData, format("{}: '{}' is {}, a floating type expected", weights.folder(),
                                          view->name, dtype_name(view->dtype)));
    }
    return view;
  };
  TargetTableViews views;
  if (keys.wants_embedding || (keys.wants_head && config.tied_embeddings)) {
    views.embedding = table(keys.embedding, "model.embedding_key", "embedding");
  }
  if (keys.wants_head) {
    views.head = config.tied_embeddings ? views.embedding : table(keys.head, "model.lm_head_key", "head");
  }
  if (!keys.wants_embedding) views.embedding = nullptr;
  return views;
}

void check_layer_count(const WeightFolder& weights, const TargetConfig& config) {
  std::set<int64_t> found;
  for (const std::string& name : weights.names()) {
    for (const char* prefix : kDecoderPrefixes) {
      const std::string start = std::string(prefix) + "layers.";
      if (!name.starts_with(start)) continue;
      int64_t number = 0;
      const char* end = name.data() + name.size();
      const auto read = std::from_chars(name.data() + start.size(), end, number);
      if (read.ec == std::errc() && read.ptr != end && *read.ptr == '.') found.insert(number);
    }
  }
  if (found.empty()) return;
  int64_t missing = 0;
  while (missing < config.num_hidden_layers && found.contains(missing)) ++missing;
  // Other families keep layers of another kind behind the decoder's, such as for drafting.
  const bool is_plain = config.model_type == "llama" || config.model_type.starts_with("qwen");
  const bool has_more = is_plain && *found.rbegin() >= config.num_hidden_layers;
  if (missing == config.num_hidden_layers && !has_more) return;
  throw Error(ExitCode::kData,
              format("{}: config.json says {} layers (num_hidden_layers), but the weights have {}, up to layer {}",
                     weights.folder(), config.num_hidden_layers, found.size(), *found.rbegin()),
              "configuration and weights are of different models, or the weights are not whole: fetch the model again");
}

std::string target_fingerprint(const Json& config, const WeightFolder& weights) {
  Json facts = config;
  for (const char* note : {"_name_or_path", "transformers_version", "architectures", "use_cache"})
    facts.remove(note);
  Sha256 sha;
  std::vector<std::string> keys;  // in one order, however the file has them
  for (const auto& [key, value] : facts.entries()) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  for (const std::string& key : keys) sha.add(key + "=" + facts.at(key).dump() + ";");
  constexpr size_t kPiece = 4096;
  for (const std::string& name : weights.names()) {
    const TensorView& tensor = *weights.find(name);
    sha.add(format("{} {} {};", name, dtype_name(tensor.dtype), tensor.shape));
    const size_t bytes = tensor.bytes.size();
    for (const size_t at : {size_t{0}, bytes / 2, bytes - std::min(bytes, kPiece)}) {
      sha.add(tensor.bytes.subspan(at, std::min(kPiece, bytes - at)));
    }
  }
  return sha.hex();
}

}  // namespace sf
