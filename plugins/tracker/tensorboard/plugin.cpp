#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "event_file.hpp"
#include "sf/tracker.hpp"

#include <unistd.h>

namespace sf {
namespace {

double wall_seconds() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

class TensorBoard {
 public:
  TensorBoard(const Host& host, const Options& options)
      : host_(host), folder_(options.get<std::string>("folder")), flush_seconds_(options.get<double>("flush_seconds")),
        write_recipe_(options.get<bool>("write_recipe")) {}

  void begin(const TrackedRun& run) {
    const std::filesystem::path folder = std::filesystem::path(run.run_folder) / folder_;
    std::error_code failed;
    std::filesystem::create_directories(folder, failed);
    if (failed) {
      throw Error(ExitCode::kCheckpoint, "can't make " + folder.string() + ": " + failed.message(), "set plugin.tensorboard.folder to another name");
    }
    // TensorBoard reads the files of a folder in the order of their names, so the time comes first; the process tells two of one second apart.
    char host_name[256] = "localhost";
    (void)gethostname(host_name, sizeof host_name - 1);
    const double now = wall_seconds();
    file_ = std::make_unique<EventFile>(folder / ("events.out.tfevents." + std::to_string(static_cast<long long>(now)) + "." + host_name + "." +
                                                  std::to_string(getpid())));
    if (run.first_step > 1) {
      file_->restart(now, run.first_step);
    } else if (write_recipe_) {
      file_->text(now, 0, "recipe", "```toml\n" + run.recipe + "\n```\n");
    }
    file_->flush();
    flushed_ = now;
    host_.log(Level::kInfo, "curves are in " + folder.string());
  }

  void record(int64_t step, const std::vector<Figure>& figures) {
    std::vector<Scalar> values;
    values.reserve(figures.size());
    for (const Figure& figure : figures) {
      values.push_back({figure.name, figure.value});
    }
    const double now = wall_seconds();
    file_->scalars(now, step, values);
    if (now - flushed_ >= flush_seconds_) {
      flushed_ = now;
      file_->flush();
    }
  }

  void finish() {
    const std::unique_ptr<EventFile> file = std::move(file_);
    file->flush();
  }

  const void* get_interface(std::string_view id) { return id == SF_TRACKER ? tracker_calls<TensorBoard>() : nullptr; }

 private:
  Host host_;
  std::string folder_;
  double flush_seconds_;
  bool write_recipe_;
  std::unique_ptr<EventFile> file_;
  double flushed_ = 0;
};

}  // namespace
}  // namespace sf

SF_PLUGIN(sf::TensorBoard, SF_KIND_TRACKER, SF_TIER_C)
