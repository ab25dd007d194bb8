// The verb `generate`: answers of the target as token records, resumable and whole or not there.
//
// While it works OUTPUT.partial holds a line that says what is being made and one for each finished answer, in the order in which they end; a stop or a
// kill costs the answers in work. At the end the records are put in the order of the prompts and OUTPUT appears in one move, with OUTPUT.report.json.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/data/weight_folder.hpp"
#include "core/model/generate.hpp"
#include "core/model/memory_bandwidth.hpp"
#include "core/plan/plan.hpp"
#include "core/train/decoding_setup.hpp"
#include "core/train/graphs.hpp"
#include "core/train/session.hpp"
#include "core/train/verbs.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPartialFormat = "sf-generate-partial";

// One answer as a line of OUTPUT; "index" only while the file is in work.
Json record_of(const Prompt& prompt, const Answer& answer) {
  std::vector<int64_t> ids = prompt.ids, mask(prompt.ids.size(), 0);
  ids.insert(ids.end(), answer.ids.begin(), answer.ids.end());
  mask.resize(ids.size(), 1);
  Json record = Json::object();
  record.set("id", prompt.id).set("category", prompt.category).set("stop", name_of(answer.reason));
  record.set("input_ids", Json::array_of(ids)).set("loss_mask", Json::array_of(mask));
  return record;
}

// What is asked, so that a partial file of another call is never gone on with.
std::string fingerprint_of(const GenerateArguments& arguments, const std::vector<Prompt>& prompts, const std::vector<int64_t>& stop_tokens,
                           const std::string& target, int64_t context) {
  Sha256 sum;
  sum.add(format("generate 2;{};{};{};{};{};{};{};{};", target, arguments.max_new_tokens, context, arguments.temperature, arguments.top_p, arguments.top_k,
                 arguments.seed, stop_tokens));
  for (const Prompt& prompt : prompts) sum.add(format("{} {} {};", prompt.id, prompt.category, prompt.ids));
  return sum.hex();
}

// The answers of an earlier call that was stopped.
class PartialFile {
 public:
  PartialFile(fs::path path, const std::string& fingerprint, size_t prompts) : path_(std::move(path)) {
    std::error_code ignored;
    std::string kept;
    if (fs::exists(path_, ignored)) {
      const std::string text = read_file(path_);
      if (!text.empty() && !is_partial(text.substr(0, text.find('\n')))) {  // its first line is written with the file, never torn
        throw Error(ExitCode::kData, format("{} is there, and is none of sf-host generate's", path_), "move it elsewhere, or give another --output");
      }
      size_t begin = 0;
      for (size_t end = text.find('\n'); end != std::string::npos; begin = end + 1, end = text.find('\n', begin)) {
        if (!take(text.substr(begin, end - begin), fingerprint, prompts)) break;  // torn by a kill: this line and what follows are made again
        kept.append(text, begin, end + 1 - begin);
      }
    }
    if (kept.empty()) {
      kept = Json::object({{"format", kPartialFormat}, {"fingerprint", fingerprint}}).dump() + "\n";
    }
    atomic_write(path_, kept);
    file_.open(path_, std::ios::app);
    require();
  }

  void add(int64_t index, Json record) {
    record.set("index", index);
    file_ << record.dump() << '\n' << std::flush;
    require();
    record.remove("index");
    records_.emplace(index, std::move(record));
  }
  [[nodiscard]] const std::map<int64_t, Json>& records() const { return records_; }

 private:
  static bool is_partial(const std::string& line) {
    try {
      const Json header = Json::parse(line);
      const Json* name = header.find("format");
      return name != nullptr && *name == Json(kPartialFormat);
    } catch (const JsonError&) {
      return false;
    }
  }
  bool take(const std::string& line, const std::string& fingerprint, size_t prompts) {
    Json record;
    try {
      record = Json::parse(line);
      if (!has_header_) {
        has_header_ = true;
        if (record.at("fingerprint").as_string() == fingerprint) return true;
      } else {
        const int64_t index = record.at("index").as_int();
        (void)record.at("input_ids").items();
        if (index < 0 || index >= static_cast<int64_t>(prompts)) return false;
        record.remove("index");
        records_.emplace(index, std::move(record));
        return true;
      }
    } catch (const JsonError&) {
      return false;
    }
    throw Error(ExitCode::kData, format("{} holds answers of another call: other prompts, target or settings", path_),
                "give another --output, or remove that file to start anew");
  }
  void require() {
    if (!file_) throw Error(ExitCode::kData, format("{} can't be written", path_), "free some space on this disk, or choose another --output; what is there is kept");
  }

  fs::path path_;
  std::ofstream file_;
  bool has_header_ = false;
  std::map<int64_t, Json> records_;
};

Json count_reasons(const std::map<int64_t, Json>& records) {
  std::map<std::string, int64_t> counts;
  for (const auto& [index, record] : records) ++counts[record.at("stop").as_string()];
  Json reasons = Json::object();
  for (const auto& [name, count] : counts) reasons.set(name, count);
  return reasons;
}

}  // namespace

