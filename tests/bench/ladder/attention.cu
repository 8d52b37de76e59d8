// Attention of one token over a KV cache that is split over the SMs: tiles of 16 positions through a ring, a tile a warp,
// partial results of every split combined by a second kernel. 1k to 128k positions. Bound: the cache's bytes at the read
// bandwidth. What SMs wait for each other is not in here: exchange.cu.
//   python tests/bench/ladder/run.py attention
#include "bench.cuh"

using namespace bench;

constexpr int kPage = 2 * kTileBytes, kSlots = 16;  // K and V of a tile; slot w is warp w's
constexpr int kRows = 8;                            // query heads of an MMA; those behind kGroup are zero
constexpr int kSplits = kGrid / kKvHeads;
static_assert(kGroup <= kRows && kSlots == kWarps);

struct alignas(128) Shared {
  uint8_t page[kSlots][kPage];
  alignas(16) uint16_t q[kRows][kHeadDim + 8];  // rows in different banks
  float2 sums[kWarps][kRows];  // maximum, denominator
  uint64_t full[kSlots], empty[kSlots];
  int32_t quit;
};
constexpr size_t kOutputs = (size_t)kWarps * kRows * kHeadDim * sizeof(float);  // behind Shared

__device__ __forceinline__ const uint8_t* tile_of(const uint8_t* kv, int64_t tiles, int layer, int head, int64_t tile) {
  return kv + ((int64_t)(layer * kKvHeads + head) * tiles + tile) * kPage;
}

