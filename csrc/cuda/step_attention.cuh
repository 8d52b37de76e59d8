// Attention of the step kernel: q/k norm, RoPE, KV write, attention over a split of the cache, combination of the splits.
//
// A unit is one KV head, some of the step's tokens, and the tiles of 16 positions t = split, split + splits, ... Its
// rows are the query heads of the group for every token, token major, 16 rows to an MMA. Tiles come through the
// experts' ring, two a page; those with new positions are made in shared memory by every unit that looks at them, and
// one of them writes the new positions to the cache. Squads of four warps work on a row block and the 32 positions of a
// page: each warp scores eight of the positions, then all weigh a quarter of the head's dimensions each. Where there
// are fewer row blocks than squads, several squads share one and divide the pages.
#pragma once
#include "step_producer.cuh"

namespace mk {

// A unit of this step. Made anew where it is used, so that it needs no registers in between.
struct Unit {
  int kv_head, split, splits, group, token0, tokens;
  __device__ __forceinline__ Unit(const StepBlock& b, int unit) {
    const AttentionPlan plan = attention_plan(b);
    splits = plan.splits;
    group = unit % plan.groups, unit /= plan.groups;
    split = unit % splits, kv_head = unit / splits;
    token0 = group * plan.tokens;
    tokens = min(plan.tokens, b.tokens() - token0);
  }
  __device__ __forceinline__ int rows() const { return tokens * kGroup; }
  __device__ __forceinline__ int part() const { return kv_head * splits + split; }
};
// Squads until one has the same row block again. Of the model's group, so that ranks which share it sum in the same
// order.
__device__ __forceinline__ int squad_spread(const StepBlock& b) {
  const int blocks = attention_blocks(attention_plan(b).tokens);
  return blocks > 2 ? kSquads : blocks;
}

// A row block's running softmax: outputs of this warp's quarter of the dimensions for rows g and g + 8. The sums are of this
// warp's positions. A squad has block squad % spread.
constexpr int kQuarterTiles = kHeadDim / 32;
struct RunningSoftmax {
  float out[kQuarterTiles][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
};

// What attention uses of the shared memory that phases use in turn.
struct AttentionScratch {
  uint16_t q[kUnitQueries][kQStride];
  SquadScores scores[kSquads];
  alignas(16) uint8_t fresh[2][2 * kTileBytes];  // tiles with new positions
  float lines[kRotary == kHeadDim ? 1 : kWarps][2][kRotary == kHeadDim ? 4 : kHeadDim];  // vectors before rotation
};
// Outputs of squads that share a row block; they take the place of the queries.
struct SquadOutputs {
  float out[kSquads][16][kHeadDim];
  float2 sums[kSquads][16];
};

// Of a tile with new positions what is not new: earlier positions from the cache, zeros for those that are still to
// come. Other units write the new positions of this tile meanwhile, so nothing else of it may be read.
__device__ __forceinline__ void fill_fresh(const StepBlock& b, const Unit& u, int tile) {
  const int begin = b.position() - tile * kTile, end = begin + b.tokens();  // of the new ones in the tile
  if (begin <= 0 && end >= kTile) return;
  const uint8_t* from = b.p.kv + kv_tile_offset(b.layer(), u.kv_head, tile);
  uint8_t* to = b.scratch<AttentionScratch>()->fresh[tile - b.position() / kTile];
#pragma unroll 1
  for (int i = b.tid; i < kTileBytes / 16; i += kTeam) {
    const int at = i / kHeadDim * 8 + i % 32 / 4;
    if (at < begin || at >= end) ((uint4*)to)[i] = at < begin ? __ldcg((const uint4*)from + i) : make_uint4(0, 0, 0, 0);
  }
  from += kTileBytes, to += kTileBytes;
#pragma unroll 1
  for (int i = b.tid; i < kTileBytes / 8; i += kTeam)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int at = i % 4 * 4 + k;
      if (at < begin || at >= end)
        ((uint16_t*)to)[4 * i + k] = at < begin ? __ldcg((const uint16_t*)from + 4 * i + k) : (uint16_t)0;
    }
}

// Queries of the unit into shared memory, and keys and values of new positions whose tiles are of its split; of the
// units that have these the first writes them to the cache too. A job is a vector: the rows of queries, then of every
// token its key and its value. Half a warp has one: lane l of sixteen holds kRun dimensions from kRun l on, and as many
// from kHeadDim / 2 + kRun l on.
constexpr int kRun = kHeadDim / 32;
__device__ __forceinline__ void load_run(float (&v)[kRun], const float* src, bool cached) {
  if constexpr (kRun == 4) {
    const float4 x = cached ? __ldg((const float4*)src) : __ldcg((const float4*)src);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  } else {
    const float2 x = cached ? __ldg((const float2*)src) : __ldcg((const float2*)src);
    v[0] = x.x, v[1] = x.y;
  }
}
__device__ __forceinline__ void store_run(uint16_t* to, const float (&v)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; i += 2) *(uint32_t*)(to + i) = pack_bf16x2(v[i], v[i + 1]);
}
__device__ __forceinline__ void prepare_unit(const StepBlock& b, const Unit& u) {
  static_assert(kRun == 2 || kRun == 4);
  const int kv_head = u.kv_head, rows = u.rows(), d = b.lane() % 16 * kRun;
  int jobs = rows;
#pragma unroll 1
  for (int tile = b.position() / kTile; tile <= (b.position() + b.tokens() - 1) / kTile; tile++)
    if (tile % u.splits == u.split) {
      fill_fresh(b, u, tile);
      jobs = rows + 2 * b.tokens();
    }
#pragma unroll 1
  for (int first = 2 * b.warp; first < jobs; first += 2 * kWarps) {  // the two halves stay together for the shuffles
    const int job = min(first + b.lane() / 16, jobs - 1);
    const int token = job < rows ? u.token0 + job / kGroup : (job - rows) / 2;
    const bool is_query = job < rows, is_value = !is_query && (job - rows) % 2, real = first + b.lane() / 16 < jobs;
    const int head = is_query ? kv_head * kGroup + job % kGroup : kHeads + is_value * kKvHeads + kv_head;
    const int position = b.position() + token;
    const float* src = b.p.qkv + token * kQkvRows + head * kHeadDim + d;
    float x[kRun], y[kRun];
    load_run(x, src, false);
    load_run(y, src + kHeadDim / 2, false);
    // Rotation partners are kRotary / 2 apart: the other run of the same lane, or dimensions of other lanes.
    const float2* table = b.p.rope + (int64_t)position * (kRotary / 2);
    float2 turn[kRun];
    if constexpr (kRotary == kHeadDim)
#pragma unroll
      for (int i = 0; i < kRun; i++) turn[i] = __ldg(table + d + i);
    if constexpr (kQkNorm) {
      const float* weights = b.vectors() + (is_query ? kNormQ : kNormK) + d;
      if constexpr (kQkNormOverProjection) weights += (is_query ? head : kv_head) * kHeadDim;
      float u[kRun], w[kRun], squares = 0, r;
      if constexpr (kQkNormWeight) {
        load_run(u, weights, true);
        load_run(w, weights + kHeadDim / 2, true);
      } else {
#pragma unroll
        for (int i = 0; i < kRun; i++) u[i] = w[i] = 1.f;
      }
      if constexpr (kQkNormOverProjection) {
        r = b.qk_rms(!is_query)[token];
      } else {
#pragma unroll
        for (int i = 0; i < kRun; i++) squares += x[i] * x[i] + y[i] * y[i];
#pragma unroll
        for (int o = 8; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
        r = rsqrtf(squares / kHeadDim + kRmsEps);
      }
#pragma unroll
      for (int i = 0; i < kRun; i++)
        if (!is_value) x[i] *= r * u[i], y[i] *= r * w[i];
    }
    if constexpr (kRotary == kHeadDim) {
#pragma unroll
      for (int i = 0; i < kRun; i++)
        if (!is_value && is_rotated(b.layer())) {
          const float a = x[i], c = y[i];
          x[i] = a * turn[i].x - c * turn[i].y;
          y[i] = c * turn[i].x + a * turn[i].y;
        }
    } else {
      // Through shared memory, which every half has a line of.
      float* line = b.scratch<AttentionScratch>()->lines[b.warp][b.lane() / 16];
#pragma unroll
      for (int i = 0; i < kRun; i++) line[d + i] = x[i], line[d + i + kHeadDim / 2] = y[i];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * kRun; i++) {
        const int at = i < kRun ? d + i : d + i - kRun + kHeadDim / 2;
        const bool low = at < kRotary / 2;
        if (is_value || !is_rotated(b.layer()) || at >= kRotary) continue;
        const float own = line[at], other = line[low ? at + kRotary / 2 : at - kRotary / 2];
        const float2 c = __ldg(table + (low ? at : at - kRotary / 2));
        (i < kRun ? x[i] : y[i - kRun]) = low ? own * c.x - other * c.y : own * c.x + other * c.y;
      }
      __syncwarp();
    }
    if (!real || (!is_query && position / kTile % u.splits != u.split)) continue;
    uint8_t* fresh = b.scratch<AttentionScratch>()->fresh[is_query ? 0 : position / kTile - b.position() / kTile];
    uint8_t* tile = b.p.kv + kv_tile_offset(b.layer(), kv_head, position / kTile);
    if (is_value) {
#pragma unroll
      for (int i = 0; i < 2 * kRun; i++) {
        const int at = kTileBytes + v_offset(position, i < kRun ? d + i : d + i - kRun + kHeadDim / 2);
        const uint16_t v = (uint16_t)pack_bf16x2(i < kRun ? x[i] : y[i - kRun], 0.f);
        *(uint16_t*)(fresh + at) = v;
        if (u.group == 0) *(uint16_t*)(tile + at) = v;
      }
      continue;
    }
    uint16_t* q = b.scratch<AttentionScratch>()->q[is_query ? job : 0];
    const int low = k_offset(position, d), high = k_offset(position, d + kHeadDim / 2);
    store_run(is_query ? q + d : (uint16_t*)(fresh + low), x);
    store_run(is_query ? q + d + kHeadDim / 2 : (uint16_t*)(fresh + high), y);
    if (is_query || u.group) continue;
    store_run((uint16_t*)(tile + low), x);
    store_run((uint16_t*)(tile + high), y);
  }
}

