#include "core/export/engine_view.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/data/safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

namespace sf {
namespace fs = std::filesystem;
namespace {

constexpr const char* kEagle3 = "LlamaForCausalLMEagle3";
constexpr const char* kDflash = "DFlashDraftModel";
constexpr const char* kDflash2 = "DFlash2DraftModel";
constexpr const char* kDspark = "DSparkDraftModel";

using Shape = std::vector<int64_t>;

constexpr int64_t kLargest = int64_t{1} << 30;  // of any size: extents of weights are products of two of them

// config.json with every question that was asked of it and not answered.
class Reader {
 public:
  Reader(const Json& config, std::vector<std::string>& problems) : config_(config), problems_(problems) {}

  [[nodiscard]] const Json* find(const std::string& dotted) const {
    const Json* at = &config_;
    for (const std::string& key : split(dotted, '.')) {
      at = at->find(key);
      if (at == nullptr || at->is_null()) return nullptr;
    }
    return at;
  }
  int64_t size(const std::string& key) {
    const Json* found = find(key);
    if (found == nullptr || !found->is_int() || found->as_int() < 1) {
      complain(key, found, "a positive integer");
      return 1;
    }
    if (found->as_int() > kLargest) {
      complain(key, found, "at most 2^30");
      return 1;
    }
    return found->as_int();
  }
  int64_t size_or(const std::string& key, int64_t otherwise) { return find(key) == nullptr ? otherwise : size(key); }
  std::vector<int64_t> list(const std::string& key) {
    const Json* found = find(key);
    std::vector<int64_t> values;
    bool is_fine = found != nullptr && found->is_array() && found->size() > 0;
    for (const Json& value : is_fine ? found->items() : Json::Array()) {
      const bool is_one = value.is_int() && value.as_int() >= -kLargest && value.as_int() <= kLargest;
      is_fine = is_fine && is_one;
      values.push_back(is_one ? value.as_int() : 0);
    }
    if (!is_fine) complain(key, found, "a list of integers");
    return values;
  }
  bool flag(const std::string& key, bool otherwise) {
    const Json* found = find(key);
    if (found == nullptr) return otherwise;
    if (!found->is_bool()) {
      complain(key, found, "true or false");
      return otherwise;
    }
    return found->as_bool();
  }
  void complain(const std::string& key, const Json* found, const std::string& expected) {
    problems_.push_back(format("config.json: \"{}\" is {}, {} expected", key, found == nullptr ? "missing" : found->dump(), expected));
  }
  /// Engines look in one place or the other.
  void same(const std::string& key, const std::string& other) {
    const Json *a = find(key), *b = find(other);
    if (a != nullptr && b != nullptr && !(*a == *b || (a->is_number() && b->is_number() && a->as_double() == b->as_double()))) {
      problems_.push_back(format("config.json: \"{}\" is {}, but \"{}\" is {}; engines read one or the other", key, a->dump(), other, b->dump()));
    }
  }
  std::vector<std::string>& problems() { return problems_; }

