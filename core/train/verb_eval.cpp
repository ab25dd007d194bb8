// The verb `eval`: a checkpoint, or the untrained draft, on held-out features.
#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/plan/plan.hpp"
#include "core/train/draft_buffers.hpp"
#include "core/train/evaluate.hpp"
#include "core/train/saved_run.hpp"
#include "core/train/verbs.hpp"

namespace sf {

Json evaluate_checkpoint(const EngineContext& context, const EvalArguments& arguments) {
  const Plan& plan = *context.plan;
  auto session = open_session(context);
  const std::filesystem::path path = arguments.features.empty() ? plan.get<std::filesystem::path>("data.eval_hidden_states_path")
                                                                : std::filesystem::path(arguments.features);
  if (path.empty()) {
    throw Error(ExitCode::kUsage, "no held-out features are named", "set data.eval_hidden_states_path, or give --features FOLDER");
  }
  const auto held_out = open_features(*session, path, arguments.features.empty() ? "data.eval_hidden_states_path" : "--features");
  // For the baseline; opened first, so that a damaged one is found before the work.
  const auto training_path = plan.get<std::filesystem::path>("data.hidden_states_path");
  std::unique_ptr<FeatureStore> training;
  if (!training_path.empty() && std::filesystem::exists(training_path)) {
    training = open_features(*session, training_path, "data.hidden_states_path");
  } else {
    log_warn("no bigram baseline: data.hidden_states_path ('{}') is not there to learn it from", training_path);
  }

  StepInfo step{.update = 0, .updates_total = 0, .wants_details = true};
  std::string what = "untrained draft";
  if (arguments.checkpoint != "untrained") {
    const auto checkpoint = open_checkpoint(session->run_folder, arguments.checkpoint);
    if (!checkpoint) {
      throw Error(ExitCode::kCheckpoint, session->run_folder.string() + " holds no complete checkpoint",
                  "train first, or give --checkpoint untrained");
    }
    require_same_draft(*checkpoint, session->description.draft_config_json);
    restore_weights(*checkpoint, *session);
    what = checkpoint->folder().string();
    step.update = checkpoint->state().step;
    step.updates_total = checkpoint->state().total_steps;
  } else if (training != nullptr) {
    make_draft_buffers(*session, *training);
  } else if (session->description.wants_token_counts && session->description.buffers_file.empty()) {
    throw Error(ExitCode::kData, "an untrained draft takes its vocabulary from the training samples, and data.hidden_states_path is not there",
                "capture the training features, or name a mapping with model.vocab_mapping_path");
  }
  const int64_t max_samples = plan.get<int64_t>("training.eval_max_samples");
  const std::optional<Evaluation> found = evaluate(*session, sample_source(*held_out), step, max_samples);
  if (!found) {
    Json stopped = Json::object();
    return stopped.set("checkpoint", what).set("interrupted", true);
  }
  const Evaluation& evaluation = *found;

  Json json = evaluation.to_json();
  json.set("checkpoint", what);
  json.set("features", path.string());
  log_info("{} on {} ({} samples, {})", what, path.string(), evaluation.samples, human_duration(evaluation.seconds));
  log_info("loss {}  acceptance length {}", format_fixed(evaluation.loss, 4), format_fixed(evaluation.acceptance_length, 4));

  if (training != nullptr) {
    const Description& description = session->description;
    const int64_t block_tokens = 1 + (description.drafted_tokens > 0 ? description.drafted_tokens : description.rows_per_slot - 1);
    const double baseline = BigramBaseline(*training).acceptance_length(*held_out, block_tokens, session->batch_shape.max_tokens, max_samples);
    json.set("bigram_acceptance_length", baseline);
    log_info("bigram baseline (next token that most often followed in the training text): acceptance length {}", format_fixed(baseline, 4));
  }
  for (const auto& [name, value] : evaluation.metrics) {
    log_debug("  {} {}", name, format_fixed(value, 4));
  }
  return json;
}

}  // namespace sf
