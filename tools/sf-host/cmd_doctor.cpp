// sf-host doctor: is everything there that a run needs? Plugins, engine, device, disk; with a recipe also the
// plan, target and features. doctor data, features, target and vocabulary look into one of these (core/doctor).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/base/log.hpp"
#include "core/data/inspect.hpp"
#include "core/data/target_config.hpp"
#include "core/doctor/feature_check.hpp"
#include "core/doctor/target_facts.hpp"
#include "core/doctor/token_page.hpp"
#include "core/plan/print.hpp"
#include "core/prepare/prepare.hpp"
#include "core/prepare/text_worker.hpp"
#include "tools/sf-host/run_session.hpp"

#include <unistd.h>

namespace sf {
namespace {

namespace fs = std::filesystem;

struct Finding {
  std::string what;
  bool is_fine = true;
  std::string text;
  ExitCode code = ExitCode::kOk;
};

Finding check_engine() {
  try {
    (void)open_engine();
    return {"engine", true, (library_folder() / "libsf_engine.so").string()};
  } catch (const Error& error) {
    return {"engine", false, format("{} ({})", error.what(), error.hint()), error.code()};
  }
}

Finding check_device() {
  Machine machine = this_machine();
  return {"device", true,
          machine.gpus > 0 ? format("{} GPU, {} processors", machine.gpus, machine.processors)
                           : format("no GPU; {} processors", machine.processors)};
}

std::vector<Finding> check_recipe(const Command& command) {
  std::vector<Finding> out;
  Command asked = command;
  asked.json = false;  // what is refused is told on stderr: the findings are the one result
  RunSession session(asked);
  if (!session.plan(true)) {
    out.push_back({"plan", false, command.json ? "refused; the reasons are on stderr" : "refused; the reasons are above", session.code()});
    return out;
  }
  const Plan& plan = session.resolved();
  out.push_back({"plan", true, format("{} plugins", plan.stack.size())});
  // Everything is read here, so that a fault of data is found before a run and not by it.
  const auto read = [&](const std::string& what, const std::function<std::string()>& inspect) {
    try {
      out.push_back({what, true, inspect()});
    } catch (const Error& error) {
      out.push_back({what, false, error.hint().empty() ? error.what() : format("{} ({})", error.what(), error.hint()),
                     error.code()});
    }
  };
  auto target = plan.get<fs::path>("model.target_model_path");
  std::string fingerprint;
  std::int64_t vocab_size = 0;
  read("target", [&] {
    Json config = read_model_config(target);
    vocab_size = target_config(config, (target / "config.json").string()).vocab_size;
    fingerprint = target_fingerprint(config, WeightFolder::open(target));
    return inspect_target(target, {.embedding = plan.get<std::string>("model.embedding_key"),
                                   .head = plan.get<std::string>("model.lm_head_key")});
  });
  auto max_length = plan.get<std::int64_t>("data.max_length");
  for (const char* key : {"data.train_data_path", "data.eval_data_path"}) {
    auto path = plan.get<fs::path>(key);
    if (!path.empty()) {
      read(key, [&] { return inspect_tokens(path, vocab_size, max_length); });
    }
  }
  for (const char* key : {"data.hidden_states_path", "data.eval_hidden_states_path"}) {
    auto path = plan.get<fs::path>(key);
    std::error_code ignored;
    if (!path.empty() && !fs::exists(path, ignored)) {
      out.push_back({key, true, format("{} is not there yet; sf-host capture makes it", path)});
    } else if (!path.empty()) {
      read(key, [&] {
        return inspect_features({.folder = path,
                                 .vocab_size = vocab_size,
                                 .max_length = max_length,
                                 .target_fingerprint = fingerprint,
                                 .named_by = key});
      });
    }
  }
  auto output = plan.get<fs::path>("output_dir");
  out.push_back({"disk", true, format("{} free for {}", human_bytes(free_bytes(output)), output)});
  return out;
}

constexpr std::int64_t kShownRecords = 6;
constexpr const char* kTokenKeys[] = {"data.train_data_path", "data.eval_data_path"};
constexpr std::int64_t kUsualDraftLength = 5;

std::int64_t number_or(const Plan& plan, const char* key, std::int64_t otherwise) {
  return plan.has(key) && plan.get<std::int64_t>(key) > 0 ? plan.get<std::int64_t>(key) : otherwise;
}

std::int64_t vocabulary_of(const Plan& plan) {
  auto target = plan.get<fs::path>("model.target_model_path");
  return target_config(read_model_config(target), (target / "config.json").string()).vocab_size;
}

TokenFile token_file(const Plan& plan, const char* key) {
  return read_token_file(plan.get<fs::path>(key), {.vocab_size = vocabulary_of(plan), .max_length = plan.get<std::int64_t>("data.max_length")});
}

bool names_tokens(const Plan& plan, const char* key) {
  return !plan.get<fs::path>(key).empty();
}

// Tokens that the recipe's draft guesses in a pass, as far as the recipe says it.
std::int64_t draft_length(const Plan& plan) {
  const std::int64_t block = number_or(plan, "model.draft_block_size", 0);
  const std::int64_t known = plan.get<std::string>("algorithm.name") == "dflash2" ? 1 : 0;  // of a block's tokens; each of DSpark's is a guess
  return number_or(plan, "training.ttt_length", block > 0 ? std::max<std::int64_t>(block - known, 1) : kUsualDraftLength);
}

VocabularySweep sweep_of(const Plan& plan, const TokenFile& train, const TokenFile* held_out) {
  std::vector<std::int64_t> sizes = usual_sizes(vocabulary_of(plan));
  const std::int64_t chosen = number_or(plan, "plugin.eagle3.draft_vocab_size", 0);
  if (chosen > 0) {
    sizes.push_back(chosen);
  }
  return sweep_vocabulary(train, held_out, std::move(sizes), draft_length(plan));
}

// The texts of the shown tokens; what keeps them from being had is told, and the ids are shown instead.
void add_texts(const Plan& plan, std::vector<PageContent>& parts) {
  try {
    TextWorker worker({.script = library_folder() / "text_worker.py", .target = plan.get<fs::path>("model.target_model_path"), .whole_texts = true, .stop_requested = is_stop_requested});
    for (PageContent& part : parts) {
      std::vector<std::vector<std::int64_t>> ids;
      for (const ShownRecord& record : part.records) {
        ids.push_back(record.ids);
      }
      std::vector<std::vector<std::string>> texts = worker.texts(ids);
      for (std::size_t i = 0; i < part.records.size(); ++i) {
        part.records[i].texts = std::move(texts.at(i));
      }
    }
  } catch (const Stopped&) {
    throw;
  } catch (const Error& error) {
    log_warn("tokens are shown as numbers: {} ({})", error.what(), error.hint());
  }
}

// Whether token records that prepare wrote are of the target's present tokenizer: prepare's report beside them names the one that made them.
// Nothing when there is no such report, or the target has no tokenizer.json.
std::optional<Finding> check_tokenizer(const Plan& plan, const char* key) {
  std::error_code ignored;
  const auto tokens = plan.get<fs::path>(key);
  const fs::path report = report_path(tokens);
  const fs::path tokenizer = plan.get<fs::path>("model.target_model_path") / "tokenizer.json";
  if (tokens.empty() || !fs::is_regular_file(report, ignored) || !fs::is_regular_file(tokenizer, ignored)) {
    return std::nullopt;
  }
  try {
    const Json read = Json::parse(read_file(report), report.string());
    const std::string made_by = read.at("rules").at("tokenizer").at("tokenizer_sha256").as_string();
    if (made_by == sha256_file(tokenizer)) {
      return Finding{format("{}: tokenizer", key), true, "the records are of the target's tokenizer.json"};
    }
    return Finding{format("{}: tokenizer", key), false,
                   format("{} was made with the tokenizer.json of {} (sha256 {}...), and {} is another one: its ids mean other tokens. Prepare and capture again, or name the "
                          "target that belongs to these records",
                          tokens, read.at("target").as_string(), made_by.substr(0, 12), tokenizer),
                   ExitCode::kData};
  } catch (const JsonError&) {
    return std::nullopt;  // not prepare's report
  }
}

ExitCode doctor_data(const Command& command, const Plan& plan) {
  std::vector<TokenFile> files;
  std::vector<PageContent> parts;
  for (const char* key : kTokenKeys) {
    if (!names_tokens(plan, key)) {
      continue;
    }
    files.push_back(token_file(plan, key));
    parts.push_back({.title = format("{}: {}", key, files.back().path),
                     .statistics = token_statistics(files.back()),
                     .records = choose_records(files.back(), command.samples > 0 ? command.samples : kShownRecords)});
  }
  if (files.empty()) {
    throw Error(ExitCode::kUsage, "the recipe names no token records to look at", "set data.train_data_path; sf-host prepare makes such a file from conversations");
  }
  add_texts(plan, parts);
  const std::int64_t size = number_or(plan, "plugin.eagle3.draft_vocab_size", 0);
  if (size > 0) {
    const std::vector<std::int64_t> kept = draft_vocabulary(files.front(), size);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      parts[i].vocabulary.insert(kept.begin(), kept.end());
      std::int64_t inside = 0;
      std::vector<std::pair<std::int64_t, std::int64_t>> outside;
      for (const auto& [token, count] : supervised_counts(files[i])) {
        parts[i].vocabulary.contains(token) ? void(inside += count) : void(outside.emplace_back(-count, token));
      }
      std::sort(outside.begin(), outside.end());
      std::string line = format("outside the draft vocabulary ({} tokens): {} % of supervised tokens, {} different ones", size,
                                format_fixed(100.0 * static_cast<double>(parts[i].statistics.supervised - inside) / static_cast<double>(std::max<std::int64_t>(parts[i].statistics.supervised, 1)), 2),
                                outside.size());
      for (std::size_t k = 0; k < std::min<std::size_t>(outside.size(), 10) && outside[k].first < -1; ++k) {
        line += format("{}{} ({} times)", k == 0 ? "; most often " : ", ", outside[k].second, -outside[k].first);
      }
      parts[i].outside.push_back(std::move(line));
    }
  }
  std::vector<std::string> doubts;  // a tokenizer that is not the records' own, or nothing to learn
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].statistics.without_pair == parts[i].statistics.records) {
      doubts.push_back(format("{}: no record has two neighbouring supervised tokens: nothing can be learnt from it. See loss_mask, and the template that made it", files[i].path));
      log_warn("{}", doubts.back());
    }
  }
  for (const char* key : kTokenKeys) {
    const std::optional<Finding> finding = check_tokenizer(plan, key);
    if (finding && !finding->is_fine) {
      doubts.push_back(finding->text);
      log_warn("{}: {}", finding->what, finding->text);
    }
  }
  const ExitCode code = doubts.empty() ? ExitCode::kOk : ExitCode::kData;
  const VocabularySweep sweep = sweep_of(plan, files.front(), files.size() > 1 ? &files[1] : nullptr);
  if (!command.output.empty()) {
    atomic_write(command.output, html_page(parts, &sweep), ExitCode::kUsage);
  }
  if (command.json) {
    Json out = Json::object();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Json part = parts[i].statistics.to_json();
      part.set("path", files[i].path.string()).set("outside_draft_vocabulary", Json::array_of(parts[i].outside));
      out.set(parts[i].title.substr(0, parts[i].title.find(':')), std::move(part));
    }
    out.set("vocabulary", sweep.to_json()).set("doubts", Json::array_of(doubts));
    std::puts(out.dump(2).c_str());
    return code;
  }
  const bool colours = ::isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
  for (const PageContent& part : parts) {
    std::printf("%s\n%s", part.title.c_str(), part.statistics.text().c_str());
    for (const std::string& line : part.outside) {
      std::printf("  %s\n", line.c_str());
    }
    std::printf("\n");
    for (const ShownRecord& record : part.records) {
      std::printf("%s\n", terminal_text(record, part.vocabulary, colours).c_str());
    }
  }
  std::fputs(sweep.text().c_str(), stdout);
  if (!command.output.empty()) {
    std::printf("page: %s\n", command.output.c_str());
  }
  return code;
}

