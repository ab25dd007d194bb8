#include "sf/json.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_set>

namespace sf {

namespace {

constexpr int kDepthMax =
    256;  // deeper than any honest file; keeps destruction and writing off the end of the stack

[[noreturn]] void wrong_kind(const char* expected, const Json& found) {
  throw JsonError(std::string("expected ") + expected + ", found " + found.kind_name());
}

void write_string(std::string& out, std::string_view text) {
  out += nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

// Builds the tree from the parser's events, so that the order of keys is kept and the depth is bounded.
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonReader(std::string_view text, std::string_view source) : text_(text), source_(source) {}

  Json take() { return std::move(root_); }

  bool null() override { return add(Json()); }
  bool boolean(bool value) override { return add(Json(value)); }
  bool number_integer(number_integer_t value) override { return add(Json(static_cast<long long>(value))); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return add(Json(static_cast<double>(value)));
    }
    return add(Json(static_cast<long long>(value)));
  }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(Json(value)); }
  bool string(string_t& value) override { return add(Json(std::move(value))); }
  bool binary(binary_t& /*value*/) override { return false; }
  bool start_object(size_t /*count*/) override { return open(Json::object()); }
  bool start_array(size_t /*count*/) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    keys_.back() = std::move(name);
    return true;
  }

  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::json::exception& error) override {
    std::string reason = error.what();
    if (size_t at = reason.find("; "); at != std::string::npos && reason.rfind("[json", 0) == 0) {
      reason = reason.substr(reason.find(": ", reason.find("column")) + 2);
    } else if (size_t colon = reason.find("column"); colon != std::string::npos) {
      reason = reason.substr(reason.find(": ", colon) + 2);
    }
    constexpr size_t kReasonMost = 300;  // what was read last may be a text of megabytes
    if (reason.size() > kReasonMost) reason = reason.substr(0, kReasonMost) + " ...";
    fail(position == 0 ? 0 : position - 1, reason);
  }

  [[noreturn]] void refuse(size_t position, const std::string& reason) const { fail(position, reason); }

 private:
  [[noreturn]] void fail(size_t position, const std::string& reason) const {
    position = std::min(position, text_.size());
    int line = 1;
    size_t line_start = 0;
    for (size_t i = 0; i < position; ++i) {
      if (text_[i] == '\n') {
        ++line;
        line_start = i + 1;
      }
    }
    const int column = static_cast<int>(position - line_start) + 1;
    throw JsonError(
        source_ + ":" + std::to_string(line) + ":" + std::to_string(column) + ": not valid JSON: " + reason,
        source_, line, column);
  }

  Json& top() { return *stack_.back(); }

  Json& place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return root_;
    }
    if (top().is_array()) {
      auto& elements = std::get<Json::Array>(top().value_);
      elements.push_back(std::move(value));
      return elements.back();
    }
    auto& entries = std::get<Json::Object>(top().value_);
    if (!seen_.back().insert(keys_.back()).second) {
      throw JsonError(source_ + ": not valid JSON: key \"" + keys_.back() + "\" appears twice in one object",
                      source_, 0, 0);
    }
    entries.emplace_back(keys_.back(), std::move(value));
    return entries.back().second;
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json container) {
    if (stack_.size() >= kDepthMax)
      throw JsonError(source_ + ": not valid JSON: nested too deeply", source_, 0, 0);
    stack_.push_back(&place(std::move(container)));
    keys_.emplace_back();
    seen_.emplace_back();
    return true;
  }
  bool close() {
    stack_.pop_back();
    keys_.pop_back();
    seen_.pop_back();
    return true;
  }

  std::string_view text_;
  std::string source_;
  Json root_;
  std::vector<Json*> stack_;  // stays valid: a container grows only when all that it holds is closed
  std::vector<std::string> keys_;
  std::vector<std::unordered_set<std::string>>
      seen_;  // keys of each open object: the index of a large model has 100,000
};

Json::Json(unsigned long value) {
  if (value <= static_cast<unsigned long>(std::numeric_limits<int64_t>::max())) {
    value_ = static_cast<int64_t>(value);
  } else {
    value_ = static_cast<double>(value);
  }
}

Json Json::object(std::initializer_list<Entry> entries) {
  Json result = object();
  for (const Entry& entry : entries) result.set(entry.first, entry.second);
  return result;
}

Json Json::parse(std::string_view text, std::string_view source_name) {
  JsonReader reader(text, source_name);
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    reader.refuse(zero, "a zero byte, which no JSON has");  // the parser would take it for the end of the text
  }
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

const char* Json::kind_name() const {
  static constexpr const char* kNames[] = {"null",     "a boolean", "an integer", "a number",
                                           "a string", "an array",  "an object"};
  return kNames[value_.index()];
}

bool Json::as_bool() const {
  if (!is_bool()) wrong_kind("a boolean", *this);
  return std::get<bool>(value_);
}