// Two tiles in shared memory (the second may not be there) against this squad's row block. position0, position1: their
// first positions. Returns what a release of the tiles must depend on.
__device__ __forceinline__ uint32_t attend_tiles(const StepBlock& b, RunningSoftmax& r, int token0,
                                                 const uint8_t* tiles, int position0, int position1, bool second,
                                                 int window) {
  AttentionScratch& scratch = *b.scratch<AttentionScratch>();
  const int member = b.warp & 3, squad = b.warp >> 2, g = b.lane() >> 2, t = b.lane() & 3;
  const int block = squad % squad_spread(b);
  const bool mine = member < 2 || second;
  const uint4* keys = (const uint4*)(tiles + member / 2 * 2 * kTileBytes) + member % 2 * (kHeadDim / 32) * 32 + b.lane();
  const float scale = kQkScale * rsqrtf((float)kHeadDim) * 1.4426950408889634f;  // and exponents of two
  float s[4] = {};  // positions 2 t and 2 t + 1 of rows g and g + 8
  const uint16_t* q = scratch.q[16 * block + g] + 8 * t;
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; i++) {
    const uint4 k = keys[32 * i], q0 = *(const uint4*)(q + 32 * i), q1 = *(const uint4*)(q + 32 * i + 8 * kQStride);
    mma_bf16(s, q0.x, q1.x, q0.y, q1.y, k.x, k.y);
    mma_bf16(s, q0.z, q1.z, q0.w, q1.w, k.z, k.w);
  }
  // Masked scores are -inf. Rows behind the last token's are computed and never looked at.
  SquadScores& x = scratch.scores[squad];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int self = b.position() + token0 + (16 * block + g + 8 * h) / kGroup;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = (member < 2 ? position0 : position1) + member % 2 * 8 + 2 * t + i;
      float& score = s[2 * h + i];
      score = mine && at <= self && (window == 0 || at > self - window) ? score * scale : -INFINITY;
    }
    float top = fmaxf(s[2 * h], s[2 * h + 1]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if (t == 0) x.top[g + 8 * h][member] = top;
  }
  group_sync(kSquadBarrier + squad, 128);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float4 all = *(const float4*)x.top[g + 8 * h];
    const float top = fmaxf(fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w)), r.top[h]);
    const float base = top == -INFINITY ? 0.f : top, fade = exp2_approx(r.top[h] - base);
    r.top[h] = top;
    const uint32_t p = pack_bf16x2(exp2_approx(s[2 * h] - base), exp2_approx(s[2 * h + 1] - base));
    *(uint32_t*)&x.p[g + 8 * h][8 * member + 2 * t] = p;
    r.sum[h] = r.sum[h] * fade + (bf16_low(p) + bf16_high(p));
