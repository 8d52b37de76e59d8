// Shared addresses, mbarriers, bulk copies, and stores that others see later.
#include <algorithm>
#include <cstdlib>
#include "machine.h"

// Where in the kernel the caller of this function is.
#define SITE __builtin_extract_return_addr(__builtin_return_address(0))

namespace emulator {
namespace {

constexpr uint32_t kPolls = 4;  // relaxed loads after which a lane gives way

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

void add(const Event& e, uint64_t due) {
  machine.events[due % kHorizon].push_back(e);
  machine.pending++;
}
// By address: stores to one place become visible in their order.
uint64_t last_store[1 << 16];

void show(const Event& store) { memcpy(store.to, &store.value, store.bytes); }

// Stores that are under way become visible, anybody's: they come before what is released now.
void show_stores() {
  for (uint64_t turn = machine.turn + 1; turn <= machine.turn + kHorizon; turn++)
    std::erase_if(machine.events[turn % kHorizon], [](const Event& e) {
      if (e.from) return false;
      show(e);
      machine.pending--;
      return true;
    });
  progress();
}

}  // namespace

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
      show(e);
    }
    progress();
    machine.pending--;
  }
  due.clear();
}

uint32_t shared_address(const void* p) {
  const int64_t inside = (const uint8_t*)p - here->shared;
  if (inside >= 0 && inside <= (int64_t)machine.shared_bytes) return kSharedBase + (uint32_t)inside;
  const int64_t offset = (const uint8_t*)p - &image;
  if (std::abs(offset) >= kStaticRange) fail("%p is not in this block's shared memory", p);
  return kStaticBase + (uint32_t)offset;
}
void* shared_pointer(uint32_t address) { return shared_at(*machine.running->warp->block, address, 1, 1, "pointer"); }
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
  const uint32_t time = race::copy_begins(b, p, (const uint8_t*)from, bytes, &mbarrier_at(b, bar), SITE);
  memset(p, 0xFF, bytes);  // whoever still reads the old bytes shall see it
  b.copies++;
  add({p, (const uint8_t*)from, 0, bytes, bar, &b, time}, machine.turn + some_turns());
}
void copy_16(void* to, const void* from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) fail("a copy of 16 bytes from %p to %p", from, to);
  shared_at(*machine.running->warp->block, shared_address(to), 16, 16, "copy of 16 bytes");
  race::access(from, 16, false, SITE);
  race::access(to, 16, true, SITE);
  memset(to, 0xFF, 16);
  machine.running->copies.emplace_back((uint8_t*)to, (const uint8_t*)from);
}
void copies_done() {
  for (const auto& [to, from] : machine.running->copies) {
    race::access(to, 16, true, SITE);
    memcpy(to, from, 16);
  }
  machine.running->copies.clear();
}
void bulk_prefetch(const void* from, uint32_t bytes) {
  if (bytes % 16 || (uintptr_t)from % 16) fail("a prefetch of %u bytes from %p", bytes, from);
  for (uint32_t i = 0; i < bytes; i += 4096) (void)*((const volatile uint8_t*)from + i);
  if (bytes) (void)*((const volatile uint8_t*)from + bytes - 1);
}
static void store_later(uint8_t* to, uint64_t value, uint32_t bytes) {
  aligned(to, bytes);
  *(volatile uint8_t*)to = *(volatile uint8_t*)to;  // a wrong address shows here
  uint64_t& last = last_store[(uintptr_t)to / bytes * 0x9E3779B97F4A7C15ull >> 48];
  const uint64_t due = std::min(std::max(last, machine.turn + some_turns()), machine.turn + kHorizon - 1);
  last = due;
  race::relaxed_store(*machine.running->warp, to);
  add({to, nullptr, value, bytes, 0, nullptr, 0}, due);
}
void store_later(uint64_t* to, uint64_t value) { store_later((uint8_t*)to, value, 8); }
void store_later(uint32_t* to, uint32_t value) { store_later((uint8_t*)to, value, 4); }
void aligned(const void* p, size_t bytes) {
  if ((uintptr_t)p % bytes) fail("an access to %zu bytes at %p", bytes, p);
}
void release(const void* to) {
  race::release(*machine.running->warp, to);
  show_stores();
}
void acquire(const void* from) { race::acquire(*machine.running->warp, from); }
void fence() {
  race::fence(*machine.running->warp);
  show_stores();
}
void proxy_fence(bool global) { race::proxy_fence(*machine.running, global); }
void atomic(const void* p) {
  race::relaxed_load(*machine.running->warp, p);
  race::relaxed_store(*machine.running->warp, p);
}
void polled(const void* from, size_t bytes) {
  if ((uintptr_t)from % bytes) fail("a load of %zu bytes from %p", bytes, from);
  Lane& l = *machine.running;
  if (++l.loads >= kPolls) {
    l.loads = 0;
    l.doing = {"polls", SITE};
    l.warp->spins = true;
    leave(State::ready);
  }
  for (size_t i = 0; i < bytes; i += 8) race::relaxed_load(*l.warp, (const uint8_t*)from + i);
}

}  // namespace emulator
