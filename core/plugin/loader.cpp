#include "core/plugin/loader.hpp"

#include <array>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "core/base/text.hpp"

#define BOOST_DLL_USE_STD_FS
#include <boost/dll/shared_library.hpp>

namespace sf {
namespace {

// Boost adds an errno text that has nothing to do with it: "...dlopen failed (dlerror system message:
// REASON): Bad file descriptor".
std::string linker_reason(std::string text) {
  constexpr std::string_view kBefore = "dlerror system message: ";
  std::size_t from = text.find(kBefore);
  if (from == std::string::npos) {
    return text;
  }
  text = text.substr(from + kBefore.size());
  std::size_t end = text.rfind("): ");
  return end == std::string::npos ? text : text.substr(0, end);
}

// Never destroyed, so never unloaded; in a list, so that a search for leaks finds it.
boost::dll::shared_library& keep(boost::dll::shared_library library) {
  struct Kept {
    std::mutex mutex;
    std::deque<boost::dll::shared_library> libraries;
  };
  static Kept& kept = *std::make_unique<Kept>().release();
  const std::lock_guard lock(kept.mutex);
  return kept.libraries.emplace_back(std::move(library));
}

}  // namespace

const sf_plugin* open_plugin(const PluginFile& file, Diagnostics& problems) {
  boost::dll::shared_library* library = nullptr;
  try {
    // Absolute path, the name as it is.
    library = &keep(boost::dll::shared_library(boost::dll::fs::path(file.path.string()), boost::dll::load_mode::rtld_now | boost::dll::load_mode::rtld_local));
  } catch (const std::exception& error) {
    std::string reason = linker_reason(error.what());
    bool is_symbol = reason.find("undefined symbol") != std::string::npos;
    problems.error(
        {.id = "plugin/open-failed",
         .message = format("plugin \"{}\" can't be opened: {}", file.name(), reason),
         .file = file.describe(),
         .why =
             is_symbol
                 ? "this usually means that it was built against another LibTorch, or linked without -z defs"
                 : "",
         .fix = "rebuild it with this host's SDK, or install the build for this host"});
    return nullptr;
  }
  if (!library->has("sf_plugin_entry_v1")) {
    problems.error({.id = "plugin/no-entry",
                    .message = format("plugin \"{}\" does not export sf_plugin_entry_v1", file.name()),
                    .file = file.describe(),
                    .fix = "build it with sf_add_plugin, and write SF_PLUGIN(...) in one of its sources"});
    return nullptr;
  }
  const sf_plugin* entry = library->get<const sf_plugin*()>("sf_plugin_entry_v1")();
  if (entry == nullptr || entry->struct_size != sizeof(sf_plugin) || entry->build == nullptr ||
      std::memcmp(entry->build, &*file.build, sizeof(sf_build)) != 0 || entry->create == nullptr ||
      entry->start == nullptr || entry->stop == nullptr || entry->destroy == nullptr ||
      entry->get_interface == nullptr) {
    problems.error(
        {.id = "plugin/entry-disagrees",
         .message = format(
             "the note in the file of \"{}\" and the loaded library differ; was it replaced while running?",
             file.name()),
         .file = file.describe(),
         .fix = "start again; when it stays, build the plugin again with sf_add_plugin"});
    return nullptr;
  }
  return entry;
}

void check_copies_in(const std::string& maps, Diagnostics& problems) {
  constexpr std::array<const char*, 4> kSingle = {"libc10.so", "libtorch_cpu.so", "libnccl.so",
                                                  "libcudart.so"};
  std::map<std::string, std::set<std::string>> copies;
  std::istringstream lines(maps);
  for (std::string line; std::getline(lines, line);) {
    std::size_t slash = line.find('/');
    if (slash == std::string::npos) {
      continue;
    }
    std::string path = line.substr(slash);
    std::string name = path.substr(path.rfind('/') + 1);
    for (const char* single : kSingle) {
      if (name.starts_with(single)) {
        copies[single].insert(path);
      }
    }
  }
  for (const auto& [name, paths] : copies) {
    if (paths.size() > 1) {
      problems.error({.id = "plugin/second-copy",
                      .message = format("two copies of {} are in this process: {} and {}", name,
                                        *paths.begin(), *std::next(paths.begin())),
                      .why = "two copies of such a library in one process corrupt each other",
                      .fix = "the plugin that brings its own copy must be linked with the host's; rebuild it "
                             "with sf_add_plugin"});
    }
  }
}

void check_copies(Diagnostics& problems) {
  std::ifstream file("/proc/self/maps");
  std::stringstream text;
  text << file.rdbuf();
  check_copies_in(text.str(), problems);
}

}  // namespace sf
