#include "core/doctor/token_page.hpp"

#include "core/base/html.hpp"
#include "core/base/text.hpp"

#include <algorithm>
#include <cstdio>

namespace sf {

namespace {

constexpr const char* kStyle = R"(
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; background: #fff }
h2 { margin-top: 2em; font-size: 1.15em; overflow-wrap: anywhere } h3 { font-size: 1em; margin-bottom: .3em }
table { border-collapse: collapse; margin: .5em 2em .5em 0; display: inline-table; vertical-align: top }
td, th { padding: .1em .8em; text-align: right; border-bottom: 1px solid #ddd } th { font-weight: 600 } td:first-child, th:first-child { text-align: left }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.7 ui-monospace, monospace; background: #f6f6f6; padding: .8em; border-radius: 6px }
.t { color: #777 } .s { background: #bfe8c5 } .s.odd { background: #9fd9a8 } .o { text-decoration: underline wavy #c33 }
.bar { display: block; height: .8em; background: #7aa7d8 } .legend span { padding: 0 .4em; margin-right: 1em }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #191919 } pre { background: #222 } .t { color: #999 }
  .s { background: #1f5a2a } .s.odd { background: #2c7039 } td, th { border-color: #444 } }
)";

std::string row_of(const std::vector<std::string>& cells, const char* tag = "td") {
  std::string out = "<tr>";
  for (const std::string& cell : cells) out += format("<{}>{}</{}>", tag, cell, tag);
  return out + "</tr>\n";
}

std::string percent(int64_t part, int64_t whole) {
  return format_fixed(100.0 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1)), 1) + " %";
}

std::string share_row(const std::string& name, const Share& share) {
  return row_of({escaped_html(name), std::to_string(share.tokens), std::to_string(share.supervised), percent(share.supervised, share.tokens)});
}

std::string tables_of(const TokenStatistics& statistics) {
  std::string out = "<table>" + row_of({"records", std::to_string(statistics.records)}) + row_of({"tokens", std::to_string(statistics.tokens)}) +
                    row_of({"supervised", format("{} ({})", statistics.supervised, percent(statistics.supervised, statistics.tokens))}) +
                    row_of({"without a supervised pair", std::to_string(statistics.without_pair)}) + row_of({"duplicates", std::to_string(statistics.duplicates)}) +
                    row_of({"questions that come again", std::to_string(statistics.repeated_questions)}) + "</table>\n<table>" +
                    row_of({"turn", "tokens", "supervised", "share"}, "th");
  for (std::size_t i = 0; i < std::min<std::size_t>(statistics.turns.size(), 12); ++i) out += share_row(std::to_string(i + 1), statistics.turns[i]);
  out += "</table>\n";
  if (!statistics.roles.empty()) {
    out += "<table>" + row_of({"role", "tokens", "supervised", "share"}, "th");
    for (const auto& [role, share] : statistics.roles) out += share_row(role, share);
    out += "</table>\n";
  }
  out += "<table>" + row_of({"length", "records", ""}, "th");
  const int64_t most = std::max<int64_t>(1, *std::max_element(statistics.histogram.begin(), statistics.histogram.end()));
  for (std::size_t i = 0; i < statistics.histogram.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    out += row_of({format("{} .. {}", at * statistics.bin_width + 1, (at + 1) * statistics.bin_width), std::to_string(statistics.histogram[i]),
                   format("<span class=\"bar\" style=\"width:{}px\"></span>", statistics.histogram[i] * 160 / most)});
  }
  return out + "</table>\n";
}

std::string tokens_of(const ShownRecord& record, const std::unordered_set<int64_t>& vocabulary) {
  std::string out;
  for (std::size_t t = 0; t < record.ids.size(); ++t) {
    std::string style = record.mask[t] != 0 ? (t % 2 != 0 ? "s odd" : "s") : "t";
    if (record.mask[t] != 0 && !vocabulary.empty() && !vocabulary.contains(record.ids[t])) style += " o";
    out += format("<span class=\"{}\" title=\"{}: token {}\">{}</span>", style, t, record.ids[t], escaped_html(visible(record.texts[t], true)));
  }
  return out;
}

}  // namespace

std::vector<ShownRecord> choose_records(const TokenFile& file, int64_t count) {
  std::vector<ShownRecord> records;
  const auto all = static_cast<int64_t>(file.samples.size());
  const int64_t wanted = std::min(count, all);
  for (int64_t i = 0; i < wanted; ++i) {
    const TokenSample& sample = file.samples[static_cast<std::size_t>(i * all / wanted)];
    ShownRecord& record = records.emplace_back(ShownRecord{sample.id, sample.input_ids, sample.loss_mask, {}});
    for (const int64_t id : sample.input_ids) record.texts.push_back(format("<{}>", id));
  }
  return records;
}

std::string visible(const std::string& text, bool breaks) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += breaks ? "⏎\n" : "⏎";
    } else if (c == '\t') {
      out += "⇥";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      char code[8];
      std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned char>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out;
}

std::string terminal_text(const ShownRecord& record, const std::unordered_set<int64_t>& vocabulary, bool colours) {
  std::string out = record.id + "\n";
  bool was_supervised = false;
  for (std::size_t t = 0; t < record.ids.size(); ++t) {
    const bool is_supervised = record.mask[t] != 0;
    const bool is_outside = is_supervised && !vocabulary.empty() && !vocabulary.contains(record.ids[t]);
    if (colours) {
      out += is_supervised ? (t % 2 != 0 ? "\x1b[30;102m" : "\x1b[30;42m") : "\x1b[90m";
      if (is_outside) out += "\x1b[4m";
      std::string text = visible(record.texts[t], false);
      out += text + "\x1b[0m";
      if (record.texts[t].ends_with('\n')) out += "\n";
    } else {
      if (is_supervised != was_supervised) out += is_supervised ? "[" : "]";
      if (is_outside) out += "~";
      out += visible(record.texts[t], true);
    }
    was_supervised = is_supervised;
  }
  if (!colours && was_supervised) out += "]";
  return out + "\n";
}

std::string html_page(const std::vector<PageContent>& parts, const VocabularySweep* sweep) {
  std::string out = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>token records</title>\n<style>";
  out += kStyle;
  out += "</style></head><body>\n<h1>Token records</h1>\n<p class=\"legend\"><span class=\"s\">supervised</span><span class=\"t\">context</span>"
         "<span class=\"s o\">outside the draft vocabulary</span> hold the pointer over a token for its place and id</p>\n";
  for (const PageContent& part : parts) {
    out += format("<h2>{}</h2>\n", escaped_html(part.title)) + tables_of(part.statistics);
    for (const std::string& line : part.outside) out += format("<p>{}</p>\n", escaped_html(line));
    for (const ShownRecord& record : part.records) out += format("<h3>{}</h3>\n<pre>", escaped_html(record.id)) + tokens_of(record, part.vocabulary) + "</pre>\n";
  }
  if (sweep != nullptr) out += "<h2>Draft vocabulary</h2>\n<pre>" + escaped_html(sweep->text()) + "</pre>\n";
  return out + "</body></html>\n";
}

}  // namespace sf
