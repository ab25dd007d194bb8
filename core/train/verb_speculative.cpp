// The verb `eval --speculative`: drafts at work on prompts, beside the target alone (docs/evaluation.md says what each figure means).
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/retention.hpp"
#include "core/kernels/ops.hpp"
#include "core/model/target_tables.hpp"
#include "core/plan/plan.hpp"
#include "core/train/acceptance_stats.hpp"
#include "core/train/decoding_setup.hpp"
#include "core/train/saved_run.hpp"
#include "core/train/session.hpp"
#include "core/train/speculative.hpp"
#include "core/train/verbs.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

constexpr double kSameStory = 0.02;      // relative: the same path by cached and by whole passes; rounding may turn a guess now and then
constexpr double kMuchWorse = 0.5;       // of what the draft gained on the features that it was trained for
constexpr double kClearly = 3;           // standard errors

// One number of drafted tokens of one draft, over all groups.
struct Variant {
  int64_t tokens = 0;
  DecodingResult result;
  int64_t exact = 0;
  std::vector<std::pair<int64_t, Difference>> differences;  // by prompt
};

// A draft over all groups.
struct Contestant {
  DecodingDraft draft;
  std::string folder;
  std::unique_ptr<LoadedDraft> units;
  std::unique_ptr<EvaluationRunner> evaluation;
  std::vector<Variant> variants;           // the first is the main one
  double recorded = 0;                     // acceptance length on held-out features when it was saved; 0: not known
  int64_t recorded_tokens = 0;             // drafted in a pass for that figure; 0: as many as it is evaluated with
  double cost = 0;                         // of its pass, in passes of the target
  int64_t trained = 0;
};

void require_target(const std::string& what, const std::string& recorded, const TargetIdentity& target) {
  if (!recorded.empty() && recorded != target.fingerprint) {
    throw Error(ExitCode::kData, format("{} was trained for another target: its fingerprint is {}, this target's is {}", what, recorded.substr(0, 16), target.fingerprint.substr(0, 16)),
                "set model.target_model_path to the target that it was trained for");
  }
}

// Weights that a pass of the draft reads over weights that a pass of the target reads. A chain reads its layer and head once for each guess; lookups cost nothing.
double cost_by_bytes(const DecodingDraft& draft, const Target& target) {
  int64_t layers = 0, once = 0;
  for (const UnitSpec& unit : draft.description.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const int64_t elements = c10::multiply_integers(parameter.shape);
      if (unit.name == "objective" || unit.name == "embedding") continue;
      (unit.shard_group == "root" ? once : layers) += elements;
    }
  }
  const int64_t hidden = target.config().hidden_size;
  const int64_t head = (draft.description.head_columns > 0 ? draft.description.head_columns : target.config().vocab_size) * hidden;
  const int64_t uses = draft.drafter->drafted_tokens_at_most() == 0 ? draft.tokens : 1;
  const auto element = static_cast<int64_t>(c10::elementSize(target.dtype()));
  return static_cast<double>((once + uses * (layers + head)) * element) / static_cast<double>(target.bytes_read());
}

