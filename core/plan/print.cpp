#include "core/plan/print.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/text.hpp"
#include "core/recipe/render.hpp"

namespace sf {
namespace {

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string stack_text(const Plan& plan) {
  std::string out = "stack\n";
  for (const PlanPlugin& plugin : plan.stack) {
    std::string where = plugin.path.empty() ? "built in" : plugin.path.string();
    std::string provides = plugin.provides.empty() ? "" : "  provides " + join(plugin.provides, ", ");
    out +=
        format("  {}  {} {}  {}{}\n", padded(plugin.slot, 10), plugin.name, plugin.version, where, provides);
  }
  return out;
}

std::string ranks_text(const Plan& plan) {
  if (plan.ranks.count == 1 && plan.ranks.origin.empty()) {
    return "";
  }
  const bool on_gpus = plan.get<std::string>("device") == "cuda";
  std::string out = format("ranks\n  {} rank{}, {} of them on this machine  {}\n", plan.ranks.count, plan.ranks.count == 1 ? "" : "s",
                           plan.ranks.on_this_machine, plan.ranks.origin);
  if (plan.ranks.count == 1) {
    return out;
  }
  const PlanValue& copies = plan.at("training.peer_copies");
  const bool are_copied = std::get<std::string>(copies.value) == "on";
  return out + format("  collectives  {}\n", !on_gpus ? "gloo (libsf_comm_gloo.so)"
                                              : are_copied ? "NCCL (libsf_engine_cuda.so); gathers and reductions by the GPUs' copy engines" + std::string(copies.is_set ? "" : ", unless they can't reach each other's memory")
                                                           : "NCCL (libsf_engine_cuda.so), gathers and reductions, too: training.peer_copies is " + copies.origin);
}

std::string values_text(const Plan& plan, bool only_set) {
  std::size_t key_width = 0;
  std::size_t value_width = 0;
  std::vector<std::array<std::string, 3>> rows;
  for (bool is_nested : {false, true}) {  // keys of the top level first
    for (const auto& [key, value] : plan.values) {
      bool is_default = !value.is_set && value.origin.starts_with("default");
      if ((key.find('.') != std::string::npos) != is_nested || (only_set && is_default)) {
        continue;
      }
      rows.push_back({key, display_text(value.value, value.type), value.origin});
      key_width = std::max(key_width, key.size());
      value_width = std::max(value_width, std::min<std::size_t>(rows.back()[1].size(), 40));
    }
  }
  std::string out;
  for (const auto& [key, value, origin] : rows) {
    out += format("  {} = {}  {}\n", padded(key, key_width), padded(value, value_width), origin);
  }
  return out;
}

}  // namespace

std::int64_t tokens_per_step(const Plan& plan) {
  return plan.get<std::int64_t>("training.batch_size") *
         plan.get<std::int64_t>("training.accumulation_steps") * plan.get<std::int64_t>("data.max_length") *
         plan.ranks.count;
}

std::string plan_text(const Plan& plan, const std::vector<PlanSize>& sizes) {
  std::string out = format("plan of {}\n{}", plan.recipe, stack_text(plan));
  out += ranks_text(plan);
  out += "facts\n";
  for (const auto& [key, value] : plan.facts) {
    out += format("  {} = {}\n", key, toml_text(value));
  }
  out += "values\n" + values_text(plan, false);
  out += format("step\n  at most {} tokens in one optimizer step\n", tokens_per_step(plan));
  if (!sizes.empty()) {
    out += "sizes on each rank\n";
    std::size_t width = 0;
    for (const PlanSize& size : sizes) {
      width = std::max(width, size.name.size());
    }
    for (const PlanSize& size : sizes) {
      out += format("  {}  {}  {}\n", padded(size.name, width),
                    padded(human_bytes(static_cast<std::uint64_t>(size.bytes)), 10), size.detail);
    }
  }
  if (!plan.undecided.empty()) {
    out += "not decided here\n";
    for (const std::string& line : plan.undecided) {
      out += "  " + line + "\n";
    }
  }
  if (!plan.unsafe_paths.empty()) {
    out += format("unsafe folders accepted: {}\n", join(plan.unsafe_paths, ", "));
  }
  return out + plan.warnings.text();
}

std::string plan_summary(const Plan& plan) {
  return format("plan of {}\n{}{}values that differ from the defaults\n{}{}", plan.recipe, stack_text(plan), ranks_text(plan),
                values_text(plan, true), plan.warnings.text());
}

Json diagnostics_json(const Diagnostics& problems) {
  Json out = Json::array();
  for (const Diagnostic& d : problems.all()) {
    Json one = Json::object();
    one.set("severity", d.severity == Severity::error ? "error" : "warning");
    one.set("id", d.id);
    one.set("message", d.message);
    if (!d.place.source.empty()) {
      one.set("source", d.place.source);
    }
    if (d.place.line > 0) {
      one.set("line", d.place.line);
      one.set("column", d.place.column);
    }
    for (const auto& [name, text] : {std::pair("note", &d.note), std::pair("file", &d.file),
                                     std::pair("why", &d.why), std::pair("fix", &d.fix)}) {
      if (!text->empty()) {
        one.set(name, *text);
      }
    }
    out.push_back(std::move(one));
  }
  return out;
}

Json plan_json(const Plan& plan, const std::vector<PlanSize>& sizes) {
  Json out = Json::object();
  out.set("recipe", plan.recipe.string());
  Json stack = Json::array();
  for (const PlanPlugin& plugin : plan.stack) {
    Json one = Json::object();
    one.set("slot", plugin.slot);
    one.set("name", plugin.name);
    one.set("version", plugin.version);
    one.set("path", plugin.path.empty() ? Json() : Json(plugin.path.string()));
    one.set("sha256", plugin.sha256);
    one.set("provides", Json::array_of(plugin.provides));
    stack.push_back(std::move(one));
  }
  out.set("stack", std::move(stack));
  out.set("ranks", Json::object().set("count", plan.ranks.count).set("on_this_machine", plan.ranks.on_this_machine).set("origin", plan.ranks.origin));
  Json facts = Json::object();
  for (const auto& [key, value] : plan.facts) {
    facts.set(key, value_json(value));
  }
  out.set("facts", std::move(facts));
  Json values = Json::object();
  for (const auto& [key, value] : plan.values) {
    Json one = Json::object();
    one.set("value", value_json(value.value));
    one.set("origin", value.origin);
    one.set("set", value.is_set);
    values.set(key, std::move(one));
  }
  out.set("values", std::move(values));
  out.set("tokens_per_step_max", tokens_per_step(plan));
  Json table = Json::array();
  for (const PlanSize& size : sizes) {
    Json one = Json::object();
    one.set("name", size.name);
    one.set("bytes", size.bytes);
    one.set("detail", size.detail);
    table.push_back(std::move(one));
  }
  out.set("sizes", std::move(table));
  out.set("undecided", Json::array_of(plan.undecided));
  out.set("problems", diagnostics_json(plan.warnings));
  return out;
}

}  // namespace sf
