#include "core/data/safetensors.hpp"

#include "sf/json.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace sf {

namespace {

constexpr uint64_t kHeaderBytesMax = 100'000'000;  // the format's own limit
constexpr size_t kAlignment = 8;  // of the first tensor's bytes, as the format's own writers do

constexpr const char* kTruncatedHint =
    "the file is damaged or was not written to its end: copy or make it again";

uint64_t little_endian_64(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  std::memcpy(&value, bytes.data(), sizeof(value));  // all machines we build for are little-endian
  return value;
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile result;
  result.path_ = path;
  const auto refuse = [&](const std::string& what, const std::string& hint = kTruncatedHint) {
    return Error(ExitCode::kData, path.string() + ": " + what, hint);
  };

  result.file_ = std::make_shared<const MappedFile>(path);
  const std::span<const std::byte> file = result.file_->bytes();
  if (file.size() < 8) {
    throw refuse(
        "not a safetensors file: it has " + std::to_string(file.size()) + " bytes, at least 8 expected",
        kTruncatedHint);
  }
  const uint64_t header_bytes = little_endian_64(file);
  if (header_bytes > kHeaderBytesMax) {
    throw refuse("not a safetensors file: its header would have " + std::to_string(header_bytes) +
                 " bytes, at most " + std::to_string(kHeaderBytesMax) + " allowed");
  }
  if (header_bytes > file.size() - 8) {
    throw refuse("truncated: the header has " + std::to_string(header_bytes) + " bytes, the file only " +
                     std::to_string(file.size()),
                 kTruncatedHint);
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8, header_bytes);
  if (text.empty() || text.front() != '{')
    throw refuse("not a safetensors file: the header does not start with {");

  Json header;
  try {
    header = Json::parse(text, "header");
  } catch (const JsonError& error) {
    throw refuse(std::string("damaged header: ") + error.what(), kTruncatedHint);
  }
  const std::span<const std::byte> data = file.subspan(8 + header_bytes);

  struct Range {
    int64_t begin;
    int64_t end;
  };
  std::vector<Range> ranges;
  for (const auto& [name, entry] : header.entries()) {
    if (name == "__metadata__") {
      if (!entry.is_object())
        throw refuse("damaged header: __metadata__ is " + std::string(entry.kind_name()));
      for (const auto& [key, value] : entry.entries()) {
        if (!value.is_string()) throw refuse("damaged header: __metadata__ '" + key + "' is not a string");
        result.metadata_[key] = value.as_string();
      }
      continue;
    }
    TensorView view;
    view.name = name;
    Range range{};
    try {
      const std::string& type = entry.at("dtype").as_string();
      const std::optional<Dtype> dtype = dtype_from_name(type);
      if (!dtype) throw refuse(format("tensor '{}' has the unknown type {}", name, type));
      view.dtype = *dtype;
      for (const Json& extent : entry.at("shape").items()) view.shape.push_back(extent.as_int());
      const Json& offsets = entry.at("data_offsets");
      if (offsets.items().size() != 2)
        throw JsonError("data_offsets has " + std::to_string(offsets.size()) + " elements");
      range = {offsets.at(size_t{0}).as_int(), offsets.at(size_t{1}).as_int()};
    } catch (const JsonError& error) {
      throw refuse("damaged header: tensor '" + name + "': " + error.what());
    }
    const std::optional<int64_t> count = element_count(view.shape);
    if (!count || *count > (int64_t{1} << 58)) {
      throw refuse("tensor '" + name + "' has the impossible shape " + shape_text(view.shape));
    }
    if (range.begin < 0 || range.end < range.begin ||
        range.end - range.begin != *count * bytes_of(view.dtype)) {
      throw refuse("damaged header: tensor '" + name + "' has bytes " + std::to_string(range.begin) + " to " +
                   std::to_string(range.end) + ", but shape " + shape_text(view.shape) + " in " +
                   dtype_name(view.dtype) + " needs " + std::to_string(*count * bytes_of(view.dtype)));
    }
    if (range.end > static_cast<int64_t>(data.size())) {
      throw refuse("truncated: tensor '" + name + "' ends at byte " + std::to_string(range.end) +
                       " of the data, the file has " + std::to_string(data.size()),
                   kTruncatedHint);
    }
    view.bytes = data.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.end - range.begin));
    view.owner = result.file_;
    result.tensors_.push_back(std::move(view));
    ranges.push_back(range);
  }

  // Order by place; empty tensors come before the one that starts where they do.
  std::vector<size_t> order(ranges.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(ranges[a].begin, ranges[a].end) < std::pair(ranges[b].begin, ranges[b].end);
  });
  std::vector<TensorView> sorted;
  int64_t end = 0;
  for (const size_t i : order) {
    if (ranges[i].begin != end) {
      throw refuse("damaged header: tensor '" + result.tensors_[i].name + "' starts at byte " +
                   std::to_string(ranges[i].begin) + ", but the tensor before it ends at " +
                   std::to_string(end));
    }
    end = ranges[i].end;
    sorted.push_back(std::move(result.tensors_[i]));
  }
  if (end != static_cast<int64_t>(data.size())) {
    throw refuse("the tensors end at byte " + std::to_string(end) + " of the data, the file has " +
                     std::to_string(data.size()),
                 kTruncatedHint);
  }
  result.tensors_ = std::move(sorted);
  for (size_t i = 0; i < result.tensors_.size(); ++i) result.index_[result.tensors_[i].name] = i;
  return result;
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const TensorView& SafetensorsFile::at(std::string_view name) const {
  if (const TensorView* view = find(name)) return *view;
  std::vector<std::string> names;
  for (const TensorView& tensor : tensors_) names.push_back(tensor.name);
  const std::string near = did_you_mean(name, names);
  throw Error(ExitCode::kData,
              path_.string() + ": there is no tensor '" + std::string(name) + "' among " +
                  std::to_string(names.size()),
              near.empty() ? "" : "did you mean '" + near + "'?");
}

