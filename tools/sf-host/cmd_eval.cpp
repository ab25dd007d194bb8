// sf-host eval: loss and acceptance length of a checkpoint on held-out features; with --speculative decoding with drafts on prompts.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <vector>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/plan/plan.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

// Plugins of drafts whose export does not name one.
constexpr std::pair<const char*, const char*> kAlgorithms[] = {{"LlamaForCausalLMEagle3", "eagle3"},
                                                               {"DFlashDraftModel", "dflash2"},
                                                               {"DFlash2DraftModel", "dflash2"},
                                                               {"DSparkDraftModel", "dspark"}};

struct DraftFolder {
  std::string algorithm;
  std::int64_t drafted_tokens = 0;  // as trained; 0: not recorded
};

DraftFolder look_at_export(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder / "config.json", ignored) || !fs::exists(folder / "model.safetensors", ignored)) {
    throw Error(ExitCode::kUsage, format("--draft {}: there is no exported draft (config.json and model.safetensors)", folder),
                "sf-host export makes such a folder; without --draft the recipe's own checkpoint is taken");
  }
  if (fs::exists(folder / "export.json", ignored)) {
    const Json record = Json::parse(read_file(folder / "export.json"), (folder / "export.json").string());
    const Json* origin = record.find("origin");
    const Json* name = origin != nullptr ? origin->find("algorithm") : nullptr;
    const Json* tokens = origin != nullptr ? origin->find("drafted_tokens") : nullptr;
    if (name != nullptr && name->is_string()) {
      return {.algorithm = name->as_string(), .drafted_tokens = tokens != nullptr && tokens->is_int() ? tokens->as_int() : 0};
    }
  }
  const Json config = Json::parse(read_file(folder / "config.json"), (folder / "config.json").string());
  const Json* architectures = config.find("architectures");
  if (architectures != nullptr && architectures->is_array() && architectures->size() > 0 && architectures->at(0).is_string()) {
    for (const auto& [architecture, algorithm] : kAlgorithms) {
      if (architectures->at(0).as_string() == architecture) {
        return {.algorithm = algorithm};
      }
    }
  }
  throw Error(ExitCode::kUsage, format("--draft {}: no plugin is known for architectures {}", folder, architectures == nullptr ? "null" : architectures->dump()),
              "LlamaForCausalLMEagle3, DFlashDraftModel, DFlash2DraftModel and DSparkDraftModel can be decoded with");
}

std::vector<std::int64_t> numbers(const std::string& text) {
  std::vector<std::int64_t> list;
  for (const std::string& part : text.empty() ? std::vector<std::string>() : split(text, ',')) {
    if (part.empty() || part.size() > 6 || part.find_first_not_of("0123456789") != std::string::npos || std::stoll(part) < 1) {
      throw Error(ExitCode::kUsage, format("--sweep is \"{}\", numbers of drafted tokens with commas between them expected", text), "for example --sweep 1,2,4");
    }
    list.push_back(std::stoll(part));
  }
  return list;
}

void refuse_lone_flags(const DecodingFlags& flags) {
  const DecodingFlags unset;
  const bool any = !flags.prompts.empty() || !flags.drafts.empty() || !flags.sweep.empty() || !flags.page.empty() || !flags.stop_tokens.empty() || flags.schedule ||
                   flags.max_prompts != 0 || flags.max_new_tokens != 0 || flags.draft_tokens != 0 || flags.draft_cost != 0 || flags.batch_size != unset.batch_size;
  if (any) {
    throw Error(ExitCode::kUsage, "--prompts, --draft and the other flags of decoding do nothing without --speculative", "add --speculative, or leave them out");
  }
}