Contestant open_draft(const SpeculativeDraft& given, const SpeculateArguments& arguments, const TargetIdentity& identity, const TargetTables& tables,
                      const Target& target) {
  const Plan& plan = *given.context->plan;
  Contestant one;
  one.draft.name = given.name;
  one.draft.algorithm = &algorithm_of(*given.context);
  one.draft.drafter = &drafter_of(*given.context);
  one.draft.use_schedule = arguments.use_schedule;
  ModelFacts facts = model_facts(plan);
  std::optional<CheckpointReader> checkpoint;
  if (!given.folder.empty()) {
    one.folder = given.folder;
    facts = facts_of_export(facts, given.folder);
    std::error_code ignored;
    if (const fs::path record = fs::path(given.folder) / "export.json"; fs::exists(record, ignored)) {
      const Json json = Json::parse(read_file(record), record.string());
      const Json* origin = json.find("origin");
      const auto text = [&](const char* key) {
        const Json* found = origin != nullptr ? origin->find(key) : nullptr;
        return found != nullptr && found->is_string() ? found->as_string() : std::string();
      };
      const auto figure = [&](const char* key) {
        const Json* found = origin != nullptr ? origin->find(key) : nullptr;
        return found != nullptr && found->is_number() ? found->as_double() : 0.0;
      };
      require_target(given.folder, text("target_fingerprint"), identity);
      one.recorded = figure("acceptance_length");
      one.recorded_tokens = static_cast<int64_t>(figure("drafted_tokens"));
    } else {
      log_warn("{} has no export.json: whether it was trained for this target is not known", given.folder);
    }
  } else {
    const fs::path run_folder = plan.get<fs::path>("output_dir") / plan.get<std::string>("run_id");
    checkpoint = open_checkpoint(run_folder, given.checkpoint);
    if (!checkpoint) {
      throw Error(ExitCode::kCheckpoint, run_folder.string() + " holds no complete checkpoint", "train first, or name an exported draft with --draft FOLDER");
    }
    one.folder = checkpoint->folder().string();
    require_target(one.folder, checkpoint->state().target_fingerprint, identity);
    if (const auto best = read_best(checkpoint->folder().parent_path()); best && best->step == checkpoint->state().step && best->metric == "acceptance_length") one.recorded = best->score;
  }
  one.draft.description = one.draft.algorithm->describe(facts);
  if (checkpoint) require_same_draft(*checkpoint, one.draft.description.draft_config_json);
  one.draft.algorithm->bind(tables, cpu_ops());
  const DraftWeights weights = checkpoint ? weights_of_checkpoint(*checkpoint, one.draft.description) : weights_of_export(given.folder, one.draft.description);
  one.units = std::make_unique<LoadedDraft>(*one.draft.algorithm, one.draft.description, weights, target.dtype(), target.device(), cpu_ops());
  one.draft.units = one.units.get();
  one.evaluation = std::make_unique<EvaluationRunner>(*one.units, target.device());
  one.trained = trained_tokens(one.draft.description);

  const int64_t most = one.draft.drafter->drafted_tokens_at_most();
  std::vector<int64_t> wanted = {arguments.draft_tokens > 0 ? arguments.draft_tokens : one.recorded_tokens > 0 ? one.recorded_tokens : one.trained};
  wanted.insert(wanted.end(), arguments.sweep.begin(), arguments.sweep.end());
  for (const int64_t tokens : wanted) {
    if (tokens < 1 || (most > 0 && tokens > most)) {
      throw Error(ExitCode::kUsage, format("{} drafts 1 to {} tokens in a pass, {} are asked for", one.draft.name, most, tokens), "correct --draft-tokens or --sweep");
    }
    if (one.variants.empty() || tokens != one.variants.front().tokens) one.variants.push_back({.tokens = tokens});
  }
  one.draft.tokens = one.variants.front().tokens;
  one.cost = arguments.draft_cost > 0 ? arguments.draft_cost : cost_by_bytes(one.draft, target);
  return one;
}

void compare(Variant& variant, const PromptGroup& group, const DecodingResult& plain, const DecodingResult& found, int64_t first_prompt, const Target& target) {
  for (size_t row = 0; row < group.prompts().size(); ++row) {
    const auto difference = judge_difference(target, group.prompts()[row], plain.answers[row], found.answers[row]);
    if (difference) {
      variant.differences.emplace_back(first_prompt + static_cast<int64_t>(row), *difference);
    } else {
      ++variant.exact;
    }
  }
}

std::vector<PromptAcceptance> by_prompt(const DecodingResult& result, const std::vector<Prompt>& prompts) {
  std::vector<PromptAcceptance> found;
  for (const Prompt& prompt : prompts) found.push_back({.category = prompt.category});
  for (const SpeculativePass& pass : result.passes) {
    PromptAcceptance& prompt = found[static_cast<size_t>(pass.prompt)];
    ++prompt.passes;
    prompt.tokens += 1 + pass.accepted;
  }
  return found;
}

