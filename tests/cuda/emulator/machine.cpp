// Runs the lanes. A turn lets every lane of one warp that can run go on until it gives way or waits; which warp is next
// comes from a random sequence, as does when copies and stores become visible.
#include "machine.h"
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace emulator {

Machine machine;
Place* here = nullptr;

namespace {

constexpr uint64_t kTurn = 20, kLeap = 1000000;  // ns that a turn takes; when nothing has happened for long
constexpr uint32_t kPolls = 16;                  // relaxed loads after which a lane gives way

uint64_t draw() {  // xorshift64*
  uint64_t& x = machine.random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  return x * 0x2545F4914F6CDD1Dull;
}
uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

void make_ready(Warp& w, uint32_t lanes) {
  for (Lane& l : w.lanes)
    if (lanes >> l.index & 1) l.state = State::ready;
  w.ready |= lanes;
  if (w.ready && !w.runnable) {
    w.runnable = true;
    machine.runnable.push_back(&w);
  }
}

// The running lane lets others run; it goes on when it is ready again.
void leave(State state) {
  Lane& l = *machine.running;
  l.state = state;
  l.loads = 0;
  if (state == State::ready) l.warp->ready |= 1u << l.index;
  switch_fiber(l.fiber, machine.main, state == State::left);
}

void resume(Lane& l) {
  machine.running = &l;
  here = &l.place;
  switch_fiber(machine.main, l.fiber);
  machine.running = nullptr;
  here = nullptr;
}

// ---- lanes that meet -----------------------------------------------------------------------------------------------
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
    {"__reduce_max_sync", [](Warp& w, uint32_t l) { return fold(w, l, [](uint32_t a, uint32_t b) { return std::max(a, b); }); }},
    {"__reduce_min_sync", [](Warp& w, uint32_t l) { return fold(w, l, [](uint32_t a, uint32_t b) { return std::min(a, b); }); }},
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

// ---- copies, stores and mbarriers ----------------------------------------------------------------------------------
// Static shared memory is addressed by its distance from a place in the program.
constexpr uint32_t kStaticBase = 1u << 30, kStaticRange = 1u << 29;
alignas(16) uint8_t image;

uint8_t* shared_at(const Block& b, uint32_t address, uint32_t bytes, uint32_t align, const char* what) {
  if (address % align) fail("%s: shared address %u is not a multiple of %u", what, address, align);
  if (address >= kStaticBase - kStaticRange) return &image + ((int64_t)address - kStaticBase);
  if (address < kSharedBase || address - kSharedBase + (uint64_t)bytes > machine.shared_bytes)
    fail("%s: shared bytes %u .. %u of %zu", what, address - kSharedBase, address - kSharedBase + bytes,
         machine.shared_bytes);
  return b.shared + address - kSharedBase;
}
Mbarrier& mbarrier_at(const Block& b, uint32_t address) {
  Mbarrier& m = *(Mbarrier*)shared_at(b, address, 8, 8, "mbarrier");
  if (m.magic != kMagic) fail("the mbarrier at shared byte %u was not made, or was overwritten", address - kSharedBase);
  return m;
}
void complete_if_all(Mbarrier& m) {
  if (m.pending || m.bytes) return;
  race::mbarrier_complete(&m);
  m.phase ^= 1;
  m.pending = m.expected;
}
void arrive(Block& b, uint32_t bar, uint32_t count) {
  Mbarrier& m = mbarrier_at(b, bar);
  if (count == 0 || count > m.pending)
    fail("the mbarrier at shared byte %u gets %u arrivals and waits for %u", bar - kSharedBase, count, m.pending);
  race::mbarrier_arrive(*machine.running->warp, &m);
  m.pending -= count;
  complete_if_all(m);
  progress();
}

// Log-uniform, so that some are at once and some much later than others.
uint64_t some_turns() { return 1 + draw() % (2ull << draw() % 11); }

void add(const Event& e, uint64_t due) {
  machine.events[due % kHorizon].push_back(e);
  machine.pending++;
}
// By address: stores to one place become visible in their order.
uint64_t last_store[1 << 16];

void run_events() {
  std::vector<Event>& due = machine.events[machine.turn % kHorizon];
  for (size_t i = 0; i < due.size(); i++) {
    const Event e = due[i];
    if (e.from) {
      memcpy(e.to, e.from, e.bytes);
      Mbarrier& m = mbarrier_at(*e.block, e.barrier);
      race::copy_ends(*e.block, &m, e.time);
      m.bytes -= e.bytes;
      complete_if_all(m);
      e.block->copies--;
    } else {
      *(uint64_t*)e.to = e.value;
    }
    progress();
    machine.pending--;
  }
  due.clear();
}

// ---- turns ---------------------------------------------------------------------------------------------------------
void lane_entry() {
  entered(machine.main);
  (*machine.body)();
  Lane& l = *machine.running;
  Warp& w = *l.warp;
  Block& b = *w.block;
  l.doing = {"left"};
  w.live &= ~(1u << l.index);
  l.state = State::left;
  machine.live_lanes--;
  progress();
  if (w.live == 0) {
    b.live_warps--;
    if (b.live_warps == 0 && b.copies) fail("block %d ends under %d bulk copies into its memory", b.index, b.copies);
    for (NamedBarrier& barrier : b.barriers)
      if (barrier.arrived && barrier.expected == 0) complete_if_all(b, barrier);
  } else {
    if (w.meeting)  // those left may be waiting for nobody else
      for (const Meeting* meeting : {&kWait, &kArrive})
        if (w.lanes[__builtin_ctz(w.meeting)].doing.what == meeting->name) end_meeting(*meeting, w, w.live);
  }
  leave(State::left);
  __builtin_unreachable();
}

void wake() {
  auto& s = machine.sleepers;
  while (!s.empty() && s.begin()->first <= machine.clock) {
    Lane* l = s.begin()->second;
    s.erase(s.begin());
    make_ready(*l->warp, 1u << l->index);
  }
}

void run_warp(Warp& w) {
  const uint32_t todo = w.ready;
  const uint64_t r = draw();
  const int n = (int)w.lanes.size(), first = (int)((r >> 8 & 0xFFFF) % n);
  const bool down = r & 1;
  w.spins = false;
  for (int i = 0; i < n; i++) {
    Lane& l = w.lanes[(first + (down ? n - i : i)) % n];
    if (!(todo >> l.index & 1)) continue;
    w.ready &= ~(1u << l.index);
    resume(l);
  }
}

Warp* choose() {
  auto& all = machine.runnable;
  for (int tries = 0;; tries++) {
    const size_t i = draw() % all.size();
    Warp* w = all[i];
    if (!w->ready) {
      w->runnable = false;
      all[i] = all.back();
      all.pop_back();
      if (all.empty()) return nullptr;
    } else if (w->held_until <= machine.turn || tries > 64) {
      return w;
    }
  }
}

// Now and then a warp, or a whole block, is left behind.
void hold_somebody() {
  const uint64_t r = draw();
  if (r % 512) return;
  Block& b = machine.blocks[(r >> 16) % machine.blocks.size()];
  const uint64_t until = machine.turn + some_turns();
  if (r >> 9 & 1)
    b.warps[(r >> 32) % b.warps.size()].held_until = until;
  else if ((r >> 10) % 4 == 0)
    for (Warp& w : b.warps) w.held_until = until;
}

void run_turns() {
  Machine& m = machine;
  const uint64_t stall = setting("MK_EMULATOR_STALL", 200000 + 2000 * m.blocks.size() * m.blocks[0].warps.size());
  m.last_progress = m.turn;
  uint64_t leaps = 0;
  while (m.live_lanes) {
    m.turn++;
    m.clock += kTurn;
    run_events();
    wake();
    Warp* w = m.runnable.empty() ? nullptr : choose();
    if (!w) {
      if (m.pending) continue;
      if (m.sleepers.empty()) fail("deadlock: every lane waits for another");
      m.clock = m.sleepers.begin()->first;
      wake();
      continue;
    }
    hold_somebody();
    do run_warp(*w);
    while (w->ready && !w->spins && draw() % 8);
    if (m.turn - m.last_progress < stall) {
      leaps = 0;
    } else {  // time passes until a watchdog of the kernel does something
      m.clock += kLeap;
      if (++leaps > stall) fail("deadlock: nothing has changed for %lu turns", m.turn - m.last_progress);
    }
  }
  while (m.pending) m.turn++, run_events();
}

// ---- a launch ------------------------------------------------------------------------------------------------------
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStack = 256 << 10;
#else
constexpr size_t kStack = 64 << 10;
#endif

uint8_t* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("emulator: mmap");
    abort();
  }
  return (uint8_t*)p;
}