#pragma unroll
    for (int j = 0; j < kQuarterTiles; j++) r.out[j][2 * h] *= fade, r.out[j][2 * h + 1] *= fade;
  }
  group_sync(kSquadBarrier + squad, 128);
  uint32_t loaded = 0;  // the keys are there already: the scores came of them
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (i && !second) break;
    const uint2* values = (const uint2*)(tiles + (2 * i + 1) * kTileBytes) + member * kQuarterTiles * 32 + b.lane();
    uint2 v[kQuarterTiles];
#pragma unroll
    for (int j = 0; j < kQuarterTiles; j++) v[j] = values[32 * j], loaded |= v[j].y;
    const uint2 p0 = *(const uint2*)&x.p[g][16 * i + 4 * t], p1 = *(const uint2*)&x.p[g + 8][16 * i + 4 * t];
#pragma unroll
    for (int j = 0; j < kQuarterTiles; j++) mma_bf16(r.out[j], p0.x, p1.x, p0.y, p1.y, v[j].x, v[j].y);
  }
  return loaded;
}

// Everything of a unit that this squad looks at; advances the ring over the unit's pages. The fresh tiles are in scratch.
__device__ __forceinline__ void attend_unit(const StepBlock& b, RunningSoftmax& r, StepRing& ring, int unit) {
  const Unit u(b, unit);
  const int splits = u.splits, split = u.split, squad = b.warp >> 2;
  const int spread = squad_spread(b), shares = kSquads / spread, share = squad / spread;
  const int window = window_of(b.layer(), std::make_index_sequence<kLayers>());
  const UnitTiles tiles(b.layer(), b.position(), split, splits);
  const int fresh0 = b.position() / kTile, fresh1 = (b.position() + b.tokens() - 1) / kTile;
  const bool has0 = fresh0 % splits == split, has1 = fresh1 != fresh0 && fresh1 % splits == split;
  const uint32_t start = ring.n;
  const int pages = tiles.pages();
  // The fresh tiles come last.
#pragma unroll 1
  for (int page = share;; page += shares) {
    const bool fresh = page >= pages;
    if (fresh && (share || !(has0 || has1))) break;
    const int i = tiles.first + 2 * page;
    ring.n = start + page;
    if (!fresh) ring.wait_full();
    const uint8_t* at = fresh ? b.scratch<AttentionScratch>()->fresh[has0 ? 0 : 1] : b.s.expert[ring.slot()];
    const int position0 = fresh ? (has0 ? fresh0 : fresh1) * kTile : (i * splits + split) * kTile;
    const int position1 = fresh ? fresh1 * kTile : ((i + 1) * splits + split) * kTile;
    const uint32_t loaded =
        attend_tiles(b, r, u.token0, at, position0, position1, fresh ? has0 && has1 : i + 1 < tiles.end, window);
    if (fresh) break;
    ring.release(loaded, b.zero, b.lane(), kSquads / spread);
  }
  ring.n = start + pages;
  // The warps' sums become the squad's.
  const int member = b.warp & 3, g = b.lane() >> 2, t = b.lane() & 3;
  SquadScores& x = b.scratch<AttentionScratch>()->scores[squad];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    r.sum[h] += __shfl_xor_sync(~0u, r.sum[h], 1);
    r.sum[h] += __shfl_xor_sync(~0u, r.sum[h], 2);
    if (t == 0) x.top[g + 8 * h][member] = r.sum[h];
  }
  group_sync(kSquadBarrier + squad, 128);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float4 all = *(const float4*)x.top[g + 8 * h];
    r.sum[h] = (all.x + all.y) + (all.z + all.w);
  }
}

