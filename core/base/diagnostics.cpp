#include "core/base/diagnostics.hpp"

#include <algorithm>
#include <utility>

namespace sf {

std::string Place::text() const {
  if (source.empty() || line == 0) {
    return source;
  }
  return source + ":" + std::to_string(line) + (column == 0 ? "" : ":" + std::to_string(column));
}

void Diagnostics::error(Diagnostic diagnostic) {
  diagnostic.severity = Severity::error;
  all_.push_back(std::move(diagnostic));
  ++error_count_;
}

void Diagnostics::warn(Diagnostic diagnostic) {
  diagnostic.severity = Severity::warning;
  all_.push_back(std::move(diagnostic));
}

void Diagnostics::add_all(const Diagnostics& other) {
  all_.insert(all_.end(), other.all_.begin(), other.all_.end());
  error_count_ += other.error_count_;
}

bool Diagnostics::contains(std::string_view id) const {
  return std::any_of(all_.begin(), all_.end(), [&](const Diagnostic& d) { return d.id == id; });
}

std::string Diagnostics::text() const {
  std::string out;
  auto line = [&out](const char* label, const std::string& text) {
    if (!text.empty()) {
      out += std::string("  ") + label + text + "\n";
    }
  };
  for (const Diagnostic& d : all_) {
    std::string place = d.place.text();
    out += (d.severity == Severity::error ? "error[" : "warning[") + d.id + "] ";
    out += (place.empty() ? "" : place + ": ") + d.message + "\n";
    line("", d.note);
    line("file: ", d.file);
    line("why:  ", d.why);
    line("fix:  ", d.fix);
  }
  return out;
}

}  // namespace sf
