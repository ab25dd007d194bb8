#include "core/train/metrics.hpp"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "sf/error.hpp"

namespace sf {

std::string step_line(const StepLine& line) {
  const int width = static_cast<int>(std::to_string(line.steps_total).size());
  char accept[16] = "    -";
  if (line.acceptance_length > 0) {
    std::snprintf(accept, sizeof accept, "%5.2f", line.acceptance_length);
  }
  char text[256];
  std::snprintf(text, sizeof text, "step %*lld/%lld  loss %7.4f  accept %s  grad %8.3f  lr %8.2e  %7.2fk tok/s  %9s  eta %s", width,
                static_cast<long long>(line.step), static_cast<long long>(line.steps_total), line.loss, accept, line.gradient_norm,
                line.learning_rate, line.tokens_per_second / 1000.0, human_bytes(static_cast<uint64_t>(line.memory_bytes)).c_str(),
                human_duration(line.seconds_left).c_str());
  return text;
}

MetricsFile::MetricsFile(const std::filesystem::path& path, int64_t last_step) : path_(path) {
  std::string kept;
  std::error_code unknown;
  if (std::filesystem::is_directory(path, unknown)) {
    throw Error(ExitCode::kCheckpoint, path.string() + " is a folder, and the run's metrics go into a file of this name", "move it away, or choose another run_id");
  }
  if (std::filesystem::exists(path, unknown)) {
    int64_t number = 0, bad = 0, first_bad = 0;
    std::istringstream lines(read_file(path, ExitCode::kCheckpoint));
    for (std::string line; std::getline(lines, line);) {
      ++number;
      try {
        const Json json = Json::parse(line, path.string());
        const Json* step = json.find("step");
        if (step != nullptr && step->as_int() <= last_step) {
          kept += line + "\n";
        }
      } catch (const JsonError&) {  // cut short by a kill, or written by somebody else; the lines after it are as good as those before
        first_bad = bad++ == 0 ? number : first_bad;
      }
    }
    if (bad > 0) {
      log_warn("{}: {} line{} no JSON and left out, the first is line {}", path, bad, bad == 1 ? " is" : "s are", first_bad);
    }
  }
  atomic_write(path, kept, ExitCode::kCheckpoint);
  file_.open(path, std::ios::app);
}

void MetricsFile::write(const Json& line) {
  file_ << line.dump() << "\n" << std::flush;
  if (!file_) {
    throw Error(ExitCode::kCheckpoint, "cannot write " + path_.string(), "is the disk full?");
  }
}

}  // namespace sf