ExitCode doctor_vocabulary(const Command& command, const Plan& plan) {
  if (!names_tokens(plan, kTokenKeys[0])) {
    throw Error(ExitCode::kUsage, "the recipe names no token records to count in", "set data.train_data_path");
  }
  const TokenFile train = token_file(plan, kTokenKeys[0]);
  if (supervised_counts(train).empty()) {
    throw Error(ExitCode::kData, format("{}: no token is supervised, so there is nothing to count", train.path), "see loss_mask; sf-host doctor data shows the records");
  }
  std::optional<TokenFile> held_out;
  if (names_tokens(plan, kTokenKeys[1])) {
    held_out = token_file(plan, kTokenKeys[1]);
  }
  const VocabularySweep sweep = sweep_of(plan, train, held_out ? &*held_out : nullptr);
  std::fputs(command.json ? (sweep.to_json().dump(2) + "\n").c_str() : sweep.text().c_str(), stdout);
  return ExitCode::kOk;
}

ExitCode tell(const Command& command, const std::vector<Finding>& findings) {
  ExitCode code = ExitCode::kOk;
  Json out = Json::array();
  for (const Finding& finding : findings) {
    if (!finding.is_fine && code == ExitCode::kOk) {
      code = finding.code;
    }
    if (command.json) {
      Json one = Json::object();
      one.set("check", finding.what);
      one.set("fine", finding.is_fine);
      one.set("text", finding.text);
      out.push_back(std::move(one));
    } else {
      std::printf("%-5s %s: %s\n", finding.is_fine ? "ok" : "BAD", finding.what.c_str(),
                  finding.text.c_str());
    }
  }
  if (command.json) {
    std::puts(out.dump(2).c_str());
  }
  return code;
}