ExitCode run_speculative(const Command& command) {
  const DecodingFlags& flags = command.decoding;
  if (!command.features.empty()) {
    throw Error(ExitCode::kUsage, "--features goes with the evaluation on features; --speculative runs the target itself", "leave one of them out");
  }
  if (!command.checkpoint.empty() && !flags.drafts.empty()) {
    throw Error(ExitCode::kUsage, "--checkpoint and --draft exclude each other", "--draft names exported folders, --checkpoint one of the recipe's run");
  }
  if (command.checkpoint == "untrained") {
    throw Error(ExitCode::kUsage, "--checkpoint untrained: an untrained draft has nothing to decode with", "name a checkpoint, or an export with --draft");
  }
  if (!(flags.draft_cost >= 0 && std::isfinite(flags.draft_cost))) {
    throw Error(ExitCode::kUsage, format("--draft-cost {}", flags.draft_cost), "how many passes of the target one of the draft costs, 0.1 for example; left out: by bytes of weights");
  }
  require_place_of_file("--page", flags.page);  // before the work, not after it
  const std::vector<std::int64_t> sweep = numbers(flags.sweep);
  std::vector<std::string> folders = flags.drafts;
  if (folders.empty()) {
    folders.emplace_back();
  }
  std::vector<std::unique_ptr<Command>> commands;     // a session keeps its command
  std::vector<std::unique_ptr<RunSession>> sessions;  // each draft has a plugin instance of its own
  std::vector<SpeculativeDraft> drafts;
  for (const std::string& folder : folders) {
    const DraftFolder found = folder.empty() ? DraftFolder() : look_at_export(folder);
    commands.push_back(std::make_unique<Command>(command));
    // A chain is as long as one likes: its teacher-forced evaluation unrolls as many uses as decoding drafts tokens.
    const std::int64_t chain = flags.draft_tokens > 0 ? flags.draft_tokens : found.drafted_tokens;
    if (found.algorithm == "eagle3" && chain > 0) {
      commands.back()->overrides.push_back(format("training.ttt_length={}", chain));
    }
    sessions.push_back(std::make_unique<RunSession>(*commands.back(), found.algorithm));
    RunSession& session = *sessions.back();
    if (!session.plan(true) || !session.open(false)) {
      return session.code();
    }
    SpeculativeDraft draft{.name = folder.empty() ? session.resolved().get<std::string>("run_id") : fs::absolute(folder).lexically_normal().filename().string(),
                           .context = &session.context(),
                           .folder = folder,
                           .checkpoint = command.checkpoint.empty() ? "best" : command.checkpoint};
    if (draft.name.empty()) {
      draft.name = fs::absolute(folder).lexically_normal().parent_path().filename().string();
    }
    if (std::any_of(drafts.begin(), drafts.end(), [&](const SpeculativeDraft& other) { return other.name == draft.name; })) {
      draft.name += format(" ({})", drafts.size() + 1);
    }
    drafts.push_back(std::move(draft));
  }
  Json report = sessions.front()->engine().speculate(drafts, {.prompts = flags.prompts,
                                                              .max_prompts = flags.max_prompts,
                                                              .max_new_tokens = flags.max_new_tokens > 0 ? flags.max_new_tokens : 64,
                                                              .batch_size = flags.batch_size,
                                                              .draft_tokens = flags.draft_tokens,
                                                              .sweep = sweep,
                                                              .use_schedule = flags.schedule,
                                                              .draft_cost = flags.draft_cost,
                                                              .stop_tokens = flags.stop_tokens,
                                                              .page = flags.page});
  if (command.json) {
    std::puts(report.dump(2).c_str());
  }
  for (const auto& session : sessions) {
    session->close();
  }
  if (report.contains("interrupted")) {
    return ExitCode::kInterrupted;
  }
  return report.at("lossless").as_bool() ? ExitCode::kOk : ExitCode::kInternal;
}

}  // namespace

ExitCode run_eval(const Command& command) {
  if (command.decoding.speculative) {
    return run_speculative(command);
  }
  refuse_lone_flags(command.decoding);
  RunSession session(command);
  if (!session.plan(true) || !session.open(true)) {
    return session.code();
  }
  Json summary = session.engine().evaluate(
      session.context(),
      {.checkpoint = command.checkpoint.empty() ? "auto" : command.checkpoint, .features = command.features});
  if (command.json) {
    std::puts(summary.dump(2).c_str());
  }
  session.close();
  return summary.contains("interrupted") ? ExitCode::kInterrupted : ExitCode::kOk;
}

}  // namespace sf
