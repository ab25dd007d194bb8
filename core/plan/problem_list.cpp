#include "core/plan/problem_list.hpp"

#include <array>

#include "core/base/text.hpp"

namespace sf {
namespace {

constexpr ExitCode kUsage = ExitCode::kUsage;
constexpr ExitCode kPlugin = ExitCode::kPlugin;

// clang-format off
constexpr std::array<ProblemKind, 56> kProblems = {{
    {"recipe/not-readable", kUsage, "the recipe or its base can't be read"},
    {"recipe/syntax", kUsage, "the recipe is not valid TOML"},
    {"recipe/include-cycle", kUsage, "a recipe includes itself, directly or through others"},
    {"recipe/bad-override", kUsage, "a --set is not of the form key=value"},
    {"recipe/unknown-key", kUsage, "no option of the host or of a plugin in the stack has this name"},
    {"recipe/moved-key", kUsage, "a key of the reference that has another name or place here"},
    {"recipe/missing", kUsage, "a required key is not given"},
    {"recipe/wrong-type", kUsage, "the value is of another type than the option"},
    {"recipe/bad-choice", kUsage, "the value is not one of the option's choices"},
    {"recipe/out-of-range", kUsage, "the number is outside the option's range"},
    {"recipe/bad-form", kUsage, "the text is not of the form that the option asks for"},
    {"recipe/bad-draft-config", kUsage, "model.draft_model_config is not there or is no JSON object"},
    {"draft/bad-config", kUsage, "a value of the draft's configuration, or one that it is made from, can't be used"},
    {"recipe/not-offered", kUsage, "an option for a plugin of the stack is set, and none of them acts on it"},
    {"recipe/renamed-key", kUsage, "a warning: the key still works under its old name"},
    {"recipe/deprecated", kUsage, "a warning: the option will go"},
    {"plugin/bad-path", kPlugin, "a plugin folder is relative or not there"},
    {"plugin/bad-flag", kPlugin, "a --plugin is not name=/absolute/file.so"},
    {"plugin/unsafe-path", kPlugin, "others can write to a folder or file that code would be loaded from"},
    {"plugin/bad-name", kPlugin, "a recipe names plugins and never paths"},
    {"plugin/not-found", kPlugin, "no folder has a plugin of this name"},
    {"plugin/duplicate", kPlugin, "two files hold plugins of one name"},
    {"plugin/not-readable", kPlugin, "the file can't be read"},
    {"plugin/not-elf", kPlugin, "the file is no shared library, or a damaged one"},
    {"plugin/wrong-machine", kPlugin, "the file is for another processor"},
    {"plugin/no-note", kPlugin, "the file is a library, but no plugin of this program"},
    {"plugin/abi", kPlugin, "built with another version of the SDK"},
    {"plugin/torch-version", kPlugin, "built for another version of LibTorch"},
    {"plugin/torch-variant", kPlugin, "built for another variant (CPU or CUDA) of LibTorch"},
    {"plugin/cxx-abi", kPlugin, "compiled with another std::string"},
    {"plugin/debug-stl", kPlugin, "compiled with or without _GLIBCXX_DEBUG, unlike the host"},
    {"plugin/sanitizer", kPlugin, "compiled with or without a sanitizer, unlike the host"},
    {"plugin/cuda-major", kPlugin, "compiled with another major version of CUDA"},
    {"plugin/wrong-kind", kPlugin, "the plugin is of another kind than its place in the recipe"},
    {"plugin/twice", kPlugin, "the stack names a plugin twice"},
    {"plugin/backend-slot", kPlugin, "--backend names two plugins of one kind, or one that has no place there"},
    {"plugin/bad-manifest", kPlugin, "the plugin's manifest has mistakes"},
    {"plugin/note-disagrees", kPlugin, "build note and manifest of the file say different things"},
    {"plugin/own-nccl", kPlugin, "linked with NCCL, which belongs to the host"},
    {"plugin/missing-library", kPlugin, "needs a library that is not installed"},
    {"plugin/option-clash", kPlugin, "two manifests declare one key"},
    {"plugin/unmet-want", kPlugin, "a capability that the plugin needs is provided by none"},
    {"plugin/conflict", kPlugin, "a capability that the plugin excludes is in the stack"},
    {"plugin/open-failed", kPlugin, "the dynamic linker refused the file"},
    {"plugin/no-entry", kPlugin, "the library does not export sf_plugin_entry_v1"},
    {"plugin/entry-disagrees", kPlugin, "the file changed between being judged and being opened"},
    {"plugin/second-copy", kPlugin, "a second LibTorch, NCCL or CUDA runtime is in the process"},
    {"plugin/create-failed", kPlugin, "the plugin refused to be created; its own reason follows"},
    {"plugin/no-interface", kPlugin, "the plugin lacks the interface of its kind"},
    {"plugin/start-failed", kPlugin, "the plugin refused to start; its own reason follows"},
    {"plugin/option-unclaimed", kPlugin, "an option was set, and the plugin never read it"},
    {"plugin/option-no-effect", kPlugin, "an option was set, and nothing in this model is changed by it"},
    {"model/no-config", ExitCode::kData, "the target's folder is not there or has no config.json"},
    {"model/bad-config", ExitCode::kData, "the target's config.json can't be understood"},
    {"device/no-gpu", ExitCode::kDevice, "the recipe wants a GPU and there is none; a warning in sf-host plan"},
    {"device/too-few-gpus", ExitCode::kDevice, "more ranks on this machine than GPUs; a warning in sf-host plan"},
}};
// clang-format on

}  // namespace

std::span<const ProblemKind> problem_kinds() {
  return kProblems;
}

std::string errors_markdown(const std::vector<Manifest>& manifests) {
  std::string out =
      "\n## Exit codes\n\n| code | meaning |\n|---|---|\n"
      "| 0 | done |\n| 1 | a mistake in this program |\n| 2 | recipe or command line |\n| 3 | a plugin was "
      "refused |\n"
      "| 4 | target, features or conversations |\n| 5 | device or memory |\n| 6 | communication between "
      "ranks |\n"
      "| 7 | saving or resuming |\n| 130 | interrupted; the step is finished and a checkpoint is saved |\n"
      "\n## Problems of recipes and plugins\n\n| id | exit code | meaning |\n|---|---|---|\n";
  for (const ProblemKind& kind : kProblems) {
    out += format("| `{}` | {} | {} |\n", kind.id, kind.code, kind.meaning);
  }
  out += "\n## Rules\n\n| id | of | exit code | message | what to do |\n|---|---|---|---|---|\n";
  for (const Manifest& manifest : manifests) {
    for (const Rule& rule : manifest.rules) {
      out += format("| `{}` | {} | {} | {} | {} |\n", rule.id, rule.owner,
                    rule.action == RuleAction::warn ? "warning" : rule.action == RuleAction::at_run ? "while running" : "2", rule.message, rule.fix);
    }
  }
  return out;
}

}  // namespace sf
