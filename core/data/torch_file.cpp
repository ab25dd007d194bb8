#include "core/data/torch_file.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/data/zip_archive.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <string_view>
#include <utility>

namespace sf {

namespace {

constexpr int kDepthMax = 100;             // a feature record nests three deep
constexpr size_t kAxesMax = 64;            // of a tensor in torch
constexpr size_t kValuesMax = 100'000;     // and has some dozens of values; 16 MB of them at most, 100 MB when each has all axes
constexpr const char* kRebuildTensor = "torch._utils _rebuild_tensor_v2";
constexpr const char* kOrderedDict = "collections OrderedDict";

struct StorageType {
  const char* global;
  Dtype dtype;
};

constexpr StorageType kStorageTypes[] = {
    {"torch FloatStorage", Dtype::kF32}, {"torch DoubleStorage", Dtype::kF64},
    {"torch HalfStorage", Dtype::kF16},  {"torch BFloat16Storage", Dtype::kBF16},
    {"torch LongStorage", Dtype::kI64},  {"torch IntStorage", Dtype::kI32},
    {"torch ShortStorage", Dtype::kI16}, {"torch CharStorage", Dtype::kI8},
    {"torch ByteStorage", Dtype::kU8},   {"torch BoolStorage", Dtype::kBool},
};

// What the pickle machine works on. A tensor is `storage` with offset, size and stride in elements.
struct Value {
  enum class Kind {
    kMark,
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kGlobal,
    kTuple,
    kList,
    kDict,
    kStorage,
    kTensor
  };
  Kind kind = Kind::kNone;
  int64_t number = 0;  // kInt, kBool; element offset of a kTensor; element count of a kStorage
  std::string_view text;  // kText; kGlobal as "module name"; archive key of a kStorage or kTensor; in the pickle, so that many tensors may share a long one
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;
  int64_t storage_elements = 0;
  std::vector<Value*> items;  // kTuple, kList; kDict as key, value, key, value ...; a damaged one may hold itself
  int depth = 0;                              // of nested items
};

/// Owns all values that it makes, so that containers which hold each other, or a chain of them, end with it.
class Unpickler {
 public:
  Unpickler(std::span<const std::byte> pickle, const std::string& file) : pickle_(pickle), file_(file) {}

  Value* run() {
    while (true) {
      const uint8_t opcode = take<uint8_t>();
      switch (opcode) {
        // clang-format off
        case 0x80: (void)take<uint8_t>(); break;                                  // PROTO
        case 0x95: (void)take<uint64_t>(); break;                                 // FRAME
        case '.': return pop();                                                   // STOP
        case '(': push(Value::Kind::kMark); break;                                // MARK
        case 'N': push(Value::Kind::kNone); break;                                // NONE
        case 0x88: push(Value::Kind::kBool)->number = 1; break;                   // NEWTRUE
        case 0x89: push(Value::Kind::kBool)->number = 0; break;                   // NEWFALSE
        case 'K': push(Value::Kind::kInt)->number = take<uint8_t>(); break;       // BININT1
        case 'M': push(Value::Kind::kInt)->number = take<uint16_t>(); break;      // BININT2
        case 'J': push(Value::Kind::kInt)->number = take<int32_t>(); break;       // BININT
        case 0x8a: push(Value::Kind::kInt)->number = long_number(); break;        // LONG1
        case 'G': (void)take<uint64_t>(); push(Value::Kind::kFloat); break;       // BINFLOAT; no tensor needs its value
        case 'X': { const auto n = take<uint32_t>(); push_text(n); break; }       // BINUNICODE
        case 0x8c: { const auto n = take<uint8_t>(); push_text(n); break; }       // SHORT_BINUNICODE
        case 'c': global(); break;                                                // GLOBAL
        case 0x93: stack_global(); break;                                         // STACK_GLOBAL
        case '}': push(Value::Kind::kDict); break;                                // EMPTY_DICT
        case ']': push(Value::Kind::kList); break;                                // EMPTY_LIST
        case ')': push(Value::Kind::kTuple); break;                               // EMPTY_TUPLE
        case 't': push_tuple(pop_to_mark()); break;                               // TUPLE
        case 0x85: tuple(1); break;                                               // TUPLE1
        case 0x86: tuple(2); break;                                               // TUPLE2
        case 0x87: tuple(3); break;                                               // TUPLE3
        case 'a': { const auto items = pop_many(1); append(items); break; }       // APPEND
        case 'e': append(pop_to_mark()); break;                                   // APPENDS
        case 's': { const auto items = pop_many(2); set(items); break; }          // SETITEM
        case 'u': set(pop_to_mark()); break;                                      // SETITEMS
        case 'q': memo_[take<uint8_t>()] = top(); break;                          // BINPUT
        case 'r': memo_[take<uint32_t>()] = top(); break;                         // LONG_BINPUT
        case 0x94: { const auto next = static_cast<uint32_t>(memo_.size()); memo_[next] = top(); break; }  // MEMOIZE
        case 'h': recall(take<uint8_t>()); break;                                 // BINGET
        case 'j': recall(take<uint32_t>()); break;                                // LONG_BINGET
        case 'Q': persistent(); break;                                            // BINPERSID
        case 'R': reduce(); break;                                                // REDUCE
        case 'b': refuse("the pickle sets the state of an object; only plain tensors are read");
        // clang-format on
        default:
          refuse("the pickle has the operation " + std::to_string(opcode) +
                 ", which plain tensors do not need");
      }
      if (std::max({stack_.size(), values_.size(), memo_.size()}) > kValuesMax) refuse("damaged pickle: too many values");
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ExitCode::kData, file_ + ": " + what);
  }

