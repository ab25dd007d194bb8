// core/data/feature_store.hpp
//
// Features as training reads them, whichever way they were stored: our format (core/data/feature_format.hpp)
// or a folder of the reference's .ckpt and .ckpt.gz files, sorted by path as strings. Every record is checked
// when it is read, so a damaged one ends a run with its name instead of spoiling it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/data/safetensors.hpp"
#include "core/data/tokens.hpp"

namespace sf {

/// A feature that an algorithm reads. In our own format it is served by what it is, layers or the last state, from any stored tensor that has it,
/// whatever that one is called; the reference's files have names alone.
struct FeatureNeed {
  std::string key;                      // "hidden_states"; the view that record() returns has this name
  int64_t width = 0;                    // layers x hidden
  bool optional = false;                // left out of records that do not have it
  std::vector<int64_t> layer_ids = {};  // compared with the manifest where there is one
  bool last_state = false;
};

struct FeatureNeeds {
  std::vector<FeatureNeed> features = {};
  int64_t vocab_size = 0;               // ids must be below it; 0: not checked
  int64_t max_length = 0;               // longer records keep their head; 0: no limit
  std::string target_fingerprint = {};  // compared with the manifest's; empty: not compared
  bool verify_checksums = false;        // read every shard once and compare its SHA-256
  std::string named_by = {};            // what named the folder, for an advice: "data.hidden_states_path", "--features"
};

/// Reading is thread-safe.
class FeatureStore {
 public:
  /// Opens a folder, checks what can be known beforehand (manifest, sizes, layer ids, target) and reads the
  /// first record. Throws sf::Error (data) with file, key, found and expected.
  [[nodiscard]] static std::unique_ptr<FeatureStore> open(const std::filesystem::path& folder,
                                                          const FeatureNeeds& needs);
  virtual ~FeatureStore() = default;

  [[nodiscard]] virtual int64_t size() const = 0;
  /// What a message calls this record: its file, and its place there.
  [[nodiscard]] virtual std::string record_name(int64_t index) const = 0;
  /// The same for the same content; part of a checkpoint, so that a resumed run knows its data again.
  [[nodiscard]] virtual const std::string& fingerprint() const = 0;
  /// target_fingerprint() of the target that the features come from; empty where it was not recorded.
  [[nodiscard]] virtual std::string target_fingerprint() const { return ""; }

  /// "input_ids" [s] int64, "loss_mask" [s] int64, and each feature that was asked for, [s, width], cut to
  /// max_length. Checked: types, equal lengths, ids within the vocabulary, widths, no NaN or infinity. Throws
  /// sf::Error (data).
  [[nodiscard]] std::vector<TensorView> record(int64_t index) const;
  /// Ids and mask alone, cut and checked in the same way.
  [[nodiscard]] TokenSample sample_tokens(int64_t index) const;

 protected:
  explicit FeatureStore(FeatureNeeds needs) : needs_(std::move(needs)) {}
  /// The record's tensors as stored, at least those of `needs_` that it has.
  [[nodiscard]] virtual std::vector<TensorView> stored(int64_t index) const = 0;

  /// Where a feature is read from.
  struct Source {
    std::string key;                  // of the stored tensor
    int64_t width = 0;                // of the stored tensor
    std::vector<int64_t> parts = {};  // which of its columns, in units of `part_width`; empty: all as they stand
    int64_t part_width = 0;
  };
  [[nodiscard]] virtual Source source_of(const FeatureNeed& need) const { return {need.key, need.width}; }

  FeatureNeeds needs_;

 private:
  [[nodiscard]] std::vector<TensorView> checked(int64_t index, const std::vector<FeatureNeed>& wanted) const;
};

/// Number of the first value that is NaN or infinite, or -1.
[[nodiscard]] int64_t first_not_finite(Dtype dtype, std::span<const std::byte> bytes);

}  // namespace sf
