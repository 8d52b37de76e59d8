// What the ranks of a model agree on when they exchange words, on any target: docs/TENSOR_PARALLEL.md.
#pragma once
#include <cstdint>

#include "common/everywhere.h"

namespace mk {

// What a rank receives in holds this where no word has come yet, so that a word is its own flag. It is a NaN as float32
// and two as bf16; what is sent in its place is the same.
constexpr uint32_t kEmptyWord = 0xFFFFFFFFu;
constexpr uint32_t kNanWord = 0x7FFF7FFFu;
MK_EVERYWHERE constexpr uint32_t sendable(uint32_t word) { return word == kEmptyWord ? kNanWord : word; }

constexpr int kExchangeCopies = 3;  // of what a rank receives in, which the epochs use in turn

}  // namespace mk
