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
constexpr int kImageQk = kImageLogits + kModelHeadRows;
// Of the norm behind each of a layer's two branches, float32: [2][kMaxTokens][kModelUnits]
constexpr int kImageBranch = kImageQk + (kQkWhole ? kMaxTokens * kModelQkUnits : 0);
// Of narrow experts: their input and what they give together, bf16 x 2: [kMaxTokens][kNarrowHidden / 2]; squares of the first,
// and of every pair's output, float32.
constexpr int kImageNarrow = kImageBranch + (kSandwich ? 2 * kMaxTokens * kModelUnits : 0);
constexpr int kImageMixed = kImageNarrow + kMaxTokens * kNarrowHidden / 2;
constexpr int kImageNarrowSquares = kImageMixed + kMaxTokens * kNarrowHidden / 2;
constexpr int kImagePairSquares = kImageNarrowSquares + kMaxTokens * kModelPreUnits;
// Of dense layers, bf16 x 2: [kMaxTokens][kDenseIntermediate / 2]
constexpr int kImageDense = kImagePairSquares + (kNarrow ? kMaxTokens * kTopK * kModelDownUnits : 0);
constexpr int kImageWords = kImageDense + (kHasDense ? kMaxTokens * kDenseIntermediate / 2 : 0);
constexpr int kReceiveWords = kRanks > 1 ? kExchangeCopies * kImageWords : 0;

// Words that a rank sends to each other after a phase: of every token, of the last token for the choice of the next one. The
// last ranks may have fewer.
constexpr int kSentQk = kQkUnits;  // where q and k are normed over all heads
constexpr int kSentAttention = kQRows / 2, kSentMid = kUnits * kUnitRows, kSentOut = kSentMid / 2, kSentSquares = kUnits;
constexpr int kSentSwiglu = kPairUnits * 8 / 2;  // and of every expert
constexpr int kSentDense = kMlpPairs * 8 / 2;    // of dense layers
constexpr int kSentNarrow = kPreUnits * 8 / 2, kSentNarrowSquares = kPreUnits, kSentMixed = kDownUnits * kUnitRows / 2;
constexpr int kSentPairSquares = kDownUnits;  // and of every expert
constexpr int kSentBest = 2 * kGrid, kSentCancel = 1, kSentLogits = kHeadRows;

