#include "core/checkpoint/reader.hpp"

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/presence.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace sf {
namespace fs = std::filesystem;
namespace {

Error damaged(const fs::path& folder, const std::string& why) {
  return Error(ExitCode::kCheckpoint, format("checkpoint {} is damaged: {}", folder, why));
}

std::span<const std::byte> part_of(const MappedFile& file, uint64_t offset, uint64_t bytes) {
  return file.bytes().subspan(offset, bytes);
}

// Copies the part that the box of `slice` and the wanted box have in common, axis by axis; the last axis in
// one piece.
struct BoxCopy {
  const SavedSlice& slice;
  const std::byte* from;
  const std::vector<int64_t>& start;
  const std::vector<int64_t>& shape;
  std::byte* to;
  uint64_t element_bytes;

  void run(size_t axis = 0, int64_t from_index = 0, int64_t to_index = 0) const {
    if (axis == shape.size()) {  // a scalar
      std::memcpy(to + static_cast<uint64_t>(to_index) * element_bytes,
                  from + static_cast<uint64_t>(from_index) * element_bytes, element_bytes);
      return;
    }
    const int64_t first = std::max(start[axis], slice.start[axis]);
    const int64_t last = std::min(start[axis] + shape[axis], slice.start[axis] + slice.shape[axis]);
    if (first >= last) {
      return;
    }
    from_index = from_index * slice.shape[axis] + first - slice.start[axis];
    to_index = to_index * shape[axis] + first - start[axis];
    if (axis + 1 == shape.size()) {
      std::memcpy(to + static_cast<uint64_t>(to_index) * element_bytes,
                  from + static_cast<uint64_t>(from_index) * element_bytes,
                  static_cast<uint64_t>(last - first) * element_bytes);
      return;
    }
    for (int64_t i = 0; i < last - first; ++i) {
      run(axis + 1, from_index + i, to_index + i);
    }
  }
};

// Calls found(place in the row-major tensor, place in the row-major box, count) for each unbroken run of a box.
template <class Found>
void each_run(const std::vector<int64_t>& tensor_shape, const std::vector<int64_t>& start, const std::vector<int64_t>& shape,
              const Found& found, size_t axis = 0, int64_t place = 0, int64_t in_box = 0) {
  int64_t inner = 1;
  bool is_whole = true;  // from the next axis on
  for (size_t a = axis + 1; a < shape.size(); ++a) {
    inner *= tensor_shape[a];
    is_whole = is_whole && start[a] == 0 && shape[a] == tensor_shape[a];
  }
  if (axis == shape.size()) {
    found(place, in_box, 1);
  } else if (is_whole) {
    found((place * tensor_shape[axis] + start[axis]) * inner, in_box * shape[axis] * inner, shape[axis] * inner);
  } else {
    for (int64_t i = 0; i < shape[axis]; ++i) {
      each_run(tensor_shape, start, shape, found, axis + 1, place * tensor_shape[axis] + start[axis] + i, in_box * shape[axis] + i);
    }
  }
}

// Copies what two runs of elements have in common.
void copy_common(ElementRange from, const std::byte* from_data, ElementRange to, std::byte* to_data, uint64_t element_bytes) {
  const int64_t begin = std::max(from.begin, to.begin), end = std::min(from.end, to.end);
  if (begin < end) {
    std::memcpy(to_data + static_cast<uint64_t>(begin - to.begin) * element_bytes,
                from_data + static_cast<uint64_t>(begin - from.begin) * element_bytes,
                static_cast<uint64_t>(end - begin) * element_bytes);
  }
}

}  // namespace

CheckpointReader CheckpointReader::open(const fs::path& folder, Verify verify) {
  std::error_code unknown;
  if (!fs::is_directory(folder, unknown)) {
    throw Error(ExitCode::kCheckpoint, format("checkpoint {} does not exist", folder));
  }
  if (!is_there(folder / kMarkerFile)) {
    throw Error(
        ExitCode::kCheckpoint,
        format("{} has no {}: it is not a checkpoint, or its save was cut short", folder, kMarkerFile));
  }
  CheckpointReader out;
  out.folder_ = folder;
  const std::string marker = read_file(folder / kMarkerFile, ExitCode::kCheckpoint);
  if (!is_there(folder / kIndexFile)) {
    throw damaged(folder, format("{} is missing", kIndexFile));
  }
  const std::string index_text = read_file(folder / kIndexFile, ExitCode::kCheckpoint);
  if (marker.find(format("index {}\n", sha256(index_text))) == std::string::npos) {
    throw damaged(folder, format("{} is not the one that {} names", kIndexFile, kMarkerFile));
  }
  try {
    out.index_ = CheckpointIndex::from_json(Json::parse(index_text, (folder / kIndexFile).string()),
                                            (folder / kIndexFile).string());
  } catch (const JsonError& error) {
    throw damaged(folder, error.what());
  }
  for (const auto& [name, file] : out.index_.files) {
    std::error_code missing;
    const uint64_t found = fs::file_size(folder / name, missing);
    if (missing || found != file.bytes) {
      throw damaged(folder, missing ? format("{} is missing", name)
                                    : format("{} has {} bytes, expected {}", name, found, file.bytes));
    }
    if (file.header_bytes == 0) {
      if (sha256_file(folder / name, ExitCode::kCheckpoint) != file.sha256) {
        throw damaged(folder, format("{} has changed since it was written (checksum)", name));
      }
      continue;
    }
    const MappedFile& mapped =
        out.files_.emplace(name, MappedFile(folder / name, ExitCode::kCheckpoint)).first->second;
    if (sha256(part_of(mapped, 0, std::min(file.header_bytes, file.bytes))) != file.sha256) {
      throw damaged(folder, format("the header of {} has changed since it was written (checksum)", name));
    }
  }
  if (!out.index_.files.contains(kStateFile)) {
    throw damaged(folder, format("{} is not in its index", kStateFile));
  }
  for (const auto& [name, tensor] : out.index_.tensors) {
    for (const SavedSlice& slice : tensor.slices) {
      const auto file = out.files_.find(slice.file);
      if (file == out.files_.end()) {
        throw damaged(folder, format("\"{}\" is said to be in {}, which holds no tensors", name, slice.file));
      }
      if (verify == Verify::checksums &&
          sha256(part_of(file->second, slice.offset, slice.bytes)) != slice.sha256) {
        throw damaged(folder,
                      format("\"{}\" in {} has changed since it was written (checksum)", name, slice.file));
      }
    }
  }
  const std::string state_file = (folder / kStateFile).string();
  try {
    out.state_ = RunState::from_json(Json::parse(read_file(state_file, ExitCode::kCheckpoint), state_file), state_file);
  } catch (const JsonError& error) {
    throw damaged(folder, error.what());
  }
  return out;
}

std::string CheckpointReader::text(const std::string& name) const {
  return index_.files.contains(name) && !files_.contains(name)
             ? read_file(folder_ / name, ExitCode::kCheckpoint)
             : std::string();
}

const SavedTensor& CheckpointReader::tensor(const std::string& name) const {
  const auto found = index_.tensors.find(name);
  if (found == index_.tensors.end()) {
    throw Error(ExitCode::kCheckpoint, format("checkpoint {} has no tensor \"{}\"", folder_, name),
                "it was written by a run with another draft configuration or optimizer");
  }
  return found->second;
}

void CheckpointReader::read(const std::string& name, std::span<std::byte> out, std::vector<int64_t> start,
                            std::vector<int64_t> shape) const {
  const SavedTensor& saved = tensor(name);
  if (start.empty() && shape.empty()) {
    start.assign(saved.shape.size(), 0);
    shape = saved.shape;
  }
  SF_CHECK(start.size() == saved.shape.size() && shape.size() == saved.shape.size(),
           "reading {} {} of \"{}\" {}", start, shape, name, saved.shape);
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    SF_CHECK(start[axis] >= 0 && shape[axis] >= 0 && start[axis] + shape[axis] <= saved.shape[axis],
             "reading {} {} of \"{}\" {}", start, shape, name, saved.shape);
  }
  const uint64_t element_bytes = dtype_bytes(saved.dtype);
  const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  SF_CHECK(out.size() == static_cast<uint64_t>(count) * element_bytes, "{} bytes for {} of \"{}\"",
           out.size(), shape, name);
  for (const SavedSlice& slice : saved.slices) {
    const std::byte* data = files_.at(slice.file).bytes().data() + slice.offset;
    if (slice.shape.size() == saved.shape.size()) {
      BoxCopy{slice, data, start, shape, out.data(), element_bytes}.run();
    } else {
      const ElementRange run{slice.start[0], slice.start[0] + slice.shape[0]};
      each_run(saved.shape, start, shape, [&](int64_t place, int64_t in_box, int64_t elements) {
        copy_common(run, data, {place, place + elements}, out.data() + static_cast<uint64_t>(in_box) * element_bytes, element_bytes);
      });
    }
  }
}

