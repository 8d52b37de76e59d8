// Example of the generated model header: the shape of Qwen3-30B-A3B (48 layers, 128 experts top-8).
#pragma once

namespace mk {
constexpr int kLayers = 48;
constexpr int kHidden = 2048;
constexpr int kHeads = 32;
constexpr int kKvHeads = 4;
constexpr int kHeadDim = 128;
constexpr int kExperts = 128;
constexpr int kTopK = 8;
constexpr int kMoeIntermediate = 768;
constexpr int kVocab = 151936;
constexpr float kRmsEps = 1e-6f;
constexpr float kRopeTheta = 1e6f;
constexpr bool kNormTopkProb = true;
constexpr int kMaxContext = 8192;  // positions of the KV cache; a multiple of 16
constexpr int kGrid = 132;         // blocks of the resident kernel, one an SM
}  // namespace mk
