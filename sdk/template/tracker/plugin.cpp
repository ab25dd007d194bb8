// A tracker that writes figures as CSV: step, name, value. What it throws is told to the user and counted; training goes on.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "sf/tracker.hpp"

namespace {

class MyTracker {
 public:
  MyTracker(const sf::Host& host, const sf::Options& options) : host_(host), only_(options.get<std::vector<std::string>>("only")) {}

  void begin(const sf::TrackedRun& run) {
    path_ = run.run_folder + "/my_tracker.csv";
    file_.open(path_, std::ios::app);
    host_.log(sf::Level::kInfo, "figures go to " + path_);
  }
  void record(int64_t step, const std::vector<sf::Figure>& figures) {
    for (const sf::Figure& figure : figures) {
      if (only_.empty() || std::find(only_.begin(), only_.end(), figure.name) != only_.end()) {
        file_ << step << "," << figure.name << "," << figure.value << "\n";
      }
    }
    if (!file_.flush()) {
      throw sf::Error(sf::ExitCode::kCheckpoint, "can't write " + path_, "is the disk full?");
    }
  }
  void finish() { file_.close(); }

  const void* get_interface(std::string_view id) { return id == SF_TRACKER ? sf::tracker_calls<MyTracker>() : nullptr; }

 private:
  sf::Host host_;
  std::vector<std::string> only_;
  std::string path_;
  std::ofstream file_;
};

}  // namespace

SF_PLUGIN(MyTracker, SF_KIND_TRACKER, SF_TIER_C)
