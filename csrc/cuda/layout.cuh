// Where every byte of the packed weights, the KV cache and the exchange buffers lies. docs/CUDA.md, "CUDA tile layout",
// tells the same in words; the packer, the kernels and the tests all go through these functions.
#pragma once
#include <cstdint>
#include "model.h"

namespace mk {

#define MK_HD __host__ __device__ constexpr

MK_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where a kernel would spill, compile.py compiles it again like this: code that keeps less in registers, and waits more.
#ifdef MK_SPARE_REGISTERS
constexpr bool kSpareRegisters = true;
#else
constexpr bool kSpareRegisters = false;
#endif

// ---- shape of the machine ------------------------------------------------------------------------------------------
constexpr int kWarps = 16;  // consumer warps of a block
constexpr int kTeam = kWarps * 32;
constexpr int kMaxTokens = 16;  // of a step
// Heads, rows and units are those of a rank; all ranks have as many. kModel...: of the whole model.
constexpr int kQRows = kHeads * kHeadDim, kModelQRows = kRanks * kQRows;
constexpr int kKvRows = kKvHeads * kHeadDim;
constexpr int kGateAt = kQRows + 2 * kKvRows;  // rows of q, k and v; those of the attention gate come behind them
constexpr int kQkvRows = kGateAt + (kAttentionGate ? kQRows : 0);
constexpr int kGroup = kHeads / kKvHeads;  // query heads of one KV head
constexpr int kModelGroup = kRanks * kHeads / kModelKvHeads;  // neighbouring ranks may share a KV head
// Hidden rows are dealt out in units of 16: SM s owns units [kOwnedUnits * s, kOwnedUnits * (s + 1)) of its rank's, keeps
// their residual and computes them in the output and in the down projection. The last ranks may have fewer units.
constexpr int kUnitRows = 16, kModelUnits = kHidden / kUnitRows, kUnits = ceil_div(kModelUnits, kRanks);
constexpr int kOwnedUnits = ceil_div(kUnits, kGrid), kOwnedRows = kOwnedUnits * kUnitRows;
constexpr int kOwners = ceil_div(kUnits, kOwnedUnits);  // SMs that own any
// Experts are as wide as the model, or narrow: projections lead to their width and back. The rows that they give are dealt
// out in the same way.
constexpr bool kNarrow = kNarrowHidden > 0;
constexpr int kExpertHidden = kNarrow ? kNarrowHidden : kHidden;
constexpr int kModelDownUnits = kExpertHidden / kUnitRows, kDownUnits = ceil_div(kModelDownUnits, kRanks);
constexpr int kDownOwned = ceil_div(kDownUnits, kGrid);
constexpr int kDownRows = kDownOwned * kUnitRows, kDownOwners = ceil_div(kDownUnits, kDownOwned);

static_assert(kHeads % kKvHeads == 0 && kHidden % 64 == 0 && kModelQRows % 64 == 0 && kMoeIntermediate % 64 == 0 &&
                  kExpertHidden % 64 == 0,
              "inputs of matrices come in chunks of 64 columns");
static_assert((kHeadDim == 64 || kHeadDim == 128) && kRotary % 2 == 0 && kRotary <= kHeadDim);
static_assert(kTopK <= 32 && kTopK <= kExperts && kExperts <= 512 && kMaxContext % 16 == 0);

// Some of the layers, a bit each.
struct LayerSet {
  uint32_t words[ceil_div(kLayers, 32)];
  constexpr LayerSet(const bool (&is)[kLayers], bool value) : words() {
    for (int i = 0; i < kLayers; i++) words[i / 32] |= (is[i] == value ? 1u : 0u) << i % 32;
  }
  constexpr int count() const {
    int n = 0;
    for (int i = 0; i < kLayers; i++) n += words[i / 32] >> i % 32 & 1;
    return n;
  }
};
// Layers with a dense MLP; the others have experts, in sections that count only them.
constexpr LayerSet kDense(kDenseLayers, true), kUnrotated(kRotatedLayers, false);
constexpr int kDenseCount = kDense.count(), kMoeCount = kLayers - kDenseCount;
constexpr bool kHasDense = kDenseCount > 0, kHasUnrotated = kUnrotated.count() > 0;
static_assert(kMoeCount > 0 && kDenseIntermediate % 8 == 0, "inputs of the dense down projection come in runs of 8 columns");

// Item i of `items` equal work items spread over the grid: SM s owns [first(s), first(s + 1)).
MK_HD int first_item(int items, int sm) { return (int)((uint32_t)items * (uint32_t)sm / kGrid); }

// ---- dense matrices, bf16 or fp8 -----------------------------------------------------------------------------------
// A row unit is 8 rows x K columns, in pages of 16 KB: 1024 columns of bf16 or 2048 of fp8. Warp w reads 1024 bytes of a
// page, the columns [64 w, 64 w + 64) of bf16 or [128 w, 128 w + 128) of fp8: two runs of 512 bytes, in each of which
// lane (g, t) finds 16 bytes of row g, the B operands of two (bf16) or four (fp8) MMAs. The last page of a unit is as
// short as K allows: K counts in warps' shares, and the missing columns are zeros.
constexpr int kPageRows = 8, kPageBytes = 16384, kShareBytes = kPageBytes / kWarps;
constexpr int kUnitPages = kUnitRows / kPageRows;  // row units of a matrix in a unit of hidden rows
MK_HD int share_columns(bool fp8) { return fp8 ? 128 : 64; }  // of one warp in one page
MK_HD int page_columns(bool fp8) { return kWarps * share_columns(fp8); }
MK_HD int unit_shares(int K, bool fp8) { return ceil_div(K, share_columns(fp8)); }
MK_HD int unit_pages(int K, bool fp8) { return ceil_div(unit_shares(K, fp8), kWarps); }
MK_HD int64_t unit_bytes(int K, bool fp8) { return (int64_t)unit_shares(K, fp8) * kShareBytes; }
MK_HD int page_bytes(int K, bool fp8, int page) {  // of page `page` of a unit
  const int left = unit_shares(K, fp8) - page * kWarps;
  return (left < kWarps ? left : kWarps) * kShareBytes;
}
MK_HD int page_offset(int row, int column, bool fp8) {  // bytes, of one element inside its page
  const int share = share_columns(fp8), run = share / 2, lane = run / 4;  // columns of a run, of a lane in it
  const int w = column / share, i = column % share / run, t = column % run / lane, e = column % lane;
  // A word of four fp8 codes is unpacked into its bytes 0, 2 and 1, 3: neighbouring columns lie two bytes apart.
  const int at = fp8 ? e / 4 * 4 + e % 2 * 2 + e % 4 / 2 : 2 * e;
  return w * kShareBytes + i * 512 + (row * 4 + t) * 16 + at;
}
// A matrix [rows, K]: row units one after the other, so that an SM's stream is contiguous.
MK_HD int64_t matrix_offset(int row, int column, int K, bool fp8) {
  const int columns = page_columns(fp8);
  return row / kPageRows * unit_bytes(K, fp8) + (int64_t)(column / columns) * kPageBytes +
         page_offset(row % kPageRows, column % columns, fp8);
}
MK_HD int64_t matrix_bytes(int rows, int K, bool fp8) { return ceil_div(rows, kPageRows) * unit_bytes(K, fp8); }

constexpr int kQkvUnits = kQkvRows / kPageRows, kHeadUnits = ceil_div(ceil_div(kVocab, kPageRows), kRanks);
// Behind the vocabulary lie rows of zeros, which are never chosen.
constexpr int kHeadRows = kHeadUnits * kPageRows, kModelHeadRows = kRanks * kHeadRows;
constexpr int64_t kQkvBytes = matrix_bytes(kQkvRows, kHidden, kAttentionFp8);
constexpr int64_t kOutBytes = matrix_bytes(kUnits * kUnitRows, kModelQRows, kAttentionFp8);
constexpr int64_t kDenseLayerBytes = kQkvBytes + kOutBytes;  // rows q, k, v as one matrix, then the output projection
constexpr int64_t kHeadBytes = matrix_bytes(kHeadRows, kHidden, kHeadFp8);
// fp8 matrices have a float32 scale a row: of a layer those of q, k, v, then of the output projection.
constexpr int kDenseScaleLayer = kAttentionFp8 ? kQkvRows + kUnits * kUnitRows : 0;

// ---- dense matrices of the MLP ------------------------------------------------------------------------------------
// Of a layer with narrow experts the projections to their width and back; of a dense layer gate and up, then down. Gate and
// up are one matrix of pairs of row units, 8 gate rows and the same 8 up rows, so that one SM has both halves of a SwiGLU.
// Units and pairs are spread over the ranks, whose last ones may have zeros.
constexpr int kModelPreUnits = kNarrowHidden / kPageRows, kPreUnits = ceil_div(kModelPreUnits, kRanks);
constexpr int kMlpPairs = ceil_div(kDenseIntermediate / kPageRows, kRanks);
constexpr int64_t kPreBytes = matrix_bytes(kPreUnits * kPageRows, kHidden, kDenseFp8);
constexpr int64_t kPostBytes = kNarrow ? matrix_bytes(kUnits * kUnitRows, kNarrowHidden, kDenseFp8) : 0;
constexpr int64_t kMlpPairBytes = matrix_bytes(2 * kPageRows * kMlpPairs, kHidden, kDenseFp8);
constexpr int64_t kMlpDownBytes = kHasDense ? matrix_bytes(kUnits * kUnitRows, kDenseIntermediate, kDenseFp8) : 0;
constexpr int64_t kMoeMlpBytes = kPreBytes + kPostBytes, kDenseMlpBytes = kMlpPairBytes + kMlpDownBytes;
constexpr int64_t kMlpBytes = kMoeCount * kMoeMlpBytes + kDenseCount * kDenseMlpBytes;
// Row scales of fp8, in the order of the rows.
constexpr int kMoeMlpScales = kDenseFp8 && kNarrow ? kPreUnits * kPageRows + kUnits * kUnitRows : 0;
constexpr int kDenseMlpScales = kDenseFp8 && kHasDense ? 2 * kPageRows * kMlpPairs + kUnits * kUnitRows : 0;
constexpr int64_t kMlpScales = (int64_t)kMoeCount * kMoeMlpScales + (int64_t)kDenseCount * kDenseMlpScales;

// ---- NVFP4 matrices ------------------------------------------------------------------------------------------------
// A tile is 16 rows x K columns in chunks of 64 columns. At most 32 chunks are a page: first 512 bytes of nibbles a
// chunk, then 64 bytes of e4m3 scales a chunk. Lane (g, t) owns columns 16 t .. 16 t + 15 of a chunk, exactly one scale
// block, of rows g and g + 8. Its 16 bytes are four words, word m serving MMA m with columns 4 m .. 4 m + 3; the low
// half-word holds the even columns, the high one the odd. A half-word holds four codes "s eem" so that two shifts, one
// select and four masks make bf16 values of them (mma.cuh):
//     code                      sign at   eem at
//     row g,     columns 0, 1     15      8..6
//     row g + 8, columns 0, 1     12      5..3
//     row g,     columns 2, 3     14     11..9
//     row g + 8, columns 2, 3     13      2..0
constexpr int kChunkBytes = 512 + 64, kPageChunks = 32;
MK_HD int tile_chunks(int K) { return K / 64; }
MK_HD int tile_bytes(int K) { return tile_chunks(K) * kChunkBytes; }
MK_HD int tile_pages(int K) { return ceil_div(tile_chunks(K), kPageChunks); }
MK_HD int tile_page_chunks(int K, int page) {  // of page `page` of a tile
  const int left = tile_chunks(K) - page * kPageChunks;
  return left < kPageChunks ? left : kPageChunks;
}
MK_HD int tile_word_offset(int row, int column) {  // bytes, of the 32-bit word that holds one code
  const int chunk = column / 64, t = column % 64 / 16, m = column % 16 / 4, g = row % 8;
  return chunk / kPageChunks * kPageChunks * kChunkBytes + chunk % kPageChunks * 512 + (g * 4 + t) * 16 + m * 4;
}
MK_HD uint32_t tile_code_bits(int row, int column, uint32_t code) {  // the code in place inside its word
  const int slot = (row / 8) + 2 * (column % 4 / 2), half = 16 * (column % 2);
  const int sign = slot == 0 ? 15 : slot == 1 ? 12 : slot == 2 ? 14 : 13;
  const int magnitude = slot == 0 ? 6 : slot == 1 ? 3 : slot == 2 ? 9 : 0;
  return (code >> 3) << (half + sign) | (code & 7) << (half + magnitude);
}
MK_HD int tile_scale_offset(int row, int column, int K) {
  const int chunk = column / 64, t = column % 64 / 16, g = row % 8, page = chunk / kPageChunks;
  return page * kPageChunks * kChunkBytes + tile_page_chunks(K, page) * 512 + chunk % kPageChunks * 64 +
         (g * 4 + t) * 2 + row / 8;
}
// Gate and up share tiles: rows 0..7 of tile u are gate rows 8 u .. 8 u + 7, rows 8..15 the same up rows, so that one
// lane ends with both halves of a SwiGLU pair.
constexpr int kPairUnits = ceil_div(kMoeIntermediate / 8, kRanks), kPairTileBytes = tile_bytes(kExpertHidden);
constexpr int kDownTileBytes = tile_bytes(kMoeIntermediate);
constexpr int64_t kPairBytes = (int64_t)kPairUnits * kPairTileBytes;
constexpr int64_t kExpertBytes = kPairBytes + (int64_t)kDownUnits * kDownTileBytes;  // gate/up tiles, then down tiles
// Tensor scales of an expert: float4 {gate, up, down, 0}.
constexpr int kTokenPairUnits = kTopK * kPairUnits;  // gate/up tiles of one token, expert slot major
constexpr int kMaxPairUnits = ceil_div(kTokenPairUnits, kGrid);
static_assert((uint64_t)kGrid * kExperts * kPairUnits < 1ull << 32 && (uint64_t)kGrid * kHeadUnits < 1ull << 32 &&
                  (uint64_t)kGrid * kQkvUnits < 1ull << 32,
              "first_item() counts in 32 bits");

// ---- routers: bf16 or float32 [expert][hidden], as in the checkpoint -----------------------------------------------
constexpr int64_t kRouterBytes = (int64_t)kExperts * kHidden * (kRouterF32 ? 4 : 2);

// ---- vectors: float32, layer after layer, then the final norm ------------------------------------------------------
constexpr int kNormInput = 0, kNormPost = kHidden;
MK_HD int vector_floats(int n) { return ceil_div(n, 4) * 4; }  // each begins at a multiple of 16 bytes
constexpr bool kQkNormVectors = kQkNorm && kQkNormWeight;
constexpr int kNormQ = 2 * kHidden, kNormK = kNormQ + (!kQkNormVectors ? 0 : kQkNormOverProjection ? kQRows : kHeadDim);
constexpr int kBiasQkv = kNormK + (!kQkNormVectors ? 0 : kQkNormOverProjection ? kKvRows : kHeadDim);
constexpr int kBiasOut = kBiasQkv + (kQkvBias ? kGateAt : 0), kSinks = kBiasOut + (kOutBias ? kHidden : 0);
constexpr int kGateAttention = kSinks + (kAttentionSinks ? vector_floats(kHeads) : 0), kSandwichSize = kSandwich ? kHidden : 0;
constexpr int kNormMlpOut = kGateAttention + kSandwichSize, kGateMlp = kNormMlpOut + kSandwichSize;
// What only layers with experts have comes last: dense layers are shorter.
constexpr int kNormPre = kGateMlp + kSandwichSize, kNormExpert = kNormPre + kNarrowHidden;
constexpr int kBiasRouter = kNormExpert + kNarrowHidden;
constexpr int kBiasChoice = kBiasRouter + (kRouterBias ? vector_floats(kExperts) : 0);
// Of every expert those of its gate and up, then of every expert those of its down projection.
constexpr int kBiasPair = kBiasChoice + (kChoiceBias ? vector_floats(kExperts) : 0);
constexpr int kPairBiases = kPairUnits * 8, kDownBiases = kDownUnits * kUnitRows;  // rows of this rank
constexpr int kBiasDown = kBiasPair + (kExpertBias ? kExperts * 2 * kPairBiases : 0);
constexpr int kNormLayer = kBiasDown + (kExpertBias ? kExperts * kDownBiases : 0), kNormMoeOnly = kNormLayer - kNormPre;
constexpr int64_t kNorms = (int64_t)kLayers * kNormLayer - (int64_t)kDenseCount * kNormMoeOnly + kHidden;
static_assert((int64_t)(kLayers + 1) * kNormLayer < 1ll << 31, "vectors are counted in 32 bits");

// ---- KV cache: tiles of 16 positions, K then V, both in MMA fragment order ------------------------------------------
constexpr int kTile = 16, kTileBytes = kTile * kHeadDim * 2, kMaxTiles = kMaxContext / kTile;
MK_HD int64_t kv_tile_offset(int layer, int kv_head, int tile) {
  return ((int64_t)(layer * kKvHeads + kv_head) * kMaxTiles + tile) * 2 * kTileBytes;
}
MK_HD int k_offset(int position, int dim) {  // bytes inside the K half of a tile
  const int i = dim / 32, t = dim % 32 / 8, e = dim % 8, p = position % kTile;
  return (p / 8 * (kHeadDim / 32) + i) * 512 + (p % 8 * 4 + t) * 16 + e * 2;
}
MK_HD int v_offset(int position, int dim) {  // bytes inside the V half of a tile
  const int p = position % kTile, j = dim / 8, g = dim % 8;
  return j * 256 + (g * 4 + p / 4) * 8 + p % 4 * 2;
}
constexpr int64_t kKvBytes = (int64_t)kLayers * kKvHeads * kMaxTiles * 2 * kTileBytes;

// ---- exchange buffers of decode_kernel: 8-byte {value, epoch} words, two copies in turn ------------------------------
constexpr int kMaxUnits = 128;                                 // attention units: KV heads x splits
constexpr int kPartialWords = kGroup * kHeadDim + 2 * kGroup;  // sums, then maximum and denominator of every head
// What the whole grid polls exists in kCopies copies, and SM s reads copy s % kCopies: 132 SMs that poll the same lines
// queue up in L2 behind each other.
constexpr int kCopies = 4;
constexpr int kXMid = 0;                                       // float32: hidden after attention, copies
constexpr int kXOut = kXMid + kCopies * kHidden;               // float32: hidden after the experts, copies
constexpr int kXAttention = kXOut + kCopies * kHidden;         // bf16 x 2: attention output, copies
constexpr int kXExperts = kXAttention + kCopies * kQRows / 2;  // bf16 x 2: SwiGLU outputs, slot major, copies
constexpr int kExpertWords = kTopK * kMoeIntermediate / 2;
constexpr int kLogitCopies = 8;
constexpr int kXLogits = kXExperts + kCopies * kExpertWords;   // float32: router logits, kLogitCopies copies
constexpr int kXQkv = kXLogits + kLogitCopies * kExperts;      // float32: q, k, v before norm and RoPE
constexpr int kXPartial = kXQkv + kGateAt;                     // float32: attention partials
constexpr int kXBest = kXPartial + kMaxUnits * kPartialWords;  // {logit}, {token} of every SM
constexpr int kXToken = kXBest + 2 * kGrid;                     // the token that SM 0 sampled
constexpr int kXWords = (kXToken + 1 + 15) / 16 * 16, kExchangeWords = 2 * kXWords;

}  // namespace mk