// Stacks live as long as the process: every launch needs them again. Each has an inaccessible page below it, unless
// there would be more than a process may have.
uint8_t* stack(size_t i) {
  static std::vector<uint8_t*> stacks;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  while (stacks.size() <= i) {
    uint8_t* p = map(kStack + page);
    if (stacks.size() < 16000) mprotect(p, page, PROT_NONE);
    stacks.push_back(p + page);
  }
  return stacks[i];
}

void run_blocks(unsigned first, unsigned count, dim3 blocks, dim3 threads, size_t shared) {
  Machine& m = machine;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (shared + page - 1) / page * page;
  const unsigned size = threads.x * threads.y * threads.z;
  m.blocks.clear();
  m.blocks.resize(count);
  m.runnable.clear();
  m.live_lanes = (int)(count * size);
  for (unsigned i = 0; i < count; i++) {
    Block& b = m.blocks[i];
    b.index = (int)(first + i);
    b.warps.resize((size + 31) / 32);
    b.live_warps = (int)b.warps.size();
    b.copies = 0;
    b.shared = map(room + page);
    memset(b.shared, 0xFF, room);  // a NaN in every format
    mprotect(b.shared + room, page, PROT_NONE);
    for (size_t j = 0; j < b.warps.size(); j++) {
      Warp& w = b.warps[j];
      const int lanes = (int)std::min<size_t>(32, size - 32 * j);
      w.block = &b;
      w.index = (int)j;
      w.exists = w.live = lanes == 32 ? ~0u : (1u << lanes) - 1;
      w.ready = w.meeting = 0;
      w.lanes.resize(lanes);
      for (int k = 0; k < lanes; k++) {
        Lane& l = w.lanes[k];
        const unsigned thread = 32 * (unsigned)j + k, block = first + i;
        l.place = {{thread % threads.x, thread / threads.x % threads.y, thread / threads.x / threads.y},
                   {block % blocks.x, block / blocks.x % blocks.y, block / blocks.x / blocks.y},
                   threads,
                   blocks,
                   b.shared};
        l.warp = &w;
        l.index = k;
        l.loads = 0;
        l.doing = {};
        l.fiber.stack = stack((size_t)i * size + thread);
        l.fiber.bytes = kStack;
        prepare(l.fiber, lane_entry);
      }
      make_ready(w, w.live);
    }
  }
  race::begin();
  run_turns();
  race::end();
  for (Block& b : m.blocks) munmap(b.shared, room + page);
  m.blocks.clear();
}

}  // namespace

