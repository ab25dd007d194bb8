#include "core/data/inflate.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace sf {
namespace {

constexpr int kLongestCode = 15;
constexpr int kFastBits = 10;       // codes up to this length are found by one look-up
constexpr size_t kLongestMatch = 258;

struct Stop {   // ends the decoding wherever it is noticed
  Unpacked state;
};

class Bits {
 public:
  explicit Bits(std::span<const std::byte> bytes) : at_(reinterpret_cast<const uint8_t*>(bytes.data())), begin_(at_), end_(at_ + bytes.size()) {}

  void refill() {
    while (count_ <= 56 && at_ < end_) {
      held_ |= static_cast<uint64_t>(*at_++) << count_;
      count_ += 8;
    }
  }
  [[nodiscard]] uint64_t held() const { return held_; }
  [[nodiscard]] int count() const { return count_; }
  void drop(int bits) {
    held_ >>= bits;
    count_ -= bits;
  }
  uint32_t take(int bits) {   // up to 32
    if (count_ < bits) {
      refill();
      if (count_ < bits) {
        throw Stop{Unpacked::truncated};
      }
    }
    const auto value = static_cast<uint32_t>(held_ & ((uint64_t{1} << bits) - 1));
    drop(bits);
    return value;
  }
  void align() { drop(count_ % 8); }
  /// Whole bytes after align().
  void copy(uint8_t* to, size_t bytes) {
    for (; bytes > 0 && count_ > 0; --bytes) {
      *to++ = static_cast<uint8_t>(held_);
      drop(8);
    }
    if (static_cast<size_t>(end_ - at_) < bytes) {
      throw Stop{Unpacked::truncated};
    }
    if (bytes > 0) {
      std::memcpy(to, at_, bytes);
      at_ += bytes;
    }
  }
  /// Bytes taken so far; one that was begun counts.
  [[nodiscard]] size_t used() const { return static_cast<size_t>(at_ - begin_) - static_cast<size_t>(count_ / 8); }

 private:
  const uint8_t *at_, *begin_, *end_;
  uint64_t held_ = 0;
  int count_ = 0;
};

/// A canonical Huffman code.
class Code {
 public:
  /// lengths[symbol], 0: not used. Throws Stop when they make no code; one that leaves bits unused is only fine with a single symbol, or none.
  explicit Code(std::span<const uint8_t> lengths) {
    for (const uint8_t length : lengths) {
      ++counts_[length];
    }
    counts_[0] = 0;
    int left = 1;
    int used = 0;
    for (int length = 1; length <= kLongestCode; ++length) {
      left = left * 2 - counts_[static_cast<size_t>(length)];
      used += counts_[static_cast<size_t>(length)];
      if (left < 0) {
        throw Stop{Unpacked::damaged};
      }
    }
    if (left > 0 && used > 1) {
      throw Stop{Unpacked::damaged};
    }
    std::array<uint16_t, kLongestCode + 2> places{};
    for (size_t length = 1; length <= kLongestCode; ++length) {
      places[length + 1] = static_cast<uint16_t>(places[length] + counts_[length]);
    }
    for (size_t symbol = 0; symbol < lengths.size(); ++symbol) {
      if (lengths[symbol] != 0) {
        symbols_[places[lengths[symbol]]++] = static_cast<uint16_t>(symbol);
      }
    }
    fill_fast();
  }

  [[nodiscard]] int decode(Bits& bits) const {
    if (bits.count() < kLongestCode) {
      bits.refill();
    }
    const Fast fast = fast_[bits.held() & ((1U << kFastBits) - 1)];
    if (fast.length != 0 && fast.length <= bits.count()) {
      bits.drop(fast.length);
      return fast.symbol;
    }
    // Bit by bit: codes of one length are neighbours, first those of the shortest.
    int code = 0, first = 0, index = 0;
    for (int length = 1; length <= kLongestCode; ++length) {
      if (length > bits.count()) {
        throw Stop{Unpacked::truncated};
      }
      code |= static_cast<int>(bits.held() >> (length - 1) & 1);
      const int count = counts_[static_cast<size_t>(length)];
      if (code - count < first) {
        bits.drop(length);
        return symbols_[static_cast<size_t>(index + code - first)];
      }
      index += count;
      first = (first + count) * 2;
      code *= 2;
    }
    throw Stop{Unpacked::damaged};
  }

 private:
  struct Fast {
    uint16_t symbol = 0;
    uint8_t length = 0;   // 0: longer than kFastBits, or no code
  };

