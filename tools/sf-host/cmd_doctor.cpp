// sf-host doctor: is everything there that a run needs? Plugins, engine, device, disk; with a recipe also the
// plan, target and features.
#include <cstdio>
#include <system_error>
#include <vector>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
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
  auto target = plan.get<fs::path>("model.target_model_path");
  bool has_weights = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(target)) {
    has_weights = has_weights || entry.path().extension() == ".safetensors";
  }
  out.push_back({"target", has_weights,
                 has_weights ? target.string() : format("\"{}\" has no .safetensors file", target),
                 ExitCode::kData});
  for (const char* key : {"data.train_data_path", "data.eval_data_path", "data.hidden_states_path",
                          "data.eval_hidden_states_path"}) {
    auto path = plan.get<fs::path>(key);
    std::error_code ignored;
    if (!path.empty()) {
      bool exists = fs::exists(path, ignored);
      bool is_made_by_capture = std::string_view(key).find("hidden_states") != std::string_view::npos;
      out.push_back({key, exists || is_made_by_capture,
                     exists               ? path.string()
                     : is_made_by_capture ? format("{} is not there yet; sf-host capture makes it", path)
                                          : format("\"{}\" does not exist", path),
                     ExitCode::kData});
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
