// core/kernels/exponential.hpp: e^x in vectors of a processor. Always inlined, so it is compiled for the processor of the function that it stands in and nothing of it is left
// for the linker to choose from.
#pragma once

namespace sf {

/// x = e^x to a unit in the last place or two, for x from -87 to 88; beyond that what it is there. Ints holds as many int32 as Floats holds float.
/// x = n ln 2 + r with |r| at most ln 2 / 2, where the series of e^r behind r^7 / 7! leaves 5e-9.
template <class Ints, class Floats>
inline __attribute__((always_inline)) void exponentiate(Floats& x) {
  constexpr float kLog2e = 1.44269504088896341F, kLn2High = 0.693145751953125F, kLn2Low = 1.42860682030941723e-6F;  // 16 bits in the first, so n times it is exact
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: what is added to it is rounded to a whole number, which its last bits hold
  x = x < -87.0F ? Floats{} - 87.0F : x;
  x = x > 88.0F ? Floats{} + 88.0F : x;
  const Floats rounded = x * kLog2e + kRound;
  const Floats n = rounded - kRound;
  const Floats r = (x - n * kLn2High) - n * kLn2Low;
  Floats sum = r * (1.0F / 5040) + 1.0F / 720;
  sum = sum * r + 1.0F / 120;
  sum = sum * r + 1.0F / 24;
  sum = sum * r + 1.0F / 6;
  sum = sum * r + 0.5F;
  sum = sum * r + 1.0F;
  sum = sum * r + 1.0F;
  const Ints power = (__builtin_bit_cast(Ints, rounded) - __builtin_bit_cast(int, kRound) + 127) << 23;
  x = sum * __builtin_bit_cast(Floats, power);
}

}  // namespace sf