// q: bf16 [layer][kHeads][kHeadDim]; partial: [layer][KV head][split][kRows][kHeadDim], sums alike
__global__ void __launch_bounds__(kTeam + 32, 1)
    attend(const uint8_t* kv, const uint16_t* q, int layers, int64_t tiles, uint32_t flight, uint32_t zero, float* partial,
           float2* partial_sums) {
  MK_DYNAMIC_SHARED(raw);
  Shared& s = *(Shared*)raw;
  float* outputs = (float*)(raw + sizeof(Shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1, head = blockIdx.x / kSplits, split = blockIdx.x % kSplits;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(smem_address(&s.full[i]), 1);
      mbarrier_init(smem_address(&s.empty[i]), 1);
    }
    mbarrier_init_fence();
    s.quit = 0;
  }
  __syncthreads();
  if (blockIdx.x >= kKvHeads * kSplits) return;
  const int64_t first = tiles * split / kSplits;
  const int count = (int)(tiles * (split + 1) / kSplits - first);
  Ring<kSlots> ring{smem_address(s.full), smem_address(s.empty)};
  if (warp < 0) {
    if (lane) return;
    Stream<kSlots> out{ring, smem_address(s.page), kPage, flight, evict_first_policy(), &s.quit, nullptr};
    for (int layer = 0; layer < layers; layer++) {
      for (int i = 0; i < count; i++) out.page(tile_of(kv, tiles, layer, head, first + i), kPage);
    }
    out.drain();
    return;
  }
  const int g = lane >> 2, t = lane & 3;
  uint32_t begun = 0;  // pages before this layer
#pragma unroll 1
  for (int layer = 0; layer < layers; layer++, begun += count) {
    for (int i = threadIdx.x - 32; i < kRows * kHeadDim; i += kTeam)
      s.q[i / kHeadDim][i % kHeadDim] =
          i < kGroup * kHeadDim ? q[((int64_t)layer * kHeads + head * kGroup) * kHeadDim + i] : (uint16_t)0;
    team_sync<kTeam>();
    float o[kHeadDim / 16][4] = {};  // dimensions g and g + 8 of every 16, of queries 2 t and 2 t + 1
    float top = -INFINITY, sum = 0;
    const float scale = rsqrtf((float)kHeadDim) * 1.4426950408889634f;
#pragma unroll 1
    for (int i = (warp - (int)begun) & (kSlots - 1); i < count; i += kSlots) {
      ring.n = begun + i;
      ring.wait_full();
      const uint8_t* tile = s.page[ring.slot()];
      uint32_t loaded = 0;
      float score[2][4] = {};  // positions 2 t, 2 t + 1 of either half
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll 2
        for (int j = 0; j < kHeadDim / 32; j++) {
          const uint4 k = ((const uint4*)tile)[(half * (kHeadDim / 32) + j) * 32 + lane];
          loaded |= k.w;
          const uint4 x = *(const uint4*)&s.q[g][32 * j + 8 * t];
          mma_bf16(score[half], x.x, 0, x.y, 0, k.x, k.y);
          mma_bf16(score[half], x.z, 0, x.w, 0, k.z, k.w);
        }
      float highest = fmaxf(fmaxf(score[0][0], score[0][1]), fmaxf(score[1][0], score[1][1])) * scale;
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(top, fmaxf(highest, __shfl_xor_sync(~0u, highest, 2)));
      const float fade = exp2_approx(top - highest);
      top = highest;
      uint32_t p[2];
#pragma unroll
      for (int half = 0; half < 2; half++)
        p[half] = pack_bf16x2(exp2_approx(score[half][0] * scale - top), exp2_approx(score[half][1] * scale - top));
      sum = sum * fade + ((bf16_low(p[0]) + bf16_high(p[0])) + (bf16_low(p[1]) + bf16_high(p[1])));
      // Weights of positions 4 t .. 4 t + 3, which is how the values lie.
      uint32_t a[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int from = 4 * g + (2 * t & 3) + j;
        const uint32_t low = __shfl_sync(~0u, p[0], from), high = __shfl_sync(~0u, p[1], from);
        a[j] = t < 2 ? low : high;
      }
      const float fade0 = __shfl_sync(~0u, fade, 8 * t), fade1 = __shfl_sync(~0u, fade, 8 * t + 4);
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; j++) {
        const uint2* values = (const uint2*)(tile + kTileBytes) + 2 * j * 32 + lane;
        const uint2 v0 = values[0], v1 = values[32];
        loaded |= v0.y | v1.y;
        o[j][0] *= fade0, o[j][1] *= fade1, o[j][2] *= fade0, o[j][3] *= fade1;
        mma_bf16(o[j], v0.x, v1.x, v0.y, v1.y, a[0], a[1]);
      }
      ring.release(loaded, zero, lane);
    }
    // Positions of the four lanes of a row, then the sixteen warps, then the splits.
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) s.sums[warp][g] = make_float2(top, sum);
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        outputs[(warp * kRows + 2 * t + i % 2) * kHeadDim + 16 * j + g + i / 2 * 8] = o[j][i];
    team_sync<kTeam>();
    const int64_t unit = ((int64_t)layer * kKvHeads + head) * kSplits + split;
    for (int i = threadIdx.x - 32; i < kGroup * kHeadDim; i += kTeam) {
      const int row = i / kHeadDim;
      float highest = -INFINITY, value = 0, total = 0;
      for (int w = 0; w < kWarps; w++) highest = fmaxf(highest, s.sums[w][row].x);
      for (int w = 0; w < kWarps; w++) {
        const float2 part = s.sums[w][row];
        const float f = part.x == -INFINITY ? 0.f : exp2_approx(part.x - highest);
        value += f * outputs[(w * kRows + row) * kHeadDim + i % kHeadDim];
        total += f * part.y;
      }
      partial[unit * kRows * kHeadDim + i] = value;
      if (i % kHeadDim == 0) partial_sums[unit * kRows + row] = make_float2(highest, total);
    }
    team_sync<kTeam>();
  }
}

// out: float32 [layer][kHeads][kHeadDim]; a block a head
__global__ void combine(const float* partial, const float2* partial_sums, float* out) {
  const int layer = blockIdx.x / kHeads, head = blockIdx.x % kHeads, row = head % kGroup;
  const int64_t unit = ((int64_t)layer * kKvHeads + head / kGroup) * kSplits;
  float highest = -INFINITY, value = 0, total = 0;
  for (int i = 0; i < kSplits; i++) highest = fmaxf(highest, partial_sums[(unit + i) * kRows + row].x);
  for (int i = 0; i < kSplits; i++) {
    const float2 part = partial_sums[(unit + i) * kRows + row];
    const float f = part.x == -INFINITY ? 0.f : exp2_approx(part.x - highest);
    value += f * partial[((unit + i) * kRows + row) * kHeadDim + threadIdx.x];
    total += f * part.y;
  }
  out[(int64_t)blockIdx.x * kHeadDim + threadIdx.x] = value / total;
}