void launch(const void* kernel, dim3 blocks, dim3 threads, size_t shared, bool together,
            const std::function<void()>& body) {
  static const bool seeded = (machine.random = setting("MK_EMULATOR_SEED", 1) * 0x9E3779B97F4A7C15ull | 1, true);
  (void)seeded;
  Machine& m = machine;
  m.kernel = kernel;
  m.body = &body;
  m.shared_bytes = shared;
  const Guard guard;
  const unsigned count = blocks.x * blocks.y * blocks.z;
  if (together)
    run_blocks(0, count, blocks, threads, shared);
  else
    for (unsigned i = 0; i < count; i++) run_blocks(i, 1, blocks, threads, shared);
  m.body = nullptr;
}

#define SITE __builtin_extract_return_addr(__builtin_return_address(0))

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
void sleep(unsigned ns) {
  Lane& l = *machine.running;
  l.doing = {"__nanosleep", SITE};
  l.warp->spins = true;
  machine.sleepers.emplace(machine.clock + ns, &l);
  leave(State::asleep);
}
void give_way() {
  Lane& l = *machine.running;
  l.doing = {"polls", SITE};
  l.warp->spins = true;
  leave(State::ready);
}
void progress() { machine.last_progress = machine.turn; }
uint64_t nanoseconds() { return machine.clock; }