// Of every image its rows and what of them is a rank's, for one that is looped back: an image that is added must be here too, or
// that rank waits in vain. Of the cancel word a row is rank 0's alone. The image is a constant wherever this is inlined.
struct StepImages {
  static constexpr bool kLoops = true;
  static MK_HD ImagePlace place(int image, int i) {
    const auto in_rows = [&](int row, int share) { return ImagePlace{i % row, row, share}; };
    if (image < kImageMid) return in_rows(kModelQRows / 2, kSentAttention);
    if (image < kImageMidSquares) return in_rows(kHidden, kSentMid);
    if (image < kImageSwiglu) return in_rows(kModelUnits, kSentSquares);
    if (image < kImageOut) return in_rows(kMoeIntermediate / 2, kSentSwiglu);
    if (image < kImageOutSquares) return in_rows(kHidden / 2, kSentOut);
    if (image < kImageBest) return in_rows(kModelUnits, kSentSquares);
    if (image < kImageCancel) return in_rows(2 * kBests, kSentBest);
    if (image < kImageLogits) return in_rows(4, 4);
    if (image < kImageQk) return in_rows(kModelHeadRows, kSentLogits);
    if (kQkWhole && image < kImageBranch) return in_rows(kModelQkUnits, kSentQk);
    if (kSandwich && image < kImageNarrow) return in_rows(kModelUnits, kSentSquares);
    if constexpr (kNarrow) {
      if (image < kImageMixed) return in_rows(kNarrowHidden / 2, kSentNarrow);
      if (image < kImageNarrowSquares) return in_rows(kNarrowHidden / 2, kSentMixed);
      if (image < kImagePairSquares) return in_rows(kModelPreUnits, kSentNarrowSquares);
      if (image < kImageDense) return in_rows(kModelDownUnits, kSentPairSquares);
    }
    return in_rows(kHasDense ? kDenseIntermediate / 2 : 1, kSentDense);
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
  store_unordered(b.s.ranks.awaited, peer + 1);
  return load_unordered(b.s.expired) != 0;
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

// What a rank computes of an array that all ranks read whole, which is as its image: into the array, and to the peers. Also of
// one rank, which has no peers. One float, or two neighbouring elements of bf16, of which `at` is the first.
template <class Block>
__device__ __forceinline__ void put_float(const Block& b, float* to, int image, int at, float value) {
  to[at] = value;
  if constexpr (kRanks > 1) exchange_of(b).put(image, at, __float_as_uint(value));
}
template <class Block>
__device__ __forceinline__ void put_two(const Block& b, uint16_t* to, int image, int at, uint32_t two) {
  *(uint32_t*)(to + at) = two;
  if constexpr (kRanks > 1) exchange_of(b).put(image, at / 2, two);
}
// Of such an array [rows][kColumns], a rank's share of whose columns is kShare, what the peers put.
template <int kColumns, int kShare, class Block>
__device__ __forceinline__ void take_floats(const Block& b, float* to, int image, int rows) {
  take_items<uint32_t>(
      b, image, rows * kColumns, [](int i) { return i % kColumns / kShare; },
      [&](int i, uint32_t w) { to[i] = __uint_as_float(w); });
}
template <int kColumns, int kShare, class Block>
__device__ __forceinline__ void take_rows(const Block& b, uint16_t* to, int image, int rows) {
  take_items<uint4>(
      b, image, rows * (kColumns / 8), [](int i) { return i % (kColumns / 8) / (kShare / 8); },
      [&](int i, uint4 w) { ((uint4*)to)[i] = w; });
}

// Rows of the embedding: every rank has all of them, so nothing is exchanged.
template <class Block>
__device__ __forceinline__ void embed_all(const Block& b, const int32_t* tokens) {
  const float* norm = b.p.norms + kNormInput;
  const auto embedded = [&](int token, int row) {
    const float v = bf16_low(__ldg(b.p.embedding + (int64_t)tokens[token] * kHidden + row));
    return kEmbedNorm ? v * b.s.rms[token] : v;
  };
#pragma unroll 1
  for (int unit = b.sm(); unit < kModelUnits; unit += kGrid) {
    for (int i = b.tid; i < b.tokens() * kUnitRows; i += kTeam) {
      const int token = i / kUnitRows, row = unit * kUnitRows + i % kUnitRows;
      const float v = embedded(token, row) * b.weight_of(norm + row, kNormOffset);
      b.p.hidden[token * kHidden + row] = (uint16_t)pack_bf16x2(v, 0.f);
    }
    if (b.tid < b.tokens()) {
      float sum = 0;
      for (int row = 0; row < kUnitRows; row++) {
        const float v = embedded(b.tid, unit * kUnitRows + row);
        sum += v * v;
      }
      b.p.squares[b.tid * kSquaresStride + unit] = sum;
    }
  }
}

// Two neighbouring dimensions of a head's attention.
template <class Block>
__device__ __forceinline__ void put_attention(const Block& b, int token, int head, int dim, uint32_t two) {
  put_two(b, b.p.attention, kImageAttention, token * kModelQRows + (b.rank() * kHeads + head) * kHeadDim + dim, two);
}
template <class Block>
__device__ __forceinline__ void take_attention(const Block& b) {
  begin_takes(b);
  take_rows<kModelQRows, 2 * kSentAttention>(b, b.p.attention, kImageAttention, b.tokens());
}

// publish_hidden() of several ranks. mid: after attention, when the router wants float32; else bf16 does.
template <bool kMid, class Block>
__device__ __forceinline__ void share_hidden(const Block& b, const float* norm, float offset) {
  constexpr int kImageSquares = kMid ? kImageMidSquares : kImageOutSquares;
  const auto x = exchange_of(b);
  const int fours = b.units() * (kUnitRows / 4);
  for (int i = b.tid; i < b.tokens() * fours; i += kTeam) {
    const int token = i / fours, row = i % fours * 4, at = token * kHidden + b.owned_row() + row;
    const float* v = b.s.residual[token] + row;
    float4 w = __ldg((const float4*)(norm + b.owned_row() + row));
    if constexpr (kCenteredNorms) w.x += offset, w.y += offset, w.z += offset, w.w += offset;
    const float4 y = {v[0] * w.x, v[1] * w.y, v[2] * w.z, v[3] * w.w};
    const uint2 rounded = {pack_bf16x2(y.x, y.y), pack_bf16x2(y.z, y.w)};
    *(uint2*)(b.p.hidden + at) = rounded;
    if constexpr (kMid) {
      *(float4*)(b.p.router_input + at) = y;
      x.put(kImageMid, at, uint4{__float_as_uint(y.x), __float_as_uint(y.y), __float_as_uint(y.z), __float_as_uint(y.w)});
    } else {
      x.put(kImageOut, at / 2, rounded);
    }
  }
  for (int i = b.tid; i < b.tokens() * b.units(); i += kTeam) {
    const int token = i / b.units(), unit = i % b.units(), at = token * kModelUnits + b.owned_row() / kUnitRows + unit;
    put_float(b, b.p.squares, kImageSquares, at, b.unit_squares(token, unit));
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
    take_rows<kHidden, 2 * kSentOut>(b, b.p.hidden, kImageOut, b.tokens());
  take_floats<kModelUnits, kSentSquares>(b, b.p.squares, kImageSquares, b.tokens());
}

// Of any number of ranks.
template <bool kMid, class Block>
__device__ __forceinline__ void publish(const Block& b, const float* norm, float offset) {
  if constexpr (kRanks > 1)
    share_hidden<kMid>(b, norm, offset);
  else
    b.publish_hidden(norm, offset);
}

// SwiGLU of rows r and r + 1 of a gate/up tile of this rank, of one pair.
template <class Block>
__device__ __forceinline__ void put_swiglu(const Block& b, int pair, int unit, int r, float h0, float h1) {
  const int row = (b.rank() * kPairUnits + unit) * 8 + r;
  if (row >= kMoeIntermediate) return;  // the last ranks' tiles may be zeros
  put_two(b, b.p.swiglu, kImageSwiglu, pair * kMoeIntermediate + row, pack_bf16x2(h0, h1));
}
template <class Block>
__device__ __forceinline__ void take_swiglu(const Block& b) {
  begin_takes(b);
  take_rows<kMoeIntermediate, 2 * kSentSwiglu>(b, b.p.swiglu, kImageSwiglu, b.tokens() * kTopK);
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
    x.put(kImageBest, 2 * at, uint2{__float_as_uint(best.x), __float_as_uint(best.y)});
    if (b.sm() == 0 && b.rank() == 0) x.put(kImageCancel, 0, (uint32_t)b.p.shared_token[1]);
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
    x.put(kImageLogits, at, __ldcg((const uint4*)(logits + at)));
  }
  begin_takes(b);
  take_items<uint4>(
      b, kImageLogits, kModelHeadRows / 4, [](int i) { return i / (kSentLogits / 4); },
      [&](int i, uint4 w) { ((uint4*)logits)[i] = w; });
}

}  // namespace mk