double worst_error(const Array<uint8_t>& kv, const std::vector<uint16_t>& q, int layers, int64_t tiles,
                   const Array<float>& out) {
  double worst = 0;
  const int64_t positions = tiles * kTile;
  for (int n = 0; n < 2; n++) {  // the first head of the first layer, the last of the last
    const int layer = n * (layers - 1), head = n * (kHeads - 1);
    const auto cache = kv.get((int64_t)(layer * kKvHeads + head / kGroup) * tiles * kPage, tiles * kPage);
    const auto got = out.get(((int64_t)layer * kHeads + head) * kHeadDim, kHeadDim);
    const auto at = [&](int64_t p, int offset) {
      uint16_t bits;
      memcpy(&bits, &cache[p / kTile * kPage + offset], 2);
      return (double)from_bf16(bits);
    };
    std::vector<double> e(positions), want(kHeadDim);
    double top = -INFINITY, sum = 0, difference = 0, size = 0;
    for (int64_t p = 0; p < positions; p++) {
      double dot = 0;
      for (int d = 0; d < kHeadDim; d++)
        dot += from_bf16(q[((int64_t)layer * kHeads + head) * kHeadDim + d]) * at(p, k_offset((int)(p % kTile), d));
      e[p] = dot / sqrt((double)kHeadDim);
      top = std::max(top, e[p]);
    }
    for (int64_t p = 0; p < positions; p++) {
      e[p] = exp(e[p] - top);
      sum += e[p];
      for (int d = 0; d < kHeadDim; d++) want[d] += e[p] * at(p, kTileBytes + v_offset((int)(p % kTile), d));
    }
    for (int d = 0; d < kHeadDim; d++) {
      difference += pow(got[d] - want[d] / sum, 2), size += pow(want[d] / sum, 2);
      if (!(got[d] == got[d])) return INFINITY;
    }
    worst = std::max(worst, sqrt(difference / size));
  }
  return worst;
}

int main(int argc, char** argv) {
  const int64_t bytes = megabytes(argc, argv, 6144) << 20;
  Array<uint8_t> kv(bytes);
  launch(fill_bf16, 8 * kGrid, 256, 0, false, (uint16_t*)kv.data, bytes / 2, uint64_t{3}, 1.f);
  const double bandwidth = read_bandwidth(kv.data, bytes);
  constexpr size_t kShared = sizeof(Shared) + kOutputs;
  allow_shared(attend, kShared);
  for (int64_t context : {1024, 8192, 32768, 131072}) {
    const int64_t tiles = context / kTile, layer_bytes = kKvHeads * tiles * kPage;
    const int layers = (int)std::min<int64_t>(kLayers, bytes / layer_bytes);
    if (layers == 0) continue;
    Array<uint16_t> q((int64_t)layers * kHeads * kHeadDim);
    std::vector<uint16_t> host(q.size);
    for (int64_t i = 0; i < q.size; i++) host[i] = to_bf16(uniform(7000000 + i) * 2);  // scores that differ
    q.put(host);
    Array<float> partial((int64_t)layers * kKvHeads * kSplits * kRows * kHeadDim), out(q.size);
    Array<float2> sums((int64_t)layers * kKvHeads * kSplits * kRows);
    for (int flight : {2, 4, 8}) {
      const double t = seconds([&] {
        launch(attend, kGrid, kTeam + 32, kShared, false, kv.data, q.data, layers, tiles, (uint32_t)flight, 0u,
               partial.data, sums.data);
        launch(combine, layers * kHeads, kHeadDim, 0, false, partial.data, sums.data, out.data);
      });
      const double error = worst_error(kv, host, layers, tiles, out);
      expect(error < 6e-3, "attention against float64");
      char what[80];
      snprintf(what, sizeof what, "context %lldk, %d under way (error %.0e)", (long long)context >> 10, flight, error);
      row("attention", what, t / layers * 1e6, layer_bytes / bandwidth * 1e6, "us", true);
    }
  }
  return finish();
}
