// NVFP4 weights through a ring into tensor-core products, for 1 to 16 tokens: gate/up tiles as the step kernel works
// through them (four warps a tile, four tiles at a time, SwiGLU behind), every token multiplied with every tile. Bound: the
// bytes of the tiles at the read bandwidth.
//   python tests/bench/ladder/run.py products
#include "bench.cuh"
#include "mma.cuh"

using namespace bench;

constexpr int kSlots = 4, kGroups = 4, kGroupWarps = kWarps / kGroups, kXRow = kHidden + 8;
constexpr float kScale = 1.f / 64;  // keeps SwiGLU's inputs near 1
static_assert(tile_pages(kHidden) == 1, "a tile is a page here");

struct alignas(128) Shared {
  uint8_t page[kSlots][kPairTileBytes];
  uint16_t x[kMaxTokens][kXRow];
  float part[kGroups][2][kGroupWarps][16][8];
  uint64_t full[kSlots], empty[kSlots];
  int32_t quit;
};

// x: bf16 [tokens][kHidden]; out: bf16 [tile][token][8]
__global__ void __launch_bounds__(kTeam + 32, 1)
    multiply(const uint8_t* src, int64_t tiles, const uint16_t* x, int tokens, uint32_t flight, uint32_t zero, uint16_t* out) {
  MK_DYNAMIC_SHARED(raw);
  Shared& s = *(Shared*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(smem_address(&s.full[i]), 1);
      mbarrier_init(smem_address(&s.empty[i]), kGroupWarps);
    }
    mbarrier_init_fence();
    s.quit = 0;
  }
  for (int i = threadIdx.x; i < tokens * kHidden; i += blockDim.x) s.x[i / kHidden][i % kHidden] = x[i];
  __syncthreads();
  const int64_t first = tiles * blockIdx.x / gridDim.x;
  const int count = (int)(tiles * (blockIdx.x + 1) / gridDim.x - first);
  Ring<kSlots> ring{smem_address(s.full), smem_address(s.empty)};
  if (warp < 0) {
    if (lane) return;
    Stream<kSlots> stream{ring, smem_address(s.page), kPairTileBytes, flight, evict_first_policy(), &s.quit, nullptr};
    for (int i = 0; i < count; i++) stream.page(src + (first + i) * kPairTileBytes, kPairTileBytes);
    stream.drain();
    return;
  }
  constexpr int kChunks = tile_chunks(kHidden), kHeld = 2;
  const int group = warp / kGroupWarps, part = warp % kGroupWarps, g = lane >> 2, t = lane & 3;
  const int c0 = kChunks * part / kGroupWarps, c1 = kChunks * (part + 1) / kGroupWarps;
  ring.n = group;
  int buffer = 0;
#pragma unroll 1
  for (int i = group; i < count; i += kGroups) {
    ring.wait_full();
    const uint4* codes = (const uint4*)s.page[ring.slot()] + lane;
    const uint16_t* scales = (const uint16_t*)(s.page[ring.slot()] + kChunks * 512) + lane;
#pragma unroll 1
    for (int pass = 0; pass < tokens; pass += 8) {  // eight tokens at a time
      const uint16_t* row = s.x[min(pass + g, tokens - 1)] + 16 * t;
      float acc[2][4] = {};
      uint32_t loaded = 0;
#pragma unroll 1
      for (int c = c0; c < c1; c += kHeld) {
        uint4 q[kHeld];
        uint32_t sc[kHeld];
#pragma unroll
        for (int j = 0; j < kHeld; j++)
          if (c + j < c1) {
            q[j] = codes[32 * (c + j)];
            sc[j] = scales[32 * (c + j)];
            loaded |= q[j].w | sc[j];
          }
        if (c + kHeld >= c1 && pass + 8 >= tokens) ring.release(loaded, zero, lane);
#pragma unroll
        for (int j = 0; j < kHeld; j++)
          if (c + j < c1) {
            const uint4* v = (const uint4*)(row + (c + j) * 64);
            mma_nvfp4_chunk(acc[j & 1], q[j], sc[j], v[0], v[1]);
          }
      }
      if (c0 == c1 && pass + 8 >= tokens) ring.release(0, zero, lane);
      float(*sums)[16][8] = s.part[group][buffer];
      *(float2*)&sums[part][g][2 * t] = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
      *(float2*)&sums[part][g + 8][2 * t] = make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
      group_sync(4 + group, kGroupWarps * 32);
      const int n = part * 32 + lane, r = n % 8, column = n / 8;
      if (column < 8 && pass + column < tokens) {
        float gate = 0, up = 0;
#pragma unroll
        for (int w = 0; w < kGroupWarps; w++) gate += sums[w][r][column], up += sums[w][r + 8][column];
        gate *= kNvfp4Scale * kScale, up *= kNvfp4Scale * kScale;
        const float h = __fdividef(gate, 1.f + __expf(-gate)) * up;
        out[((first + i) * tokens + pass + column) * 8 + r] = (uint16_t)pack_bf16x2(h, 0.f);
      }
      buffer ^= 1;
    }
    ring.n += kGroups - 1;  // release() went on by one
  }
}

