#include "core/data/plugin_services.hpp"

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/data/philox.hpp"
#include "sf/plugin.hpp"

namespace sf {
namespace {

// "my_tracker", "my_tracker.csv", "my_tracker-1.txt"; no folder, no other plugin's.
bool is_named_after(std::string_view name, std::string_view plugin) {
  return name.starts_with(plugin) && name.find('/') == std::string_view::npos &&
         (name.size() == plugin.size() || std::string_view(".-_").find(name[plugin.size()]) != std::string_view::npos);
}

}  // namespace

PluginServices::PluginServices(std::string plugin, std::uint64_t seed, const std::filesystem::path& run_folder)
    : plugin_(std::move(plugin)), seed_(seed), folder_(std::filesystem::absolute(run_folder).lexically_normal().string()) {
  random_.struct_size = sizeof(sf_random);
  random_.ctx = this;
  random_.draw = [](const void* ctx, const char* stream, std::uint64_t row, std::uint64_t first, std::uint64_t count, std::uint64_t* out) {
    const auto& self = *static_cast<const PluginServices*>(ctx);
    const PhiloxStream draws(self.seed_, "plugin/" + self.plugin_ + "/" + stream);
    for (std::uint64_t i = 0; i < count; ++i) {
      out[i] = draws.bits(0, row, first + i);
    }
  };
  files_.struct_size = sizeof(sf_run_files);
  files_.ctx = this;
  files_.folder = folder_.c_str();
  files_.write = [](const void* ctx, const char* name, const void* data, std::uint64_t bytes, sf_status* status) -> std::int32_t {
    const auto& self = *static_cast<const PluginServices*>(ctx);
    return guard(status, [&] {
      if (name == nullptr || (data == nullptr && bytes > 0)) {
        throw std::invalid_argument("a file of the run's folder needs a name, and its bytes an address");
      }
      if (!is_named_after(name, self.plugin_)) {
        throw std::invalid_argument(format("a file of plugin \"{}\" in the run's folder can't be called \"{}\": its name begins with the plugin's", self.plugin_, name));
      }
      atomic_write(std::filesystem::path(self.folder_) / name, {static_cast<const char*>(data), bytes}, ExitCode::kCheckpoint);
    });
  };
}

const void* PluginServices::find(std::string_view id) const {
  return id == SF_RANDOM ? static_cast<const void*>(&random_) : id == SF_RUN_FILES ? static_cast<const void*>(&files_) : nullptr;
}

}  // namespace sf