 private:
  const Json& config_;
  std::vector<std::string>& problems_;
};

struct Sizes {
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
  bool bias;
};

Sizes read_sizes(Reader& config) {
  Sizes sizes{.hidden = config.size("hidden_size"),
              .intermediate = config.size("intermediate_size"),
              .layers = config.size("num_hidden_layers"),
              .heads = config.size("num_attention_heads"),
              .kv_heads = config.size("num_key_value_heads"),
              .head_dim = config.size("head_dim"),
              .vocab = config.size("vocab_size"),
              .bias = config.flag("attention_bias", false)};
  if (sizes.heads % sizes.kv_heads != 0) {
    config.problems().push_back(format("config.json: {} query heads can't share {} key/value heads", sizes.heads, sizes.kv_heads));
  }
  return sizes;
}

// Both spellings have to be there and say the same: old readers know rope_theta and rope_scaling, new ones rope_parameters.
void check_rope(Reader& config, Json& facts) {
  const Json* theta = config.find("rope_theta");
  if (theta == nullptr || !theta->is_number() || !(theta->as_double() > 1)) {
    config.complain("rope_theta", theta, "a number above 1 (an engine that finds none takes a default of its own)");
  } else {
    facts.set("rope_theta", *theta);
  }
  config.same("rope_theta", "rope_parameters.rope_theta");
  config.same("rope_theta", "rope_scaling.rope_theta");
  const auto type = [&](const std::string& table) -> std::string {
    for (const char* key : {"rope_type", "type"}) {
      const Json* found = config.find(table + "." + key);
      if (found != nullptr && found->is_string()) return found->as_string();
    }
    return "default";
  };
  const std::string old_type = type("rope_scaling"), new_type = type("rope_parameters");
  facts.set("rope_type", old_type);
  if (config.find("rope_parameters") != nullptr && old_type != new_type) {
    config.problems().push_back(format("config.json: rope_scaling is of type \"{}\", rope_parameters of type \"{}\"; engines read one or the other", old_type, new_type));
  }
  for (const char* key : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    config.same(format("rope_scaling.{}", key), format("rope_parameters.{}", key));
  }
}

void check_layer_ids(Reader& config, const std::string& key, const std::vector<int64_t>& ids, const Json* target_text, Json& facts) {
  facts.set("target_layer_ids", Json::array_of(ids));
  for (size_t i = 1; i < ids.size(); ++i) {
    if (ids[i - 1] >= ids[i]) {
      config.problems().push_back(format("config.json: \"{}\" is {}, which does not ascend; engines hand captured layers over in the model's order", key, ids));
      break;
    }
  }
  const Json* layers = target_text != nullptr ? target_text->find("num_hidden_layers") : nullptr;
  for (const int64_t id : ids) {
    if (id < 0 || (layers != nullptr && layers->is_int() && id >= layers->as_int())) {
      config.problems().push_back(format("config.json: \"{}\" names layer {}, and the target has the layers 0 to {}", key, id,
                                         layers != nullptr ? layers->as_int() - 1 : -1));
    }
  }
}

using Expected = std::map<std::string, Shape>;

void expect_attention(Expected& tensors, const std::string& prefix, const Sizes& s, int64_t in) {
  const auto add = [&](const char* name, int64_t out, int64_t columns) {
    tensors[prefix + "self_attn." + name + ".weight"] = {out, columns};
    if (s.bias) tensors[prefix + "self_attn." + name + ".bias"] = {out};
  };
  add("q_proj", s.heads * s.head_dim, in);
  add("k_proj", s.kv_heads * s.head_dim, in);
  add("v_proj", s.kv_heads * s.head_dim, in);
  add("o_proj", s.hidden, s.heads * s.head_dim);
  tensors[prefix + "mlp.gate_proj.weight"] = tensors[prefix + "mlp.up_proj.weight"] = {s.intermediate, s.hidden};
  tensors[prefix + "mlp.down_proj.weight"] = {s.hidden, s.intermediate};
  tensors[prefix + "input_layernorm.weight"] = tensors[prefix + "post_attention_layernorm.weight"] = {s.hidden};
}

Expected expect_block_draft(Reader& config, const std::string& architecture, const Sizes& s, const Json* target_text, Json& facts) {
  Expected tensors;
  const std::vector<int64_t> ids = config.list("dflash_config.target_layer_ids");
  check_layer_ids(config, "dflash_config.target_layer_ids", ids, target_text, facts);
  const int64_t block = config.size("block_size");
  facts.set("block_size", block);
  for (const char* key : {"block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}) {
    config.same(key, format("dflash_config.{}", key));
  }
  const Json* mask = config.find("dflash_config.mask_token_id");
  if (mask == nullptr || !mask->is_int() || mask->as_int() < 0 || mask->as_int() >= s.vocab) {
    config.complain("dflash_config.mask_token_id", mask, format("a token of the target, 0 to {},", s.vocab - 1));
  } else {
    facts.set("mask_token_id", mask->as_int());
  }
  const Json* types = config.find("layer_types");
  if (types == nullptr || !types->is_array() || static_cast<int64_t>(types->size()) != s.layers) {
    config.complain("layer_types", types, format("one entry for each of the {} layers", s.layers));
  } else {
    for (const Json& type : types->items()) {
      const std::string name = type.is_string() ? type.as_string() : type.dump();
      if (name == "sliding_attention") {
        (void)config.size("sliding_window");
      } else if (name != "full_attention") {
        config.problems().push_back(format("config.json: layer_types has {}, which no engine knows", name));
      }
    }
  }
  tensors["fc.weight"] = {s.hidden, static_cast<int64_t>(ids.size()) * s.hidden};
  tensors["hidden_norm.weight"] = tensors["norm.weight"] = {s.hidden};
  const bool has_convolution = architecture == kDflash2;
  const int64_t taps = has_convolution ? config.size("dflash_config.conv_kernel_size") : 0;
  const int64_t group = has_convolution ? config.size("dflash_config.conv_group_size") : 1;
  for (int64_t i = 0; i < s.layers; ++i) {
    const std::string prefix = format("layers.{}.", i);
    expect_attention(tensors, prefix, s, s.hidden);
    tensors[prefix + "self_attn.q_norm.weight"] = tensors[prefix + "self_attn.k_norm.weight"] = {s.head_dim};
    for (const char* name : {"attention_conv", "mlp_conv"}) {
      if (!has_convolution) continue;
      tensors[prefix + name + ".base_kernel"] = {2, taps, s.hidden};
      tensors[prefix + name + ".kernel_projection.weight"] = {2 * taps * (s.hidden / group), s.hidden};
    }
  }
  if (has_convolution) {
    const int64_t rank = config.size("dflash_config.selector_rank");
    facts.set("selector_top_k", config.size("dflash_config.selector_top_k"));
    tensors["candidate_selector.predecessor_codebook"] = tensors["candidate_selector.successor_codebook"] = {s.vocab, rank};
    tensors["candidate_selector.hidden_projection.weight"] = {rank, s.hidden};
  }
  if (architecture == kDspark) {  // engines read these at the top
    const Json* stated = config.find("markov_rank");
    const int64_t rank = stated != nullptr && stated->is_int() && stated->as_int() == 0 ? 0 : config.size("markov_rank");
    const Json* type = config.find("markov_head_type");
    const std::string head = type != nullptr && type->is_string() ? type->as_string() : "";
    if (rank > 0 && head != "vanilla" && head != "gated" && head != "rnn") config.complain("markov_head_type", type, "vanilla, gated or rnn");
    if (rank > 0) tensors["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w2.weight"] = {s.vocab, rank};
    if (rank > 0 && head == "gated") {
      tensors["markov_head.gate_proj.weight"] = {rank, s.hidden + rank};
      tensors["markov_head.gate_proj.bias"] = {rank};
    }
    if (rank > 0 && head == "rnn") {
      tensors["markov_head.joint_proj.weight"] = {3 * rank, 2 * rank + s.hidden};
      tensors["markov_head.joint_proj.bias"] = {3 * rank};
    }
    if (config.flag("enable_confidence_head", true)) {
      tensors["confidence_head.proj.weight"] = {1, s.hidden + (config.flag("confidence_head_with_markov", rank > 0) ? rank : 0)};
      tensors["confidence_head.proj.bias"] = {1};
    }
  }
  return tensors;
}

Expected expect_eagle3(Reader& config, const Sizes& s, const Json* target_text, Json& facts) {
  Expected tensors;
  const int64_t target_hidden = config.size_or("target_hidden_size", s.hidden), draft_vocab = config.size("draft_vocab_size");
  if (s.layers != 1) config.problems().push_back(format("config.json: num_hidden_layers is {}, an EAGLE3 draft has one", s.layers));
  if (config.flag("tie_word_embeddings", false)) {
    config.problems().push_back("config.json: tie_word_embeddings is true, so an engine puts the embedding in the place of the draft's head");
  }
  const std::vector<int64_t> ids = config.list("eagle_config.eagle_aux_hidden_state_layer_ids");
  check_layer_ids(config, "eagle_config.eagle_aux_hidden_state_layer_ids", ids, target_text, facts);
  if (ids.size() != 3) config.problems().push_back(format("config.json: an EAGLE3 draft reads three layers, {} are named", ids.size()));
  if (config.find("eagle_aux_hidden_state_layer_ids") != nullptr) {  // vLLM counts a layer by its input
    std::vector<int64_t> inputs = config.list("eagle_aux_hidden_state_layer_ids");
    for (int64_t& id : inputs) --id;
    if (inputs != ids) {
      config.problems().push_back(format("config.json: eagle_aux_hidden_state_layer_ids stands for the layers {}, eagle_config's for {}; the first counts one more for the same state", inputs, ids));
    }
  }
  facts.set("draft_vocab_size", draft_vocab);
  tensors["fc.weight"] = {s.hidden, 3 * target_hidden};
  for (int n = 0; config.flag("fc_norm", false) && n < 3; ++n) tensors[format("fc_norm.{}.weight", n)] = {target_hidden};
  expect_attention(tensors, "midlayer.", s, 2 * s.hidden);
  tensors["midlayer.hidden_norm.weight"] = tensors["norm.weight"] = {s.hidden};
  tensors["lm_head.weight"] = {draft_vocab, s.hidden};
  tensors["t2d"] = {s.vocab};
  tensors["d2t"] = {draft_vocab};
  return tensors;
}

// d2t holds offsets: draft token u is the target's u + d2t[u]; t2d says which of the target's tokens these are.
void check_vocabulary(const SafetensorsFile& file, std::vector<std::string>& problems) {
  const TensorView *t2d = file.find("t2d"), *d2t = file.find("d2t");
  if (t2d == nullptr || d2t == nullptr) return;
  if (t2d->dtype != Dtype::kBool || d2t->dtype != Dtype::kI64) {
    problems.push_back(format("t2d is {}, d2t is {}; BOOL and I64 expected", dtype_name(t2d->dtype), dtype_name(d2t->dtype)));
    return;
  }
  const auto vocabulary = static_cast<int64_t>(t2d->bytes.size()), count = static_cast<int64_t>(d2t->bytes.size() / sizeof(int64_t));
  int64_t kept = 0, last = -1;
  for (const std::byte one : t2d->bytes) kept += one != std::byte{0} ? 1 : 0;
  for (int64_t u = 0; u < count; ++u) {
    int64_t offset;
    std::memcpy(&offset, d2t->bytes.data() + u * static_cast<int64_t>(sizeof offset), sizeof offset);
    int64_t token = 0;
    if (__builtin_add_overflow(u, offset, &token)) token = -1;  // none either
    if (token < 0 || token >= vocabulary || t2d->bytes[static_cast<size_t>(token)] == std::byte{0}) {
      problems.push_back(format("d2t says that draft token {} is the target's {}, which {}; d2t holds offsets, token = {} + d2t", u, token,
                                token < 0 || token >= vocabulary ? "it does not have" : "t2d says the draft does not guess", u));
      return;
    }
    if (token <= last) {
      problems.push_back(format("d2t says that draft token {} is the target's {}, and the one before is {}; both ascend together", u, token, last));
      return;
    }
    last = token;
  }
  if (kept != count) problems.push_back(format("t2d keeps {} tokens, d2t has {}", kept, count));
}

void check_tensors(const fs::path& path, const Expected& expected, Reader& config, const std::string& architecture) {
  std::vector<std::string>& problems = config.problems();
  const SafetensorsFile file = SafetensorsFile::open(path);
  const Json* stated = config.find("dtype");
  const std::string type = stated != nullptr && stated->is_string() ? stated->as_string() : "";
  for (const auto& [name, shape] : expected) {
    const TensorView* view = file.find(name);
    if (view == nullptr) {
      problems.push_back(format("model.safetensors: \"{}\" {} is missing; an engine would leave it as it was drawn", name, shape));
      continue;
    }
    if (view->shape != shape) problems.push_back(format("model.safetensors: \"{}\" has shape {}, config.json makes it {}", name, view->shape, shape));
    const bool is_index = name == "t2d" || name == "d2t";
    const char* found = dtype_name(view->dtype);
    const char* meant = type == "bfloat16" ? "BF16" : type == "float32" ? "F32" : type == "float16" ? "F16" : "";
    if (!is_index && std::string_view(found) != meant) problems.push_back(format("model.safetensors: \"{}\" is {}, config.json says {}", name, found, type.empty() ? "nothing" : type));
  }
  for (const TensorView& view : file.tensors()) {
    if (expected.count(view.name) == 0 && view.name != "embed_tokens.weight") {
      problems.push_back(format("model.safetensors: \"{}\" is no tensor of {}; an engine would pass it over", view.name, architecture));
    }
  }
  if (architecture == kEagle3) check_vocabulary(file, problems);
}

}  // namespace

EngineView look_as_engine(const fs::path& folder, const Json& target) {
  EngineView view;
  try {
    const Json json = Json::parse(read_file(folder / "config.json"), (folder / "config.json").string());
    Reader config(json, view.problems);
    const Json* architectures = config.find("architectures");
    if (architectures == nullptr || !architectures->is_array() || architectures->size() != 1 || !architectures->at(0).is_string()) {
      config.complain("architectures", architectures, "a list with one name");
      return view;
    }
    view.architecture = architectures->at(0).as_string();
    const bool is_eagle3 = view.architecture == kEagle3;
    if (!is_eagle3 && view.architecture != kDflash && view.architecture != kDflash2 && view.architecture != kDspark) return view;  // of a plugin that we don't know

    const Json* text = target.is_null() ? nullptr : target.find("text_config") != nullptr ? target.find("text_config") : &target;
    const Sizes sizes = read_sizes(config);
    check_rope(config, view.facts);
    const Json* epsilon = config.find("rms_norm_eps");
    if (epsilon == nullptr || !epsilon->is_number() || !(epsilon->as_double() > 0)) config.complain("rms_norm_eps", epsilon, "a positive number");
    const Json* type = config.find("model_type");
    const char* wanted_type = is_eagle3 ? "llama" : "qwen3";
    if (type == nullptr || !type->is_string() || type->as_string() != wanted_type) config.complain("model_type", type, format("\"{}\"", wanted_type));
    const auto as_target = [&](const char* what, int64_t value, const char* key) {
      const Json* theirs = text != nullptr ? text->find(key) : nullptr;
      if (theirs != nullptr && theirs->is_int() && theirs->as_int() != value) {
        view.problems.push_back(format("config.json: {} is {}, the target's {} is {}", what, value, key, theirs->as_int()));
      }
    };
    if (text == nullptr || text->find("padded_vocab_size") == nullptr) as_target("vocab_size", sizes.vocab, "vocab_size");
    is_eagle3 ? as_target("target_hidden_size", config.size_or("target_hidden_size", sizes.hidden), "hidden_size") : as_target("hidden_size", sizes.hidden, "hidden_size");
    const Expected expected = is_eagle3 ? expect_eagle3(config, sizes, text, view.facts) : expect_block_draft(config, view.architecture, sizes, text, view.facts);
    check_tensors(folder / "model.safetensors", expected, config, view.architecture);
  } catch (const std::exception& error) {
    view.problems.emplace_back(error.what());
  }
  return view;
}

Json serve_commands(const std::string& architecture, const fs::path& folder, const fs::path& target, int64_t drafted_tokens) {
  struct Names {
    const char *architecture, *sglang, *vllm;
  };
  constexpr Names kNames[] = {{kEagle3, "EAGLE3", "eagle3"}, {kDflash, "DFLASH", "dflash"}, {kDflash2, "DFLASH", "dflash"}, {kDspark, "DSPARK", "dspark"}};
  Json commands = Json::object();
  for (const Names& names : kNames) {
    if (architecture != names.architecture) continue;
    commands.set("sglang", format("python -m sglang.launch_server --model-path {} --speculative-algorithm {} --speculative-draft-model-path {}", target, names.sglang, folder));
    commands.set("vllm", format("vllm serve {} --speculative-config '{\"method\": \"{}\", \"model\": \"{}\", \"num_speculative_tokens\": {}}'", target, names.vllm,
                                folder, drafted_tokens));
  }
  return commands;
}

}  // namespace sf
