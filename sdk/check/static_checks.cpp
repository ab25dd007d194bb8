// What the file itself says. Nothing of it is executed.
#include <algorithm>
#include <set>
#include <string_view>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "sdk/check/check.hpp"

namespace sf::check {
namespace {

// Problems that judging the file has found, of these ids.
Outcome problems_of(const Candidate& subject, const std::vector<std::string_view>& ids) {
  std::string text;
  for (const Diagnostic& problem : subject.file.problems.all()) {
    if (std::find(ids.begin(), ids.end(), problem.id) != ids.end()) {
      text += (text.empty() ? "" : "; ") + problem.place.text() + (problem.place.source.empty() ? "" : ": ") + problem.message;
    }
  }
  return text.empty() ? passed() : failed(text);
}

// Only after static/note and static/manifest can the others be asked.
Outcome needs_manifest(const Candidate& subject, const std::function<Outcome(const Manifest&)>& check) {
  return subject.file.manifest ? check(*subject.file.manifest) : skipped("there is no readable manifest");
}

Outcome with_elf(const Candidate& subject, const std::function<Outcome(const ElfFile&)>& check) {
  ElfProblem problem;
  const std::optional<ElfFile> elf = read_elf(subject.file.path, problem);
  return elf ? check(*elf) : skipped("it is no shared library");
}

Outcome check_options(const Manifest& manifest) {
  std::vector<std::string> wrong;
  if (manifest.summary.size() < 10) {
    wrong.emplace_back("the summary says nothing");
  }
  for (const Option& option : manifest.options) {
    if (option.help.size() < 8) {
      wrong.push_back(format("option {} has no help that helps", option.name));
    } else if (option.help.ends_with('.')) {
      wrong.push_back(format("help of option {} ends in a period; it is one sentence, lower case, without", option.name));
    }
  }
  return wrong.empty() ? passed() : failed(join(wrong, "; "));
}

// Keys that a rule speaks of: the plugin's own, the host's, facts, the model's numbers, or another plugin's, which may not be there.
Outcome check_rules_of(const Manifest& manifest) {
  std::vector<std::string> wrong, foreign;
  const auto knows = [](const std::vector<Option>& options, const std::string& key) {
    return std::any_of(options.begin(), options.end(), [&](const Option& option) { return option.key == key; });
  };
  for (const Rule& rule : manifest.rules) {
    std::vector<Condition> all = rule.when;
    all.insert(all.end(), rule.requirements.begin(), rule.requirements.end());
    for (const Condition& condition : all) {
      for (const std::string& key : {condition.subject == Subject::key ? condition.name : std::string(), condition.reference}) {
        if (key.empty() || key.starts_with("fact.") || knows(manifest.options, key) || knows(host_manifest().options, key)) {
          continue;
        }
        if (key.starts_with("plugin.")) {
          foreign.push_back(format("{} speaks of {}", rule.id, key));
        } else if (!key.starts_with("model.")) {
          wrong.push_back(format("rule {} speaks of {}, which neither it nor the host has", rule.id, key));
        }
      }
    }
    if (!rule.id.starts_with(manifest.name + "/") && rule.id.find('/') == std::string::npos && rule.id.size() > 4) {
      wrong.push_back(format("rule id \"{}\" does not begin with \"{}/\"", rule.id, manifest.name));
    }
  }
  for (const std::string& key : manifest.claims) {
    if (!knows(host_manifest().options, key)) {
      wrong.push_back(format("it claims {}, which the host does not have", key));
    }
  }
  return !wrong.empty() ? failed(join(wrong, "; ")) : passed(foreign.empty() ? "" : "of another plugin: " + join(foreign, ", "));
}

Outcome check_libraries(const Candidate& subject, const ElfFile& elf) {
  Outcome outcome = problems_of(subject, {"plugin/own-nccl", "plugin/missing-library"});
  std::vector<std::string> wrong;
  if (outcome.verdict == Verdict::failed) {
    wrong.push_back(outcome.text);
  }
  const auto needs = [&](std::string_view name) {
    return std::any_of(elf.needed.begin(), elf.needed.end(), [&](const std::string& library) { return library.starts_with(name); });
  };
  const MappedFile file(subject.file.path, ExitCode::kPlugin);
  if (file.text().find("N6spdlog") != std::string_view::npos || needs("libspdlog")) {
    wrong.emplace_back("spdlog is in it: log through the host");
  }
  // Not needing the shared one proves nothing: a linker leaves it out when LibTorch's libraries already give every symbol that is used. A copy inside has this text.
  if (subject.file.build && subject.file.build->tier == SF_TIER_TORCH_CXX && !needs("libstdc++") &&
      file.text().find("terminate called after throwing an instance of") != std::string_view::npos) {
    wrong.emplace_back("it has a libstdc++ of its own: exceptions and containers of LibTorch would be another's; link without -static-libstdc++");
  }
  if (file.text().find(".nv_fatbin") != std::string_view::npos && !needs("libcudart")) {
    wrong.emplace_back("it has CUDA code and a CUDA runtime of its own; link libcudart.so (nvcc -cudart=shared)");
  }
  if (needs("libcuda.so")) {
    wrong.emplace_back("it is linked with libcuda, which machines without a GPU do not have");
  }
  return wrong.empty() ? passed() : failed(join(wrong, "; "));
}

}  // namespace

std::vector<Check> static_checks() {
  return {
      {"static/note", "the file is a shared library of this machine with a whole build note",
       [](const Candidate& s) { return problems_of(s, {"plugin/not-readable", "plugin/not-elf", "plugin/wrong-machine", "plugin/no-note"}); }},
      {"static/fits", "it was built with this SDK, and for the LibTorch, compiler ABI and flags of this host",
       [](const Candidate& s) {
         return s.file.build ? problems_of(s, {"plugin/abi", "plugin/torch-version", "plugin/torch-variant", "plugin/cxx-abi", "plugin/debug-stl",
                                               "plugin/sanitizer", "plugin/cuda-major"})
                             : skipped("there is no build note");
       }},
      {"static/manifest", "the manifest is there, parses, and has no unknown keys", [](const Candidate& s) { return problems_of(s, {"plugin/bad-manifest"}); }},
      {"static/agree", "note, manifest and file say the same name, version and kind",
       [](const Candidate& s) {
         const Outcome outcome = problems_of(s, {"plugin/note-disagrees"});
         return outcome.verdict == Verdict::passed && s.file.build && s.file.stem != s.file.name()
                    ? failed(format("the file is called {}.so, the plugin \"{}\"", s.file.stem, s.file.name()))
                    : outcome;
       }},
      {"static/options", "the summary and every option's help say something",
       [](const Candidate& s) { return needs_manifest(s, check_options); }},
      {"static/rules", "rules and claims speak of keys that exist", [](const Candidate& s) { return needs_manifest(s, check_rules_of); }},
      {"static/exports", "sf_plugin_entry_v1 is the only exported symbol",
       [](const Candidate& s) {
         return with_elf(s, [](const ElfFile& elf) {
           return elf.exported == std::vector<std::string>{"sf_plugin_entry_v1"}
                      ? passed()
                      : failed(format("it exports {} symbols: {}", elf.exported.size(),
                                      join({elf.exported.begin(), elf.exported.begin() + std::min<std::ptrdiff_t>(5, std::ssize(elf.exported))}, ", ")));
         });
       }},
      {"static/stays-loaded", "it is linked with -z nodelete",
       [](const Candidate& s) { return with_elf(s, [](const ElfFile& elf) { return elf.stays_loaded ? passed() : failed("link it with -Wl,-z,nodelete"); }); }},
      {"static/search-path", "it has no search path of its own but $ORIGIN",
       [](const Candidate& s) {
         return with_elf(s, [](const ElfFile& elf) {
           for (const std::string& folder : elf.run_path) {
             if (!folder.starts_with("$ORIGIN")) {
               return failed(format("its search path has {}: LibTorch is the host's, found by its name", folder));
             }
           }
           return passed();
         });
       }},
      {"static/libraries", "it brings no NCCL, spdlog, libstdc++ or CUDA runtime of its own, and what it needs is installed",
       [](const Candidate& s) { return with_elf(s, [&](const ElfFile& elf) { return check_libraries(s, elf); }); }},
  };
}

}  // namespace sf::check
