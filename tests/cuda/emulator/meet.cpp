// Where lanes meet: shuffles, votes and MMAs of a warp, and the barriers of a block.
#include <algorithm>
#include <functional>
#include "machine.h"

// Where in the kernel the caller of this function is.
#define SITE __builtin_extract_return_addr(__builtin_return_address(0))

namespace emulator {
namespace {

using Finish = bool (*)(Warp& w, uint32_t lanes);  // false: the lanes do not go on yet

struct Meeting {
  const char* name;
  Finish finish;
};

void end_meeting(const Meeting& m, Warp& w, uint32_t lanes) {
  if ((w.meeting & lanes) != lanes) return;
  w.meeting &= ~lanes;
  if (m.finish(w, lanes)) make_ready(w, lanes);
}

// The running lane comes to a meeting; the last of `lanes` to come ends it.
void meet(const Meeting& m, uint32_t lanes, const Doing& doing) {
  Lane& l = *machine.running;
  Warp& w = *l.warp;
  l.doing = doing;
  if (!(lanes >> l.index & 1)) fail("%s: the mask %08x does not name the lane that calls it", m.name, doing.mask);
  if (const uint32_t there = w.meeting & lanes) {
    const Lane& other = w.lanes[__builtin_ctz(there)];
    if (other.doing.what != m.name || other.doing.mask != doing.mask || other.doing.barrier != doing.barrier ||
        other.doing.detail != doing.detail)
      fail("lanes of a warp meet at different places: lane %d in %s, lane %d in %s", l.index, m.name, other.index,
           other.doing.what);
  }
  w.meeting |= 1u << l.index;
  l.state = State::meeting;
  end_meeting(m, w, lanes);
  leave(l.state);
}
void meet(const Meeting& m, uint32_t mask, const void* operand, const void* site) {
  meet(m, mask & machine.running->warp->exists, {m.name, site, mask, operand});
}

template <class T>
T& operand(Warp& w, int lane) {
  return *(T*)w.lanes[lane].doing.operand;
}

struct Word {
  uint64_t value;
  int source = 0;
  uint64_t result = 0;
};
bool finish_sync(Warp& w, uint32_t) {
  race::lanes_met(w);
  return true;
}
bool finish_shuffle(Warp& w, uint32_t lanes) {
  for (int i = 0; i < 32; i++)
    if (lanes >> i & 1) {
      Word& word = operand<Word>(w, i);
      const bool given = word.source >= 0 && word.source < 32 && lanes >> word.source & 1;
      word.result = given ? operand<Word>(w, word.source).value : ~0ull;
    }
  return true;
}
bool finish_equal(Warp& w, uint32_t lanes) {
  for (int i = 0; i < 32; i++)
    for (int j = 0; j < 32; j++)
      if ((lanes >> i & 1) && (lanes >> j & 1) && operand<Word>(w, i).value == operand<Word>(w, j).value)
        operand<Word>(w, i).result |= 1ull << j;
  return true;
}
template <class Combine>
bool fold(Warp& w, uint32_t lanes, Combine combine) {
  uint32_t all = 0;
  bool first = true;
  for (int i = 0; i < 32; i++)
    if (lanes >> i & 1) {
      const uint32_t v = (uint32_t)operand<Word>(w, i).value;
      all = first ? v : combine(all, v);
      first = false;
    }
  for (int i = 0; i < 32; i++)
    if (lanes >> i & 1) operand<Word>(w, i).result = all;
  return true;
}
bool finish_ballot(Warp& w, uint32_t lanes) {
  for (int i = 0; i < 32; i++)
    if (lanes >> i & 1) operand<Word>(w, i).value <<= i;
  return fold(w, lanes, [](uint32_t a, uint32_t b) { return a | b; });
}

const Meeting kSync{"__syncwarp", finish_sync}, kShuffle{"a shuffle", finish_shuffle};
const Meeting kVotes[] = {
    {"__any_sync", [](Warp& w, uint32_t l) { return fold(w, l, [](uint32_t a, uint32_t b) { return a | b; }); }},
    {"__all_sync", [](Warp& w, uint32_t l) { return fold(w, l, [](uint32_t a, uint32_t b) { return a & b; }); }},
    {"__ballot_sync", finish_ballot},
    {"__match_any_sync", finish_equal},
    {"__reduce_max_sync",
     [](Warp& w, uint32_t l) { return fold(w, l, [](uint32_t a, uint32_t b) { return std::max(a, b); }); }},
    {"__reduce_min_sync",
     [](Warp& w, uint32_t l) { return fold(w, l, [](uint32_t a, uint32_t b) { return std::min(a, b); }); }},
    {"signed __reduce_max_sync",
     [](Warp& w, uint32_t l) {
       return fold(w, l, [](uint32_t a, uint32_t b) { return (uint32_t)std::max((int)a, (int)b); });
     }},
    {"signed __reduce_min_sync",
     [](Warp& w, uint32_t l) {
       return fold(w, l, [](uint32_t a, uint32_t b) { return (uint32_t)std::min((int)a, (int)b); });
     }},
    {"__reduce_add_sync", [](Warp& w, uint32_t l) { return fold(w, l, std::plus<uint32_t>()); }},
    {"__reduce_and_sync", [](Warp& w, uint32_t l) { return fold(w, l, std::bit_and<uint32_t>()); }},
    {"__reduce_or_sync", [](Warp& w, uint32_t l) { return fold(w, l, std::bit_or<uint32_t>()); }},
    {"__reduce_xor_sync", [](Warp& w, uint32_t l) { return fold(w, l, std::bit_xor<uint32_t>()); }},
};

struct Mma {
  float* d;
  const uint32_t *a, *b;
};
float low(uint32_t v) { return __uint_as_float(v << 16); }
float high(uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }
bool finish_mma(Warp& w, uint32_t) {
  double a[16][16], b[16][8], d[16][8];  // products of bf16 are exact in it, and 17 terms lose nothing that float keeps
  for (int lane = 0; lane < 32; lane++) {
    const Mma& m = operand<Mma>(w, lane);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
      const int row = g + 8 * (i % 2), column = 2 * t + 8 * (i / 2);
      a[row][column] = low(m.a[i]);
      a[row][column + 1] = high(m.a[i]);
      d[g + 8 * (i / 2)][2 * t + i % 2] = m.d[i];
    }
    for (int i = 0; i < 2; i++) {
      b[2 * t + 8 * i][g] = low(m.b[i]);
      b[2 * t + 8 * i + 1][g] = high(m.b[i]);
    }
  }
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) d[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++)
      operand<Mma>(w, lane).d[i] = (float)d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  return true;
}
const Meeting kMma{"mma", finish_mma};

