// What the phases of step_kernel send to and take from the other ranks of a model; nothing of it is in kernels of one rank.
// A phase stores what it computed into its rank's activations and into the images of the peers; before the barrier that ends
// it, the blocks of a rank take what the peers computed into the same activations. exchange.cuh has the protocol.
#pragma once
#include "step_block.cuh"

namespace mk {

// Images, in words, one behind the other; each at a multiple of four.
MK_HD int whole_vectors(int words) { return ceil_div(words, 4) * 4; }
constexpr int kImageAttention = 0;                                               // bf16 x 2: [kMaxTokens][kModelQRows / 2]
constexpr int kImageMid = kImageAttention + kMaxTokens * kModelQRows / 2;        // float32: [kMaxTokens][kHidden]
constexpr int kImageMidSquares = kImageMid + kMaxTokens * kHidden;               // float32: [kMaxTokens][kModelUnits]
constexpr int kImageSwiglu = kImageMidSquares + kMaxTokens * kModelUnits;        // bf16 x 2: [pair][kMoeIntermediate / 2]
constexpr int kImageOut = kImageSwiglu + kMaxTokens * kTopK * kMoeIntermediate / 2;  // bf16 x 2: [kMaxTokens][kHidden / 2]
constexpr int kImageOutSquares = kImageOut + kMaxTokens * kHidden / 2;           // float32: [kMaxTokens][kModelUnits]
constexpr int kImageBest = kImageOutSquares + kMaxTokens * kModelUnits;          // [kBests] {logit, row} for the last token
constexpr int kImageCancel = kImageBest + whole_vectors(2 * kBests);             // rank 0's: what the host says
constexpr int kImageLogits = kImageCancel + 4;                                   // float32: [kModelHeadRows], of the last token
// Of norms of q and k over all heads, float32: [kMaxTokens][kModelQkUnits]
constexpr int kImageQk = kImageLogits + kModelHeadRows, kQkWhole = kQkNorm && kQkNormOverProjection;
constexpr int kImageWords = kImageQk + (kQkWhole ? whole_vectors(kMaxTokens * kModelQkUnits) : 0);
constexpr int kReceiveWords = kRanks > 1 ? kExchangeCopies * kImageWords : 0;

// Words that a rank sends to each other after a phase: of every token, of the last token for the choice of the next one. The
// last ranks may have fewer.
constexpr int kSentQk = kQkUnits;  // where q and k are normed over all heads
constexpr int kSentAttention = kQRows / 2, kSentMid = kUnits * kUnitRows, kSentOut = kSentMid / 2, kSentSquares = kUnits;
constexpr int kSentSwiglu = kPairUnits * 8 / 2;  // and of every expert
constexpr int kSentBest = 2 * kGrid, kSentCancel = 1, kSentLogits = kHeadRows;

// Of every image its rows and what of them is a rank's, for one that is looped back: an image that is added must be here too, or
// that rank waits in vain. Of the cancel word a row is rank 0's alone.
struct StepImages {
  static constexpr bool kLoops = true;
  static MK_HD ImagePlace place(int i) {
    const auto in_rows = [](int at, int row, int share) { return ImagePlace{at % row, row, share}; };
    if (i < kImageMid) return in_rows(i - kImageAttention, kModelQRows / 2, kSentAttention);
    if (i < kImageMidSquares) return in_rows(i - kImageMid, kHidden, kSentMid);
    if (i < kImageSwiglu) return in_rows(i - kImageMidSquares, kModelUnits, kSentSquares);
    if (i < kImageOut) return in_rows(i - kImageSwiglu, kMoeIntermediate / 2, kSentSwiglu);
    if (i < kImageOutSquares) return in_rows(i - kImageOut, kHidden / 2, kSentOut);
    if (i < kImageBest) return in_rows(i - kImageOutSquares, kModelUnits, kSentSquares);
    if (i < kImageCancel) return in_rows(i - kImageBest, 2 * kBests, kSentBest);
    if (i < kImageLogits) return in_rows(i - kImageCancel, 4, 4);
    if (i < kImageQk) return in_rows(i - kImageLogits, kModelHeadRows, kSentLogits);
    return in_rows(i - kImageQk, kModelQkUnits, kSentQk);
  }
};

// Templates, so that kernels of one rank need not know the members that only several have.
template <class Block>
__device__ __forceinline__ Exchange<kRanks, kExchangeFlags, StepImages> exchange_of(const Block& b) {
  return {b.p.peers, b.s.epoch % kExchangeCopies * (uint32_t)kImageWords};
}
// While a thread waits for a peer; true when it must not.
template <class Block>
__device__ __forceinline__ bool awaits_peer(const Block& b, int peer) {
  *(volatile int32_t*)&b.s.ranks.awaited = peer + 1;
  return *(const volatile int32_t*)&b.s.expired != 0;
}
// The dense producer's watchdog speaks for its block.
template <class Watch, class Block>
__device__ __forceinline__ void watch_peers(Watch& watch, const Block& b) {
  if constexpr (kRanks > 1) watch.reports = b.p.reports, watch.rank = b.rank(), watch.awaited = &b.s.ranks.awaited;
}
// Between what a block puts and what it takes, once an exchange.
template <class Block>
__device__ __forceinline__ void begin_takes(const Block& b) {
  if (b.p.peers.loop == kCounted && b.tid == 0 && b.sm() == 0) atomicAdd(b.p.peers.counts, 1u);
  if constexpr (kExchangeFlags) {
    team_sync<kTeam>();
    if (b.tid == 0) {
      const auto x = exchange_of(b);
      x.sent();
      x.await(++b.s.ranks.exchanges * kGrid, [&](int peer) { return awaits_peer(b, peer); });
    }
    team_sync<kTeam>();
  }
}
// Items [0, count) of an image at word `at`, each a Word: what is not this rank's is taken and kept, by the warps of the rank in
// turn, 32 at a time. owner(i) is the rank that sent item i.
template <class Word, class Block, class Owner, class Keep>
__device__ __forceinline__ void take_items(const Block& b, int at, int count, Owner&& owner, Keep&& keep) {
  const auto x = exchange_of(b);
#pragma unroll 1
  for (int first = 32 * (b.sm() + kGrid * b.warp); first < count; first += 32 * kGrid * kWarps) {
    const int i = first + b.lane(), peer = i < count ? owner(i) : b.rank();
    if (peer == b.rank()) continue;
    keep(i, x.template take<Word>(at + i * (int)(sizeof(Word) / 4), peer,
                                  [&](int waits_for) { return awaits_peer(b, waits_for); }));
  }
}

// Rows of the embedding: every rank has all of them, so nothing is exchanged.
template <class Block>
__device__ __forceinline__ void embed_all(const Block& b, const int32_t* tokens) {
  const float* norm = b.p.norms + kNormInput;
#pragma unroll 1
  for (int unit = b.sm(); unit < kModelUnits; unit += kGrid) {
    for (int i = b.tid; i < b.tokens() * kUnitRows; i += kTeam) {
      const int token = i / kUnitRows, row = unit * kUnitRows + i % kUnitRows;
      const float v = bf16_low(__ldg(b.p.embedding + (int64_t)tokens[token] * kHidden + row)) * __ldg(norm + row);
      b.p.hidden[token * kHidden + row] = (uint16_t)pack_bf16x2(v, 0.f);
    }
    if (b.tid < b.tokens()) {
      float sum = 0;
      for (int row = 0; row < kUnitRows; row++) {
        const float v = bf16_low(__ldg(b.p.embedding + (int64_t)tokens[b.tid] * kHidden + unit * kUnitRows + row));
        sum += v * v;
      }
      b.p.squares[b.tid * kSquaresStride + unit] = sum;
    }
  }
}

// Squares of a row unit of this rank's q and k.
template <class Block>
__device__ __forceinline__ void put_qk_squares(const Block& b, int token, int unit, float sum) {
  const int at = token * kModelQkUnits + b.rank() * kQkUnits + unit;
  b.qk_squares()[at] = sum;
  exchange_of(b).put(kImageQk + at, __float_as_uint(sum));
}
template <class Block>
__device__ __forceinline__ void take_qk_squares(const Block& b) {
  begin_takes(b);
  take_items<uint32_t>(
      b, kImageQk, b.tokens() * kModelQkUnits, [](int i) { return i % kModelQkUnits / kSentQk; },
      [&](int i, uint32_t w) { b.qk_squares()[i] = __uint_as_float(w); });
}

// Two neighbouring dimensions of a head's attention.
template <class Block>
__device__ __forceinline__ void put_attention(const Block& b, int token, int head, int dim, uint32_t two) {
  const int at = (token * kModelQRows + (b.rank() * kHeads + head) * kHeadDim + dim) / 2;
  ((uint32_t*)b.p.attention)[at] = two;
  exchange_of(b).put(kImageAttention + at, two);
}
template <class Block>
__device__ __forceinline__ void take_attention(const Block& b) {
  begin_takes(b);
  take_items<uint4>(
      b, kImageAttention, b.tokens() * (kModelQRows / 8), [](int i) { return i % (kModelQRows / 8) / (kSentAttention / 4); },
      [&](int i, uint4 w) { ((uint4*)b.p.attention)[i] = w; });
}

// publish_hidden() of several ranks. mid: after attention, when the router wants float32; else bf16 does.
template <bool kMid, class Block>
__device__ __forceinline__ void share_hidden(const Block& b, const float* norm) {
  const auto x = exchange_of(b);
  const int fours = b.units() * (kUnitRows / 4);
  for (int i = b.tid; i < b.tokens() * fours; i += kTeam) {
    const int token = i / fours, row = i % fours * 4, at = token * kHidden + b.owned_row() + row;
    const float* v = b.s.residual[token] + row;
    const float4 w = __ldg((const float4*)(norm + b.owned_row() + row));
    const float4 y = {v[0] * w.x, v[1] * w.y, v[2] * w.z, v[3] * w.w};
    const uint2 rounded = {pack_bf16x2(y.x, y.y), pack_bf16x2(y.z, y.w)};
    *(uint2*)(b.p.hidden + at) = rounded;
    if constexpr (kMid) {
      *(float4*)(b.p.router_input + at) = y;
      x.put(kImageMid + at, uint4{__float_as_uint(y.x), __float_as_uint(y.y), __float_as_uint(y.z), __float_as_uint(y.w)});
    } else {
      x.put(kImageOut + at / 2, rounded);
    }
  }
  for (int i = b.tid; i < b.tokens() * b.units(); i += kTeam) {
    const int token = i / b.units(), unit = i % b.units(), at = token * kModelUnits + b.owned_row() / kUnitRows + unit;
    const float sum = b.unit_squares(token, unit);
    b.p.squares[at] = sum;
    x.put((kMid ? kImageMidSquares : kImageOutSquares) + at, __float_as_uint(sum));
  }
  begin_takes(b);
  if constexpr (kMid)
    take_items<uint4>(
        b, kImageMid, b.tokens() * (kHidden / 4), [](int i) { return i % (kHidden / 4) / (kSentMid / 4); },
        [&](int i, uint4 w) {
          const float4 y = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
          ((float4*)b.p.router_input)[i] = y;
          ((uint2*)b.p.hidden)[i] = uint2{pack_bf16x2(y.x, y.y), pack_bf16x2(y.z, y.w)};
        });
  else
    take_items<uint4>(
        b, kImageOut, b.tokens() * (kHidden / 8), [](int i) { return i % (kHidden / 8) / (kSentOut / 4); },
        [&](int i, uint4 w) { ((uint4*)b.p.hidden)[i] = w; });
  take_items<uint32_t>(
      b, kMid ? kImageMidSquares : kImageOutSquares, b.tokens() * kModelUnits,
      [](int i) { return i % kModelUnits / kSentSquares; },
      [&](int i, uint32_t w) { b.p.squares[i] = __uint_as_float(w); });
}

// SwiGLU of rows r and r + 1 of a gate/up tile of this rank, of one pair.
template <class Block>
__device__ __forceinline__ void put_swiglu(const Block& b, int pair, int unit, int r, float h0, float h1) {
  const int row = (b.rank() * kPairUnits + unit) * 8 + r;
  if (row >= kMoeIntermediate) return;  // the last ranks' tiles may be zeros
  const int at = (pair * kMoeIntermediate + row) / 2;
  const uint32_t two = pack_bf16x2(h0, h1);
  ((uint32_t*)b.p.swiglu)[at] = two;
  exchange_of(b).put(kImageSwiglu + at, two);
}
template <class Block>
__device__ __forceinline__ void take_swiglu(const Block& b) {
  begin_takes(b);
  take_items<uint4>(
      b, kImageSwiglu, b.tokens() * kTopK * (kMoeIntermediate / 8),
      [](int i) { return i % (kMoeIntermediate / 8) / (kSentSwiglu / 4); },
      [&](int i, uint4 w) { ((uint4*)b.p.swiglu)[i] = w; });
}

// The end of the head: p.best has this SM's best of the last token, shared_token[1] what the host said to rank 0.
template <class Block>
__device__ __forceinline__ void share_best(const Block& b) {
  const auto x = exchange_of(b);
  float2* last = b.p.best + (b.tokens() - 1) * kBests;
  team_sync<kTeam>();
  if (b.tid == 0) {
    const int at = b.rank() * kGrid + b.sm();
    const float2 best = __ldcg(last + at);
    x.put(kImageBest + 2 * at, uint2{__float_as_uint(best.x), __float_as_uint(best.y)});
    if (b.sm() == 0 && b.rank() == 0) x.put(kImageCancel, (uint32_t)b.p.shared_token[1]);
  }
  begin_takes(b);
  take_items<uint2>(
      b, kImageBest, kBests, [](int i) { return 2 * i / kSentBest; },
      [&](int i, uint2 w) { last[i] = make_float2(__uint_as_float(w.x), __uint_as_float(w.y)); });
  take_items<uint32_t>(
      b, kImageCancel, kSentCancel, [](int) { return 0; }, [&](int, uint32_t w) { b.p.shared_token[1] = (int32_t)w; });
}

// Logits of a token: this rank's to the others, theirs to p.logits.
template <class Block>
__device__ __forceinline__ void share_logits(const Block& b, float* logits) {
  const auto x = exchange_of(b);
  for (int i = b.tid + kTeam * b.sm(); i < kHeadRows / 4; i += kTeam * kGrid) {
    const int at = b.rank() * kHeadRows + 4 * i;
    x.put(kImageLogits + at, __ldcg((const uint4*)(logits + at)));
  }
  begin_takes(b);
  take_items<uint4>(
      b, kImageLogits, kModelHeadRows / 4, [](int i) { return i / (kSentLogits / 4); },
      [&](int i, uint4 w) { ((uint4*)logits)[i] = w; });
}

}  // namespace mk