// Outputs and sums of the first `rows` rows of a block to where it is summed up or kept.
__device__ __forceinline__ void store_block(const StepBlock& b, const RunningSoftmax& r, float* out, float2* sums,
                                            int rows) {
  const int g = b.lane() >> 2, t = b.lane() & 3, member = b.warp & 3;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (g + 8 * h >= rows) continue;
#pragma unroll
    for (int j = 0; j < kQuarterTiles; j++)
      *(float2*)(out + (g + 8 * h) * kHeadDim + 8 * (member * kQuarterTiles + j) + 2 * t) =
          make_float2(r.out[j][2 * h], r.out[j][2 * h + 1]);
    if (member == 0 && t == 0) sums[g + 8 * h] = make_float2(r.top[h], r.sum[h]);
  }
}

// Several squads had the same row block: their outputs lie in shared memory.
__device__ __forceinline__ void merge_shares(const StepBlock& b, int rows, float* out, float2* sums) {
  const int spread = squad_spread(b), shares = kSquads / spread;
  const SquadOutputs& o = *b.scratch<SquadOutputs>();
#pragma unroll 1
  for (int i = b.tid; i < rows * kHeadDim; i += kTeam) {
    const int row = i / kHeadDim, d = i % kHeadDim, squad = row / 16;
    float top = -INFINITY;
#pragma unroll
    for (int k = 0; k < kSquads; k++)
      if (k < shares) top = fmaxf(top, o.sums[k * spread + squad][row % 16].x);
    float value = 0, sum = 0;
#pragma unroll
    for (int k = 0; k < kSquads; k++) {
      if (k >= shares) continue;
      const float2 part = o.sums[k * spread + squad][row % 16];
      const float f = part.x == -INFINITY ? 0.f : exp2_approx(part.x - top);
      value += f * o.out[k * spread + squad][row % 16][d];
      sum += f * part.y;
    }
    out[row * kHeadDim + d] = value;
    if (d == 0) sums[row] = make_float2(top, sum);
  }
}

