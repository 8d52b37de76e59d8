// All-gathers between the ranks of a model, from inside their kernels: direct stores into the peers' memory, and the data is
// its own flag. docs/TENSOR_PARALLEL.md, "GPU ranks", has the protocol and why it is safe.
//
// An exchange has an image: the gathered result in 32-bit words, each of which one rank computes. Every rank has three copies
// of the image to receive in, which the epochs use in turn. Its own words are of no use there and stay EMPTY.
#pragma once
#include "common/exchange.h"
#include "ptx.cuh"

namespace mk {

// How a rank that measures itself alone, as rank 0, does without its peers: what it sends to one lands in its own images, in
// that peer's place, so that stores, waits and clearing are as many as with them. What it computes then means nothing.
enum Loop : int32_t {
  kNotLooped,
  kLooped,
  kCounted,  // and adds up what it does
  kMuted,    // sends nothing and awaits nothing: the step without its exchanges
};
// A word's place in a row of an image, of which every rank has `share` words, the last ones perhaps fewer.
struct ImagePlace {
  int at, row, share;
};
// Of images that are never looped back.
struct UnloopedImages {
  static constexpr bool kLoops = false;
};

// The ranks of a model as one of them sees them. In the parameters of a kernel.
template <int kRanks>
struct Peers {
  int32_t rank;             // this one
  Loop loop;
  uint32_t* words[kRanks];  // of every rank its receive memory: images one after the other, three times; EMPTY at first
  uint32_t* sent[kRanks];   // of every rank, by rank: how many times a block of that one has sent; used by flags only
  uint32_t* counts;         // looped back and counted: exchanges, words taken
};

__device__ __forceinline__ uint2 sendable(uint2 w) { return {sendable(w.x), sendable(w.y)}; }
__device__ __forceinline__ uint4 sendable(uint4 w) {
  return {sendable(w.x), sendable(w.y), sendable(w.z), sendable(w.w)};
}
__device__ __forceinline__ bool all_here(uint32_t w) { return w != kEmptyWord; }
__device__ __forceinline__ bool all_here(uint2 w) { return w.x != kEmptyWord && w.y != kEmptyWord; }
__device__ __forceinline__ bool all_here(uint4 w) {
  return w.x != kEmptyWord && w.y != kEmptyWord && w.z != kEmptyWord && w.w != kEmptyWord;
}
__device__ __forceinline__ void clear_words(uint32_t* p, uint32_t) { store_peer(p, kEmptyWord); }
__device__ __forceinline__ void clear_words(uint32_t* p, uint2) { store_peer(p, uint2{kEmptyWord, kEmptyWord}); }
__device__ __forceinline__ void clear_words(uint32_t* p, uint4) {
  store_peer(p, uint4{kEmptyWord, kEmptyWord, kEmptyWord, kEmptyWord});
}

// One exchange of one epoch. kByFlag: the oracle, in which words are read after an acquire of what their senders released.
// Images: which of its words are whose, where they may be looped back.
template <int kRanks, bool kByFlag, class Images = UnloopedImages>
struct Exchange {
  const Peers<kRanks>& peers;
  uint32_t at;  // words before this image's copy

  // Words i, i + 1, ... of the image that begins at word `image`, which this rank computed, to all peers. Word: uint32_t, uint2
  // or uint4, and i a multiple of its size. The peers are taken in turn from the next one on, so that not all send to the same.
  template <class Word>
  __device__ __forceinline__ void put(uint32_t image, uint32_t i, Word w) const {
    w = sendable(w);
    if constexpr (Images::kLoops)
      if (peers.loop != kNotLooped) return put_back(image, i, w);
#pragma unroll 1
    for (int k = 1; k < kRanks; k++) {
      int peer = peers.rank + k;
      if (peer >= kRanks) peer -= kRanks;
      store_peer(peers.words[peer] + at + image + i, w);
    }
  }
  // The same looped back.
  template <class Word>
  __device__ __forceinline__ void put_back(uint32_t image, uint32_t i, Word w) const {
    if (peers.loop == kMuted) return;
    const ImagePlace place = Images::place(image, i);
#pragma unroll 1
    for (int k = 1, ahead = place.share; k < kRanks && place.at + ahead < place.row; k++, ahead += place.share)
      store_peer(peers.words[0] + at + image + i + ahead, w);
  }
  // By flag: after a block's last put, by one thread that knows of all of them.
  __device__ __forceinline__ void sent() const {
    if constexpr (kByFlag)
#pragma unroll
      for (int k = 0; k < kRanks; k++)
        if (k != peers.rank) add_peer_release(peers.sent[k] + peers.rank, 1);
  }
  // By flag: before a block's first take, by one thread; a block barrier must follow. count: how often blocks of each rank have
  // sent when this exchange is complete. waiting(peer) is called now and then; true ends the wait.
  template <class Waiting>
  __device__ __forceinline__ void await(uint32_t count, Waiting&& waiting) const {
    if constexpr (kByFlag)
      for (int k = 0; k < kRanks; k++)
        if (k != peers.rank)
          for (uint32_t spins = 1; (int32_t)(load_peer_acquire(peers.sent[peers.rank] + k) - count) < 0; spins++)
            if (spins % 16 == 0 && waiting(k)) return;
  }
  // Words i, ... of the image, of `peer`, once they are here; by one thread, as what it leaves is EMPTY.
  template <class Word, class Waiting>
  __device__ __forceinline__ Word take(uint32_t i, int peer, Waiting&& waiting) const {
    if constexpr (Images::kLoops)
      if (peers.loop >= kCounted) {
        if (peers.loop == kMuted) return Word{};
        atomicAdd(peers.counts + 1, (uint32_t)(sizeof(Word) / sizeof(uint32_t)));
      }
    uint32_t* p = peers.words[peers.rank] + at + i;
    Word w;
    load_peer(w, p);
    if constexpr (!kByFlag)
      for (uint32_t spins = 1; !all_here(w); spins++) {
        if (spins % 16 == 0 && waiting(peer)) break;
        load_peer(w, p);
      }
    clear_words(p, w);
    return w;
  }
};

}  // namespace mk
