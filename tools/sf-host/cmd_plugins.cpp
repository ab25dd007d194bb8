// sf-host plugins: what is installed and whether it fits; with a name, all about one plugin. Opens nothing.
#include <algorithm>
#include <cstdio>

#include "core/base/text.hpp"
#include "core/plan/print.hpp"
#include "core/recipe/render.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {
namespace {

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

const char* tier_name(const PluginFile& file) {
  return !file.build                             ? "?"
         : file.build->tier == SF_TIER_C         ? "c"
         : file.build->tier == SF_TIER_TORCH_CXX ? "torch_cxx"
                                                 : "?";
}

Json file_json(const PluginFile& file) {
  Json out = Json::object();
  out.set("name", file.name());
  out.set("path", file.path.string());
  out.set("origin", file.origin);
  out.set("tier", tier_name(file));
  out.set("fits", file.fits());
  out.set("manifest", file.manifest ? manifest_json(*file.manifest) : Json());
  out.set("problems", diagnostics_json(file.problems));
  return out;
}

std::string table_text(const Catalog& catalog) {
  std::vector<std::vector<std::string>> rows = {
      {"name", "kind", "version", "tier", "fits", "provides", "summary"}};
  for (const PluginFile& file : catalog.files()) {
    const Manifest* manifest = file.manifest ? &*file.manifest : nullptr;
    rows.push_back({file.name(), manifest != nullptr ? manifest->kind : "?",
                    manifest != nullptr ? manifest->version : "?", tier_name(file),
                    file.fits() ? "yes" : "no", manifest != nullptr ? join(manifest->provides, ", ") : "",
                    manifest != nullptr ? manifest->summary : ""});
  }
  std::string out;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      std::size_t width = 0;
      for (const auto& row : rows) {
        width = std::max(width, row[c].size());
      }
      line += c + 1 < rows[r].size() ? padded(rows[r][c], width + 2) : rows[r][c];
    }
    out += std::string(line, 0, line.find_last_not_of(' ') + 1) + "\n";
    if (r > 0) {
      for (const Diagnostic& problem : catalog.files()[r - 1].problems.all()) {
        out += "    " + problem.message + "\n";
      }
    }
  }
  if (catalog.files().empty()) {
    out = "no plugins are installed\n";
  }
  for (const PluginDir& dir : catalog.dirs()) {
    out += format("looked in {} ({})\n", dir.path, dir.origin);
  }
  return out;
}

std::string detail_text(const PluginFile& file) {
  std::string out = format("{}\n  file      {}\n  tier      {}\n  fits      {}\n", file.name(),
                           file.describe(), tier_name(file), file.fits() ? "yes" : "no");
  if (file.manifest) {
    const Manifest& manifest = *file.manifest;
    out += format("  kind      {}\n  summary   {}\n", manifest.kind, manifest.summary);
    for (const auto& [name, list] :
         {std::pair("provides", &manifest.provides), std::pair("wants", &manifest.wants),
          std::pair("conflicts", &manifest.conflicts)}) {
      if (!list->empty()) {
        out += format("  {}{}\n", padded(name, 10), join(*list, ", "));
      }
    }
    if (!manifest.reads.empty()) {
      out += "reads from each record\n";
      for (const ReadTensor& read : manifest.reads) {
        out += format("  {}  {} [{}]  {}\n", read.name, read.dtype, join(read.shape, ", "), read.help);
      }
    }
    if (!manifest.options.empty()) {
      out += "options\n" + options_help(manifest.options, 110);
    }
    if (!manifest.rules.empty()) {
      out += "rules\n";
      for (const Rule& rule : manifest.rules) {
        out += format("  {}  {}: {}\n      fix: {}\n", rule.id,
                      rule.action == RuleAction::warn ? "warning" : rule.action == RuleAction::at_run ? "while running" : "error", rule.message, rule.fix);
      }
    }
  }
  return out + file.problems.text();
}

}  // namespace

ExitCode run_plugins(const Command& command) {
  Diagnostics problems;
  Catalog catalog(search_request(command), command.plugins, host_build(), problems);
  if (problems.has_errors()) {
    print_problems(command, problems, ExitCode::kPlugin);
    return ExitCode::kPlugin;
  }
  if (command.positional.empty()) {
    if (command.json) {
      Json out = Json::array();
      for (const PluginFile& file : catalog.files()) {
        out.push_back(file_json(file));
      }
      std::puts(out.dump(2).c_str());
    } else {
      std::fputs(table_text(catalog).c_str(), stdout);
    }
    return ExitCode::kOk;
  }
  for (const PluginFile& file : catalog.files()) {
    if (file.name() == command.positional[0]) {
      std::fputs(command.json ? (file_json(file).dump(2) + "\n").c_str() : detail_text(file).c_str(), stdout);
      return file.fits() ? ExitCode::kOk : ExitCode::kPlugin;
    }
  }
  (void)catalog.find(command.positional[0], {}, problems);
  print_problems(command, problems, ExitCode::kPlugin);
  return ExitCode::kPlugin;
}

}  // namespace sf
