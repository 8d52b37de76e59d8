// The slow twin of mkpack/pack_cuda.py: every element goes where a function of layout.cuh says. A host program.
//   layout_twin sizes                 name and value of every constant that Python mirrors
//   layout_twin matrix ROWS K FORMAT  bf16 or fp8 [ROWS, K] and, of fp8, a float32 a row on standard input -> its pages
//   layout_twin tile K                codes [16, K / 2] and scales [16, K / 16] -> a tile
//   layout_twin blob                  every tensor in canonical order, then the head of a tied model; of each its data,
//                                     scales and tensor or row scales, row major -> the blob
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#define __host__
#define __device__
#include "layout.cuh"

using namespace mk;

static std::vector<uint8_t> read_bytes(size_t n) {
  std::vector<uint8_t> v(n);
  if (fread(v.data(), 1, n, stdin) != n) exit(2);
  return v;
}

static void read_floats(uint8_t* out, size_t n) {
  const std::vector<uint8_t> v = read_bytes(n * sizeof(float));
  memcpy(out, v.data(), v.size());
}

// Rows [first, first + rows) of a dense matrix at `out`; fp8 has the scales of its rows at `scales`. turns: its row units take
// turns with those of so many matrices.
static void put_dense(uint8_t* out, uint8_t* scales, int first, int rows, int K, bool fp8, int turns = 1) {
  const auto place = [&](int row) { return row / 8 * turns * 8 + row % 8; };
  const size_t width = fp8 ? 1 : 2;
  const std::vector<uint8_t> in = read_bytes(rows * K * width);
  for (int row = 0; row < rows; row++)
    for (int column = 0; column < K; column++)
      memcpy(out + matrix_offset(first + place(row), column, K, fp8), &in[((size_t)row * K + column) * width], width);
  if (fp8)
    for (int row = 0; row < rows; row++) read_floats(scales + (first + place(row)) * sizeof(float), 1);
}

struct Nvfp4 {
  int rows, K;
  std::vector<uint8_t> data, scale;
  Nvfp4(int rows, int K)
      : rows(rows), K(K), data(read_bytes((size_t)rows * K / 2)), scale(read_bytes((size_t)rows * K / 16)) {}
  // Row `row` of the matrix is row r of the tile at `out`.
  void put(uint8_t* out, int r, int row) const {
    for (int column = 0; column < K; column++) {
      const uint32_t code = data[((size_t)row * K + column) / 2] >> (column % 2 * 4) & 15;
      uint32_t word;
      memcpy(&word, out + tile_word_offset(r, column), 4);
      word |= tile_code_bits(r, column, code);
      memcpy(out + tile_word_offset(r, column), &word, 4);
      out[tile_scale_offset(r, column, K)] = scale[((size_t)row * K + column) / 16];
    }
  }
};

static void put_expert(uint8_t* out, uint8_t* scales) {
  for (int part = 0; part < 2; part++) {  // gate, up
    const Nvfp4 matrix(kMoeIntermediate, kExpertHidden);
    for (int row = 0; row < kMoeIntermediate; row++)
      matrix.put(out + (int64_t)(row / 8) * kPairTileBytes, 8 * part + row % 8, row);
    read_floats(scales + part * sizeof(float), 1);
  }
  const Nvfp4 down(kExpertHidden, kMoeIntermediate);
  for (int row = 0; row < kExpertHidden; row++)
    down.put(out + kPairBytes + (int64_t)(row / kUnitRows) * kDownTileBytes, row % kUnitRows, row);
  read_floats(scales + 2 * sizeof(float), 1);
}

