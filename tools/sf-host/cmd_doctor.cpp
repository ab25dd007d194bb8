// sf-host doctor: is everything there that a run needs? Plugins, engine, device, disk; with a recipe also the
// plan, target and features.
#include <cstdio>
#include <functional>
#include <system_error>
#include <vector>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/data/inspect.hpp"
#include "core/plan/print.hpp"
#include "tools/sf-host/run_session.hpp"

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
  RunSession session(command);
  if (!session.plan(true)) {
    out.push_back({"plan", false, "refused; the reasons are above", session.code()});
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

}  // namespace

ExitCode run_doctor(const Command& command) {
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

}  // namespace sf
