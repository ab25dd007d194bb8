#include "core/train/tracking.hpp"

#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/plugin/tracker_call.hpp"

namespace sf {
namespace {

void add_figures(const Json& object, const std::string& prefix, std::vector<std::pair<std::string, double>>& out) {
  for (const auto& [key, value] : object.entries()) {
    if (value.is_object()) {
      add_figures(value, prefix + key + "/", out);
    } else if (value.is_number() && !(prefix.empty() && key == "step")) {
      out.emplace_back(prefix + key, value.as_double());
    }
  }
}

sf_status empty_status() {
  sf_status status{};
  status.struct_size = sizeof(sf_status);
  return status;
}

std::string reason(int32_t code, const sf_status& status) {
  return status.what[0] != 0 ? status.what : format("it returned code {} without a text", code);
}

}  // namespace

std::vector<std::pair<std::string, double>> figures_of(const Json& line) {
  std::vector<std::pair<std::string, double>> out;
  add_figures(line, "", out);
  return out;
}

Trackers::Trackers(const std::vector<LoadedPlugin>& plugins, const Run& run) {
  const std::string folder = run.run_folder.string();
  const sf_tracked_run tracked{.struct_size = sizeof(sf_tracked_run),
                               .reserved = 0,
                               .run_id = run.run_id.c_str(),
                               .run_folder = folder.c_str(),
                               .recipe = run.recipe.c_str(),
                               .first_step = run.updates_done + 1,
                               .steps_total = run.updates_total};
  for (const LoadedPlugin& plugin : plugins) {
    if (plugin.kind != SF_KIND_TRACKER) {
      continue;
    }
    One one{.name = plugin.name,
            .functions = static_cast<const sf_tracker*>(plugin.entry->get_interface(plugin.instance, SF_TRACKER)),
            .instance = plugin.instance};
    if (one.functions == nullptr || one.functions->struct_size != sizeof(sf_tracker)) {
      finish();
      throw Error(ExitCode::kPlugin, format("plugin \"{}\" has no {} of this host's size", one.name, SF_TRACKER), "rebuild it with this host's SDK");
    }
    sf_status status = empty_status();
    const int32_t code = one.functions->begin(one.instance, &tracked, &status);
    if (code != SF_OK) {
      finish();
      const std::string fix = format("or take \"{}\" out of backend.trackers: the figures are in metrics.jsonl, too", one.name);
      throw Error(ExitCode::kPlugin, format("tracker \"{}\" can't begin: {}", one.name, reason(code, status)),
                  status.hint[0] != 0 ? std::string(status.hint) + "; " + fix : fix);
    }
    trackers_.push_back(std::move(one));
  }
}

Trackers::~Trackers() { finish(); }

void Trackers::count(One& tracker, const std::string& doing, int32_t code, const sf_status& status) {
  ++tracker.calls;
  if (code == SF_OK) {
    return;
  }
  if (++tracker.failed == 1) {
    log_warn("tracker '{}' failed {}: {}{}; training goes on, further failures are counted", tracker.name, doing, reason(code, status),
             status.hint[0] != 0 ? format(" ({})", status.hint) : "");
  }
}

void Trackers::record(int64_t step, const Json& line) {
  if (trackers_.empty()) {
    return;
  }
  const auto figures = figures_of(line);
  for (One& tracker : trackers_) {
    sf_status status = empty_status();
    const int32_t code = record_figures(*tracker.functions, tracker.instance, step, figures, status);
    count(tracker, format("at step {}", step), code, status);
  }
}

void Trackers::finish() {
  if (is_finished_) {
    return;
  }
  is_finished_ = true;
  for (One& tracker : trackers_) {
    sf_status status = empty_status();
    const int32_t code = tracker.functions->finish(tracker.instance, &status);
    count(tracker, "when it was to finish", code, status);
    if (tracker.failed > 0) {
      log_warn("tracker '{}' failed in {} of {} calls: what it shows of this run is not whole; metrics.jsonl is", tracker.name, tracker.failed, tracker.calls);
    }
  }
}

Json Trackers::failures() const {
  Json out = Json::object();
  for (const One& tracker : trackers_) {
    out.set(tracker.name, tracker.failed);
  }
  return out;
}

}  // namespace sf
