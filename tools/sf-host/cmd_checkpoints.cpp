// sf-host checkpoints: what a run has on disk, for people and scripts; opens no plugin and no engine.
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>

#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/checkpoint/inspect.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

void print_json(const Json& json) { std::puts(json.dump(2).c_str()); }

std::string padded(std::string text, size_t width) {
  text.resize(std::max(text.size(), width), ' ');
  return text;
}

// A run's folder, from a folder or from the recipe of the run.
fs::path run_folder_of(const Command& command, const std::string& word) {
  if (!word.ends_with(".toml")) {
    return word;
  }
  Command recipe = command;
  recipe.positional = {word};
  RunSession session(recipe);
  if (!session.plan(false)) {
    throw RefusedRun(session.code());
  }
  return session.resolved().get<fs::path>("output_dir") / session.resolved().get<std::string>("run_id");
}

// One checkpoint: a step's folder, or a run's newest.
CheckpointReader checkpoint_of(const Command& command, const std::string& word) {
  auto reader = open_checkpoint(".", run_folder_of(command, word).string());
  if (!reader) {
    throw Error(ExitCode::kCheckpoint, format("{} holds no complete checkpoint", word), "sf-host checkpoints list says what is there");
  }
  return std::move(*reader);
}

Json list_json(const std::vector<ListedCheckpoint>& all) {
  Json json = Json::array();
  for (const ListedCheckpoint& listed : all) {
    json.push_back(to_json(listed));
  }
  return json;
}

void print_list(const std::vector<ListedCheckpoint>& all) {
  for (const ListedCheckpoint& listed : all) {
    const FoundCheckpoint& found = listed.found;
    const bool is_whole = found.state == FoundCheckpoint::State::complete;
    const std::string what = is_whole ? format("{}  {} rank{}{}", padded(human_bytes(listed.bytes), 10), listed.ranks, listed.ranks == 1 ? "" : "s",
                                               listed.sharding.empty() ? "" : " of " + listed.sharding)
                                      : found.state == FoundCheckpoint::State::damaged ? "damaged: " + found.why
                                                                                       : "unfinished: " + found.why;
    std::printf("%s  %s%s%s\n", padded(found.folder.filename().string(), 22).c_str(), what.c_str(), listed.is_latest ? "  latest" : "",
                listed.is_best ? "  best" : "");
  }
}

// A folder of runs is easily taken for one.
void print_no_checkpoint(const fs::path& folder) {
  std::vector<std::string> runs;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory() && !list_checkpoints(entry.path()).empty()) {
      runs.push_back(entry.path().string());
    }
  }
  std::sort(runs.begin(), runs.end());
  std::printf("no checkpoint in %s%s%s\n", folder.c_str(), runs.empty() ? "" : "; runs below it: ", join(runs, ", ").c_str());
}

void print_all(const fs::path& folder, const std::vector<ListedCheckpoint>& all) { all.empty() ? print_no_checkpoint(folder) : print_list(all); }

ExitCode list(const Command& command, const std::vector<std::string>& words) {
  const fs::path folder = run_folder_of(command, words.at(0));
  const auto all = list_run(folder, CheckpointReader::Verify::sizes);
  command.json ? print_json(list_json(all)) : print_all(folder, all);
  return ExitCode::kOk;
}

ExitCode inspect(const Command& command, const std::vector<std::string>& words) {
  const Json json = describe_checkpoint(checkpoint_of(command, words.at(0)));
  if (command.json) {
    print_json(json);
    return ExitCode::kOk;
  }
  for (const auto& [key, value] : json.entries()) {
    if (value.is_object()) {
      std::printf("%s\n", key.c_str());
      for (const auto& [name, inner] : value.entries()) {
        std::printf("  %s  %s\n", padded(name, 34).c_str(), inner.is_string() ? inner.as_string().c_str() : inner.dump().c_str());
      }
    } else {
      std::printf("%s  %s\n", padded(key, 22).c_str(), value.is_string() ? value.as_string().c_str() : value.dump().c_str());
    }
  }
  return ExitCode::kOk;
}

// Every byte. A step's folder alone, or all of a run; exit code 7 when one of them is damaged or none is complete.
ExitCode verify(const Command& command, const std::vector<std::string>& words) {
  const fs::path folder = run_folder_of(command, words.at(0));
  if (step_of_folder_name(fs::path(folder / ".").lexically_normal().parent_path().filename().string()) || fs::exists(folder / kMarkerFile)) {
    const CheckpointReader reader = CheckpointReader::open(folder, CheckpointReader::Verify::checksums);
    command.json ? print_json(Json::object({{"folder", folder.string()}, {"state", "complete"}, {"step", reader.index().step}}))
                 : static_cast<void>(std::printf("%s is whole\n", folder.c_str()));
    return ExitCode::kOk;
  }
  const auto all = list_run(folder, CheckpointReader::Verify::checksums);
  command.json ? print_json(list_json(all)) : print_all(folder, all);
  const auto count = [&](FoundCheckpoint::State state) {
    return std::count_if(all.begin(), all.end(), [&](const ListedCheckpoint& listed) { return listed.found.state == state; });
  };
  const auto whole = count(FoundCheckpoint::State::complete), damaged = count(FoundCheckpoint::State::damaged);
  if (!command.json && !all.empty()) {
    std::printf("every byte checked: %td whole, %td damaged\n", whole, damaged);
  }
  return damaged > 0 || whole == 0 ? ExitCode::kCheckpoint : ExitCode::kOk;
}

