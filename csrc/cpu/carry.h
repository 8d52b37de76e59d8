// How the input of the experts' down projection is carried (`quantise.down_input`): as float32, or rounded to bf16 or to
// NVFP4 under a calibrated global scale. The 16 output rows of a gate/up tile are one block of 16 channels of a token, so
// a block is rounded where it is computed; ranks tell each other the same blocks as they are carried. Plain loops, one
// rounding an operation: the bits are the same at every vector width.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/e4m3.h"
#include "common/format.h"

namespace mk {

// 16 channels of a token. No code is 8 (-0), and a scale is 1 to 0x7e, or 0x7f where the channels are NaN: what is left is
// free for an exchange, which must tell "nothing yet" from a block.
struct Nvfp4Block {
  uint8_t codes[8];  // e2m1, the even channel in the low nibble
  uint8_t scale;     // e4m3
};

// bf16 bits of a float32, to nearest even; beyond bf16 infinity, a NaN stays one.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}
inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// nvidia-modelopt's dynamic quantiser but for the sign of zero: scale = e4m3(amax / (6 * scale2)) within [2^-9, 448], or 1
// where that is zero; code = e2m1(x / (scale * scale2)), to nearest even. What is beyond the largest value, infinities
// too, becomes the largest; a NaN makes all 16 channels NaN.
inline Nvfp4Block encode_nvfp4(const float* x, float scale2) {
  uint32_t top = 0;  // magnitudes are ordered as their bits are, NaN above all
  for (int i = 0; i < 16; i++) top = std::max(top, std::bit_cast<uint32_t>(x[i]) & 0x7fffffff);
  Nvfp4Block block;
  if (top > 0x7f800000) {
    std::fill(block.codes, block.codes + 8, uint8_t{0x77});
    block.scale = 0x7f;
    return block;
  }
  const float wanted = std::bit_cast<float>(top) / (6.0f * scale2);
  block.scale = to_e4m3(wanted == 0 ? 1.0f : std::min(std::max(wanted, 0x1p-9f), 448.0f));
  const float unit = from_e4m3(block.scale) * scale2;
  uint8_t code[16];
  for (int i = 0; i < 16; i++) {
    const float a = std::fabs(x[i]) / unit;
    const int magnitude = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    code[i] = static_cast<uint8_t>(magnitude | (x[i] < 0 && magnitude > 0 ? 8 : 0));
  }
  for (int i = 0; i < 8; i++) block.codes[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  return block;
}

inline void decode_nvfp4(const Nvfp4Block& block, float scale2, float* x) {
  constexpr float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};
  const float unit = from_e4m3(block.scale) * scale2;
  for (int i = 0; i < 16; i++) x[i] = values[block.codes[i / 2] >> (i % 2 * 4) & 15] * unit;
}

// Leaves in x what a block is once it was carried. scale2: of the expert, for NVFP4 alone.
template <Fmt F>
inline void carry(float* x, float scale2) {
  static_assert(F == Fmt::f32 || F == Fmt::bf16 || F == Fmt::nvfp4);
  if constexpr (F == Fmt::bf16)
    for (int i = 0; i < 16; i++) x[i] = from_bf16(to_bf16(x[i]));
  if constexpr (F == Fmt::nvfp4) decode_nvfp4(encode_nvfp4(x, scale2), scale2, x);
}

// A message between ranks is blocks as they are carried, in groups of whole words: of NVFP4 four blocks, a word of their
// scales and two words of codes each; of bf16 one block, two channels a word. No word of codes is eight times 8, so with
// these bits flipped none is all ones, which says that no word has come; nor is a word of scales, which are below 0x80.
constexpr uint32_t kFlipped = 0x77777777u;
constexpr int group_blocks(Fmt f) { return f == Fmt::nvfp4 ? 4 : 1; }
constexpr int group_words(Fmt f) { return f == Fmt::nvfp4 ? 9 : f == Fmt::bf16 ? 8 : 16; }
constexpr int64_t carried_words(Fmt f, int64_t blocks) { return ceil_div(blocks, group_blocks(f)) * group_words(f); }

// carry(), and the block as number i of a message.
template <Fmt F>
inline void carry_into(float* x, float scale2, uint32_t* message, int64_t i) {
  static_assert(F == Fmt::bf16 || F == Fmt::nvfp4);
  uint32_t* group = message + i / group_blocks(F) * group_words(F);
  if constexpr (F == Fmt::bf16) {
    for (int w = 0; w < 8; w++) {
      const uint16_t low = to_bf16(x[2 * w]), high = to_bf16(x[2 * w + 1]);
      group[w] = low | static_cast<uint32_t>(high) << 16;
      x[2 * w] = from_bf16(low), x[2 * w + 1] = from_bf16(high);
    }
  } else {
    const Nvfp4Block block = encode_nvfp4(x, scale2);
    decode_nvfp4(block, scale2, x);
    // By bytes: other threads may put the group's other blocks.
    std::memcpy(reinterpret_cast<uint8_t*>(group) + i % 4, &block.scale, 1);
    uint32_t codes[2];
    std::memcpy(codes, block.codes, 8);
    for (int w = 0; w < 2; w++) group[1 + i % 4 * 2 + w] = codes[w] ^ kFlipped;
  }
}

// Leaves in x what carry_into() left there.
template <Fmt F>
inline void take_out(const uint32_t* message, int64_t i, float scale2, float* x) {
  static_assert(F == Fmt::bf16 || F == Fmt::nvfp4);
  const uint32_t* group = message + i / group_blocks(F) * group_words(F);
  if constexpr (F == Fmt::bf16) {
    for (int c = 0; c < 16; c++) x[c] = from_bf16(static_cast<uint16_t>(group[c / 2] >> (c % 2 * 16)));
  } else {
    Nvfp4Block block;
    std::memcpy(&block.scale, reinterpret_cast<const uint8_t*>(group) + i % 4, 1);
    const uint32_t codes[2] = {group[1 + i % 4 * 2] ^ kFlipped, group[2 + i % 4 * 2] ^ kFlipped};
    std::memcpy(block.codes, codes, 8);
    decode_nvfp4(block, scale2, x);
  }
}

}  // namespace mk
