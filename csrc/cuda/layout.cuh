// Where every byte of the packed weights, the KV cache and the exchange buffers lies. docs/CUDA.md, "CUDA tile layout",
// tells the same in words; the packer, the kernel and the tests all go through these functions.
#pragma once
#include <cstdint>
#include "model.h"

namespace mk {

#define MK_HD __host__ __device__ constexpr

// ---- shape of the machine ------------------------------------------------------------------------------------------
constexpr int kWarps = 16;  // consumer warps of a block; every matrix product splits K over them
constexpr int kTeam = kWarps * 32;
constexpr int kQRows = kHeads * kHeadDim;
constexpr int kKvRows = kKvHeads * kHeadDim;
constexpr int kQkvRows = kQRows + 2 * kKvRows;
constexpr int kGroup = kHeads / kKvHeads;  // query heads of one KV head
constexpr int kOwnedRows = 16;             // hidden rows whose residual one SM keeps
constexpr int kOwners = kHidden / kOwnedRows;

static_assert(kHidden == kWarps * 128, "the K split of this version needs a hidden size of 2048");
static_assert(kQRows == 4096 && kHeadDim == 128 && kGroup == 8,
              "attention is written for 8 query heads of 128 a KV head");
static_assert(kOwners <= kGrid && kExperts == 128 && kExperts <= kGrid, "16 hidden rows and one router row an SM");
static_assert(kTopK == 8 && kMoeIntermediate % 128 == 0, "two warps an expert, whole chunks of 64 columns each");
static_assert(kVocab % 8 == 0 && kMaxContext % 16 == 0 && kNormTopkProb, "not written for this model");

// Item i of `items` equal work items spread over the grid: SM s owns [first(s), first(s + 1)).
MK_HD int first_item(int items, int sm) { return (int)((uint32_t)items * (uint32_t)sm / kGrid); }

// ---- bf16 matrices -------------------------------------------------------------------------------------------------
// A page is 8 rows x 1024 columns, 16 KB, and warp w reads columns [64 w, 64 w + 64) of it. Lane (g, t) finds row g,
// columns 32 i + 8 t .. + 7 of its warp's 64 in the i-th 512 bytes: four registers, the B operands of two MMAs.
constexpr int kPageRows = 8, kPageColumns = 1024, kPageBytes = kPageRows * kPageColumns * 2;
MK_HD int page_offset(int row, int column) {  // bytes, of one element inside its page
  int w = column / 64, i = column % 64 / 32, t = column % 32 / 8, e = column % 8;
  return w * 1024 + i * 512 + (row * 4 + t) * 16 + e * 2;
}
// Pages of one matrix [rows, K]: row unit major, then K. An SM's units are neighbours, so its stream is contiguous.
MK_HD int64_t matrix_offset(int row, int column, int K) {
  int64_t page = (int64_t)(row / kPageRows) * (K / kPageColumns) + column / kPageColumns;
  return page * kPageBytes + page_offset(row % kPageRows, column % kPageColumns);
}
constexpr int kQkvUnits = kQkvRows / kPageRows, kHeadUnits = kVocab / kPageRows;
constexpr int kQkvPagesPerUnit = kHidden / kPageColumns, kOutPagesPerUnit = kQRows / kPageColumns;
constexpr int kOutPages = kOwnedRows / kPageRows * kOutPagesPerUnit;  // of one owner
constexpr int64_t kQkvBytes = (int64_t)kQkvRows * kHidden * 2, kOutBytes = (int64_t)kHidden * kQRows * 2;
constexpr int64_t kDenseLayerBytes = kQkvBytes + kOutBytes;

// ---- NVFP4 matrices ------------------------------------------------------------------------------------------------
// A tile is 16 rows x K columns in chunks of 64 columns: first 512 bytes of nibbles a chunk, then 64 bytes of e4m3
// scales a chunk. Lane (g, t) owns columns 16 t .. 16 t + 15 of a chunk, exactly one scale block, of rows g and g + 8.
// Its 16 bytes are four words, word m serving MMA m with columns 4 m .. 4 m + 3; the low half-word holds the even
// columns, the high one the odd. A half-word holds four codes "s eem" so that two shifts, one select and four masks
// make bf16 values of them (mma.cuh):
//     code                      sign at   eem at
//     row g,     columns 0, 1     15      8..6
//     row g + 8, columns 0, 1     12      5..3
//     row g,     columns 2, 3     14     11..9
//     row g + 8, columns 2, 3     13      2..0
MK_HD int tile_bytes(int K) { return K / 64 * (512 + 64); }
MK_HD int tile_word_offset(int row, int column) {  // bytes, of the 32-bit word that holds one code
  int chunk = column / 64, t = column % 64 / 16, m = column % 16 / 4, g = row % 8;
  return chunk * 512 + (g * 4 + t) * 16 + m * 4;
}
MK_HD uint32_t tile_code_bits(int row, int column, uint32_t code) {  // the code in place inside its word
  int slot = (row / 8) + 2 * (column % 4 / 2), half = 16 * (column % 2);
  int sign = slot == 0 ? 15 : slot == 1 ? 12 : slot == 2 ? 14 : 13;
  int magnitude = slot == 0 ? 6 : slot == 1 ? 3 : slot == 2 ? 9 : 0;
  return (code >> 3) << (half + sign) | (code & 7) << (half + magnitude);
}
MK_HD int tile_scale_offset(int row, int column, int K) {
  int chunk = column / 64, t = column % 64 / 16, g = row % 8;
  return K / 64 * 512 + chunk * 64 + (g * 4 + t) * 2 + row / 8;
}
// Gate and up share tiles: rows 0..7 of tile u are gate rows 8 u .. 8 u + 7, rows 8..15 the same up rows, so that one
// lane ends with both halves of a SwiGLU pair. One tile is one page.
constexpr int kPairUnits = kMoeIntermediate / 8, kPairTileBytes = tile_bytes(kHidden);
constexpr int kDownTileBytes = tile_bytes(kMoeIntermediate);
constexpr int64_t kPairBytes = (int64_t)kPairUnits * kPairTileBytes;
constexpr int64_t kExpertBytes = kPairBytes + (int64_t)kOwners * kDownTileBytes;  // gate/up tiles, then down tiles
constexpr int kTokenPairUnits = kTopK * kPairUnits;  // gate/up tiles of one token, expert slot major
constexpr int kMaxPairUnits = (kTokenPairUnits + kGrid - 1) / kGrid;
static_assert(kDownTileBytes % 16 == 0 && kPairTileBytes % 128 == 0 && 2 * kDownTileBytes <= kPairTileBytes);

// ---- routers: bf16 [expert][hidden], as in the checkpoint
// -------------------------------------------------------------
constexpr int64_t kRouterBytes = (int64_t)kExperts * kHidden * 2;

// ---- norms: float32, layer after layer, then the final norm ---------------------------------------------------------
constexpr int kNormInput = 0, kNormPost = kHidden, kNormQ = 2 * kHidden, kNormK = kNormQ + kHeadDim;
constexpr int kNormLayer = kNormK + kHeadDim;

// ---- KV cache: tiles of 16 positions, K then V, both in MMA fragment order ------------------------------------------
constexpr int kTile = 16, kTileBytes = kTile * kHeadDim * 2, kMaxTiles = kMaxContext / kTile;
MK_HD int64_t kv_tile_offset(int layer, int kv_head, int tile) {
  return ((int64_t)(layer * kKvHeads + kv_head) * kMaxTiles + tile) * 2 * kTileBytes;
}
MK_HD int k_offset(int position, int dim) {  // bytes inside the K half of a tile
  int i = dim / 32, t = dim % 32 / 8, e = dim % 8, p = position % kTile;
  return (p / 8 * 4 + i) * 512 + (p % 8 * 4 + t) * 16 + e * 2;
}
MK_HD int v_offset(int position, int dim) {  // bytes inside the V half of a tile
  int p = position % kTile, j = dim / 8, g = dim % 8;
  return j * 256 + (g * 4 + p / 4) * 8 + p % 4 * 2;
}
constexpr int64_t kKvBytes = (int64_t)kLayers * kKvHeads * kMaxTiles * 2 * kTileBytes;

// ---- exchange buffers: 8-byte {value, epoch} words, two copies in turn ----------------------------------------------
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
constexpr int kXPartial = kXQkv + kQkvRows;                    // float32: attention partials
constexpr int kXBest = kXPartial + kMaxUnits * kPartialWords;  // {logit}, {token} of every SM
constexpr int kXWords = (kXBest + 2 * kGrid + 15) / 16 * 16, kExchangeWords = 2 * kXWords;

}  // namespace mk