void CheckpointReader::read_range(const std::string& name, std::span<std::byte> out, int64_t begin, int64_t end) const {
  const SavedTensor& saved = tensor(name);
  const int64_t all = std::accumulate(saved.shape.begin(), saved.shape.end(), int64_t{1}, std::multiplies<>());
  const uint64_t element_bytes = dtype_bytes(saved.dtype);
  SF_CHECK(0 <= begin && begin <= end && end <= all, "reading elements {} to {} of \"{}\" {}", begin, end, name, saved.shape);
  SF_CHECK(out.size() == static_cast<uint64_t>(end - begin) * element_bytes, "{} bytes for elements {} to {} of \"{}\"", out.size(),
           begin, end, name);
  for (const SavedSlice& slice : saved.slices) {
    const std::byte* data = files_.at(slice.file).bytes().data() + slice.offset;
    if (const auto run = range_of(slice, saved.shape)) {
      copy_common(*run, data, {begin, end}, out.data(), element_bytes);
    } else {
      each_run(saved.shape, slice.start, slice.shape, [&](int64_t place, int64_t in_box, int64_t elements) {
        copy_common({place, place + elements}, data + static_cast<uint64_t>(in_box) * element_bytes, {begin, end}, out.data(),
                    element_bytes);
      });
    }
  }
}

}  // namespace sf