TargetIdentity identify_target(const Plan& plan) {
  const auto folder = plan.get<fs::path>("model.target_model_path");
  const Json json = read_model_config(folder);
  return {.config = target_config(json, (folder / "config.json").string()), .fingerprint = target_fingerprint(json, WeightFolder::open(folder))};
}

Target load_whole_target(const Plan& plan, const TargetConfig& config) {
  const at::Device device = open_device(plan.get<std::string>("device"));
  return Target::load({.folder = plan.get<fs::path>("model.target_model_path"),
                       .dtype = compute_type(config, device),
                       .device = device,
                       .head_needed = true,
                       .embedding_key = plan.get<std::string>("model.embedding_key"),
                       .lm_head_key = plan.get<std::string>("model.lm_head_key")});
}

std::vector<int64_t> stop_tokens_from(const std::string& text, const Plan& plan, int64_t vocab_size) {
  if (text == "none") return {};
  if (text.empty()) return stop_tokens_of(plan.get<fs::path>("model.target_model_path"));
  std::vector<int64_t> tokens;
  for (const std::string& part : split(text, ',')) {
    const bool is_number = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    if (!is_number || std::stoll(part) >= vocab_size) {
      throw Error(ExitCode::kUsage, format("--stop-tokens: \"{}\" is no token of the target, which has 0 to {}", part, vocab_size - 1), "for example --stop-tokens 2,5, or none");
    }
    tokens.push_back(std::stoll(part));
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

const Drafter& drafter_of(const EngineContext& context) {
  for (const LoadedPlugin& plugin : context.plugins) {
    if (plugin.kind != SF_KIND_ALGORITHM) continue;
    const void* found = plugin.entry->get_interface(plugin.instance, kDrafterInterface);
    if (found == nullptr) {
      throw Error(ExitCode::kPlugin, format("plugin '{}' offers no \"{}\": its drafts can be trained and exported, not decoded with here", plugin.name, kDrafterInterface),
                  "implement sf/drafter.hpp in it; sf-host eval without --speculative and sf-host export --no-check need nothing of it");
    }
    return *static_cast<const Drafter*>(found);
  }
  throw Error(ExitCode::kPlugin, "no algorithm plugin is loaded", "name one in the recipe");
}

int64_t trained_tokens(const Description& description) {
  return description.drafted_tokens > 0 ? description.drafted_tokens : description.rows_per_slot - 1;
}

Json generate_answers(const EngineContext& context, const GenerateArguments& arguments) {
  const Plan& plan = *context.plan;
  const TargetIdentity identity = identify_target(plan);
  const fs::path prompts_path = arguments.prompts.empty() ? plan.get<fs::path>("data.train_data_path") : fs::path(arguments.prompts);
  if (prompts_path.empty()) {
    throw Error(ExitCode::kUsage, "no prompts are named", "give --prompts FILE, or set data.train_data_path");
  }
  const int64_t context_tokens = identity.config.max_position_embeddings;
  const std::vector<Prompt> prompts = read_prompts(prompts_path, identity.config.vocab_size, context_tokens, arguments.max_prompts);
  const std::vector<int64_t> stop_tokens = stop_tokens_from(arguments.stop_tokens, plan, identity.config.vocab_size);
  const std::string fingerprint = fingerprint_of(arguments, prompts, stop_tokens, identity.fingerprint, context_tokens);

  const fs::path output = fs::absolute(arguments.output), report_path = output.string() + ".report.json";
  std::error_code ignored;
  if (fs::is_directory(output, ignored) || !fs::is_directory(output.parent_path(), ignored)) {
    throw Error(ExitCode::kUsage, format("--output {}: {}", output, fs::is_directory(output, ignored) ? "is a folder" : "its folder does not exist"),
                "name a file in a folder that exists");
  }
  if (fs::exists(output, ignored)) {
    if (fs::exists(report_path, ignored)) {
      Json report = Json::parse(read_file(report_path), report_path.string());
      const Json *made = report.find("fingerprint"), *sum = report.find("sha256");
      if (made != nullptr && *made == Json(fingerprint) && (sum == nullptr || *sum == Json(sha256_file(output)))) {
        log_info("{} has these answers already", output);
        return report.set("was_finished", true);
      }
    }
    throw Error(ExitCode::kUsage, format("{} exists and holds something else", output), "give another --output, or remove it");
  }

  PartialFile partial(output.string() + ".partial", fingerprint, prompts.size());
  std::vector<int64_t> which;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (partial.records().count(static_cast<int64_t>(i)) == 0) which.push_back(static_cast<int64_t>(i));
  }
  const Target target = load_whole_target(plan, identity.config);
  log_info("generate: {} of {} prompts to answer, batch {}, {}, weights {}", which.size(), prompts.size(), arguments.batch_size,
           arguments.temperature == 0 ? std::string("greedy") : format("temperature {} top-p {} top-k {} seed {}", arguments.temperature, arguments.top_p, arguments.top_k, arguments.seed),
           human_bytes(static_cast<uint64_t>(target.bytes_read())));
  const auto start = std::chrono::steady_clock::now();
  auto told = start;
  GenerationOptions options;
  options.sampling = {.temperature = arguments.temperature, .top_p = arguments.top_p, .top_k = arguments.top_k, .seed = static_cast<uint64_t>(arguments.seed)};
  options.batch_size = arguments.batch_size;
  options.max_new_tokens = arguments.max_new_tokens;
  options.context_tokens = context_tokens;
  options.stop_tokens = stop_tokens;
  options.finished = [&](const Answer& answer) { partial.add(answer.prompt, record_of(prompts[static_cast<size_t>(answer.prompt)], answer)); };
  options.stop_requested = context.stop_requested;
  options.progress = [&](int64_t tokens, int64_t answers) {
    const auto now = std::chrono::steady_clock::now();
    if (std::chrono::duration<double>(now - told).count() < 5) return;
    told = now;
    const double rate = static_cast<double>(tokens) / std::chrono::duration<double>(now - start).count();
    log_info("generate  {} / {} answers  {} tokens  {} tok/s", answers, which.size(), human_count(static_cast<uint64_t>(tokens)), human_count(static_cast<uint64_t>(rate)));
  };
  std::shared_ptr<GraphRecorder> recorder;  // outlives what it recorded
  std::vector<std::shared_ptr<RecordedGraph>> graphs;
  if (target.device().is_cuda()) {
    recorder = open_graph_recorder(target.device());
    options.on_device = true;
    options.record = [&](const std::function<void()>& work) -> std::function<void()> {
      std::vector<at::Tensor> made;
      const std::function<std::vector<at::Tensor>()> body = [&work] {
        work();
        return std::vector<at::Tensor>();
      };
      graphs.push_back(recorder->record(body, made));
      return [graph = graphs.back()] { graph->replay(); };
    };
  }
  // Neighbours take their share of a CPU's memory and give it back: looked at before and after, and the better counts.
  const double bandwidth_before = target.device().is_cpu() && !which.empty() ? memory_bandwidth(target.device()) : 0;
  const GenerationTimes times = generate(target, prompts, which, options);

  Json report = Json::object();
  report.set("output", output.string()).set("prompts", static_cast<int64_t>(prompts.size())).set("answers", static_cast<int64_t>(partial.records().size()));
  report.set("stop_reasons", count_reasons(partial.records())).set("fingerprint", fingerprint).set("target_fingerprint", identity.fingerprint);
  report.set("tokens_generated", times.tokens).set("prompt_tokens", times.prompt_tokens);
  const double rate = static_cast<double>(times.decode_tokens) / std::max(times.decode_seconds, 1e-9);
  report.set("decode_tokens_per_second", rate).set("decode_passes_per_second", static_cast<double>(times.decode_passes) / std::max(times.decode_seconds, 1e-9));
  report.set("weight_bytes_per_pass", target.bytes_read()).set("prefill_seconds", times.prefill_seconds).set("decode_seconds", times.decode_seconds);
  std::string of_bound;
  if (times.decode_passes > 0) {
    // Every pass has to read all weights, and of each sequence what it has seen.
    const double read = std::max(bandwidth_before, memory_bandwidth(target.device()));
    const double bytes = static_cast<double>(times.decode_passes) * static_cast<double>(target.bytes_read()) + static_cast<double>(times.cache_bytes);
    // Reads that were disturbed more than decoding was say less than decoding itself: memory is at least as fast as what went through it.
    const double moved = bytes / std::max(times.decode_seconds, 1e-9), bandwidth = std::max(read, moved);
    const char* const reads = target.device().is_cpu() ? "the best of 24 reads of 256 MiB by the same threads, half of them before and half after" : "the best of 12 rounds of copies of 1 GiB";
    const double bound = static_cast<double>(times.decode_tokens) / (bytes / bandwidth), share = rate / bound;
    report.set("memory_bandwidth", bandwidth).set("memory_bandwidth_is", moved > read ? format("what decoding moved, more than {}: {} GB/s", reads, format_fixed(read / 1e9, 1)) : std::string(reads));
    report.set("cache_bytes_read", times.cache_bytes).set("bandwidth_tokens_per_second", bound).set("share_of_bandwidth", share);
    of_bound = format(", {} % of the {} that {} GB/s of memory bandwidth allow", format_fixed(100 * share, 1), human_count(static_cast<uint64_t>(bound)), format_fixed(bandwidth / 1e9, 1));
  }
  if (times.interrupted) {
    log_warn("stopped with {} of {} answers; the same call goes on from them", partial.records().size(), prompts.size());
    return report.set("interrupted", true);
  }
  std::string text;
  for (const auto& [index, record] : partial.records()) text += record.dump() + "\n";
  report.set("sha256", sha256(text));
  atomic_write(report_path, report.dump(2) + "\n");
  atomic_write(output, text);
  fs::remove(output.string() + ".partial", ignored);
  log_info("generated {} answers into '{}': {} tokens, {} tok/s while decoding{}; stops: {}", partial.records().size(), output,
           human_count(static_cast<uint64_t>(times.tokens)), human_count(static_cast<uint64_t>(rate)), of_bound, report.at("stop_reasons").dump());
  return report;
}

}  // namespace sf
