// What the host makes of trackers that work and of trackers that fail.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "core/base/log.hpp"
#include "core/train/tracking.hpp"
#include "sf/tracker.hpp"

using namespace sf;

namespace {

struct Notebook {
  explicit Notebook(std::string call = "") : fail_in(std::move(call)) {}
  Notebook(const Host&, const Options&) {}

  std::string seen;
  std::string fail_in;

  void begin(const TrackedRun& run) {
    fail("begin");
    seen += "begin " + run.run_id + " " + run.run_folder + " " + std::to_string(run.first_step) + "/" + std::to_string(run.steps_total) + "\n";
  }
  void record(int64_t step, const std::vector<Figure>& figures) {
    fail("record");
    for (const Figure& figure : figures) {
      seen += std::to_string(step) + " " + std::string(figure.name) + " " + std::to_string(figure.value) + "\n";
    }
  }
  void finish() {
    seen += "finish\n";
    fail("finish");
  }
  const void* get_interface(std::string_view id) { return id == SF_TRACKER && fail_in != "interface" ? tracker_calls<Notebook>() : nullptr; }

  void fail(const std::string& call) const {
    if (fail_in == call) {
      throw Error(ExitCode::kCheckpoint, "no ink", "buy some");
    }
  }
};

const sf_plugin& notebook_plugin() {
  using Calls = PluginCalls<Notebook>;
  static const sf_plugin plugin{sizeof(sf_plugin), nullptr, &Calls::create, &Calls::start, &Calls::stop, &Calls::destroy, &Calls::get_interface};
  return plugin;
}

LoadedPlugin loaded(const std::string& name, Notebook& notebook) {
  LoadedPlugin plugin;
  plugin.name = name;
  plugin.kind = SF_KIND_TRACKER;
  plugin.entry = &notebook_plugin();
  plugin.instance = reinterpret_cast<sf_instance*>(&notebook);
  return plugin;
}

struct Warnings {
  std::vector<std::string> lines;
  Warnings() {
    redirect_log([this](Level level, std::string_view line) {
      if (level == Level::kWarn) {
        lines.emplace_back(line);
      }
    });
  }
  ~Warnings() { redirect_log({}); }
};

const Trackers::Run kRun{.run_id = "r", .run_folder = "/runs/r", .recipe = "seed = 1\n", .updates_done = 4, .updates_total = 9};

Json line_of(int64_t step) {
  Json line = Json::object();
  line.set("step", step).set("loss", 2.5).set("note", "text").set("eval", Json::object().set("samples", 3).set("metrics", Json::object().set("a", 0.5)));
  return line;
}

}  // namespace

TEST_CASE("tracking: a line's numbers have flat names in order, without the step and without texts") {
  const auto figures = figures_of(line_of(5));
  CHECK(figures == std::vector<std::pair<std::string, double>>{{"loss", 2.5}, {"eval/samples", 3}, {"eval/metrics/a", 0.5}});
}

TEST_CASE("tracking: every tracker hears of the run, of each line and of the end, once") {
  Notebook a, b;
  Warnings warnings;
  {
    Trackers trackers({loaded("a", a), loaded("b", b)}, kRun);
    trackers.record(5, line_of(5));
    trackers.finish();
    CHECK(trackers.failures() == Json::object().set("a", 0).set("b", 0));
  }
  CHECK(a.seen == "begin r /runs/r 5/9\n5 loss 2.500000\n5 eval/samples 3.000000\n5 eval/metrics/a 0.500000\nfinish\n");
  CHECK(b.seen == a.seen);
  CHECK(warnings.lines.empty());
}

TEST_CASE("tracking: a tracker that fails while training is a warning once, the count at the end, and does not keep others from their figures") {
  Notebook bad("record"), good;
  Warnings warnings;
  Trackers trackers({loaded("bad", bad), loaded("good", good)}, kRun);
  for (int64_t step = 5; step < 8; ++step) {
    trackers.record(step, line_of(step));
  }
  trackers.finish();
  REQUIRE(warnings.lines.size() == 2);
  CHECK(warnings.lines[0] == "tracker 'bad' failed at step 5: no ink (buy some); training goes on, further failures are counted");
  CHECK(warnings.lines[1] == "tracker 'bad' failed in 3 of 4 calls: what it shows of this run is not whole; metrics.jsonl is");
  CHECK(trackers.failures() == Json::object().set("bad", 3).set("good", 0));
  CHECK(good.seen.find("7 loss") != std::string::npos);
}

TEST_CASE("tracking: a failure to finish is told, too") {
  Notebook bad("finish");
  Warnings warnings;
  Trackers({loaded("bad", bad)}, kRun).finish();
  REQUIRE(warnings.lines.size() == 2);
  CHECK(warnings.lines[0].find("failed when it was to finish: no ink") != std::string::npos);
}

TEST_CASE("tracking: a tracker that can't begin ends the run with its reason, and those before it are finished") {
  Notebook good, bad("begin");
  const auto run = [&](Notebook& last) -> std::string {
    try {
      Trackers trackers({loaded("good", good), loaded("bad", last)}, kRun);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::kPlugin);
      return std::string(error.what()) + " | " + error.hint();
    }
    return "nothing was thrown";
  };
  CHECK(run(bad) == "tracker \"bad\" can't begin: no ink | buy some; or take \"bad\" out of backend.trackers: the figures are in metrics.jsonl, too");
  CHECK(good.seen == "begin r /runs/r 5/9\nfinish\n");
  Notebook without("interface");
  CHECK(run(without).find("plugin \"bad\" has no sf.tracker/1") == 0);
}

TEST_CASE("tracking: plugins of other kinds are no trackers") {
  Notebook other;
  LoadedPlugin plugin = loaded("other", other);
  plugin.kind = SF_KIND_ALGORITHM;
  Trackers trackers({plugin}, kRun);
  trackers.record(5, line_of(5));
  CHECK(other.seen.empty());
  CHECK(trackers.failures() == Json::object());
}