ExitCode doctor_features(const Command& command, const Plan& plan) {
  std::vector<Finding> findings;
  constexpr std::pair<const char*, const char*> kPairs[] = {{"data.hidden_states_path", "data.train_data_path"}, {"data.eval_hidden_states_path", "data.eval_data_path"}};
  for (const auto& [features, tokens] : kPairs) {
    if (std::optional<Finding> finding = check_tokenizer(plan, tokens)) {
      findings.push_back(std::move(*finding));
    }
    auto path = plan.get<fs::path>(features);
    std::error_code ignored;
    if (path.empty() || !fs::exists(path, ignored)) {
      if (!path.empty() && std::string(features) == kPairs[0].first) {
        findings.push_back({features, false, format("{} is not there; sf-host capture makes it", path), ExitCode::kData});
      }
      continue;
    }
    for (const FeatureFinding& finding : check_features({.features = path,
                                                         .target = plan.get<fs::path>("model.target_model_path"),
                                                         .keys = {.embedding = plan.get<std::string>("model.embedding_key"), .head = plan.get<std::string>("model.lm_head_key")},
                                                         .max_length = plan.get<std::int64_t>("data.max_length"),
                                                         .tokens = plan.get<fs::path>(tokens),
                                                         .named_by = features})) {
      findings.push_back({format("{}: {}", features, finding.what), finding.is_fine, finding.text, finding.is_fine ? ExitCode::kOk : ExitCode::kData});
    }
  }
  if (findings.empty()) {
    throw Error(ExitCode::kUsage, "the recipe names no features to look at", "set data.hidden_states_path");
  }
  return tell(command, findings);
}

