// sf-host schema: all options of host and installed plugins, as a JSON schema for editors or as Markdown for
// docs/recipes.md.
#include <cstdio>

#include "core/recipe/render.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {

ExitCode run_schema(const Command& command) {
  Diagnostics problems;
  Catalog catalog(search_request(command), command.plugins, host_build(), problems);
  if (problems.has_errors()) {
    print_problems(command, problems, ExitCode::kPlugin);
    return ExitCode::kPlugin;
  }
  std::vector<Manifest> manifests = {host_manifest()};
  for (Manifest& manifest : catalog.manifests()) {
    manifests.push_back(std::move(manifest));
  }
  std::fputs(
      (command.markdown ? recipes_markdown(manifests) : recipe_schema(manifests).dump(2) + "\n").c_str(),
      stdout);
  return ExitCode::kOk;
}

}  // namespace sf
