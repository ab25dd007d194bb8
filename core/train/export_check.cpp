// Shapes: b blocks (known tokens of a record) · t tokens · k drafted tokens · v what a guess is the best of
#include "core/train/export_check.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/data/weight_folder.hpp"
#include "core/export/engine_view.hpp"
#include "core/kernels/ops.hpp"
#include "core/model/target_tables.hpp"
#include "core/plan/plan.hpp"
#include "core/train/acceptance_stats.hpp"
#include "core/train/decoding_setup.hpp"
#include "core/train/loaded_draft.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRecords = 8, kBlocksOfRecord = 16;

// What a draft says to the known tokens of one record.
struct Replay {
  at::Tensor ids_bk, scores_bkv;
};

// The draft that is asked, with what opening features wants of a session.
struct ReplayedDraft {
  Session session;                       // plan, description, tables, target
  std::unique_ptr<LoadedDraft> units;
  std::unique_ptr<FeatureStore> store;
};

std::vector<int64_t> known_places(const at::Tensor& loss_mask, int64_t tokens) {
  const at::Tensor mask = loss_mask.to(at::kLong).contiguous();
  const auto* supervised = mask.const_data_ptr<int64_t>();
  std::vector<int64_t> all, some;
  for (int64_t t = 1; t + 1 < tokens; ++t) {
    if (supervised[t] != 0 && supervised[t + 1] != 0) all.push_back(t);
  }
  const auto count = static_cast<int64_t>(all.size());
  for (int64_t i = 0; i < std::min(count, kBlocksOfRecord); ++i) some.push_back(all[static_cast<size_t>(i * count / std::min(count, kBlocksOfRecord))]);
  return some;
}

// The tokens that a draft is to foresee, -1 elsewhere: what stands behind an answer is nobody's guess.
at::Tensor supervised_ids(const at::Tensor& ids, const at::Tensor& loss_mask) {
  return at::where(at::gt(loss_mask.to(at::kLong), 0), ids, at::full_like(ids, -1));
}

Replay replay(const ReplayedDraft& subject, const Drafter& drafter, int64_t record, const std::vector<int64_t>& places, int64_t drafted) {
  const at::NoGradGuard no_grad;
  const Sample sample = sample_source(*subject.store).read(record);
  const auto b = static_cast<int64_t>(places.size());
  const int64_t t = *std::max_element(places.begin(), places.end());
  const at::Device device = subject.session.placement.device;
  const at::Tensor ids = sample.tensors.at("input_ids");
  const at::Tensor places_b = at::tensor(places, at::kLong);
  SeenTokens seen;
  for (const std::string& name : drafter.reads()) {
    seen.features[name] = sample.tensors.at(name).narrow(0, 0, t).to(device, subject.session.placement.dtype).unsqueeze(0).expand({b, -1, -1}).contiguous();
  }
  seen.next_ids_bt = ids.narrow(0, 1, t).to(device).unsqueeze(0).expand({b, -1}).contiguous();
  seen.starts_b = at::zeros({b}, at::kLong);
  seen.counts_b = places_b;
  seen.room_tokens = t + drafted + 1;
  DraftMemory memory;
  drafter.remember(*subject.units, memory, seen);
  const DraftAnswer answer = drafter.propose(*subject.units, memory,
                                             {.known_ids_b = ids.index_select(0, places_b).to(device),
                                              .positions_b = places_b.to(device),
                                              .tokens = drafted,
                                              .wants_scores = true});
  return {answer.ids_bk.cpu(), answer.scores_bkv.cpu()};
}

// Keys whose values differ, in words.
void compare_configs(const Json& meant, const Json& found, const std::string& prefix, std::vector<std::string>& problems) {
  std::set<std::string> keys;
  for (const Json* side : {&meant, &found}) {
    for (const auto& [key, value] : side->entries()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    if (prefix.empty() && (key == "dtype" || key == "torch_dtype")) continue;  // export.dtype's
    const Json *a = meant.find(key), *b = found.find(key);
    if (a != nullptr && b != nullptr && a->is_object() && b->is_object()) {
      compare_configs(*a, *b, prefix + key + ".", problems);
    } else if (a == nullptr || b == nullptr || !(*a == *b)) {
      problems.push_back(format("config.json: \"{}{}\" is {}, the draft was trained with {}", prefix, key, b == nullptr ? "missing" : b->dump(), a == nullptr ? "nothing there" : a->dump()));
    }
  }
}

void compare_record(const fs::path& folder, std::vector<std::string>& problems) {
  std::error_code ignored;
  const fs::path path = folder / "export.json";
  if (!fs::exists(path, ignored)) {
    problems.push_back(format("{} is missing: this folder was not written by sf-host export", path));
    return;
  }
  try {
    const Json record = Json::parse(read_file(path), path.string());
    for (const auto& [name, sum] : record.at("files").entries()) {
      if (sha256_file(folder / name) != sum.as_string()) problems.push_back(format("{} was changed after it was written: its SHA-256 is not the one in export.json", name));
    }
  } catch (const JsonError& error) {
    problems.push_back(format("export.json is damaged: {}", error.what()));
  }
}

DraftWeights rounded(DraftWeights weights, at::ScalarType type) {
  for (auto& [name, tensor] : weights.parameters) tensor = tensor.to(type);
  return weights;
}

fs::path features_path(const ExportCheckRequest& request, const Plan& plan) {
  if (!request.features.empty()) return request.features;
  std::error_code ignored;
  for (const char* key : {"data.eval_hidden_states_path", "data.hidden_states_path"}) {
    const auto path = plan.get<fs::path>(key);
    if (!path.empty() && fs::exists(path, ignored)) return path;
  }
  return {};
}

}  // namespace