// ---- barriers of a block -------------------------------------------------------------------------------------------
void complete(NamedBarrier& b) {
  for (Warp* w : b.waiting) {
    race::learn(*w, b.clock);
    make_ready(*w, w->live);
  }
  b = {};
  progress();
}
// threads 0: all that have not left, as in __syncthreads.
void complete_if_all(Block& block, NamedBarrier& b) {
  const uint32_t expected = b.expected ? b.expected : 32u * (uint32_t)block.live_warps;
  if (b.arrived > expected)
    fail("named barrier %d has %u threads of %u", int(&b - block.barriers), b.arrived, expected);
  if (b.arrived && b.arrived == expected) complete(b);
}
bool finish_barrier(Warp& w, bool wait) {
  const Doing& doing = w.lanes[__builtin_ctz(w.live)].doing;
  const uint32_t id = doing.barrier, threads = doing.detail;
  NamedBarrier& b = w.block->barriers[id];
  if (b.arrived && b.expected != threads)
    fail("named barrier %u is waited for with %u and with %u threads", id, b.expected, threads);
  b.expected = threads;
  b.arrived += 32;
  race::lanes_met(w);
  race::publish(w, b.clock);
  if (wait) {
    b.waiting.push_back(&w);
    for (Lane& l : w.lanes)
      if (l.state != State::left) l.state = State::barrier;
  }
  complete_if_all(*w.block, b);
  return !wait;
}
const Meeting kArrive{"bar.arrive", [](Warp& w, uint32_t) { return finish_barrier(w, false); }},
    kWait{"bar.sync", [](Warp& w, uint32_t) { return finish_barrier(w, true); }};

void meet_barrier(const Meeting& m, int id, int threads, const void* site) {
  if (id < 0 || id > 15) fail("there is no named barrier %d", id);
  if (threads % 32 || threads < 0 || threads > 1024) fail("named barrier %d of %d threads", id, threads);
  meet(m, machine.running->warp->live, {m.name, site, 0, nullptr, (uint32_t)id, (uint32_t)threads});
}

}  // namespace

void lane_left(Warp& w) {
  Block& b = *w.block;
  if (w.live == 0) {
    b.live_warps--;
    if (b.live_warps == 0 && b.copies) fail("block %d ends under %d bulk copies into its memory", b.index, b.copies);
    for (NamedBarrier& barrier : b.barriers)
      if (barrier.arrived && barrier.expected == 0) complete_if_all(b, barrier);
  } else if (w.meeting) {  // those left may be waiting for nobody else
    for (const Meeting* meeting : {&kWait, &kArrive})
      if (w.lanes[__builtin_ctz(w.meeting)].doing.what == meeting->name) end_meeting(*meeting, w, w.live);
  }
}

void sync_warp(uint32_t mask) { meet(kSync, mask, nullptr, SITE); }
uint64_t shuffle(uint32_t mask, uint64_t value, int source) {
  Word w{value, source};
  meet(kShuffle, mask, &w, SITE);
  return w.result;
}
uint32_t vote(uint32_t mask, uint32_t value, Vote kind) {
  Word w{value};
  meet(kVotes[(int)kind], mask, &w, SITE);
  return (uint32_t)w.result;
}
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const Mma m{d, a, b};
  meet(kMma, ~0u, &m, SITE);
}
void sync_block() { meet_barrier(kWait, 0, 0, SITE); }
void barrier(int id, int threads, bool wait) {
  if (threads == 0) fail("named barrier %d of no threads", id);
  meet_barrier(wait ? kWait : kArrive, id, threads, SITE);
}

}  // namespace emulator
