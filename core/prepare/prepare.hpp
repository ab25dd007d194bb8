// core/prepare/prepare.hpp: a file of chat records becomes a file of token records: in pieces, by several processes, so that it can be stopped and gone
// on with, and whole or not there at the end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "sf/json.hpp"

#include "core/prepare/records.hpp"
#include "core/prepare/text_worker.hpp"

namespace sf {

struct PrepareRequest {
  std::string name;                         // of this job, for the log: "train"
  std::filesystem::path input;              // JSONL, or a folder whose *.jsonl are read in the order of their names
  std::filesystem::path output;             // token records
  std::filesystem::path held_out_output;    // where the held-out ones go; empty: nothing is held out
  double held_out_share = 0;
  int64_t split_seed = 42;
  bool deduplicate = true;
  double max_skipped_share = 0.5;           // more is an error
  TextWorkerSettings text;
  MaskOptions mask;
  int64_t vocab_size = 0;                   // of the target; the tokenizer must stay below; 0: not checked
  int64_t workers = 0;                      // processes; 0: one for each processor
  StopRequest stop_requested;               // ends it within a fraction of a second, whatever is going on
};

struct PrepareResult {
  Json report;               // as written beside the output, as `output`.report.json
  bool was_finished = false;  // nothing was to do
  bool interrupted = false;  // stopped; what is done is kept
  int64_t bytes_read = 0;    // in this call
  double seconds = 0;
};

/// Throws Error(data): input missing or empty, no Python, tokenizer or template not usable or of another model, a conversation whose rendering does not end,
/// too many rows skipped, none supervised, output in the way, disk full. Then no output is there that was not there before.
[[nodiscard]] PrepareResult prepare(const PrepareRequest& request);

/// Where the report of a token file lies.
[[nodiscard]] std::filesystem::path report_path(const std::filesystem::path& output);

}  // namespace sf
