// Runs the lanes. A turn lets every lane of one warp that can run go on until it gives way or waits; which warp is next
// comes from a random sequence, as does when copies and stores become visible.
#include "machine.h"
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

// Where in the kernel the caller of this function is.
#define SITE __builtin_extract_return_addr(__builtin_return_address(0))

namespace emulator {

Machine machine;
Place* here = nullptr;

uint64_t draw() {  // xorshift64*
  uint64_t& x = machine.random;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  return x * 0x2545F4914F6CDD1Dull;
}
uint64_t some_turns() { return 1 + draw() % (2ull << draw() % 11); }

namespace {

constexpr uint64_t kTurn = 20, kLeap = 1000000;  // ns that a turn takes; when nothing has happened for long

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace

void make_ready(Warp& w, uint32_t lanes) {
  for (Lane& l : w.lanes)
    if (lanes >> l.index & 1) l.state = State::ready;
  w.ready |= lanes;
  if (w.ready && !w.runnable) {
    w.runnable = true;
    machine.runnable.push_back(&w);
  }
}

void leave(State state) {
  Lane& l = *machine.running;
  l.state = state;
  if (state == State::ready) l.warp->ready |= 1u << l.index;
  switch_fiber(l.fiber, machine.main, state == State::left);
}

namespace {

void resume(Lane& l) {
  machine.running = &l;
  here = &l.place;
  switch_fiber(machine.main, l.fiber);
  machine.running = nullptr;
  here = nullptr;
}

void lane_entry() {
  entered(machine.main);
  (*machine.body)();
  Lane& l = *machine.running;
  Warp& w = *l.warp;
  if (!l.copies.empty()) fail("a lane leaves under %zu copies of 16 bytes", l.copies.size());
  l.doing = {"left"};
  w.live &= ~(1u << l.index);
  l.state = State::left;
  machine.live_lanes--;
  progress();
  lane_left(w);
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

// Real nanoseconds that passed in it.
uint64_t nap() {
  const auto start = std::chrono::steady_clock::now();
  usleep(200);
  return (uint64_t)std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
}

void run_turns() {
  Machine& m = machine;
  const uint64_t stall = setting("MK_EMULATOR_STALL", 200000 + 2000 * m.blocks.size() * m.blocks[0].warps.size());
  // Where other processes may write, waiting is no deadlock, and takes as long as it takes.
  const bool alone = !shares_memory();
  constexpr uint64_t kTheirTurn = 2000, kBetweenNaps = 64;
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
    // A warp goes on for a few meetings of its lanes or for many: the cache then holds their stacks.
    const uint64_t meetings = 4ull << draw() % 5;
    do run_warp(*w);
    while (w->ready && !w->spins && draw() % meetings);
    if (m.turn - m.last_progress < (alone ? stall : kTheirTurn)) {
      leaps = 0;
    } else if (!alone) {
      if (m.turn % kBetweenNaps == 0) m.clock += nap();
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

// Stacks live as long as the library: every launch needs them again. Each has an inaccessible page below it, unless
// there would be more than a process may have.
class Stacks {
 public:
  ~Stacks() {  // a process may load many libraries, one after the other
    for (uint8_t* p : stacks_) munmap(p, kStack + page_);
  }
  uint8_t* at(size_t i) {
    while (stacks_.size() <= i) {
      uint8_t* p = map(kStack + page_);
      if (stacks_.size() < 16000) mprotect(p, page_, PROT_NONE);
      stacks_.push_back(p);
    }
    return stacks_[i] + page_;
  }

 private:
  std::vector<uint8_t*> stacks_;
  const size_t page_ = (size_t)sysconf(_SC_PAGESIZE);
};

uint8_t* stack(size_t i) {
  static Stacks stacks;
  return stacks.at(i);
}

// Every lane at the start of the kernel.
void set_up(Block& b, size_t first_stack, dim3 blocks, dim3 threads) {
  const unsigned size = threads.x * threads.y * threads.z, block = (unsigned)b.index;
  b.warps.resize((size + 31) / 32);
  b.live_warps = (int)b.warps.size();
  b.copies = 0;
  for (unsigned thread = 0; thread < size; thread++) {
    Warp& w = b.warps[thread / 32];
    if (thread % 32 == 0) {
      const unsigned lanes = std::min(32u, size - thread);
      w.block = &b;
      w.index = (int)(thread / 32);
      w.exists = w.live = lanes == 32 ? ~0u : (1u << lanes) - 1;
      w.ready = w.meeting = 0;
      w.lanes.resize(lanes);
    }
    Lane& l = w.lanes[thread % 32];
    l.place = {{thread % threads.x, thread / threads.x % threads.y, thread / threads.x / threads.y},
               {block % blocks.x, block / blocks.x % blocks.y, block / blocks.x / blocks.y},
               threads,
               blocks,
               b.shared};
    l.warp = &w;
    l.index = (int)(thread % 32);
    l.loads = 0;
    l.fiber.stack = stack(first_stack + thread);
    l.fiber.bytes = kStack;
    prepare(l.fiber, lane_entry);
  }
}

// Runs blocks `first` and on, all of them resident. The last one of several starts `late` ns after the others.
void run_blocks(unsigned first, unsigned count, dim3 blocks, dim3 threads, size_t shared, uint64_t late) {
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
    b.shared = map(room + page);
    memset(b.shared, 0xFF, room);  // a NaN in every format
    mprotect(b.shared + room, page, PROT_NONE);
    set_up(b, (size_t)i * size, blocks, threads);
    const bool waits = late && i && i + 1 == count;
    for (Warp& w : b.warps) {
      if (!waits) make_ready(w, w.live);
      for (Lane& l : w.lanes)
        if (waits) l.state = State::asleep, m.sleepers.emplace(m.clock + late, &l);
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
    run_blocks(0, count, blocks, threads, shared, setting("MK_EMULATOR_LATE", 0));
  else
    for (unsigned i = 0; i < count; i++) run_blocks(i, 1, blocks, threads, shared, 0);
  m.body = nullptr;
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

}  // namespace emulator