uint32_t shared_address(const void* p) {
  const int64_t inside = (const uint8_t*)p - here->shared;
  if (inside >= 0 && inside <= (int64_t)machine.shared_bytes) return kSharedBase + (uint32_t)inside;
  const int64_t offset = (const uint8_t*)p - &image;
  if (std::abs(offset) >= kStaticRange) fail("%p is not in this block's shared memory", p);
  return kStaticBase + (uint32_t)offset;
}
void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  if (arrivals == 0 || arrivals > 32767) fail("an mbarrier for %u arrivals", arrivals);
  Mbarrier& m = *(Mbarrier*)shared_at(*machine.running->warp->block, bar, 8, 8, "mbarrier");
  m = {kMagic, 0, arrivals, arrivals, 0};
}
void mbarrier_arrive(uint32_t bar, uint32_t count) { arrive(*machine.running->warp->block, bar, count); }
void mbarrier_expect(uint32_t bar, uint32_t bytes) {
  Block& b = *machine.running->warp->block;
  mbarrier_at(b, bar).bytes += bytes;
  arrive(b, bar, 1);
}
bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  Lane& l = *machine.running;
  l.doing = {"mbarrier wait", SITE, 0, nullptr, bar, parity};
  if (parity > 1) fail("an mbarrier has no parity %u", parity);
  const Mbarrier& m = mbarrier_at(*l.warp->block, bar);
  if (m.phase != parity) {
    race::mbarrier_waited(*l.warp, &m);
    return true;
  }
  l.warp->spins = true;
  leave(State::ready);
  return false;
}
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  Block& b = *machine.running->warp->block;
  if (bytes == 0 || bytes % 16 || (uintptr_t)from % 16) fail("a bulk copy of %u bytes from %p", bytes, from);
  uint8_t* p = shared_at(b, to, bytes, 16, "bulk copy");
  mbarrier_at(b, bar);
  const uint32_t time = race::copy_begins(b, p, bytes, SITE);
  memset(p, 0xFF, bytes);  // whoever still reads the old bytes shall see it
  b.copies++;
  add({p, (const uint8_t*)from, 0, bytes, bar, &b, time}, machine.turn + some_turns());
}
void bulk_prefetch(const void* from, uint32_t bytes) {
  if (bytes % 16 || (uintptr_t)from % 16) fail("a prefetch of %u bytes from %p", bytes, from);
  for (uint32_t i = 0; i < bytes; i += 4096) (void)*((const volatile uint8_t*)from + i);
  if (bytes) (void)*((const volatile uint8_t*)from + bytes - 1);
}
void store_later(uint64_t* to, uint64_t value) {
  if ((uintptr_t)to % 8) fail("a store of 8 bytes to %p", (void*)to);
  *(volatile uint64_t*)to = *(volatile uint64_t*)to;  // a wrong address shows here
  uint64_t& last = last_store[(uintptr_t)to / 8 * 0x9E3779B97F4A7C15ull >> 48];
  const uint64_t due = std::min(std::max(last, machine.turn + some_turns()), machine.turn + kHorizon - 1);
  last = due;
  race::relaxed_store(*machine.running->warp, to);
  add({(uint8_t*)to, nullptr, value, 8, 0, nullptr, 0}, due);
}
// What anybody stored before is visible before the releasing store is.
void release(const void* to) {
  race::release(*machine.running->warp, to);
  for (std::vector<Event>& events : machine.events) {
    std::erase_if(events, [](const Event& e) {
      if (e.from) return false;
      *(uint64_t*)e.to = e.value;
      machine.pending--;
      return true;
    });
  }
  progress();
}
void acquire(const void* from) { race::acquire(*machine.running->warp, from); }
void fence() { race::fence(*machine.running->warp); }
void atomic(const void* p) {
  race::relaxed_load(*machine.running->warp, p);
  race::relaxed_store(*machine.running->warp, p);
}
void polled(const void* from, size_t bytes) {
  if ((uintptr_t)from % bytes) fail("a load of %zu bytes from %p", bytes, from);
  Lane& l = *machine.running;
  for (size_t i = 0; i < bytes; i += 8) race::relaxed_load(*l.warp, (const uint8_t*)from + i);
  if (++l.loads < kPolls) return;
  l.doing = {"polls", SITE};
  l.warp->spins = true;
  leave(State::ready);
}

}  // namespace emulator