ExitCode doctor_target(const Command& command, const Plan& plan) {
  const std::vector<InheritedFact> facts = inherited_facts({.folder = plan.get<fs::path>("model.target_model_path"),
                                                            .keys = {.embedding = plan.get<std::string>("model.embedding_key"), .head = plan.get<std::string>("model.lm_head_key")},
                                                            .mask_token_id = plan.get<std::int64_t>("model.mask_token_id"),
                                                            .draft_config = plan.get<fs::path>("model.draft_model_config"),
                                                            .layer_ids = plan.get<std::vector<std::int64_t>>("model.target_layer_ids")});
  if (!command.json) {
    std::fputs(facts_table(facts).c_str(), stdout);
    return ExitCode::kOk;
  }
  Json out = Json::array();
  for (const InheritedFact& fact : facts) {
    out.push_back(Json::object({{"name", fact.name}, {"value", fact.value}, {"origin", fact.origin}, {"doubt", fact.doubt}}));
  }
  std::puts(out.dump(2).c_str());
  return ExitCode::kOk;
}

struct Part {
  const char* name;
  ExitCode (*run)(const Command&, const Plan&);
};

constexpr Part kParts[] = {{"data", doctor_data}, {"features", doctor_features}, {"target", doctor_target}, {"vocabulary", doctor_vocabulary}};

}  // namespace

ExitCode run_doctor(const Command& command) {
  if (!command.positional.empty()) {
    for (const Part& part : kParts) {
      if (command.positional[0] != part.name) {
        continue;
      }
      if (part.run != doctor_data && (command.samples != 0 || !command.output.empty())) {
        throw Error(ExitCode::kUsage, format("--samples and --output do nothing with doctor {}", part.name), "they belong to doctor data; leave them out, or add --json for a result to keep");
      }
      require_place_of_file("--output", command.output);
      Command rest = command;
      rest.positional.erase(rest.positional.begin());
      RunSession session(rest);
      return session.plan(true) ? part.run(rest, session.resolved()) : session.code();
    }
    if (command.positional.size() > 1) {
      throw Error(ExitCode::kUsage, format("doctor does not know \"{}\"", command.positional[0]), "doctor data, features, target or vocabulary, and then a recipe");
    }
  }
  if (command.samples != 0 || !command.output.empty()) {
    throw Error(ExitCode::kUsage, "--samples and --output belong to doctor data", "sf-host doctor data RECIPE, or leave them out");
  }
  std::vector<Finding> findings;
  Diagnostics problems;
  Catalog catalog(search_request(command), command.plugins, host_build(), problems);
  findings.push_back({"plugin folders", !problems.has_errors(),
                      problems.has_errors() ? problems.text() : format("{} plugins", catalog.files().size()),
                      ExitCode::kPlugin});
  for (const PluginFile& file : catalog.files()) {
    findings.push_back({"plugin " + file.name(), file.fits(),
                        file.fits() ? file.describe() : std::string(trim(file.problems.text())),
                        ExitCode::kPlugin});
  }
  findings.push_back(check_engine());
  findings.push_back(check_device());
  if (!command.positional.empty()) {
    for (Finding& finding : check_recipe(command)) {
      findings.push_back(std::move(finding));
    }
  }
  return tell(command, findings);
}

}  // namespace sf
