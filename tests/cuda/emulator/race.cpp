#include "race.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include "machine.h"

namespace emulator::race {
namespace {

bool instrumented = false, running = false;
bool dependent = false;  // relaxed words order what came before, as values that depend on it do

struct Access {
  uint32_t time = 0;  // of its warp; 0: none
  uint16_t warp = 0;  // or, behind the warps, the copies of a block
  uint8_t lane = 0, bytes = 0;
  uint32_t met = 0;
  const void* site = nullptr;
};
constexpr uint8_t kManyLanes = 255;
constexpr uint32_t kCellBytes = 2, kPageBytes = 4096;
struct Cell {
  Access write;
  std::vector<Access> reads;  // since then, the last of every warp
};
struct Page {
  Cell cells[kPageBytes / kCellBytes];
};
struct ProxyFence {
  uint32_t time;  // of its warp
  uint16_t warp;
  uint8_t lane;
  bool global;
  Clock after;  // what came before it, of other lanes
};
struct MbarrierClocks {
  Clock arrived, done;
};

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
std::unordered_map<const void*, MbarrierClocks> mbarriers;
std::unordered_map<const void*, Clock> words;  // released at an address
std::vector<uint32_t> copy_times;              // by block
std::vector<ProxyFence> proxy_fences;          // of this launch
std::set<std::pair<const void*, const void*>> found;
size_t warps = 0, clocks = 0;

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

std::string who(uint32_t warp, uint8_t lane) {
  const size_t each = machine.blocks[0].warps.size();
  if (warp >= warps) return "a bulk copy of block " + std::to_string(warp - warps);
  return "block " + std::to_string(warp / each) + ", warp " + std::to_string(warp % each) +
         (lane == kManyLanes ? "" : ", lane " + std::to_string(lane));
}

// unfenced: ordered, but for the proxy fence that is missing between the two.
void tell(const uint8_t* p, const Access& now, bool now_writes, const Access& before, bool before_wrote,
          bool unfenced = false) {
  if (!found.insert({now.site, before.site}).second) return;
  const Lane& l = *machine.running;
  const int64_t inside = p - l.warp->block->shared;
  const std::string place = inside >= 0 && inside < (int64_t)machine.shared_bytes
                                ? "byte " + std::to_string(inside) + " of shared memory"
                                : "device memory" + nearest_allocation(p);
  fprintf(stderr,
          "emulator: race at %s\n  %s by %s: %s\n  %s after the %s by %s: %s\n", place.c_str(),
          now_writes ? "the write" : "the read", who(now.warp, now.lane).c_str(), source(now.site).c_str(),
          unfenced ? "comes without a proxy fence" : "is not ordered",
          before_wrote ? "write" : "read", who(before.warp, before.lane).c_str(), source(before.site).c_str());
}

bool ordered(const Access& before, const Knowledge& k, uint8_t lane) {
  if (before.warp == k.id) return before.lane == lane || before.met < k.met;
  return before.time <= k.known[before.warp];
}

// Of a write that is ordered before this lane: a proxy fence of the lane that wrote, or of one that knew of the write, is too.
bool proxy_fenced(const Access& write, const Knowledge& k, uint8_t lane, bool global) {
  return std::any_of(proxy_fences.rbegin(), proxy_fences.rend(), [&](const ProxyFence& f) {
    if (global && !f.global) return false;
    const bool before = f.warp == k.id ? f.lane == lane || f.time <= k.met_at : f.time <= k.known[f.warp];
    const bool same_lane = f.warp == write.warp && f.lane == write.lane;
    return before && write.time <= (same_lane ? f.time : f.after[write.warp]);
  });
}

void touch(Cell& cell, const uint8_t* p, const Access& now, bool writes, const Knowledge& k, uint8_t lane) {
  const bool copy = now.warp >= warps;
  if (cell.write.time && cell.write.bytes & now.bytes) {
    if (!ordered(cell.write, k, lane))
      tell(p, now, writes, cell.write, true);
    else if (copy && cell.write.warp < warps && !proxy_fenced(cell.write, k, lane, !writes))
      tell(p, now, writes, cell.write, true, true);
  }
  if (copy && !writes) return;  // whether it is over before somebody writes there is not asked
  if (writes) {
    for (const Access& read : cell.reads)
      if (read.bytes & now.bytes && !ordered(read, k, lane)) tell(p, now, true, read, false);
    std::erase_if(cell.reads, [&](const Access& read) { return (read.bytes & ~now.bytes) == 0; });
    cell.write = now;
    return;
  }
  for (Access& read : cell.reads)
    if (read.warp == now.warp && read.bytes == now.bytes) {
      const uint8_t lanes = read.met == now.met && read.lane != now.lane ? kManyLanes : now.lane;
      read = now;
      read.lane = lanes;
      return;
    }
  cell.reads.push_back(now);
}

void touch(const uint8_t* p, size_t bytes, Access now, bool writes, const Knowledge& k, uint8_t lane) {
  static uintptr_t last = 0;
  static Page* page = nullptr;
  const bool copied = !writes && now.warp >= warps;  // most of what copies read nobody ever wrote
  if (pages.empty() || !page) last = 0;
  for (const uint8_t* end = p + bytes; p < end;) {
    const uintptr_t at = (uintptr_t)p, inside = at % kCellBytes;
    const size_t part = std::min<size_t>(kCellBytes - inside, (size_t)(end - p));
    if (last != at / kPageBytes) {
      last = at / kPageBytes;
      if (copied) {
        const auto known = pages.find(last);
        page = known == pages.end() ? nullptr : known->second.get();
      } else {
        std::unique_ptr<Page>& found_page = pages[last];
        if (!found_page) found_page = std::make_unique<Page>();
        page = found_page.get();
      }
    }
    now.bytes = (uint8_t)(((1u << part) - 1) << inside);
    if (page) touch(page->cells[at % kPageBytes / kCellBytes], p, now, writes, k, lane);
    p += part;
  }
}

}  // namespace

void access(const void* address, size_t bytes, bool writes, const void* site) {
  const Lane* l = machine.running;
  if (!running || !l) return;
  const uint8_t* p = (const uint8_t*)address;
  const uint8_t* shared = l->warp->block->shared;
  if ((p < shared || p >= shared + machine.shared_bytes) && !is_device_memory(p)) return;
  const Knowledge& k = l->warp->knowledge;
  touch(p, bytes, {k.known[k.id], (uint16_t)k.id, (uint8_t)l->index, 0, k.met, site}, writes, k, (uint8_t)l->index);
}
void begin() {
  pages.clear();
  mbarriers.clear();
  words.clear();
  proxy_fences.clear();
  running = instrumented;
  if (!running) return;
  dependent = getenv("MK_EMULATOR_DEPENDENT") != nullptr;
  warps = machine.blocks.size() * machine.blocks[0].warps.size();
  clocks = warps + machine.blocks.size();
  copy_times.assign(machine.blocks.size(), 0);
  uint32_t id = 0;
  for (Block& b : machine.blocks)
    for (Warp& w : b.warps) {
      w.knowledge.id = id;
      w.knowledge.known.assign(clocks, 0);
      w.knowledge.known[id++] = 1;
    }
}
void end() {
  running = false;
  if (!found.empty()) fail("%zu races were found, see above", found.size());
}
void publish(Warp& w, Clock& to) {
  if (!running) return;
  join(to, w.knowledge.known);
  w.knowledge.known[w.knowledge.id]++;
}
void learn(Warp& w, const Clock& from) {
  if (running) join(w.knowledge.known, from);
}
void lanes_met(Warp& w) {
  w.knowledge.met++;
  if (running) w.knowledge.met_at = w.knowledge.known[w.knowledge.id]++;
}
void mbarrier_arrive(Warp& w, const void* bar) {
  if (running) publish(w, mbarriers[bar].arrived);
}
void mbarrier_complete(const void* bar) {
  if (running) mbarriers[bar].done = mbarriers[bar].arrived;
}
void mbarrier_waited(Warp& w, const void* bar) {
  if (running) learn(w, mbarriers[bar].done);
}
uint32_t copy_begins(Block& b, const uint8_t* to, const uint8_t* from, uint32_t bytes, const void* bar,
                     const void* site) {
  if (!running) return 0;
  const size_t slot = (size_t)(&b - machine.blocks.data());
  const Lane& l = *machine.running;
  const uint32_t time = ++copy_times[slot];
  const Access copy{time, (uint16_t)(warps + slot), 0, 0, 0, site};
  touch(from, bytes, copy, false, l.warp->knowledge, (uint8_t)l.index);
  touch(to, bytes, copy, true, l.warp->knowledge, (uint8_t)l.index);
  publish(*l.warp, mbarriers[bar].arrived);  // its phase ends after this copy, which ends after it was begun
  return time;
}
void copy_ends(Block& b, const void* bar, uint32_t time) {
  if (!running) return;
  Clock& c = mbarriers[bar].arrived;
  c.resize(clocks);
  uint32_t& known = c[warps + (size_t)(&b - machine.blocks.data())];
  known = std::max(known, time);
}
void release(Warp& w, const void* to) {
  if (running) publish(w, words[to]);
}
void acquire(Warp& w, const void* from) {
  if (!running) return;
  const auto at = words.find(from);
  if (at != words.end()) learn(w, at->second);
}
void relaxed_store(Warp& w, const void* to) {
  if (running && dependent) publish(w, words[to]);
  if (running && !w.knowledge.fenced.empty()) join(words[to], w.knowledge.fenced);
}
void relaxed_load(Warp& w, const void* from) {
  if (!running) return;
  const auto at = words.find(from);
  if (at != words.end()) join(dependent ? w.knowledge.known : w.knowledge.seen, at->second);
}
void fence(Warp& w) {
  if (!running) return;
  lanes_met(w);  // a lane may have learned of another
  learn(w, w.knowledge.seen);
  publish(w, w.knowledge.fenced);
}
void proxy_fence(Lane& l, bool global) {
  if (!running) return;
  Knowledge& k = l.warp->knowledge;
  ProxyFence& f = proxy_fences.emplace_back(k.known[k.id], (uint16_t)k.id, (uint8_t)l.index, global, k.known);
  f.after[k.id] = k.met_at;
  k.known[k.id]++;  // what this lane writes from here on comes after
}

}  // namespace emulator::race

