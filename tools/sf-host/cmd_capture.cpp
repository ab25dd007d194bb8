// sf-host capture: the target's hidden states for the recipe's token records.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <vector>

#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/plan/plan.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {
namespace {

// What the other algorithms of --for read: each is planned, opened and asked as it would be for a run of its own.
bool ask_readers(const Command& command, const std::filesystem::path& target, std::vector<CaptureRead>& reads, ExitCode& code) {
  std::size_t begin = 0;
  while (begin <= command.readers.size()) {
    const std::size_t comma = std::min(command.readers.find(',', begin), command.readers.size());
    const std::string reader = command.readers.substr(begin, comma - begin);
    begin = comma + 1;
    if (reader.empty()) {
      throw Error(ExitCode::kUsage, format("--for is \"{}\", names with commas between them expected", command.readers),
                  "for example --for eagle3,dflash2,dspark");
    }
    const bool is_recipe = reader.ends_with(".toml");
    Command other = command;
    if (is_recipe) {
      other.positional = {reader};
      other.overrides.clear();  // they are the first recipe's
    }
    log_info("--for {}: planned, and asked what it reads", reader);  // what is wrong with it stands below this
    RunSession session(other, is_recipe ? std::string() : reader);
    if (!session.plan(true) || !session.open(false)) {
      code = session.code();
      return false;
    }
    std::error_code ignored;
    const auto its_target = session.resolved().get<std::filesystem::path>("model.target_model_path");
    if (!std::filesystem::equivalent(its_target, target, ignored)) {
      throw Error(ExitCode::kUsage, format("--for {}: its target is '{}', the capture's '{}'", reader, its_target.string(), target.string()),
                  "one capture is of one target; capture for this recipe by itself");
    }
    for (CaptureRead& read : session.engine().reads(session.context())) {
      reads.push_back(std::move(read));
    }
    session.close();
  }
  return true;
}

}  // namespace

ExitCode run_capture(const Command& command) {
  if (command.split != "train" && command.split != "eval" && command.split != "all") {
    throw Error(ExitCode::kUsage, format("--split is \"{}\", expected train, eval or all", command.split),
                "all captures what the recipe names");
  }
  RunSession session(command);
  if (!session.plan(true) || !session.open(true)) {
    return session.code();
  }
  std::vector<CaptureRead> reads;
  if (!command.readers.empty()) {
    ExitCode code = ExitCode::kOk;
    if (!ask_readers(command, session.resolved().get<std::filesystem::path>("model.target_model_path"), reads, code)) {
      return code;
    }
  }
  Json summary = session.engine().capture(session.context(), {.split = command.split, .reads = reads});
  if (command.json) {
    std::puts(summary.dump(2).c_str());
  }
  const Json* interrupted = summary.find("interrupted");
  bool is_interrupted = interrupted != nullptr && interrupted->is_bool() && interrupted->as_bool();
  session.close();
  return is_interrupted ? ExitCode::kInterrupted : ExitCode::kOk;
}

}  // namespace sf
