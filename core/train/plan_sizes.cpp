// What a run will take, before anything is allocated: from shapes alone.
#include <algorithm>
#include <map>

#include "core/base/text.hpp"
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

}  // namespace

std::vector<SizeLine> plan_sizes(const Plan& plan, const Description& description, const Sharding* sharding) {
  const ModelFacts facts = model_facts(plan);
  const int64_t element = facts.bfloat16 ? 2 : 4;
  const int64_t gradient_element = plan.get<std::string>("training.grad_accum_dtype") == "bfloat16" ? 2 : 4;

  // A product keeps its input and output until backward; pointwise work between products keeps about as much again.
  const int64_t batch_rows = plan.get<int64_t>("training.batch_size");
  const int64_t rows_of_sample = description.rows_per_token > 0
                                     ? description.rows_per_token * plan.get<int64_t>("data.max_length")
                                     : slots_of_sample(plan, description) * std::max<int64_t>(1, description.rows_per_slot);
  const int64_t draft_rows = batch_rows * rows_of_sample;
  const auto recompute = plan.get<std::vector<std::string>>("training.recompute");
  int64_t parameters = 0, trainable = 0, activation_columns = 0;
  for (const UnitSpec& unit : description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      parameters += elements(parameter);
      trainable += parameter.trainable ? elements(parameter) : 0;
      if (unit.shard_group != "root" && parameter.shape.size() == 2) {
        activation_columns += 2 * (parameter.shape[0] + parameter.shape[1]);
      }
    }
  }

  const auto world = plan.facts.find("fact.world_size");
  const int64_t ranks = world == plan.facts.end() ? 1 : std::get<int64_t>(world->second);
  ShardingMemory held{.weights = parameters * element, .trainable_elements = trainable};
  if (sharding != nullptr) {
    held = sharding->memory(description.units, ranks, facts.bfloat16 ? at::kBFloat16 : at::kFloat);
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
  const int64_t tokens = plan.get<int64_t>("data.max_length");
  const std::string type = facts.bfloat16 ? "bfloat16" : "float32";
  const auto count = [](int64_t n) { return human_count(static_cast<uint64_t>(n)); };
  std::vector<SizeLine> lines = {
      {"weights", held.weights, count(parameters) + " parameters, " + type + (held.detail.empty() ? "" : ", " + held.detail)},
      {"gradient buffers", trainable * gradient_element, count(trainable) + " trainable" + (ranks > 1 ? ", whole on every rank until the window ends" : "")},
      {"optimizer", held.trainable_elements * (facts.bfloat16 ? 12 : 8),
       facts.bfloat16 ? "float32 masters and two moments" : "two float32 moments"},
      {"frozen tables", tables * vocab * hidden * element,
       format("{} x [{}, {}]{}{}", tables, vocab, hidden, tied ? ", tied" : "",
              held.shards_tables ? format(", within a window; 1/{} of it is kept always", ranks) : std::string())},
      {"features of a batch", batch_rows * tokens * feature_columns * element, format("at most [{}, {}, {}]", batch_rows, tokens, feature_columns)},
      {"activations (estimate)", draft_rows * activation_columns * element,
       format("{} draft rows{}", draft_rows, recompute.empty() ? "" : ", without recompute")},
  };
  if (description.needs_head) {
    // Logits, their exponentials and the gradient; half of it wide where the model is not.
    const int64_t head_rows = description.head_rows_at_most > 0 ? std::min(description.head_rows_at_most, draft_rows) : draft_rows;
    const int64_t columns = description.head_columns > 0 ? description.head_columns : vocab;
    lines.push_back({"logits (at most)", head_rows * columns * (facts.bfloat16 ? 12 : 8), format("{} rows x {}", head_rows, count(columns))});
  }
  if (held.whole > 0) {
    lines.insert(lines.begin() + 1, {"whole parameters", held.whole, "while their group is in use"});
  }
  if (held.buffers > 0) {
    lines.insert(lines.begin() + (held.whole > 0 ? 2 : 1), {"communication buffers", held.buffers, "gathers, reductions, this rank's gradients"});
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

}  // namespace sf
