// The slow twin of mkpack/pack_cuda.py: every element goes where a function of layout.cuh says. A host program.
//   layout_twin sizes                 name and value of every constant that Python mirrors
//   layout_twin matrix ROWS K FORMAT  "bf16" or "fp8" [ROWS, K] on standard input -> its pages
//   layout_twin tile K                codes [16, K / 2] and scales [16, K / 16] -> a tile
//   layout_twin expert                data and scales of gate, up and down, row major -> the expert's bytes
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

struct Matrix {
  int rows, K;
  std::vector<uint8_t> data, scale;
  Matrix(int rows, int K)
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
    const size_t width = fp8 ? 1 : 2;
    const std::vector<uint8_t> in = read_bytes(rows * K * width);
    out.resize(matrix_bytes(rows, K, fp8));
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < K; column++)
        memcpy(&out.at(matrix_offset(row, column, K, fp8)), &in[((size_t)row * K + column) * width], width);
  } else if (what == "tile" && argc == 3) {
    const Matrix tile(16, atoi(argv[2]));
    out.resize(tile_bytes(tile.K));
    for (int row = 0; row < 16; row++) tile.put(out.data(), row, row);
  } else if (what == "expert") {
    const Matrix gate(kMoeIntermediate, kHidden), up(kMoeIntermediate, kHidden), down(kHidden, kMoeIntermediate);
    out.resize(kExpertBytes);
    for (int row = 0; row < kMoeIntermediate; row++) {
      uint8_t* tile = out.data() + (int64_t)(row / 8) * kPairTileBytes;
      gate.put(tile, row % 8, row);
      up.put(tile, 8 + row % 8, row);
    }
    for (int row = 0; row < kHidden; row++)
      down.put(out.data() + kPairBytes + (int64_t)(row / kUnitRows) * kDownTileBytes, row % kUnitRows, row);
  } else {
    return 1;
  }
  return fwrite(out.data(), 1, out.size(), stdout) != out.size();
}
