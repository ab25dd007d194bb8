// sf-host prepare: the recipe's chat records become the token records that capture reads.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/data/target_config.hpp"
#include "core/plan/plan.hpp"
#include "core/prepare/prepare.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

struct Job {
  const char* name;
  const char* input_key;
  const char* output_key;
};

constexpr Job kJobs[] = {{"train", "data.train_conversations_path", "data.train_data_path"},
                         {"eval", "data.eval_conversations_path", "data.eval_data_path"},
                         {"prompts", "data.prompts_conversations_path", "data.prompts_data_path"}};

// "enable_thinking=false" as {"enable_thinking": false}; what is no JSON is a text.
Json template_options(const std::vector<std::string>& settings) {
  Json options = Json::object();
  for (const std::string& setting : settings) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw Error(ExitCode::kUsage, format("data.chat_template_options has \"{}\", NAME=VALUE expected", setting), "for example \"enable_thinking=false\"");
    }
    const std::string name = setting.substr(0, equals), value = setting.substr(equals + 1);
    if (options.find(name) != nullptr || std::ranges::find(kOwnTemplateValues, name) != std::ranges::end(kOwnTemplateValues)) {
      throw Error(ExitCode::kUsage, format("data.chat_template_options sets {}, {}", name, options.find(name) != nullptr ? "twice" : "which comes from the records"), "leave one out");
    }
    try {
      options.set(name, Json::parse(value));
    } catch (const JsonError&) {
      options.set(name, value);
    }
  }
  return options;
}

// The same file under two keys: the second would replace the first.
void refuse_shared_outputs(const std::vector<PrepareRequest>& requests) {
  std::vector<std::pair<fs::path, std::string>> files;
  for (const PrepareRequest& request : requests) {
    for (const auto& [path, key] : {std::pair(request.output, format("the records of {}", request.name)), std::pair(request.held_out_output, std::string("the held-out records"))}) {
      if (path.empty()) {
        continue;
      }
      const fs::path known = fs::weakly_canonical(path);
      for (const auto& [other, other_key] : files) {
        if (other == known) {
          throw Error(ExitCode::kUsage, format("{} and {} have one file: {}", other_key, key, path), "data.train_data_path, data.eval_data_path and data.prompts_data_path have to differ");
        }
      }
      files.emplace_back(known, key);
    }
  }
}

// Records among the conversations: the next call would read them as rows.
void refuse_outputs_among_inputs(const std::vector<PrepareRequest>& requests) {
  for (const PrepareRequest& reader : requests) {
    const fs::path folder = fs::weakly_canonical(reader.input);
    std::error_code ignored;
    if (!fs::is_directory(folder, ignored)) {
      continue;
    }
    for (const PrepareRequest& writer : requests) {
      for (const fs::path& path : {writer.output, writer.held_out_output}) {
        if (path.extension() == ".jsonl" && fs::weakly_canonical(path).parent_path() == folder) {
          throw Error(ExitCode::kUsage, format("{} would lie in {}, whose *.jsonl are the conversations: the next call would read its records as rows", path, reader.input),
                      "name another folder for token records, or single files of conversations");
        }
      }
    }
  }
}