double shorter_length(const DecodingResult& result, int64_t tokens) {
  double sum = 0;
  for (const SpeculativePass& pass : result.passes) sum += 1 + static_cast<double>(std::min(pass.accepted, tokens));
  return sum / static_cast<double>(std::max<size_t>(1, result.passes.size()));
}

Json difference_json(const Prompt& prompt, const Difference& difference) {
  return Json::object({{"prompt", prompt.id},
                       {"position", difference.position},
                       {"expected", difference.expected},
                       {"found", difference.found},
                       {"margin", std::isfinite(difference.margin) ? difference.margin : -1.0},
                       {"tolerance", difference.tolerance},
                       {"is_tie", difference.is_tie}});
}

double rate(int64_t tokens, double seconds) { return static_cast<double>(tokens) / std::max(seconds, 1e-9); }

Json report_of(const Contestant& one, const std::vector<Prompt>& prompts, double plain_rate) {
  const Variant& main = one.variants.front();
  const DecodingResult& result = main.result;
  const std::vector<PromptAcceptance> rows = by_prompt(result, prompts);
  const AcceptanceLength length = acceptance_of(rows);
  Json json = Json::object();
  json.set("name", one.draft.name).set("folder", one.folder).set("draft_tokens", main.tokens);
  json.set("acceptance_length", length.to_json());
  json.set("tokens", result.tokens).set("passes", static_cast<int64_t>(result.passes.size())).set("target_passes", result.target_passes);
  json.set("tokens_per_pass", static_cast<double>(result.tokens) / static_cast<double>(std::max<size_t>(1, result.passes.size())));

  std::vector<PositionAcceptance> positions;
  int64_t advised = 0, advised_accepted = 0, advising = 0;
  for (const SpeculativePass& pass : result.passes) {
    add_pass(positions, pass.judged, pass.accepted);
    if (pass.advised >= 0) {
      ++advising;
      advised += std::min(pass.advised, pass.judged);
      advised_accepted += std::min(pass.advised, pass.accepted);
    }
  }
  Json places = Json::array();
  for (size_t i = 0; i < positions.size(); ++i) {
    places.push_back(Json::object({{"position", static_cast<int64_t>(i) + 1},
                                   {"reached", positions[i].reached},
                                   {"accepted", positions[i].accepted},
                                   {"rate", static_cast<double>(positions[i].accepted) / static_cast<double>(std::max<int64_t>(1, positions[i].reached))},
                                   {"survival", static_cast<double>(positions[i].accepted) / static_cast<double>(std::max<size_t>(1, result.passes.size()))}}));
  }
  json.set("per_position", std::move(places));
  Json categories = Json::object();
  for (const auto& [category, found] : acceptance_by_category(rows)) categories.set(category, found.to_json());
  json.set("by_category", std::move(categories));
  Json lengths = Json::array();
  for (int64_t tokens = 1; tokens <= main.tokens; ++tokens) {
    lengths.push_back(Json::object({{"draft_tokens", tokens},
                                    {"acceptance_length", shorter_length(result, tokens)},
                                    {"how", tokens == main.tokens ? "measured" : "estimated from the passes of the longest"}}));
  }
  for (size_t i = 1; i < one.variants.size(); ++i) {
    const Variant& other = one.variants[i];
    lengths.push_back(Json::object({{"draft_tokens", other.tokens},
                                    {"acceptance_length", acceptance_of(by_prompt(other.result, prompts)).value},
                                    {"tokens_per_second", rate(other.result.tokens, other.result.draft_seconds + other.result.target_seconds)},
                                    {"how", "measured"}}));
  }
  json.set("by_draft_tokens", std::move(lengths));
  if (advising > 0) {
    json.set("schedule", Json::object({{"used", one.draft.use_schedule},
                                       {"advised_tokens", static_cast<double>(advised) / static_cast<double>(advising)},
                                       {"acceptance_length", 1 + static_cast<double>(advised_accepted) / static_cast<double>(advising)},
                                       {"hit_rate", static_cast<double>(advised_accepted) / static_cast<double>(std::max<int64_t>(1, advised))}}));
  }
  const double seconds = result.draft_seconds + result.target_seconds, tokens_per_second = rate(result.tokens, seconds);
  json.set("draft_seconds", result.draft_seconds).set("target_seconds", result.target_seconds).set("tokens_per_second", tokens_per_second);
  json.set("speedup_measured", tokens_per_second / std::max(plain_rate, 1e-9));
  json.set("draft_cost", one.cost).set("speedup_estimated", length.value / (1 + one.cost));

  int64_t ties = 0;
  Json differences = Json::array();
  for (const Variant& variant : one.variants) {
    for (const auto& [prompt, difference] : variant.differences) {
      ties += difference.is_tie ? 1 : 0;
      if (differences.size() < 10) differences.push_back(difference_json(prompts[static_cast<size_t>(prompt)], difference).set("draft_tokens", variant.tokens));
    }
  }
  json.set("exact_prompts", main.exact).set("ties", ties).set("differences", std::move(differences));

  std::string verdict = length.prompts < 2 ? format("acceptance length {} in {} passes of one prompt, which say nothing of another", format_fixed(length.value, 3), length.passes)
                                           : format("acceptance length {} ({} to {}) in {} passes", format_fixed(length.value, 3), format_fixed(length.low, 3),
                                                    format_fixed(length.high, 3), length.passes);
  if (result.passes.empty()) {  // the first token of an answer is the target's, from the prompt
    return json.set("teacher_forced", Json::object()).set("verdict", "nothing was drafted: every answer ends with its first token, which comes with the prompt; raise --max-new-tokens");
  }
  const double walked = one.evaluation->numerator("acceptance/walk_length") / std::max(one.evaluation->denominator("acceptance/walk_length"), 1.0);
  const double everywhere = one.evaluation->numerator("acceptance_length") / std::max(one.evaluation->denominator("acceptance_length"), 1.0);
  Json forced = Json::object({{"walk_length", walked}, {"acceptance_length", everywhere}});
  const bool is_comparable = main.tokens == one.trained && !one.draft.use_schedule;
  if (is_comparable) {
    const bool agrees = std::abs(walked - length.value) <= kSameStory * length.value;
    forced.set("agrees", agrees);
    verdict += agrees ? format("; teacher-forced evaluation of the same path says {}: they agree", format_fixed(walked, 3))
                      : format("; teacher-forced evaluation of the same path says {}: THEY DISAGREE, so training and decoding do not run the same draft", format_fixed(walked, 3));
  } else {
    verdict += format("; not compared with teacher-forced evaluation, which drafts {} tokens{}", one.trained, one.draft.use_schedule ? " without a schedule" : "");
  }
  verdict += format(" ({} over every position)", format_fixed(everywhere, 3));
  // A chain that is cut shorter (--draft-tokens) accepts less by that alone.
  if (one.recorded > 0 && (one.recorded_tokens == 0 || one.recorded_tokens == one.trained)) {
    // So few positions, or so little to lose, that chance explains it, say nothing. Accepted guesses as if each came alone: variance m (1 + m).
    const double gained = one.recorded - 1, places_seen = std::max(one.evaluation->denominator("acceptance_length"), 1.0);
    const double error = std::sqrt(gained * (1 + gained) / places_seen);
    const bool as_recorded = everywhere - 1 >= kMuchWorse * gained || one.recorded - everywhere <= kClearly * error;
    forced.set("recorded_acceptance_length", one.recorded).set("as_recorded", as_recorded);
    if (!as_recorded) {
      verdict += format("; WHEN IT WAS SAVED IT HAD {} ON HELD-OUT FEATURES: the features that it was trained on are not what this target gives (shifted, swapped, "
                        "of another model), or these prompts are of another kind",
                        format_fixed(one.recorded, 3));
    }
  }
  json.set("teacher_forced", std::move(forced)).set("verdict", verdict);
  return json;
}