  void fill_fast() {
    uint32_t code = 0;
    size_t index = 0;
    for (int length = 1; length <= kFastBits; ++length) {
      for (int i = 0; i < counts_[static_cast<size_t>(length)]; ++i, ++code, ++index) {
        uint32_t turned = 0;   // codes begin with their highest bit, the stream with the lowest
        for (int bit = 0; bit < length; ++bit) {
          turned |= (code >> bit & 1) << (length - 1 - bit);
        }
        for (uint32_t place = turned; place < (1U << kFastBits); place += 1U << length) {
          fast_[place] = {symbols_[index], static_cast<uint8_t>(length)};
        }
      }
      code <<= 1;
    }
  }

  std::array<uint16_t, kLongestCode + 1> counts_{};
  std::array<uint16_t, 288> symbols_{};
  std::array<Fast, 1 << kFastBits> fast_{};
};

struct Codes {
  Code literals, distances;
};

const Codes& fixed_codes() {
  static const Codes codes = [] {
    std::array<uint8_t, 288> literals{};
    for (size_t symbol = 0; symbol < literals.size(); ++symbol) {
      literals[symbol] = symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : 8;
    }
    std::array<uint8_t, 32> distances{};   // 30 and 31 belong to the code and never occur
    distances.fill(5);
    return Codes{Code(literals), Code(distances)};
  }();
  return codes;
}

Codes read_codes(Bits& bits) {
  static constexpr std::array<uint8_t, 19> kOrder = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  const size_t literals = bits.take(5) + 257, distances = bits.take(5) + 1, lengths_of_lengths = bits.take(4) + 4;
  if (literals > 286 || distances > 30) {
    throw Stop{Unpacked::damaged};
  }
  std::array<uint8_t, 19> short_lengths{};
  for (size_t i = 0; i < lengths_of_lengths; ++i) {
    short_lengths[kOrder[i]] = static_cast<uint8_t>(bits.take(3));
  }
  const Code code(short_lengths);
  std::array<uint8_t, 320> lengths{};
  for (size_t i = 0; i < literals + distances;) {
    const int symbol = code.decode(bits);
    if (symbol < 16) {
      lengths[i++] = static_cast<uint8_t>(symbol);
      continue;
    }
    if (symbol == 16 && i == 0) {
      throw Stop{Unpacked::damaged};
    }
    const uint8_t repeated = symbol == 16 ? lengths[i - 1] : uint8_t{0};
    const size_t times = symbol == 16 ? 3 + bits.take(2) : symbol == 17 ? 3 + bits.take(3) : 11 + bits.take(7);
    if (times > literals + distances - i) {
      throw Stop{Unpacked::damaged};
    }
    std::fill_n(lengths.begin() + static_cast<std::ptrdiff_t>(i), times, repeated);
    i += times;
  }
  if (lengths[256] == 0) {
    throw Stop{Unpacked::damaged};   // a block without an end
  }
  return {Code({lengths.data(), literals}), Code({lengths.data() + literals, distances})};
}

/// Where content goes: a vector that grows in large steps and is cut to its size at the end.
class Output {
 public:
  Output(std::vector<std::byte>& out, uint64_t limit) : out_(out), begin_(out.size()), size_(out.size()), limit_(limit) {}

  void put(uint8_t byte) {
    room(1);
    out_[size_++] = static_cast<std::byte>(byte);
  }
  uint8_t* append(size_t bytes) {
    room(bytes);
    size_ += bytes;
    return reinterpret_cast<uint8_t*>(out_.data()) + size_ - bytes;
  }
  void repeat(size_t distance, size_t length) {
    if (distance > size_ - begin_) {
      throw Stop{Unpacked::damaged};
    }
    room(length);
    std::byte* to = out_.data() + size_;
    for (size_t i = 0; i < length; ++i) {   // may overlap: a byte just written is read again
      to[i] = to[static_cast<std::ptrdiff_t>(i) - static_cast<std::ptrdiff_t>(distance)];
    }
    size_ += length;
  }
  void finish() { out_.resize(size_); }

 private:
  void room(size_t bytes) {
    if (size_ + bytes <= out_.size()) {
      return;
    }
    if (size_ - begin_ + bytes > limit_) {
      throw Stop{Unpacked::damaged};
    }
    const uint64_t wanted = std::max<uint64_t>(size_ + bytes, size_ + size_ / 2 + (size_t{64} << 10));
    out_.resize(static_cast<size_t>(std::min<uint64_t>(wanted, begin_ + std::min<uint64_t>(limit_, uint64_t{1} << 62))));
  }