PrepareRequest request_of(const Plan& plan, const Job& job, std::int64_t workers) {
  const bool is_prompts = std::string(job.name) == "prompts";
  PrepareRequest request{.name = job.name, .input = plan.get<fs::path>(job.input_key), .output = plan.get<fs::path>(job.output_key)};
  if (request.output.empty()) {
    throw Error(ExitCode::kUsage, format("{} is set, but {} is not", job.input_key, job.output_key), format("set {}: the file of token records to make", job.output_key));
  }
  const auto target = plan.get<fs::path>("model.target_model_path");
  request.deduplicate = plan.get<bool>("data.deduplicate");
  request.max_skipped_share = plan.get<double>("data.max_skipped_share");
  request.split_seed = plan.get<std::int64_t>("data.split_seed");
  request.vocab_size = target_config(read_model_config(target), (target / "config.json").string()).vocab_size;
  request.workers = workers;
  request.stop_requested = is_stop_requested;
  request.text = {.script = library_folder() / "text_worker.py",
                  .target = target,
                  .template_path = plan.get<fs::path>("data.chat_template_path"),
                  .template_options = template_options(plan.get<std::vector<std::string>>("data.chat_template_options")),
                  .date = plan.get<std::string>("data.chat_template_date"),
                  .max_length = plan.get<std::int64_t>("data.max_length"),
                  .ignored = plan.get<std::vector<std::string>>("data.ignored_texts"),
                  .whole_texts = plan.get<std::string>("data.text_supervision") == "all",
                  .prompts = is_prompts,
                  .skip_special_text = plan.get<std::string>("data.special_token_text") == "skip"};
  request.mask = {.only_last_turn = plan.get<bool>("data.train_only_last_turn"),
                  .reasoning = plan.get<bool>("data.train_on_reasoning"),
                  .min_supervised_tokens = plan.get<std::int64_t>("data.min_supervised_tokens"),
                  .prompts = is_prompts};
  if (std::find(request.text.ignored.begin(), request.text.ignored.end(), "") != request.text.ignored.end()) {
    throw Error(ExitCode::kUsage, "data.ignored_texts has an empty text, which is everywhere and nowhere", "leave it out");
  }
  const auto share = plan.get<double>("data.held_out_share");
  if (share > 0 && std::string(job.name) == "train") {
    if (!plan.get<fs::path>("data.eval_conversations_path").empty()) {
      throw Error(ExitCode::kUsage, "data.held_out_share and data.eval_conversations_path are both set", "conversations to evaluate on come from one of them");
    }
    request.held_out_share = share;
    request.held_out_output = plan.get<fs::path>("data.eval_data_path");
    if (request.held_out_output.empty()) {
      throw Error(ExitCode::kUsage, format("data.held_out_share = {}, but data.eval_data_path is not set", share), "set data.eval_data_path: the file of held-out token records to make");
    }
  }
  return request;
}

void print(const char* name, const Json& report) {
  std::printf("%s: %lld rows", name, static_cast<long long>(report.at("rows").as_int()));
  for (const Json& output : report.at("outputs").items()) {
    const std::int64_t tokens = output.at("tokens").as_int();
    std::printf("\n  %s: %lld records, %lld tokens, %lld supervised (%lld %%)", output.at("path").as_string().c_str(),
                static_cast<long long>(output.at("records").as_int()), static_cast<long long>(tokens), static_cast<long long>(output.at("supervised").as_int()),
                static_cast<long long>(tokens > 0 ? 100 * output.at("supervised").as_int() / tokens : 0));
  }
  const RowCounts counts = RowCounts::from_json(report);
  if (counts.skipped_rows() > 0) std::printf("\n  skipped %lld rows%s", static_cast<long long>(counts.skipped_rows()), counts.table().c_str());
  if (counts.cut > 0) std::printf("\n  cut to data.max_length: %lld", static_cast<long long>(counts.cut));
  std::printf("%s\n", counts.notes_table().c_str());
}

}  // namespace

ExitCode run_prepare(const Command& command) {
  RunSession session(command);
  if (!session.plan(true)) {
    return session.code();
  }
  const Plan& plan = session.resolved();
  std::vector<PrepareRequest> requests;
  for (const Job& job : kJobs) {
    if (!plan.get<fs::path>(job.input_key).empty()) {
      requests.push_back(request_of(plan, job, command.workers));
    }
  }
  if (requests.empty()) {
    throw Error(ExitCode::kUsage, "the recipe names no conversations to prepare",
                "set data.train_conversations_path to a JSONL file of chat records and data.train_data_path to the file of token records to make");
  }
  refuse_shared_outputs(requests);
  refuse_outputs_among_inputs(requests);
  Json out = Json::object();
  for (const PrepareRequest& request : requests) {
    log_info("prepare ({}): {} -> {}", request.name, request.input, request.output);
    const PrepareResult result = prepare(request);
    if (result.interrupted) {
      return ExitCode::kInterrupted;
    }
    if (!result.was_finished) {
      log_info("prepare ({}): {} MB in {}, {} MB/s", request.name, format_fixed(static_cast<double>(result.bytes_read) / 1e6, 2), human_duration(result.seconds),
               format_fixed(static_cast<double>(result.bytes_read) / std::max(result.seconds, 1e-9) / 1e6, 2));
    }
    if (command.json) {
      Json report = result.report;
      report.set("was_finished", result.was_finished);
      out.set(request.name, std::move(report));
    } else {
      print(request.name.c_str(), result.report);
    }
  }
  if (command.json) {
    std::puts(out.dump(2).c_str());
  }
  return ExitCode::kOk;
}

}  // namespace sf