  template <class Number>
  Number take() {
    if (pickle_.size() - at_ < sizeof(Number)) refuse("damaged: the pickle ends too early");
    Number value;
    std::memcpy(&value, pickle_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::string_view take_text(size_t count) {
    if (pickle_.size() - at_ < count) refuse("damaged: the pickle ends too early");
    const std::string_view text(reinterpret_cast<const char*>(pickle_.data()) + at_, count);
    at_ += count;
    return text;
  }
  std::string_view take_line() {
    size_t count = 0;
    while (at_ + count < pickle_.size() && pickle_[at_ + count] != std::byte{'\n'}) ++count;
    const std::string_view line = take_text(count);
    (void)take<uint8_t>();
    return line;
  }
  int64_t long_number() {
    const uint8_t count = take<uint8_t>();
    if (count > 8) refuse("damaged pickle: a number of " + std::to_string(count) + " bytes");
    uint64_t value = 0;
    for (uint8_t i = 0; i < count; ++i) value |= uint64_t{take<uint8_t>()} << (8 * i);
    if (count > 0 && count < 8 && (value >> (8 * count - 1)) != 0)
      value |= ~uint64_t{0} << (8 * count);  // sign
    return static_cast<int64_t>(value);
  }

  Value* push(Value::Kind kind) {
    values_.emplace_back().kind = kind;
    stack_.push_back(&values_.back());
    return stack_.back();
  }
  void push_text(size_t count) {
    push(Value::Kind::kText)->text = take_text(count);
  }
  Value* top() {
    if (stack_.empty()) refuse("damaged pickle: a value is missing");
    return stack_.back();
  }
  Value* pop() {
    Value* value = top();
    stack_.pop_back();
    return value;
  }
  std::vector<Value*> pop_many(size_t count) {
    if (stack_.size() < count) refuse("damaged pickle: a value is missing");
    std::vector<Value*> values(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return values;
  }
  std::vector<Value*> pop_to_mark() {
    size_t count = 0;
    while (count < stack_.size() && stack_[stack_.size() - 1 - count]->kind != Value::Kind::kMark) ++count;
    if (count == stack_.size()) refuse("damaged pickle: a mark is missing");
    std::vector<Value*> values = pop_many(count);
    stack_.pop_back();
    return values;
  }
  void tuple(size_t count) { push_tuple(pop_many(count)); }
  void push_tuple(const std::vector<Value*>& items) {
    Value* tuple = push(Value::Kind::kTuple);
    for (Value* item : items) add_item(*tuple, item);
  }
  void add_item(Value& container, Value* item) {
    container.depth = std::max(container.depth, item->depth + 1);
    if (container.depth > kDepthMax) refuse("damaged pickle: nested too deeply");
    container.items.push_back(item);
  }
  void append(const std::vector<Value*>& values) {
    Value* const list = top();
    if (list->kind != Value::Kind::kList) refuse("damaged pickle: append to something that is not a list");
    for (Value* value : values) add_item(*list, value);
  }
  void set(const std::vector<Value*>& values) {
    Value* const dict = top();
    if (dict->kind != Value::Kind::kDict || values.size() % 2 != 0)
      refuse("damaged pickle: items of something that is no dictionary");
    for (Value* value : values) add_item(*dict, value);
  }
  void recall(uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) refuse("damaged pickle: value " + std::to_string(index) + " was never stored");
    stack_.push_back(found->second);
  }
  void add_global(std::string_view module, std::string_view name) {
    const std::string found = std::string(module) + " " + std::string(name);
    std::string_view allowed = found == kRebuildTensor ? kRebuildTensor : found == kOrderedDict ? kOrderedDict : "";
    for (const StorageType& type : kStorageTypes) allowed = found == type.global ? type.global : allowed;
    if (allowed.empty()) {
      throw Error(
          ExitCode::kData,
          file_ + ": the pickle asks for '" + found + "', which is not allowed: only plain tensors are read",
          "save a dictionary of plain CPU tensors with torch.save");
    }
    push(Value::Kind::kGlobal)->text = allowed;
  }
  void global() {
    const std::string_view module = take_line();
    add_global(module, take_line());
  }
  void stack_global() {
    const auto parts = pop_many(2);
    add_global(parts[0]->text, parts[1]->text);
  }
  void persistent() {
    Value* const id = pop();
    if (id->kind != Value::Kind::kTuple || id->items.size() != 5 || id->items[0]->text != "storage" ||
        id->items[1]->kind != Value::Kind::kGlobal || id->items[2]->kind != Value::Kind::kText ||
        id->items[4]->kind != Value::Kind::kInt) {
      refuse("damaged pickle: a storage is not described as torch.save does");
    }
    const StorageType* type = nullptr;
    for (const StorageType& candidate : kStorageTypes) {
      if (id->items[1]->text == candidate.global) type = &candidate;
    }
    if (type == nullptr) refuse("damaged pickle: '" + std::string(id->items[1]->text) + "' is not a storage");
    Value* storage = push(Value::Kind::kStorage);
    storage->text = id->items[2]->text;
    storage->dtype = type->dtype;
    storage->number = id->items[4]->number;
  }
  [[nodiscard]] std::vector<int64_t> numbers(const Value& tuple) const {
    if (tuple.items.size() > kAxesMax) refuse("damaged pickle: a tensor of " + std::to_string(tuple.items.size()) + " axes");
    std::vector<int64_t> result;
    for (const Value* item : tuple.items) result.push_back(item->number);
    return result;
  }
  void reduce() {
    Value* const arguments = pop();
    Value* const function = pop();
    if (function->kind != Value::Kind::kGlobal || arguments->kind != Value::Kind::kTuple) {
      refuse("damaged pickle: a call of something that can't be called");
    }
    if (function->text == kOrderedDict) {
      if (!arguments->items.empty())
        refuse("the pickle fills an OrderedDict in a way that plain tensors do not need");
      push(Value::Kind::kDict);
      return;
    }
    const auto& items = arguments->items;
    if (function->text != kRebuildTensor || items.size() < 4 || items[0]->kind != Value::Kind::kStorage ||
        items[1]->kind != Value::Kind::kInt || items[2]->kind != Value::Kind::kTuple ||
        items[3]->kind != Value::Kind::kTuple || items[2]->items.size() != items[3]->items.size()) {
      refuse("damaged pickle: a tensor is not described as torch.save does");
    }
    Value* tensor = push(Value::Kind::kTensor);
    tensor->text = items[0]->text;
    tensor->dtype = items[0]->dtype;
    tensor->storage_elements = items[0]->number;
    tensor->number = items[1]->number;
    tensor->shape = numbers(*items[2]);
    tensor->stride = numbers(*items[3]);
  }

  std::span<const std::byte> pickle_;
  const std::string& file_;
  size_t at_ = 0;
  std::deque<Value> values_;  // which stay where they are
  std::vector<Value*> stack_;
  std::map<uint32_t, Value*> memo_;
};

// Row-major, looking only at axes that have more than one element.
bool is_contiguous(const Value& tensor) {
  int64_t expected = 1;
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) return true;  // the other extents may be anything
  for (size_t i = tensor.shape.size(); i-- > 0;) {
    if (tensor.shape[i] > 1 && tensor.stride[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace

TorchFile TorchFile::open(const std::filesystem::path& path) {
  const std::string name = path.string();
  std::shared_ptr<const void> owner;
  std::span<const std::byte> bytes;
  auto file = std::make_shared<const MappedFile>(path);
  if (path.extension() == ".gz") {
    auto unpacked = unpack_gzip(file->bytes(), name);
    bytes = std::span<const std::byte>(*unpacked);
    owner = std::move(unpacked);
  } else {
    bytes = file->bytes();
    owner = std::move(file);
  }
  if (bytes.empty()) throw Error(ExitCode::kData, name + ": the file is empty", "make it again");

  const ZipArchive archive(bytes, name);
  std::string stem;
  for (const std::string& entry : archive.entries()) {
    static constexpr std::string_view kEnd = "/data.pkl";
    if (entry.size() > kEnd.size() && entry.ends_with(kEnd))
      stem = entry.substr(0, entry.size() - kEnd.size() + 1);
  }
  if (stem.empty())
    throw Error(ExitCode::kData, name + ": not a file of torch.save: the archive has no data.pkl");
  if (archive.contains(stem + "byteorder")) {
    const ZipBytes order = archive.read(stem + "byteorder");
    if (std::string_view(reinterpret_cast<const char*>(order.bytes.data()), order.bytes.size()) != "little") {
      throw Error(ExitCode::kData, name + ": its numbers are not little-endian");
    }
  }

  const ZipBytes pickle = archive.read(stem + "data.pkl");
  Unpickler unpickler(pickle.bytes, name);
  const Value* root = unpickler.run();
  if (root->kind != Value::Kind::kDict)
    throw Error(ExitCode::kData, name + ": a dictionary of tensors was expected");

  TorchFile result;
  for (size_t i = 0; i + 1 < root->items.size(); i += 2) {
    const Value& key = *root->items[i];
    const Value& value = *root->items[i + 1];
    if (value.kind != Value::Kind::kTensor || key.kind != Value::Kind::kText) continue;
    const std::string where = name + ": key '" + std::string(key.text) + "'";
    const std::optional<int64_t> count = element_count(value.shape);
    if (!count) throw Error(ExitCode::kData, where + " has the impossible shape " + shape_text(value.shape));
    if (!is_contiguous(value)) {
      throw Error(ExitCode::kData,
                  where + " has shape " + shape_text(value.shape) + " with strides " +
                      shape_text(value.stride) + ", but row-major order is expected",
                  "save tensor.contiguous()");
    }
    const ZipBytes storage = archive.read(stem + "data/" + std::string(value.text));
    const int64_t element = bytes_of(value.dtype);
    const auto elements = static_cast<int64_t>(storage.bytes.size()) / element;
    if (value.number < 0 || value.storage_elements != elements || *count > elements - value.number) {
      throw Error(ExitCode::kData,
                  where + " has shape " + shape_text(value.shape) + " at element " +
                      std::to_string(value.number) + " of a storage that should have " +
                      std::to_string(value.storage_elements) + " elements and has " +
                      std::to_string(elements),
                  "the file is damaged or was not written to its end: copy or make it again");
    }
    TensorView view;
    view.name = key.text;
    view.dtype = value.dtype;
    view.shape = value.shape;
    view.bytes = storage.bytes.subspan(static_cast<size_t>(value.number * element),
                                       static_cast<size_t>(*count * element));
    view.owner = storage.owner ? storage.owner : owner;
    result.tensors_.push_back(std::move(view));
  }
  return result;
}

const TensorView* TorchFile::find(std::string_view name) const {
  const TensorView* found = nullptr;
  for (const TensorView& tensor : tensors_) {
    if (tensor.name == name) found = &tensor;  // the last one counts, as in a dictionary
  }
  return found;
}

}  // namespace sf
