// e4m3 codes of positive numbers, as block scales are: the quantiser's and those of what is carried.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace mk {

// Of a float32 in [2^-9, 448], to nearest even.
inline uint8_t to_e4m3(float x) {
  if (x < 0x1p-6f) return static_cast<uint8_t>(std::nearbyint(x * 512));  // subnormal: multiples of 2^-9
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint8_t>(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
}
inline float from_e4m3(uint8_t code) {
  return code == 0x7f ? NAN : std::bit_cast<float>(static_cast<uint32_t>(code) << 20) * 0x1p120f;
}

}  // namespace mk
