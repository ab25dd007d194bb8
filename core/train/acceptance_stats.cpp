#include "core/train/acceptance_stats.hpp"

#include <algorithm>
#include <cmath>

#include "core/base/html.hpp"
#include "core/base/text.hpp"

namespace sf {

Json AcceptanceLength::to_json() const {
  return Json::object({{"value", value}, {"low", low}, {"high", high}, {"prompts", prompts}, {"passes", passes}});
}

AcceptanceLength acceptance_of(const std::vector<PromptAcceptance>& prompts) {
  AcceptanceLength result;
  double tokens = 0, passes = 0, n = 0;
  for (const PromptAcceptance& prompt : prompts) {
    if (prompt.passes == 0) continue;
    tokens += static_cast<double>(prompt.tokens);
    passes += static_cast<double>(prompt.passes);
    n += 1;
  }
  if (passes == 0) return result;
  result.value = result.low = result.high = tokens / passes;
  result.prompts = static_cast<int64_t>(n);
  result.passes = static_cast<int64_t>(passes);
  if (n < 2) return result;
  double squares = 0;
  for (const PromptAcceptance& prompt : prompts) {
    const double residual = static_cast<double>(prompt.tokens) - result.value * static_cast<double>(prompt.passes);
    squares += residual * residual;
  }
  constexpr double kNormal95 = 1.959964;
  const double half = kNormal95 * std::sqrt(squares * n / (n - 1)) / passes;
  result.low = result.value - half;
  result.high = result.value + half;
  return result;
}

std::map<std::string, AcceptanceLength> acceptance_by_category(const std::vector<PromptAcceptance>& prompts) {
  std::map<std::string, std::vector<PromptAcceptance>> groups;
  for (const PromptAcceptance& prompt : prompts) groups[prompt.category].push_back(prompt);
  std::map<std::string, AcceptanceLength> found;
  for (const auto& [category, group] : groups) found[category] = acceptance_of(group);
  return found;
}

void add_pass(std::vector<PositionAcceptance>& positions, int64_t drafted, int64_t accepted) {
  if (static_cast<int64_t>(positions.size()) < drafted) positions.resize(static_cast<size_t>(drafted));
  for (int64_t i = 0; i < drafted && i <= accepted; ++i) {
    ++positions[static_cast<size_t>(i)].reached;
    if (i < accepted) ++positions[static_cast<size_t>(i)].accepted;
  }
}

namespace {

std::string number(const Json& json, const char* key, int digits) {
  const Json* found = json.find(key);
  return found == nullptr || !found->is_number() ? "-" : format_fixed(found->as_double(), digits);
}

// One prompt has no interval, and none has no length.
std::string interval(const Json& length) {
  const int64_t prompts = length.at("prompts").as_int();
  if (prompts < 2) return prompts == 0 ? "-" : number(length, "value", 3);
  return number(length, "value", 3) + " <small>" + number(length, "low", 3) + " to " + number(length, "high", 3) + "</small>";
}

std::string bar(double share) {
  return format("<span class=bar style=\"width:{}px\"></span>", format_fixed(160 * std::clamp(share, 0.0, 1.0), 0));
}

std::string row(const std::vector<std::string>& cells, const char* tag = "td") {
  std::string out = "<tr>";
  for (const std::string& cell : cells) out += format("<{}>{}</{}>", tag, cell, tag);
  return out + "</tr>\n";
}

constexpr const char* kHead = R"(<!doctype html>
<html lang="en"><meta charset="utf-8"><title>speculative decoding</title>
<style>
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.6em 0 1.4em}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}small{color:#666}.bar{display:block;height:.8em;background:#4a7ebb}.words{text-align:left}
.bad{color:#b00020;font-weight:600}.good{color:#176b2c}h2{margin-top:1.8em}
</style>
)";

}  // namespace

std::string speculative_page(const Json& report) {
  std::string out = kHead;
  out += format("<h1>Speculative decoding</h1><p>Target <b>{}</b>, {} prompts of <b>{}</b>, at most {} new tokens, batch {}, {}.</p>\n",
                escaped_html(report.at("target").as_string()), report.at("prompts").as_int(), escaped_html(report.at("prompts_file").as_string()),
                report.at("max_new_tokens").as_int(), report.at("batch_size").as_int(), escaped_html(report.at("device").as_string()));
  const bool lossless = report.at("lossless").as_bool();
  out += format("<p class={}>{}</p>\n", lossless ? "good" : "bad", escaped_html(report.at("lossless_text").as_string()));
  out += "<table>" + row({"draft", "tokens drafted", "acceptance length (95 %)", "tokens per pass", "tok/s here", "speed-up here", "estimated speed-up", "teacher-forced, same path"}, "th");
  for (const Json& draft : report.at("drafts").items()) {
    const Json* forced = draft.find("teacher_forced");
    out += row({escaped_html(draft.at("name").as_string()), to_text(draft.at("draft_tokens").as_int()), interval(draft.at("acceptance_length")),
                number(draft, "tokens_per_pass", 3), number(draft, "tokens_per_second", 1), number(draft, "speedup_measured", 2),
                number(draft, "speedup_estimated", 2), forced != nullptr && forced->is_object() ? number(*forced, "walk_length", 3) : "-"});
  }
  out += "</table>\n";
  out += format("<p>Plain decoding: {} tok/s. Acceptance length: tokens per pass of the target, 1 is no help. The estimate takes a pass with guesses to cost "
                "what a plain one costs, and the draft's share as given with each.</p>\n",
                number(report, "plain_tokens_per_second", 1));
  for (const Json& draft : report.at("drafts").items()) {
    out += format("<h2>{}</h2><p>{}</p>\n", escaped_html(draft.at("name").as_string()), escaped_html(draft.at("verdict").as_string()));
    out += "<table>" + row({"drafted token", "came to it", "right", "share", "", "of all passes", ""}, "th");
    for (const Json& place : draft.at("per_position").items()) {
      out += row({to_text(place.at("position").as_int()), to_text(place.at("reached").as_int()), to_text(place.at("accepted").as_int()), number(place, "rate", 3),
                  bar(place.at("rate").as_double()), number(place, "survival", 3), bar(place.at("survival").as_double())});
    }
    out += "</table>\n<table>" + row({"tokens drafted", "acceptance length", ""}, "th");
    for (const Json& length : draft.at("by_draft_tokens").items()) {
      out += row({to_text(length.at("draft_tokens").as_int()), number(length, "acceptance_length", 3), "<div class=words>" + escaped_html(length.at("how").as_string()) + "</div>"});
    }
    out += "</table>\n<table>" + row({"category", "prompts", "passes", "acceptance length (95 %)"}, "th");
    for (const auto& [category, length] : draft.at("by_category").entries()) {
      out += row({escaped_html(category), to_text(length.at("prompts").as_int()), to_text(length.at("passes").as_int()), interval(length)});
    }
    out += "</table>\n";
  }
  return out + "</html>\n";
}

}  // namespace sf
