// plugins/tracker/tensorboard: figures of a run as TensorBoard's event files. No protobuf and no TensorFlow: the few messages are written by hand.
//
// event_file.hpp: one event file. It is a sequence of records
//
//   length (uint64) · masked CRC-32C of the length (uint32) · bytes · masked CRC-32C of the bytes (uint32)      all little endian
//
// whose bytes are a message Event of tensorflow/core/util/event.proto:
//
//   1 wall_time double · 2 step int64 · 3 file_version string · 5 summary Summary · 7 session_log SessionLog
//   Summary: 1 value (repeated): 1 tag string · 2 simple_value float · 8 tensor TensorProto · 9 metadata (1 plugin_data (1 plugin_name string))
//   TensorProto: 1 dtype (7 = string) · 2 tensor_shape · 8 string_val        SessionLog: 1 status (1 = START)
//
// A reader that meets a START drops what it has read of steps at or after the event's: that is how a resumed run replaces its abandoned future.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace sf {

/// CRC-32C (Castagnoli): polynomial 0x1EDC6F41, reflected, as in iSCSI and SSE 4.2.
[[nodiscard]] std::uint32_t crc32c(std::string_view bytes);
/// Rotated and shifted, so that the checksum of bytes that hold checksums stays a good one.
[[nodiscard]] constexpr std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8U; }

struct Scalar {
  std::string_view tag;
  double value = 0;
};

class EventFile {
 public:
  /// Makes a new file. Throws Error(kCheckpoint).
  explicit EventFile(const std::filesystem::path& path);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  /// What the files of this folder hold from `step` on is void.
  void restart(double wall_seconds, std::int64_t step);
  void scalars(double wall_seconds, std::int64_t step, const std::vector<Scalar>& values);
  /// A text (Markdown) under `tag`, shown by TensorBoard's text view.
  void text(double wall_seconds, std::int64_t step, std::string_view tag, std::string_view markdown);
  /// Writes what has been gathered. When that fails it throws Error(kCheckpoint), and what was not yet written is given up: a file that ends in
  /// the middle of a record would be unreadable from there on.
  void flush();

 private:
  void event(double wall_seconds, std::int64_t step, const std::string& content);

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::int64_t written_ = 0;  // bytes of whole records in the file
  std::string gathered_;
};

}  // namespace sf
