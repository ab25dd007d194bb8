// A tracker that writes what it gets, line by line, and fails in the call that its option names.
#include <fstream>
#include <string>

#include "sf/services.h"
#include "sf/tracker.hpp"

namespace {

class FakeTracker {
 public:
  FakeTracker(const sf::Host& host, const sf::Options& options) : host_(host), fail_in_(options.get<std::string>("fail_in")) {}

  void begin(const sf::TrackedRun& run) {
    fail("begin");
    file_.open(run.run_folder + "/fake_tracker.txt", std::ios::app);
    const auto& files = host_.get_service<const sf_run_files>(SF_RUN_FILES);
    sf_status status{};
    if (files.write(files.ctx, "fake_tracker.note", "whole", 5, &status) != SF_OK) {
      throw sf::Error(sf::ExitCode::kCheckpoint, status.what, status.hint);
    }
    file_ << "begin " << run.run_id << " " << run.first_step << " of " << run.steps_total << "\n";
  }
  void record(int64_t step, const std::vector<sf::Figure>& figures) {
    if (step % 2 == 0) {
      fail("record");
    }
    for (const sf::Figure& figure : figures) {
      file_ << step << " " << figure.name << " " << figure.value << "\n";
    }
  }
  void finish() {
    file_ << "finish\n";
    file_.close();
    fail("finish");
  }
  const void* get_interface(std::string_view id) { return id == SF_TRACKER ? sf::tracker_calls<FakeTracker>() : nullptr; }

 private:
  void fail(const std::string& call) const {
    if (fail_in_ == call) {
      throw sf::Error(sf::ExitCode::kDevice, "told to fail in " + call, "set plugin.fake_tracker.fail_in = \"nothing\"");
    }
  }
  sf::Host host_;
  std::string fail_in_;
  std::ofstream file_;
};

}  // namespace

SF_PLUGIN(FakeTracker, SF_KIND_TRACKER, SF_TIER_C)