int64_t Json::as_int() const {
  if (is_int()) return std::get<int64_t>(value_);
  if (is_double()) {
    const double value = std::get<double>(value_);
    if (std::trunc(value) == value && std::abs(value) <= 9007199254740992.0)
      return static_cast<int64_t>(value);
  }
  wrong_kind("an integer", *this);
}

double Json::as_double() const {
  if (is_int()) return static_cast<double>(std::get<int64_t>(value_));
  if (!is_double()) wrong_kind("a number", *this);
  return std::get<double>(value_);
}

const std::string& Json::as_string() const {
  if (!is_string()) wrong_kind("a string", *this);
  return std::get<std::string>(value_);
}

const Json::Array& Json::items() const {
  if (!is_array()) wrong_kind("an array", *this);
  return std::get<Array>(value_);
}

Json::Array& Json::items() {
  if (!is_array()) wrong_kind("an array", *this);
  return std::get<Array>(value_);
}

const Json::Object& Json::entries() const {
  if (!is_object()) wrong_kind("an object", *this);
  return std::get<Object>(value_);
}

size_t Json::size() const {
  if (is_array()) return std::get<Array>(value_).size();
  if (is_object()) return std::get<Object>(value_).size();
  return 0;
}

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  for (const Entry& entry : std::get<Object>(value_)) {
    if (entry.first == key) return &entry.second;
  }
  return nullptr;
}

Json* Json::find(std::string_view key) {
  return const_cast<Json*>(std::as_const(*this).find(key));
}

const Json& Json::at(std::string_view key) const {
  if (!is_object()) wrong_kind("an object", *this);
  const Json* value = find(key);
  if (value == nullptr) throw JsonError("there is no key \"" + std::string(key) + "\"");
  return *value;
}

const Json& Json::at(size_t index) const {
  const Array& elements = items();
  if (index >= elements.size()) {
    throw JsonError("there is no element " + std::to_string(index) + ", the array has " +
                    std::to_string(elements.size()));
  }
  return elements[index];
}

Json& Json::set(std::string_view key, Json value) {
  if (is_null()) value_ = Object{};
  if (!is_object()) wrong_kind("an object", *this);
  if (Json* old = find(key)) {
    *old = std::move(value);
  } else {
    std::get<Object>(value_).emplace_back(std::string(key), std::move(value));
  }
  return *this;
}

bool Json::remove(std::string_view key) {
  if (!is_object()) return false;
  return std::erase_if(std::get<Object>(value_), [&](const Entry& entry) { return entry.first == key; }) > 0;
}

Json& Json::push_back(Json value) {
  if (is_null()) value_ = Array{};
  items().push_back(std::move(value));
  return *this;
}

std::string Json::dump(int indent) const {
  std::string out;
  write(out, indent, 0);
  return out;
}

void Json::write(std::string& out, int indent, int depth) const {
  const auto new_line = [&](int level) {
    if (indent < 0) return;
    out += '\n';
    out.append(static_cast<size_t>(indent) * static_cast<size_t>(level), ' ');
  };
  if (is_null()) {
    out += "null";
  } else if (is_bool()) {
    out += std::get<bool>(value_) ? "true" : "false";
  } else if (is_int()) {
    out += std::to_string(std::get<int64_t>(value_));
  } else if (is_double()) {
    const double value = std::get<double>(value_);
    if (!std::isfinite(value)) {
      out += "null";
      return;
    }
    char buffer[32];
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
    const std::string_view digits(buffer, static_cast<size_t>(end - buffer));
    out += digits;
    if (digits.find_first_of(".e") == std::string_view::npos) out += ".0";  // stays a double when read again
  } else if (is_string()) {
    write_string(out, std::get<std::string>(value_));
  } else if (is_array()) {
    const Array& elements = std::get<Array>(value_);
    out += '[';
    for (size_t i = 0; i < elements.size(); ++i) {
      if (i > 0) out += indent < 0 ? ", " : ",";
      new_line(depth + 1);
      elements[i].write(out, indent, depth + 1);
    }
    if (!elements.empty()) new_line(depth);
    out += ']';
  } else {
    const Object& entries = std::get<Object>(value_);
    out += '{';
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out += indent < 0 ? ", " : ",";
      new_line(depth + 1);
      write_string(out, entries[i].first);
      out += ": ";
      entries[i].second.write(out, indent, depth + 1);
    }
    if (!entries.empty()) new_line(depth);
    out += '}';
  }
}

bool operator==(const Json& a, const Json& b) {
  if (a.value_.index() != b.value_.index()) return false;
  if (!a.is_object()) return a.value_ == b.value_;
  if (a.size() != b.size()) return false;
  for (const Json::Entry& entry : a.entries()) {
    const Json* other = b.find(entry.first);
    if (other == nullptr || !(*other == entry.second)) return false;
  }
  return true;
}

}  // namespace sf
