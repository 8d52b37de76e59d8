// Rows of weights -> NVFP4, bit for bit what nvidia-modelopt's NVFP4QTensor.quantize gives, in one pass instead of two
// dozen. tests/test_nvfp4_kernel.py holds the two together. Part of building, not of any artifact.
//
// Every operation on a value is one IEEE float32 operation and the compiler may not contract them, so vector width
// changes nothing.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../common/e4m3.h"

namespace {

constexpr int BLOCK = 16;
constexpr float E2M1_MAX = 6, E4M3_MAX = 448, E4M3_MIN = 0x1p-9f;

// The second half added to the first until one is left.
double sum(double (&terms)[BLOCK]) {
  for (int width = BLOCK / 2; width; width /= 2)
    for (int i = 0; i < width; i++) terms[i] += terms[i + width];
  return terms[0];
}

// e2m1 codes of a block under one scale. Returns the squared error: of float32 differences, squared and added as
// doubles.
double encode(const float* x, int scale_code, float scale2, uint8_t* codes) {
  const float scale = mk::from_e4m3(static_cast<uint8_t>(scale_code)), step = scale * scale2;
  double squares[BLOCK];
  for (int i = 0; i < BLOCK; i++) {
    const float y = x[i] / step, a = std::fabs(y);
    // Ties to even: a bound belongs to the code above it when that is the even one.
    const int low = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f);
    const int high = (a > 2.5f) + (a >= 3.5f), top = a > 5, negative = y < 0;
    codes[i] = static_cast<uint8_t>(low + high + top + 8 * negative);
    const float magnitude = 0.5f * static_cast<float>(low + 2 * high + 4 * top);
    const float value = (negative ? -magnitude : magnitude) * scale * scale2;
    const double difference = value - x[i];
    squares[i] = difference * difference;
  }
  return sum(squares);
}

float largest(const float* x) {
  float most[BLOCK];
  for (int i = 0; i < BLOCK; i++) most[i] = std::fabs(x[i]);
  for (int width = BLOCK / 2; width; width /= 2)
    for (int i = 0; i < width; i++) most[i] = most[i] > most[i + width] ? most[i] : most[i + width];
  return most[0];
}

void load(const void* weights, bool bf16, int64_t first, int count, float* x) {
  if (!bf16) {
    std::memcpy(x, static_cast<const float*>(weights) + first, sizeof(float) * count);
    return;
  }
  uint16_t bits[BLOCK] = {};
  std::memcpy(bits, static_cast<const uint16_t*>(weights) + first, sizeof(uint16_t) * count);
  for (int i = 0; i < BLOCK; i++) x[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
}

}  // namespace

// weights: [rows, cols] without gaps, float32, or bfloat16 bits when bf16 is not 0; all finite. data: uint8 [rows,
// ceil(cols / 16) * 8], even column in the low nibble; scales: uint8 e4m3 [rows, ceil(cols / 16)]. Columns past the
// last are zeros.
//
// Scales are the block's maximum / (6 * scale2), rounded. below, above: how many neighbouring codes of that one are
// tried as well; the one of the least squared error is taken, the rounded maximum where no other is better.
//
// sums[3] are added to: squared errors of what is stored, squared errors under the rounded maximum, squares of weights.
extern "C" __attribute__((visibility("default"))) void mk_nvfp4(const void* weights, int bf16, int64_t rows,
                                                                int64_t cols, float scale2, int below, int above,
                                                                uint8_t* data, uint8_t* scales, double* sums) {
  const int64_t blocks = (cols + BLOCK - 1) / BLOCK;
  double error = 0, error_max = 0, squares = 0;
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t first = row * cols + block * BLOCK;
      const int count = static_cast<int>(cols - block * BLOCK < BLOCK ? cols - block * BLOCK : BLOCK);
      float x[BLOCK] = {};
      load(weights, bf16, first, count, x);
      float wanted = largest(x) / (E2M1_MAX * scale2);
      if (wanted == 0) wanted = 1;  // a block of zeros, or one that underflows: modelopt's choice
      wanted = wanted < E4M3_MIN ? E4M3_MIN : wanted > E4M3_MAX ? E4M3_MAX : wanted;
      const int start = mk::to_e4m3(wanted);
      uint8_t codes[BLOCK], other[BLOCK];
      int chosen = start;
      const double of_max = encode(x, start, scale2, codes);
      double least = of_max;
      for (int code = start - below < 1 ? 1 : start - below; code <= start + above && code <= 126; code++) {
        if (code == start || least == 0) continue;
        const double found = encode(x, code, scale2, other);
        if (found < least) {
          least = found, chosen = code;
          std::memcpy(codes, other, BLOCK);
        }
      }
      uint8_t* out = data + (row * blocks + block) * (BLOCK / 2);
      for (int i = 0; i < BLOCK / 2; i++) out[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
      scales[row * blocks + block] = static_cast<uint8_t>(chosen);
      double terms[BLOCK];
      for (int i = 0; i < BLOCK; i++) terms[i] = static_cast<double>(x[i]) * x[i];
      error += least, error_max += of_max, squares += sum(terms);
    }
  }
  sums[0] += error, sums[1] += error_max, sums[2] += squares;
}