void warn_or_tell(const Json& draft) {
  const std::string line = format("{}: {}", draft.at("name").as_string(), draft.at("verdict").as_string());
  const Json& forced = draft.at("teacher_forced");
  const auto is_false = [&](const char* key) { return forced.contains(key) && !forced.at(key).as_bool(); };
  is_false("agrees") || is_false("as_recorded") ? log_warn("{}", line) : log_info("{}", line);
  log_info("{}: {} tok/s, {} x plain decoding here; estimated {} x where a draft's pass costs {} of the target's", draft.at("name").as_string(),
           format_fixed(draft.at("tokens_per_second").as_double(), 1), format_fixed(draft.at("speedup_measured").as_double(), 2),
           format_fixed(draft.at("speedup_estimated").as_double(), 2), format_fixed(draft.at("draft_cost").as_double(), 3));
}

}  // namespace

Json evaluate_speculative(const std::vector<SpeculativeDraft>& drafts, const SpeculateArguments& arguments) {
  const EngineContext& context = *drafts.front().context;
  const Plan& plan = *context.plan;
  const TargetIdentity identity = identify_target(plan);
  const fs::path prompts_path = arguments.prompts.empty() ? plan.get<fs::path>("data.eval_data_path") : fs::path(arguments.prompts);
  if (prompts_path.empty()) {
    throw Error(ExitCode::kUsage, "no prompts are named", "give --prompts FILE, or set data.eval_data_path");
  }
  const std::vector<Prompt> prompts = read_prompts(prompts_path, identity.config.vocab_size, identity.config.max_position_embeddings, arguments.max_prompts);
  DecodingLimits limits{.max_new_tokens = arguments.max_new_tokens,
                        .context_tokens = identity.config.max_position_embeddings,
                        .stop_tokens = stop_tokens_from(arguments.stop_tokens, plan, identity.config.vocab_size)};
  const Target target = load_whole_target(plan, identity.config);
  const TargetTables tables = load_target_tables({.folder = plan.get<fs::path>("model.target_model_path"),
                                                  .embedding_key = plan.get<std::string>("model.embedding_key"),
                                                  .lm_head_key = plan.get<std::string>("model.lm_head_key"),
                                                  .dtype = target.dtype(),
                                                  .device = target.device()});
  std::vector<Contestant> contestants;
  std::set<int64_t> layers;
  int64_t room = 0;
  for (const SpeculativeDraft& draft : drafts) {
    contestants.push_back(open_draft(draft, arguments, identity, tables, target));
    for (const FeatureRead& read : contestants.back().draft.description.reads) {
      for (const int64_t id : read.layer_ids) {
        if (id < 0 || id >= identity.config.num_hidden_layers) {
          throw Error(ExitCode::kData, format("{} reads layer {}, and the target has the layers 0 to {}", draft.name, id, identity.config.num_hidden_layers - 1),
                      "the draft belongs to another target");
        }
        layers.insert(id);
      }
    }
    for (const Variant& variant : contestants.back().variants) room = std::max(room, variant.tokens);
  }
  const std::vector<int64_t> layer_ids(layers.begin(), layers.end());

  log_info("speculative decoding: {} prompts, at most {} new tokens, batch {}, {} drafts on {}", prompts.size(), arguments.max_new_tokens, arguments.batch_size,
           contestants.size(), c10::DeviceTypeName(target.device().type(), true));
  DecodingResult plain;
  int64_t checked = 0;
  double worst_margin = 0, tolerance = 0;
  bool interrupted = false;
  for (size_t begin = 0; begin < prompts.size() && !interrupted; begin += static_cast<size_t>(arguments.batch_size)) {
    if (context.stop_requested && context.stop_requested()) {
      interrupted = true;
      break;
    }
    const size_t end = std::min(prompts.size(), begin + static_cast<size_t>(arguments.batch_size));
    const PromptGroup group(target, {prompts.begin() + static_cast<std::ptrdiff_t>(begin), prompts.begin() + static_cast<std::ptrdiff_t>(end)},
                            static_cast<int64_t>(begin), limits, layer_ids, room);
    DecodingResult alone = group.plain();
    const WholePass whole = whole_pass(target, group.prompts(), alone.answers, layer_ids);
    checked += whole.tokens_checked;
    if (whole.worst_margin > worst_margin || tolerance == 0) {
      worst_margin = whole.worst_margin;
      tolerance = whole.tolerance;
    }
    for (Contestant& one : contestants) {
      for (Variant& variant : one.variants) {
        DecodingDraft draft = one.draft;
        draft.tokens = variant.tokens;
        DecodingResult found = group.speculative(draft);
        compare(variant, group, alone, found, static_cast<int64_t>(begin), target);
        variant.result.add(std::move(found));
      }
      evaluate_answers(one.draft, *one.evaluation, group.prompts(), alone.answers, whole, layer_ids, target.device(), target.dtype());
    }
    const auto advises = [](const SpeculativePass& pass) { return pass.advised >= 0; };
    const auto is_without = [&](const Contestant& one) { return !std::any_of(one.variants[0].result.passes.begin(), one.variants[0].result.passes.end(), advises); };
    if (arguments.use_schedule && !contestants[0].variants[0].result.passes.empty() && std::all_of(contestants.begin(), contestants.end(), is_without)) {
      throw Error(ExitCode::kUsage, "--schedule does nothing: no draft here says how far it trusts itself", "DSpark drafts do; leave --schedule out");
    }
    plain.add(std::move(alone));
    log_info("speculative decoding: {} of {} prompts", end, prompts.size());
  }

  Json report = Json::object();
  report.set("target", plan.get<fs::path>("model.target_model_path").string()).set("prompts_file", prompts_path.string());
  report.set("prompts", static_cast<int64_t>(prompts.size())).set("max_new_tokens", arguments.max_new_tokens).set("batch_size", arguments.batch_size);
  report.set("device", std::string(c10::DeviceTypeName(target.device().type(), true)) + ", " + std::string(c10::toString(target.dtype())));
  if (interrupted) return report.set("interrupted", true);
  const double plain_rate = rate(plain.tokens, plain.target_seconds);
  report.set("plain_tokens", plain.tokens).set("plain_seconds", plain.target_seconds).set("plain_tokens_per_second", plain_rate);

  std::vector<ComparedAnswers> compared;
  for (const Contestant& one : contestants) {
    for (const Variant& variant : one.variants) {
      ComparedAnswers answers{.draft = one.draft.name, .answers = static_cast<int64_t>(prompts.size()), .exact = variant.exact, .differences = {}};
      for (const auto& [prompt, difference] : variant.differences) answers.differences.emplace_back(prompts[static_cast<size_t>(prompt)].id, difference);
      compared.push_back(std::move(answers));
    }
  }
  const LosslessVerdict verdict = lossless_verdict(compared, {.tokens = checked, .worst_margin = worst_margin, .tolerance = tolerance});
  report.set("lossless", verdict.lossless).set("lossless_text", verdict.text);
  report.set("exact_answers", verdict.exact).set("compared_answers", verdict.answers).set("ties", verdict.ties);
  report.set("whole_pass_tokens", checked).set("whole_pass_margin", worst_margin).set("whole_pass_tolerance", tolerance);
  if (!verdict.first.empty()) report.set("first_difference", verdict.first);
  verdict.lossless ? log_info("{}", verdict.text) : log_error("{}", verdict.text);
  log_info("plain decoding: {} tok/s", format_fixed(plain_rate, 1));
  Json list = Json::array();
  for (const Contestant& one : contestants) {
    list.push_back(report_of(one, prompts, plain_rate));
    warn_or_tell(list.items().back());
  }
  report.set("drafts", std::move(list));
  if (!arguments.page.empty()) {
    atomic_write(fs::absolute(arguments.page), speculative_page(report));
    log_info("report: {}", arguments.page);
  }
  return report;
}

}  // namespace sf