int64_t SafetensorsFile::file_bytes() const {
  return static_cast<int64_t>(file_->bytes().size());
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     const std::vector<TensorSpec>& tensors,
                                     const std::map<std::string, std::string>& metadata, ExitCode failure)
    : path_(path), failure_(failure) {
  Json header = Json::object();
  if (!metadata.empty()) {
    Json entries = Json::object();
    for (const auto& [key, value] : metadata) entries.set(key, value);
    header.set("__metadata__", std::move(entries));
  }
  int64_t offset = 0;
  for (const TensorSpec& tensor : tensors) {
    SF_CHECK(element_count(tensor.shape).has_value(), "tensor '{}' has shape {}", tensor.name,
             shape_text(tensor.shape));
    const int64_t bytes = tensor.bytes();
    SF_CHECK(ranges_.emplace(tensor.name, std::pair(offset, bytes)).second, "tensor '{}' is given twice",
             tensor.name);
    header.set(
        tensor.name,
        Json::object({{"dtype", dtype_name(tensor.dtype)},
                      {"shape", Json::array_of(tensor.shape)},
                      {"data_offsets", Json::array_of(std::vector<int64_t>{offset, offset + bytes})}}));
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  const uint64_t header_bytes = text.size();
  const int64_t data_start = 8 + static_cast<int64_t>(header_bytes);
  for (auto& [name, range] : ranges_) range.first += data_start;
  file_bytes_ = data_start + offset;

  descriptor_ = ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail("creating it", errno);
  try {
    // Real blocks, not a hole: a disk that is too small says so here and not after an hour. The system call itself, as the C
    // library's would write zeros all over a file system that can't reserve.
    int reserved = 0;
    do {
      reserved = ::fallocate(descriptor_, 0, 0, file_bytes_) == 0 ? 0 : errno;
    } while (reserved == EINTR);
    if (reserved == EOPNOTSUPP || reserved == ENOSYS) {
      if (::ftruncate(descriptor_, file_bytes_) != 0) fail("setting its size", errno);
    } else if (reserved != 0) {
      fail("reserving " + human_bytes(static_cast<uint64_t>(file_bytes_)), reserved);
    }
    std::string start(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
    start += text;
    ranges_[""] = {0, static_cast<int64_t>(start.size())};
    write("", 0, std::as_bytes(std::span(start)));
    ranges_.erase("");
  } catch (...) {
    ::close(descriptor_);
    ::unlink(path.c_str());
    descriptor_ = -1;
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void SafetensorsWriter::write(std::string_view name, int64_t offset, std::span<const std::byte> bytes) {
  const auto range = ranges_.find(name);
  SF_CHECK(range != ranges_.end(), "there is no tensor '{}' to write", std::string(name));
  SF_CHECK(descriptor_ >= 0, "'{}' is closed", path_.string());
  SF_CHECK(offset >= 0 && offset + static_cast<int64_t>(bytes.size()) <= range->second.second,
           "bytes {} to {} of tensor '{}', which has {}", offset, offset + static_cast<int64_t>(bytes.size()),
           std::string(name), range->second.second);
  int64_t at = range->second.first + offset;
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("writing", written == 0 ? ENOSPC : errno);
    at += written;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void SafetensorsWriter::finish() {
  SF_CHECK(descriptor_ >= 0, "'{}' is closed", path_.string());
  const bool synced = ::fsync(descriptor_) == 0;
  const int sync_error = errno;
  const bool closed = ::close(descriptor_) == 0;
  const int close_error = errno;
  descriptor_ = -1;
  if (!synced) fail("bringing it to the disk", sync_error);
  if (!closed) fail("closing it", close_error);
}

void SafetensorsWriter::fail(const std::string& doing, int error_number) const {
  throw Error(
      failure_, path_.string() + ": " + doing + ": " + std::strerror(error_number),
      error_number == ENOSPC || error_number == EDQUOT ? "make room, or name a folder on another disk" : "");
}

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorView>& tensors,
                       const std::map<std::string, std::string>& metadata, ExitCode failure) {
  std::vector<TensorSpec> specs;
  specs.reserve(tensors.size());
  for (const TensorView& tensor : tensors) specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  const std::filesystem::path part = path.string() + ".part";
  try {
    SafetensorsWriter writer(part, specs, metadata, failure);
    for (const TensorView& tensor : tensors) writer.write(tensor.name, 0, tensor.bytes);
    writer.finish();
    std::error_code failed;
    std::filesystem::rename(part, path, failed);
    if (failed) throw Error(failure, format("{}: naming the finished file: {}", path, failed.message()), "is something else of this name there? Move it away");
  } catch (...) {
    ::unlink(part.c_str());
    throw;
  }
  sync_path(path.has_parent_path() ? path.parent_path() : std::filesystem::path("."), failure);
}

}  // namespace sf