// 1/rms of every token's q and k over all heads, by one warp a token; a team_sync must follow. Shares of row units add up to
// those of heads, and these in the order of the heads. Of a KV head that several ranks have the first one's are taken.
__device__ __forceinline__ void load_qk_rms(const StepBlock& b) {
  if (b.warp >= b.tokens()) return;
  constexpr int kPerHead = kHeadDim / kPageRows;
#pragma unroll 1
  for (int keys = 0; keys < 2; keys++) {
    const float* squares = b.qk_squares() + b.warp * kModelQkUnits + (keys ? kQRows / kPageRows : 0);
    const int heads = keys ? kModelKvHeads : kRanks * kHeads;
    float all = 0;
#pragma unroll 1
    for (int first = 0; first < heads; first += 32) {
      float sum = 0;
      if (first + b.lane() < heads) {
        const int head = first + b.lane(), rank = kRanks == 1 ? 0 : head * kRanks / heads;
        const int held = kRanks == 1 ? head : head % (keys ? kKvHeads : kHeads);
#pragma unroll
        for (int i = 0; i < kPerHead; i++) sum += __ldcg(squares + rank * kQkUnits + held * kPerHead + i);
      }
#pragma unroll 4
      for (int i = 0; i < min(32, heads - first); i++) all += __shfl_sync(~0u, sum, i);
    }
    if (b.lane() == 0) b.qk_rms(keys)[b.warp] = rsqrtf(all / (heads * kHeadDim) + kRmsEps);
  }
}

