// SHA-256 as FIPS 180-4 section 6.2 defines it, in portable code and with the x86 SHA instructions where the
// processor has them (features are checksummed by the gigabyte; the instructions are about six times as
// fast).
#include <bit>
#include <cstring>

#include "core/base/file.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace sf {
namespace {

alignas(16) constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_blocks_portable(std::uint32_t* state, const std::uint8_t* data, std::size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    std::uint32_t w[64];
    for (std::size_t t = 0; t < 16; ++t) {
      std::uint32_t word = 0;
      std::memcpy(&word, data + 4 * t, 4);
      w[t] = __builtin_bswap32(word);
    }
    for (int t = 16; t < 64; ++t) {
      std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    std::uint32_t v[8];  // a b c d e f g h
    std::memcpy(v, state, sizeof v);
    for (int t = 0; t < 64; ++t) {
      std::uint32_t sum1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
      std::uint32_t choose = (v[4] & v[5]) ^ (~v[4] & v[6]);
      std::uint32_t t1 = v[7] + sum1 + choose + kRound[t] + w[t];
      std::uint32_t sum0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
      std::uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      for (int i = 7; i > 0; --i) {
        v[i] = v[i - 1];
      }
      v[4] += t1;
      v[0] = t1 + sum0 + majority;
    }
    for (int i = 0; i < 8; ++i) {
      state[i] += v[i];
    }
  }
}

#if defined(__x86_64__)
bool has_sha_instructions() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_SSE4_1) == 0 || (c & bit_SSSE3) == 0) {
    return false;
  }
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1u << 29)) != 0;
}

// The instructions keep the state as two registers, (a b e f) and (c d g h) from the high end, and make two
// rounds at a time.
__attribute__((target("sha,sse4.1,ssse3"))) void add_blocks_sha(std::uint32_t* state,
                                                                const std::uint8_t* data,
                                                                std::size_t blocks) {
  const __m128i kSwap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i abef = _mm_set_epi32(static_cast<int>(state[0]), static_cast<int>(state[1]),
                               static_cast<int>(state[4]), static_cast<int>(state[5]));
  __m128i cdgh = _mm_set_epi32(static_cast<int>(state[2]), static_cast<int>(state[3]),
                               static_cast<int>(state[6]), static_cast<int>(state[7]));
  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];  // the last sixteen words of the message schedule, four in each
    for (std::ptrdiff_t i = 0; i < 16; ++i) {
      if (i < 4) {
        w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), kSwap);
      } else {
        const __m128i w7 = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);  // w[t-7]
        w[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), w7),
                                        w[(i + 3) % 4]);
      }
      __m128i sum = _mm_add_epi32(w[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  alignas(16) std::uint32_t high[4];
  alignas(16) std::uint32_t low[4];
  _mm_store_si128(reinterpret_cast<__m128i*>(high), abef);
  _mm_store_si128(reinterpret_cast<__m128i*>(low), cdgh);
  const std::uint32_t out[8] = {high[3], high[2], low[3], low[2], high[1], high[0], low[1], low[0]};
  std::memcpy(state, out, sizeof out);
}
#endif

void add_blocks(std::uint32_t* state, const std::uint8_t* data, std::size_t blocks) {
#if defined(__x86_64__)
  static const bool fast = has_sha_instructions();
  if (fast) {
    add_blocks_sha(state, data, blocks);
    return;
  }
#endif
  add_blocks_portable(state, data, blocks);
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19},
      block_{} {}

void Sha256::add(std::span<const std::byte> bytes) {
  if (bytes.empty()) {  // of nothing, which may have no address either
    return;
  }
  const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
  std::size_t left = bytes.size();
  std::size_t filled = length_ % 64;
  length_ += left;
  if (filled > 0) {
    std::size_t take = left < 64 - filled ? left : 64 - filled;
    std::memcpy(block_ + filled, data, take);
    data += take;
    left -= take;
    if (filled + take < 64) {
      return;
    }
    add_blocks(state_, block_, 1);
  }
  add_blocks(state_, data, left / 64);
  if (left % 64 > 0) {
    std::memcpy(block_, data + left / 64 * 64, left % 64);
  }
}

void Sha256::add(std::string_view text) {
  add(std::as_bytes(std::span(text.data(), text.size())));
}

std::string Sha256::hex() {
  std::uint64_t bits = length_ * 8;
  std::byte padding[72] = {std::byte{0x80}};
  std::size_t zeros =
      (119 - length_ % 64) % 64;  // after the 0x80, up to eight bytes before the end of a block
  for (int i = 0; i < 8; ++i) {
    padding[1 + zeros + static_cast<std::size_t>(i)] = static_cast<std::byte>(bits >> (56 - 8 * i));
  }
  add(std::span<const std::byte>(padding, 1 + zeros + 8));
  std::string out;
  for (std::uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) {
      out += "0123456789abcdef"[word >> shift & 15];
    }
  }
  return out;
}

}  // namespace sf
