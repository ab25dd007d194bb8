// core/data/philox.hpp
//
// Randomness as a function: the same arguments give the same bits on every machine, rank and device, whatever
// ran before. A draw is named by (seed, stream) and by (epoch, sample, position), so batches, padding, ranks
// and resumes cannot change it. Algorithm plugins get their draws from the host (SampleContext::draw).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace sf {

/// Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): four
/// words that depend on every bit of counter and key. Known answers of the authors' test file are in
/// tests/data.
[[nodiscard]] constexpr std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter,
                                                              std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product_0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product_1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product_1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product_1),
               static_cast<uint32_t>(product_0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product_0)};
    key[0] += 0x9E3779B9;  // golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

/// One stream of draws, for example ("anchors"). Streams with other names or seeds are independent of it.
class PhiloxStream {
 public:
  constexpr PhiloxStream(uint64_t seed, std::string_view stream_name) {
    uint64_t hash = 0xCBF29CE484222325;  // FNV-1a, 64 bit
    for (const char c : stream_name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3;
    // The seed goes through Philox under the name's hash, so neighbouring seeds share nothing.
    const auto words = philox4x32_10({static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0},
                                     {static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32)});
    key_ = {words[0], words[1]};
  }

  /// 64 uniform bits. `position` counts tokens of a sample, or whatever the stream enumerates; epoch and
  /// position below 2^32.
  [[nodiscard]] constexpr uint64_t bits(uint64_t epoch, uint64_t sample, uint64_t position) const {
    const auto words = philox4x32_10({static_cast<uint32_t>(position), static_cast<uint32_t>(sample),
                                      static_cast<uint32_t>(sample >> 32), static_cast<uint32_t>(epoch)},
                                     key_);
    return (uint64_t{words[1]} << 32) | words[0];
  }

  /// Uniform in [0, 1), in steps of 2^-53.
  [[nodiscard]] constexpr double uniform(uint64_t epoch, uint64_t sample, uint64_t position) const {
    return static_cast<double>(bits(epoch, sample, position) >> 11) * 0x1p-53;
  }

 private:
  std::array<uint32_t, 2> key_{};
};

}  // namespace sf