static std::vector<uint8_t> blob() {
  namespace m = model;
  std::vector<uint8_t> blob(m::blob_bytes);
  const auto at = [&](uint64_t section, uint64_t byte) { return blob.data() + section + byte; };
  const std::vector<uint8_t> embedding = read_bytes((size_t)kVocab * kHidden * 2);
  memcpy(at(m::embedding_at, 0), embedding.data(), embedding.size());
  uint64_t norms = m::norms_at, mlp = m::mlp_at, mlp_scales = m::mlp_scales_at;
  for (int layer = 0, moe = 0; layer < kLayers; layer++) {
    const auto vector = [&](int first, int floats) { read_floats(at(norms, first * sizeof(float)), floats); };
    uint8_t* dense = at(m::dense_at, layer * kDenseLayerBytes);
    uint8_t* scales = at(m::dense_scales_at, (uint64_t)layer * kDenseScaleLayer * sizeof(float));
    vector(kNormInput, kHidden);
    put_dense(dense, scales, 0, kQRows, kHidden, kAttentionFp8);
    put_dense(dense, scales, kQRows, kKvRows, kHidden, kAttentionFp8);
    put_dense(dense, scales, kQRows + kKvRows, kKvRows, kHidden, kAttentionFp8);
    if (kAttentionGate) put_dense(dense, scales, kGateAt, kQRows, kHidden, kAttentionFp8);
    if (kQkvBias) vector(kBiasQkv, kGateAt);
    if (kQkNorm && kQkNormWeight) vector(kNormQ, kNormK - kNormQ), vector(kNormK, kBiasQkv - kNormK);
    if (kAttentionSinks) vector(kSinks, kHeads);
    put_dense(dense + kQkvBytes, scales + kQkvRows * sizeof(float), 0, kHidden, kQRows, kAttentionFp8);
    if (kOutBias) vector(kBiasOut, kHidden);
    if (kSandwich) vector(kGateAttention, kHidden);
    vector(kNormPost, kHidden);
    const auto matrix = [&](uint64_t place, int row, int rows, int K, int turns = 1) {
      put_dense(at(mlp, place), at(mlp_scales, row * sizeof(float)), 0, rows, K, kDenseFp8, turns);
    };
    if (kDenseLayers[layer]) {
      matrix(0, 0, kDenseIntermediate, kHidden, 2);
      matrix(unit_bytes(kHidden, kDenseFp8), 8, kDenseIntermediate, kHidden, 2);
      matrix(kMlpPairBytes, 2 * kDenseIntermediate, kHidden, kDenseIntermediate);
    } else {
      const std::vector<uint8_t> router = read_bytes(kRouterBytes);
      memcpy(at(m::routers_at, moe * kRouterBytes), router.data(), router.size());
      if (kRouterBias) vector(kBiasRouter, kExperts);
      if (kNarrow) matrix(0, 0, kNarrowHidden, kHidden);
      if (kChoiceBias) vector(kBiasChoice, kExperts);
      if (kNarrow) vector(kNormPre, kNarrowHidden);
      for (int expert = 0; expert < kExperts; expert++) {
        const uint64_t number = (uint64_t)moe * kExperts + expert;
        put_expert(at(m::experts_at, number * kExpertBytes), at(m::expert_scales_at, number * 4 * sizeof(float)));
        if (!kExpertBias) continue;
        vector(kBiasPair + expert * 2 * kMoeIntermediate, kMoeIntermediate);  // gate
        vector(kBiasPair + (expert * 2 + 1) * kMoeIntermediate, kMoeIntermediate);
        vector(kBiasDown + expert * kExpertHidden, kExpertHidden);
      }
      if (kNarrow) vector(kNormExpert, kNarrowHidden), matrix(kPreBytes, kNarrowHidden, kHidden, kNarrowHidden);
      moe++;
    }
    if (kSandwich) vector(kNormMlpOut, kHidden), vector(kGateMlp, kHidden);
    norms += (kDenseLayers[layer] ? kNormPre : kNormLayer) * sizeof(float);
    mlp += kDenseLayers[layer] ? kDenseMlpBytes : kMoeMlpBytes;
    mlp_scales += (kDenseLayers[layer] ? kDenseMlpScales : kMoeMlpScales) * sizeof(float);
  }
  read_floats(at(norms, 0), kHidden);
  put_dense(at(m::head_at, 0), at(m::head_scales_at, 0), 0, kVocab, kHidden, kHeadFp8);
  return blob;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  std::vector<uint8_t> out;
  if (what == "sizes") {
    const struct {
      const char* name;
      long long value;
    } values[] = {
        {"qkv_bytes", kQkvBytes},
        {"dense_layer_bytes", kDenseLayerBytes},
        {"head_bytes", kHeadBytes},
        {"head_rows", kHeadRows},
        {"pair_bytes", kPairBytes},
        {"expert_bytes", kExpertBytes},
        {"dense_scale_layer", kDenseScaleLayer},
        {"router_bytes", kRouterBytes},
        {"norm_layer", kNormLayer},
        {"attn_norm", kNormInput},
        {"mlp_norm", kNormPost},
        {"q_norm", kNormQ},
        {"k_norm", kNormK},
        {"q_bias", kBiasQkv},
        {"o_bias", kBiasOut},
        {"sinks", kSinks},
        {"router_bias", kBiasRouter},
        {"choice_bias", kBiasChoice},
        {"gate_up_bias", kBiasPair},
        {"down_bias", kBiasDown},
        {"pair_tile", kPairTileBytes},
        {"down_tile", kDownTileBytes},
        {"qkv_rows", kQkvRows},
        {"k_at", matrix_offset(kQRows, 0, kHidden, kAttentionFp8)},
        {"v_at", matrix_offset(kQRows + kKvRows, 0, kHidden, kAttentionFp8)},
    };
    for (const auto& v : values) printf("%s %lld\n", v.name, v.value);
  } else if (what == "matrix" && argc == 5) {
    const int rows = atoi(argv[2]), K = atoi(argv[3]);
    const bool fp8 = std::string(argv[4]) == "fp8";
    out.resize(matrix_bytes(rows, K, fp8));
    std::vector<uint8_t> scales(rows * sizeof(float));
    put_dense(out.data(), scales.data(), 0, rows, K, fp8);
  } else if (what == "tile" && argc == 3) {
    const Nvfp4 tile(16, atoi(argv[2]));
    out.resize(tile_bytes(tile.K));
    for (int row = 0; row < 16; row++) tile.put(out.data(), row, row);
  } else if (what == "blob") {
    out = blob();
  } else {
    return 1;
  }
  return fwrite(out.data(), 1, out.size(), stdout) != out.size();
}
