// What differs between layers. Device code cannot index a constant of the host, so no table is looked up.
#pragma once
#include <utility>
#include "layout.cuh"

namespace mk {

// Layers of a set, by words that are picked while compiling.
using LayerWords = std::make_index_sequence<ceil_div(kLayers, 32)>;
template <const LayerSet& kSet, size_t... kWord>
__device__ __forceinline__ bool layer_is_in(int layer, std::index_sequence<kWord...>) {
  uint32_t word = 0;
  ((layer / 32 == (int)kWord ? word = std::integral_constant<uint32_t, kSet.words[kWord]>::value : 0), ...);
  return word >> layer % 32 & 1;
}
template <const LayerSet& kSet, size_t... kWord>
__device__ __forceinline__ int layers_before(int layer, std::index_sequence<kWord...>) {
  int n = 0;
  ((n += __popc(std::integral_constant<uint32_t, kSet.words[kWord]>::value &
                (layer >= 32 * (int)kWord + 32 ? ~0u : layer > 32 * (int)kWord ? (1u << (layer - 32 * (int)kWord)) - 1 : 0u))),
   ...);
  return n;
}
__device__ __forceinline__ bool is_dense(int layer) {
  if constexpr (kHasDense) return layer_is_in<kDense>(layer, LayerWords());
  return false;
}
__device__ __forceinline__ bool is_rotated(int layer) {
  if constexpr (kHasUnrotated) return !layer_is_in<kUnrotated>(layer, LayerWords());
  return true;
}
__device__ __forceinline__ int moe_layers_before(int layer) {
  if constexpr (kHasDense) return layer - layers_before<kDense>(layer, LayerWords());
  return layer;
}

__device__ __forceinline__ int first_vector(int layer) {
  if constexpr (kHasDense) return layer * kNormLayer - layers_before<kDense>(layer, LayerWords()) * kNormMoeOnly;
  return layer * kNormLayer;
}

// Positions that a query of this layer sees, 0: all. Every layer is asked for in turn; where none has a window, the compiler
// sees that.
template <size_t... kLayer>
__device__ __forceinline__ int window_of(int layer, std::index_sequence<kLayer...>) {
  int window = 0;
  ((layer == (int)kLayer ? window = std::integral_constant<int, kWindows[kLayer]>::value : 0), ...);
  return window;
}

}  // namespace mk
