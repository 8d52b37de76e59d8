// The draw for one position: depends on (seed, position) only, so every target and every cut of the work agrees.
#pragma once
#include <cstdint>

#include "common/everywhere.h"

namespace mk {

// splitmix64's finaliser over a Weyl sequence: 53 random bits.
MK_EVERYWHERE inline uint64_t draw_bits(uint64_t seed, uint64_t position) {
  uint64_t z = seed + (position + 1) * 0x9e3779b97f4a7c15ull;
  for (int round = 0; round < 2; round++) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
  }
  return z >> 11;
}
// The same as a fraction, uniform in [0, 1).
inline double draw(uint64_t seed, uint64_t position) { return static_cast<double>(draw_bits(seed, position)) * 0x1p-53; }

}  // namespace mk