__device__ __forceinline__ void step_attention(StepBlock& b, StepRing& ring) {
  b.stamp(kPhaseAttention, 0);
  if constexpr (kQkWhole) {
    load_qk_rms(b);
    team_sync<kTeam>();
  }
#pragma unroll 1
  for (int unit = b.sm(); unit < attention_plan(b).units(); unit += kGrid) {
    prepare_unit(b, Unit(b, unit));
    team_sync<kTeam>();
    b.stamp(kPhaseAttention, 1);
    RunningSoftmax r;
    attend_unit(b, r, ring, unit);
    b.stamp(kPhaseAttention, 2);
    const Unit u(b, unit);
    const int first = u.part() * kAttentionRows + u.token0 * kGroup, squad = b.warp >> 2;
    float* out = b.p.partial + (int64_t)first * kHeadDim;
    float2* sums = b.p.partial_sums + first;
    if (squad_spread(b) == kSquads) {
      const int row = 16 * squad;
      if (row < u.rows()) store_block(b, r, out + row * kHeadDim, sums + row, u.rows() - row);
      team_sync<kTeam>();  // the next unit overwrites shared memory
    } else {
      team_sync<kTeam>();  // queries and scores were read
      SquadOutputs& o = *b.scratch<SquadOutputs>();
      store_block(b, r, o.out[squad][0], o.sums[squad], 16);
      team_sync<kTeam>();
      merge_shares(b, u.rows(), out, sums);
      team_sync<kTeam>();
    }
  }
  b.stamp(kPhaseAttention, 3);
  b.meet();
}

// One warp a row of heads x tokens, spread over the grid.
__device__ __forceinline__ void step_combine(StepBlock& b) {
  b.stamp(kPhaseCombine, 0);
  const int splits = attention_plan(b).splits;
  constexpr int kLane = kHeadDim / 32;
#pragma unroll 1
  for (int i = b.sm() + kGrid * b.warp; i < b.tokens() * kHeads; i += kGrid * kWarps) {
    const int token = i / kHeads, head = i % kHeads, row = token * kGroup + head % kGroup;
    const int unit = head / kGroup * splits;
    const float2 mine = b.lane() < splits ? __ldcg(b.p.partial_sums + (unit + b.lane()) * kAttentionRows + row)
                                        : make_float2(-INFINITY, 0.f);
    float top = mine.x;
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float sink = 0;  // its share of the sum; it has no value
    if constexpr (kAttentionSinks) {
      const float score = __ldg(b.vectors() + kSinks + head) * 1.4426950408889634f;
      top = fmaxf(top, score);
      sink = exp2_approx(score - top);
    }
    const float f = mine.x == -INFINITY ? 0.f : exp2_approx(mine.x - top);
    const float inverse = __fdividef(1.f, kAttentionSinks ? warp_sum(f * mine.y) + sink : warp_sum(f * mine.y));
    float v[kLane] = {};
    const float* src = b.p.partial + ((int64_t)unit * kAttentionRows + row) * kHeadDim + b.lane() * kLane;
#pragma unroll 4
    for (int k = 0; k < splits; k++, src += kAttentionRows * kHeadDim) {
      const float w = __shfl_sync(~0u, f, k);
#pragma unroll
      for (int j = 0; j < kLane; j += 2) {
        const float2 part = __ldcg((const float2*)(src + j));
        v[j] += w * part.x, v[j + 1] += w * part.y;
      }
    }
    if constexpr (kAttentionOutNorm || kAttentionGate) {
      float squares = 0, rms = 1;
#pragma unroll
      for (int j = 0; j < kLane; j++) v[j] *= inverse, squares += v[j] * v[j];
      if constexpr (kAttentionOutNorm) rms = rsqrtf(warp_sum(squares) / kHeadDim + kRmsEps);
#pragma unroll
      for (int j = 0; j < kLane; j++) {
        v[j] *= rms;
        if constexpr (kAttentionGate) {
          const float gate = __ldcg(b.p.qkv + token * kQkvRows + kGateAt + head * kHeadDim + b.lane() * kLane + j);
          v[j] = __fdividef(v[j], 1.f + __expf(-gate));
        }
      }
    }
    const float whole = kAttentionOutNorm || kAttentionGate ? 1.f : inverse;
#pragma unroll
    for (int j = 0; j < kLane; j += 2)
      if constexpr (kRanks > 1)
        put_attention(b, token, head, b.lane() * kLane + j, pack_bf16x2(v[j] * whole, v[j + 1] * whole));
      else
        *(uint32_t*)(b.p.attention + token * kQRows + head * kHeadDim + b.lane() * kLane + j) =
            pack_bf16x2(v[j] * whole, v[j + 1] * whole);
  }
  if constexpr (kRanks > 1) take_attention(b);
  b.stamp(kPhaseCombine, 3);
  b.meet();
}

}  // namespace mk
