// sf/json.hpp
//
// JSON as a plain tree of values: what configurations, manifests, indexes and metric lines are made of. In:
// UTF-8 text. Out: a tree, or a JsonError that names source, line and column. Objects keep the order in which
// keys were added, so a file that is read and written again stays readable. Integers keep all 64 bits; they
// are not doubles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace sf {

/// Malformed text, a missing key or a value of another kind. `what()` is a whole sentence with the place in
/// it.
class __attribute__((visibility("default"))) JsonError : public std::runtime_error {
 public:
  explicit JsonError(const std::string& what) : std::runtime_error(what) {}
  JsonError(const std::string& what, std::string source, int line, int column)
      : std::runtime_error(what), source_(std::move(source)), line_(line), column_(column) {}

  /// Name given to `parse`; empty when the error is about a value and not about text.
  [[nodiscard]] const std::string& source() const { return source_; }
  /// Counted from one; 0 when the error is about a value and not about text.
  [[nodiscard]] int line() const { return line_; }
  [[nodiscard]] int column() const { return column_; }

 private:
  std::string source_;
  int line_ = 0;
  int column_ = 0;
};

class Json {
 public:
  using Array = std::vector<Json>;
  using Entry = std::pair<std::string, Json>;
  using Object = std::vector<Entry>;

  Json() = default;                                               // null
  Json(std::nullptr_t) {}                                         // NOLINT(google-explicit-constructor)
  Json(bool value) : value_(value) {}                             // NOLINT(google-explicit-constructor)
  Json(int value) : value_(static_cast<int64_t>(value)) {}        // NOLINT(google-explicit-constructor)
  Json(unsigned value) : value_(static_cast<int64_t>(value)) {}   // NOLINT(google-explicit-constructor)
  Json(long value) : value_(static_cast<int64_t>(value)) {}       // NOLINT(google-explicit-constructor)
  Json(long long value) : value_(static_cast<int64_t>(value)) {}  // NOLINT(google-explicit-constructor)
  Json(unsigned long value);                                      // NOLINT(google-explicit-constructor)
  Json(unsigned long long value)  // NOLINT(google-explicit-constructor)
      : Json(static_cast<unsigned long>(value)) {}
  Json(double value) : value_(value) {}                         // NOLINT(google-explicit-constructor)
  Json(const char* value) : value_(std::string(value)) {}       // NOLINT(google-explicit-constructor)
  Json(std::string_view value) : value_(std::string(value)) {}  // NOLINT(google-explicit-constructor)
  Json(std::string value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)

  [[nodiscard]] static Json array() { return Json(Value(Array{})); }
  [[nodiscard]] static Json object() { return Json(Value(Object{})); }
  [[nodiscard]] static Json object(std::initializer_list<Entry> entries);
  /// An array of the elements of any container of things that a Json can be made from.
  template <class Container>
  [[nodiscard]] static Json array_of(const Container& elements) {
    Json result = array();
    for (const auto& element : elements) result.push_back(Json(element));
    return result;
  }

  /// The whole of `text` as one value. `source_name` is a path or another name for messages. Throws
  /// JsonError.
  [[nodiscard]] static Json parse(std::string_view text, std::string_view source_name = "text");

  [[nodiscard]] bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  [[nodiscard]] bool is_bool() const { return std::holds_alternative<bool>(value_); }
  [[nodiscard]] bool is_int() const { return std::holds_alternative<int64_t>(value_); }
  [[nodiscard]] bool is_double() const { return std::holds_alternative<double>(value_); }
  [[nodiscard]] bool is_number() const { return is_int() || is_double(); }
  [[nodiscard]] bool is_string() const { return std::holds_alternative<std::string>(value_); }
  [[nodiscard]] bool is_array() const { return std::holds_alternative<Array>(value_); }
  [[nodiscard]] bool is_object() const { return std::holds_alternative<Object>(value_); }
  /// "null", "a boolean", "an integer", "a number", "a string", "an array", "an object".
  [[nodiscard]] const char* kind_name() const;

  // Each of these throws JsonError when the value is of another kind.
  [[nodiscard]] bool as_bool() const;
  [[nodiscard]] int64_t as_int() const;    // a double with an integral value counts (1e6, 5.0)
  [[nodiscard]] double as_double() const;  // integers count
  [[nodiscard]] const std::string& as_string() const;

  /// Elements of an array.
  [[nodiscard]] const Array& items() const;
  [[nodiscard]] Array& items();
  /// Entries of an object, in order.
  [[nodiscard]] const Object& entries() const;
  /// Number of elements or entries; 0 for every other kind.
  [[nodiscard]] size_t size() const;

  /// The value at `key`, or nullptr when there is none or this is not an object. A null value is found.
  [[nodiscard]] const Json* find(std::string_view key) const;
  [[nodiscard]] Json* find(std::string_view key);
  [[nodiscard]] bool contains(std::string_view key) const { return find(key) != nullptr; }
  /// The value at `key`; throws JsonError when there is none.
  [[nodiscard]] const Json& at(std::string_view key) const;
  /// Element `index` of an array; throws JsonError when it is out of range.
  [[nodiscard]] const Json& at(size_t index) const;

  /// Replaces or adds an entry. Null becomes an object. Returns *this.
  Json& set(std::string_view key, Json value);
  /// Takes an entry out; false when there was none.
  bool remove(std::string_view key);
  /// Adds an element. Null becomes an array. Returns *this.
  Json& push_back(Json value);

  /// Text in one line (`indent` < 0) or with `indent` spaces a level. Bytes that are not UTF-8 are replaced.
  /// A double that is not finite becomes null, as JSON has no such numbers. Doubles are written so that they
  /// read back exactly.
  [[nodiscard]] std::string dump(int indent = -1) const;

  /// Same kind and value; objects are equal whatever the order of their keys.
  friend bool operator==(const Json& a, const Json& b);

 private:
  using Value = std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object>;
  explicit Json(Value value) : value_(std::move(value)) {}
  void write(std::string& out, int indent, int depth) const;
  friend class JsonReader;

  Value value_;
};

}  // namespace sf