// Block scales that are numbers of some size, where random bytes lie: 0.5 to 3.75 in every tile.
__global__ void mend_scales(uint8_t* src, int64_t tiles) {
  constexpr int kScales = tile_chunks(kHidden) * 64;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < tiles * kScales;
       i += (int64_t)gridDim.x * blockDim.x) {
    uint8_t& b = src[i / kScales * kPairTileBytes + tile_chunks(kHidden) * 512 + i % kScales];
    b = 0x30 + b % 24;
  }
}

// A weight of a tile, through the functions that say where it lies.
double weight(const std::vector<uint8_t>& tile, int r, int column) {
  static const double values[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  uint32_t word;
  memcpy(&word, &tile[tile_word_offset(r, column)], 4);
  const uint32_t mask = tile_code_bits(r, column, 15);
  uint32_t code = 0;
  while (tile_code_bits(r, column, code) != (word & mask)) code++;
  const int scale = tile[tile_scale_offset(r, column, kHidden)];
  const double v = values[code & 7] * std::ldexp(1 + (scale & 7) / 8., (scale >> 3) - 7);
  return code & 8 ? -v : v;
}

double worst_error(const Array<uint8_t>& weights, int64_t tiles, const std::vector<uint16_t>& x, int tokens,
                   const Array<uint16_t>& out) {
  double difference = 0, size = 0;
  const int64_t samples = std::min<int64_t>(tiles, 24);
  for (int64_t n = 0; n < samples; n++) {
    const int64_t tile = samples > 1 ? n * (tiles - 1) / (samples - 1) : 0;
    const auto bytes = weights.get(tile * kPairTileBytes, kPairTileBytes);
    const auto got = out.get(tile * tokens * 8, tokens * 8);
    std::vector<double> w(16 * kHidden);
    for (int i = 0; i < 16 * kHidden; i++) w[i] = weight(bytes, i / kHidden, i % kHidden);
    for (int i = 0; i < tokens * 8; i++) {
      double sums[2] = {};
      for (int k = 0; k < kHidden; k++)
        for (int half = 0; half < 2; half++)
          sums[half] += w[(i % 8 + 8 * half) * kHidden + k] * from_bf16(x[i / 8 * kHidden + k]) * kScale;
      const double h = sums[0] / (1 + exp(-sums[0])) * sums[1], d = from_bf16(got[i]) - h;
      difference += d * d, size += h * h;
      if (!(d == d)) return INFINITY;
    }
  }
  return sqrt(difference / size);
}

int main(int argc, char** argv) {
  const int64_t tiles = std::max<int64_t>(kGrid, (megabytes(argc, argv, 1024) << 20) / kPairTileBytes);
  Array<uint8_t> weights(tiles * kPairTileBytes);
  launch(fill_words, 8 * kGrid, 256, 0, false, (uint32_t*)weights.data, weights.size / 4, uint64_t{2});
  launch(mend_scales, 8 * kGrid, 256, 0, false, weights.data, tiles);
  Array<uint16_t> x(kMaxTokens * kHidden), out(tiles * kMaxTokens * 8);
  std::vector<uint16_t> host(x.size);
  for (int i = 0; i < (int)host.size(); i++) host[i] = to_bf16(uniform(1000 + i) / sqrtf(kHidden) * 16);
  x.put(host);
  allow_shared(multiply, sizeof(Shared));
  const double bound = weights.size / read_bandwidth(weights.data, weights.size);
  for (int tokens : {1, 2, 4, 8, 16})
    for (int flight : {2, 4}) {
      CHECK(cudaMemset(out.data, 0xFF, out.size * 2));
      const double t = seconds([&] {
        launch(multiply, kGrid, kTeam + 32, sizeof(Shared), false, weights.data, tiles, x.data, tokens, (uint32_t)flight,
               0u, out.data);
      });
      const double error = worst_error(weights, tiles, host, tokens, out);
      expect(error < 6e-3, "products against float64");
      char what[80];
      snprintf(what, sizeof what, "NVFP4, T = %d, %d under way (error %.0e)", tokens, flight, error);
      row("products", what, t * 1e3, bound * 1e3, "ms", true);
    }
  return finish();
}