// ---- what the compiler calls ---------------------------------------------------------------------------------------
#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define SITE __builtin_extract_return_addr(__builtin_return_address(0))
#define ACCESSES(n)                                                                                     \
  HOOK __tsan_read##n(const void* p) { emulator::race::access(p, n, false, SITE); }                     \
  HOOK __tsan_write##n(const void* p) { emulator::race::access(p, n, true, SITE); }                     \
  HOOK __tsan_unaligned_read##n(const void* p) { emulator::race::access(p, n, false, SITE); }           \
  HOOK __tsan_unaligned_write##n(const void* p) { emulator::race::access(p, n, true, SITE); }           \
  HOOK __tsan_volatile_read##n(const void*) {}                                                          \
  HOOK __tsan_volatile_write##n(const void*) {}                                                         \
  HOOK __tsan_unaligned_volatile_read##n(const void*) {}                                                \
  HOOK __tsan_unaligned_volatile_write##n(const void*) {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
HOOK __tsan_read_range(const void* p, size_t n) { emulator::race::access(p, n, false, SITE); }
HOOK __tsan_write_range(const void* p, size_t n) { emulator::race::access(p, n, true, SITE); }
HOOK __tsan_init() { emulator::race::instrumented = true; }
HOOK __tsan_func_entry(const void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_vptr_update(void** p, void* v) { *p = v; }
// Atomics of the host side.
#define ATOMICS(bits, T)                                                                                       \
  extern "C" __attribute__((visibility("hidden"))) T __tsan_atomic##bits##_load(const volatile T* p, int) {    \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                               \
  }                                                                                                            \
  HOOK __tsan_atomic##bits##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }      \
  extern "C" __attribute__((visibility("hidden"))) T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) { \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                            \
  extern "C" __attribute__((visibility("hidden"))) T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) { \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                        \
  }
ATOMICS(8, uint8_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