ExitCode diff(const Command& command, const std::vector<std::string>& words) {
  const CheckpointReader first = checkpoint_of(command, words.at(0)), second = checkpoint_of(command, words.at(1));
  const CheckpointDifference found = compare_checkpoints(first, second);
  if (command.json) {
    Json tensors = Json::array();
    for (const TensorDifference& tensor : found.tensors) {
      tensors.push_back(Json::object({{"name", tensor.name}, {"what", tensor.what}, {"elements", tensor.elements}, {"differing", tensor.differing},
                                      {"largest", tensor.largest}, {"mean", tensor.mean}}));
    }
    print_json(Json::object({{"values", Json::array_of(found.values)}, {"tensors", std::move(tensors)}, {"equal_tensors", found.equal_tensors}}));
    return ExitCode::kOk;
  }
  std::printf("first:  %s\nsecond: %s\n", first.folder().c_str(), second.folder().c_str());
  for (const std::string& value : found.values) {
    std::printf("  %s\n", value.c_str());
  }
  for (const TensorDifference& tensor : found.tensors) {
    std::printf("  %s: %s\n", tensor.name.c_str(), tensor.what.c_str());
  }
  std::printf("%lld tensors are equal, %zu differ\n", static_cast<long long>(found.equal_tensors), found.tensors.size());
  return ExitCode::kOk;
}

ExitCode prune(const Command& command, const std::vector<std::string>& words) {
  if (command.keep < 1 && !command.damaged) {
    throw Error(ExitCode::kUsage, "prune needs --keep N or --damaged, else it would delete nothing",
                "--keep 3 keeps the three newest, and the best one always; --dry-run shows what would go");
  }
  const fs::path folder = run_folder_of(command, words.at(0));
  (void)list_run(folder, CheckpointReader::Verify::sizes);  // a folder that is none is told
  const FolderLock lock(folder, ExitCode::kCheckpoint, "a process is training in this run folder",
                        "wait for it or stop it: it deletes by its own training.max_checkpoints");
  const std::vector<FoundCheckpoint> gone = prunable(folder, {.newest = command.keep, .every = command.keep_every}, command.damaged);
  Json json = Json::array();
  for (const FoundCheckpoint& found : gone) {
    if (!command.dry_run) {
      remove_folder(found.folder);
    }
    json.push_back(found.folder.string());
    if (!command.json) {
      std::printf("%s %s\n", command.dry_run ? "would delete" : "deleted", found.folder.c_str());
    }
  }
  if (command.json) {
    print_json(Json::object({{command.dry_run ? "would_delete" : "deleted", std::move(json)}}));
  } else if (gone.empty()) {
    std::puts("nothing to delete");
  }
  return ExitCode::kOk;
}

struct Action {
  const char* name;
  const char* arguments;
  size_t words;
  ExitCode (*run)(const Command&, const std::vector<std::string>&);
};
constexpr std::array<Action, 5> kActions = {{{"list", "RUN", 1, list},
                                             {"inspect", "CHECKPOINT | RUN", 1, inspect},
                                             {"verify", "CHECKPOINT | RUN", 1, verify},
                                             {"diff", "CHECKPOINT CHECKPOINT", 2, diff},
                                             {"prune", "RUN --keep N", 1, prune}}};

}  // namespace

ExitCode run_checkpoints(const Command& command) {
  std::vector<std::string> names;
  for (const Action& action : kActions) {
    names.emplace_back(action.name);
    if (!command.positional.empty() && command.positional[0] == action.name) {
      const std::vector<std::string> words(command.positional.begin() + 1, command.positional.end());
      if (words.size() != action.words) {
        throw Error(ExitCode::kUsage, format("checkpoints {} takes {} argument{}, found {}", action.name, action.words, action.words == 1 ? "" : "s", words.size()),
                    format("sf-host checkpoints {} {}", action.name, action.arguments));
      }
      return action.run(command, words);
    }
  }
  if (command.positional.size() == 1 && (fs::exists(command.positional[0]) || command.positional[0].ends_with(".toml"))) {
    return list(command, command.positional);
  }
  const std::string near = command.positional.empty() ? "" : did_you_mean(command.positional[0], names);
  throw Error(ExitCode::kUsage, command.positional.empty() ? "checkpoints needs to know what to do, and with which run"
                                                           : format("checkpoints knows no \"{}\"", command.positional[0]),
              near.empty() ? format("{}: sf-host checkpoints list runs/my-run", join(names, ", ")) : format("did you mean {}?", near));
}

}  // namespace sf