  std::vector<std::byte>& out_;
  size_t begin_, size_;
  uint64_t limit_;
};

void read_stored(Bits& bits, Output& out) {
  bits.align();
  const uint32_t length = bits.take(16), complement = bits.take(16);
  if (length != (complement ^ 0xffffU)) {
    throw Stop{Unpacked::damaged};
  }
  bits.copy(out.append(length), length);
}

void read_block(Bits& bits, Output& out, const Codes& codes) {
  static constexpr std::array<uint16_t, 29> kLengths = {3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, kLongestMatch};
  static constexpr std::array<uint8_t, 29> kLengthBits = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
  static constexpr std::array<uint16_t, 30> kDistances = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
                                                          193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
  static constexpr std::array<uint8_t, 30> kDistanceBits = {0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
  while (true) {
    const int symbol = codes.literals.decode(bits);
    if (symbol < 256) {
      out.put(static_cast<uint8_t>(symbol));
      continue;
    }
    if (symbol == 256) {
      return;
    }
    const auto length_code = static_cast<size_t>(symbol - 257);
    if (length_code >= kLengths.size()) {
      throw Stop{Unpacked::damaged};
    }
    const size_t length = kLengths[length_code] + bits.take(kLengthBits[length_code]);
    const auto distance_code = static_cast<size_t>(codes.distances.decode(bits));
    if (distance_code >= kDistances.size()) {
      throw Stop{Unpacked::damaged};
    }
    out.repeat(kDistances[distance_code] + bits.take(kDistanceBits[distance_code]), length);
  }
}

constexpr std::array<std::array<uint32_t, 256>, 8> crc_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 1) != 0 ? (crc >> 1) ^ 0xedb88320U : crc >> 1;
    }
    tables[0][i] = crc;
  }
  for (size_t t = 1; t < tables.size(); ++t) {   // for bytes further ahead: eight at once
    for (uint32_t i = 0; i < 256; ++i) {
      tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xff];
    }
  }
  return tables;
}

constexpr auto kCrcTables = crc_tables();

}  // namespace

Inflation inflate(std::span<const std::byte> packed, std::vector<std::byte>& out, uint64_t limit) {
  Bits bits(packed);
  Output output(out, limit);
  try {
    for (bool is_last = false; !is_last;) {
      is_last = bits.take(1) != 0;
      switch (bits.take(2)) {
        case 0: read_stored(bits, output); break;
        case 1: read_block(bits, output, fixed_codes()); break;
        case 2: read_block(bits, output, read_codes(bits)); break;
        default: throw Stop{Unpacked::damaged};
      }
    }
  } catch (const Stop& stop) {
    output.finish();
    return {stop.state, 0};
  }
  output.finish();
  return {Unpacked::whole, bits.used()};
}

uint32_t crc32(std::span<const std::byte> bytes) {
  uint32_t crc = 0xffffffffU;
  const auto* at = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, at, 8);
    eight ^= crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) {
      crc ^= kCrcTables[7 - i][eight >> (8 * i) & 0xff];
    }
  }
  for (; left > 0; --left, ++at) {
    crc = (crc >> 8) ^ kCrcTables[0][(crc ^ *at) & 0xff];
  }
  return crc ^ 0xffffffffU;
}

Unpacked gunzip(std::span<const std::byte> packed, std::vector<std::byte>& out) {
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(packed[at]); };
  const auto number = [&](size_t at) { return uint32_t{byte(at)} | uint32_t{byte(at + 1)} << 8 | uint32_t{byte(at + 2)} << 16 | uint32_t{byte(at + 3)} << 24; };
  do {   // member by member
    constexpr size_t kHead = 10, kTail = 8;
    if (packed.size() < 2 || byte(0) != 0x1f || byte(1) != 0x8b) {
      return Unpacked::damaged;
    }
    if (packed.size() < kHead) {
      return Unpacked::truncated;
    }
    const uint8_t flags = byte(3);
    if (byte(2) != 8 || (flags & 0xe0) != 0) {
      return Unpacked::damaged;
    }
    size_t at = kHead;
    if ((flags & 4) != 0) {   // extra field
      if (packed.size() < at + 2) {
        return Unpacked::truncated;
      }
      at += 2 + size_t{byte(at)} + (size_t{byte(at + 1)} << 8);
    }
    for (const int text : {8, 16}) {   // name, comment
      if ((flags & text) != 0) {
        while (at < packed.size() && byte(at) != 0) {
          ++at;
        }
        ++at;
      }
    }
    at += (flags & 2) != 0 ? 2 : 0;   // checksum of the head
    if (at > packed.size()) {
      return Unpacked::truncated;
    }
    const size_t begin = out.size();
    const Inflation inflation = inflate(packed.subspan(at), out, UINT64_MAX - begin);
    if (inflation.state != Unpacked::whole) {
      return inflation.state;
    }
    at += inflation.used;
    if (packed.size() - at < kTail) {
      return Unpacked::truncated;
    }
    const std::span<const std::byte> content = std::span(out).subspan(begin);
    if (number(at) != crc32(content) || number(at + 4) != static_cast<uint32_t>(content.size())) {
      return Unpacked::damaged;
    }
    packed = packed.subspan(at + kTail);
  } while (!packed.empty());
  return Unpacked::whole;
}

}  // namespace sf