Json check_export(const ExportCheckRequest& request) {
  const EngineContext& context = *request.context;
  const Plan& plan = *context.plan;
  Algorithm& algorithm = algorithm_of(context);
  const auto target_folder = plan.get<fs::path>("model.target_model_path");
  const Json target_json = read_model_config(target_folder);
  const EngineView view = look_as_engine(request.folder, target_json);
  std::vector<std::string> problems = view.problems;

  // The checkpoint's draft, as far as the type of the export lets it through.
  ReplayedDraft trained;
  trained.session.context = &context;
  trained.session.plan = &plan;
  trained.session.placement.device = open_device(plan.get<std::string>("device"), context.world);
  trained.session.placement.dtype =
      trained.session.placement.device.is_cpu() || plan.get<std::string>("model.torch_dtype") != "bfloat16" ? at::kFloat : at::kBFloat16;
  trained.session.batch_shape.max_tokens = plan.get<int64_t>("data.max_length");
  const ModelFacts facts = model_facts(plan);
  trained.session.description = algorithm.describe(facts);
  const Description meant = trained.session.description;
  int64_t drafted = trained_tokens(meant), blocks = 0, changed = 0;
  double largest = 0, scale = 0;
  std::vector<PositionAcceptance> positions;
  Json replayed;
  std::string why_not, doing = "building the draft from the folder alone";
  try {
    trained.session.target_fingerprint = target_fingerprint(target_json, WeightFolder::open(target_folder));
    if (const std::string& own = request.checkpoint->state().target_fingerprint; !own.empty() && own != trained.session.target_fingerprint) {
      problems.push_back(format("the checkpoint was trained for another target than {}: that one's fingerprint is {}, this one's {}", target_folder, own.substr(0, 16),
                                trained.session.target_fingerprint.substr(0, 16)));
    }
    trained.session.tables = load_target_tables({.folder = target_folder,
                                                 .embedding_key = plan.get<std::string>("model.embedding_key"),
                                                 .lm_head_key = plan.get<std::string>("model.lm_head_key"),
                                                 .dtype = trained.session.placement.dtype,
                                                 .device = trained.session.placement.device});
  } catch (const Error& error) {
    why_not = format("the target's embedding and head can't be read ({})", error.what());
  }
  try {
    if (!view.architecture.empty()) {
      const fs::path config_path = request.folder / "config.json";
      compare_configs(Json::parse(meant.draft_config_json), Json::parse(read_file(config_path), config_path.string()), "", problems);
    }
    compare_record(request.folder, problems);
    const fs::path features = features_path(request, plan);
    const Drafter& drafter = drafter_of(context);
    if (!why_not.empty()) {
      // told below
    } else if (features.empty()) {
      why_not = "there are no recorded features to replay: capture the recipe's, or give --features";
    } else {
      const at::ScalarType type = plan.get<std::string>("export.dtype") == "bfloat16" ? at::kBFloat16 : at::kFloat;
      const DraftWeights whole = weights_of_checkpoint(*request.checkpoint, meant);
      std::vector<std::vector<int64_t>> places;
      std::vector<at::Tensor> labels;
      std::vector<Replay> expected, unrounded;
      algorithm.bind(trained.session.tables, cpu_ops());
      const std::string after = std::exchange(doing, format("replaying the features {}, which says nothing of the draft", features));
      trained.store = open_features(trained.session, features, "--features");
      for (int64_t record = 0; record < std::min(kRecords, trained.store->size()); ++record) {
        const Sample sample = sample_source(*trained.store).read(record);
        places.push_back(known_places(sample.tensors.at("loss_mask"), sample.tokens));
        labels.push_back(supervised_ids(sample.tensors.at("input_ids"), sample.tensors.at("loss_mask")));
      }
      const auto ask = [&](const ReplayedDraft& subject, std::vector<Replay>& into) {
        for (size_t i = 0; i < places.size(); ++i) {
          into.push_back(places[i].empty() ? Replay{} : replay(subject, drafter, static_cast<int64_t>(i), places[i], drafted));
        }
      };
      const auto load = [&](ReplayedDraft& subject, const DraftWeights& weights) {
        subject.units = std::make_unique<LoadedDraft>(algorithm, subject.session.description, weights, subject.session.placement.dtype, subject.session.placement.device, cpu_ops());
      };
      load(trained, whole);
      ask(trained, unrounded);
      load(trained, rounded(whole, type));
      ask(trained, expected);
      trained.units.reset();

      // The same from the folder alone.
      doing = after;
      ReplayedDraft exported;
      exported.session.plan = &plan;
      exported.session.placement = trained.session.placement;
      exported.session.batch_shape = trained.session.batch_shape;
      exported.session.target_fingerprint = trained.session.target_fingerprint;
      exported.session.tables = trained.session.tables;
      exported.session.description = algorithm.describe(facts_of_export(facts, request.folder));
      algorithm.bind(exported.session.tables, cpu_ops());
      exported.store = open_features(exported.session, features, "--features");
      if (drafter.drafted_tokens_at_most() > 0) drafted = std::min(drafted, drafter.drafted_tokens_at_most());
      load(exported, weights_of_export(request.folder, exported.session.description));
      std::vector<Replay> found;
      ask(exported, found);
      for (size_t i = 0; i < places.size(); ++i) {
        if (places[i].empty()) continue;
        blocks += static_cast<int64_t>(places[i].size());
        if (found[i].scores_bkv.sizes() != expected[i].scores_bkv.sizes()) {
          problems.push_back(format("replay: the export's scores have shape {}, the checkpoint's {}", found[i].scores_bkv.sizes().vec(), expected[i].scores_bkv.sizes().vec()));
          break;
        }
        scale = std::max(scale, expected[i].scores_bkv.abs().max().item<double>());
        const double apart = (found[i].scores_bkv - expected[i].scores_bkv).abs().max().item<double>();
        largest = apart == apart ? std::max(largest, apart) : std::numeric_limits<double>::infinity();
        changed += found[i].ids_bk.ne(unrounded[i].ids_bk).any(1).sum().item<int64_t>();
        const auto ids = found[i].ids_bk.accessor<int64_t, 2>();
        const auto label = labels[i].accessor<int64_t, 1>();
        for (size_t row = 0; row < places[i].size(); ++row) {
          const int64_t a = places[i][row];
          int64_t within = 0, hits = 0;
          while (within < ids.size(1) && a + 1 + within < label.size(0) && label[a + 1 + within] >= 0) ++within;
          while (hits < within && ids[static_cast<int64_t>(row)][hits] == label[a + 1 + hits]) ++hits;
          add_pass(positions, within, hits);
        }
      }
      if (blocks > 0 && largest > 1e-6 * std::max(1.0, scale)) {
        problems.push_back(format("replay: built from the folder alone the draft's logits are not the checkpoint's, they differ by up to {} (largest logit {}) in {} blocks of recorded features",
                                  largest, format_fixed(scale, 2), blocks));
      }
      if (blocks == 0) why_not = format("{} has no place with two supervised tokens to replay", features);
      replayed = Json::object({{"features", features.string()}, {"blocks", blocks}, {"largest_difference", largest}, {"largest_logit", scale},
                               {"blocks_changed_by_rounding", changed}});
    }
  } catch (const Error& error) {
    if (error.code() == ExitCode::kPlugin) {
      why_not = error.what();
    } else {
      problems.push_back(format("{}: {}", doing, error.what()));
    }
  }

  Json check = Json::object();
  check.set("fine", problems.empty()).set("problems", Json::array_of(problems)).set("replayed", replayed).set("engine_facts", view.facts);
  Json list = Json::array();
  double length = 1, all = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    all = std::max(all, static_cast<double>(positions[0].reached));
    length += static_cast<double>(positions[i].accepted) / std::max(1.0, all);
    list.push_back(Json::object({{"position", static_cast<int64_t>(i) + 1}, {"reached", positions[i].reached}, {"accepted", positions[i].accepted},
                                 {"rate", static_cast<double>(positions[i].accepted) / static_cast<double>(std::max<int64_t>(1, positions[i].reached))}}));
  }
  check.set("per_position", std::move(list)).set("acceptance_length", positions.empty() ? Json() : Json(length));
  check.set("serve", serve_commands(view.architecture, request.folder, target_folder, drafted));
  if (!why_not.empty()) {
    check.set("not_replayed", why_not);
    log_warn("export check: names, shapes, types and configuration only; {}", why_not);
  }
  for (const std::string& problem : problems) log_error("export check: {}", problem);
  if (problems.empty()) {
    log_info("export check: fine{}", blocks == 0 ? std::string() : format("; built from the folder alone it has the checkpoint's logits in {} blocks of recorded features", blocks));
    std::string rates;
    for (const Json& place : check.at("per_position").items()) rates += format("{}{}", rates.empty() ? "" : "  ", format_fixed(place.at("rate").as_double(), 3));
    if (!rates.empty()) log_info("export check: hit rates by position {}, acceptance length {} on {} blocks; {} of them guess otherwise than before rounding", rates, format_fixed(length, 3), blocks, changed);
    for (const auto& [engine, command] : check.at("serve").entries()) log_info("{}: {}", engine, command.as_string());
  } else {
    log_error("export check: do not serve {}", request.folder);
  }
  return check;
}

}  // namespace sf
