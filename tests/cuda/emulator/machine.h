// The emulated machine as machine.cpp runs it and report.cpp shows it: lanes on fibers, warps, blocks, and what is
// under way between them. Everything happens in one thread of the process.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include "emulator.h"
#include "fiber.h"
#include "race.h"

namespace emulator {

struct Warp;
struct Block;

// What a lane did last; while it waits, what for.
struct Doing {
  const char* what = "starts";
  const void* site = nullptr;    // return address in the kernel
  uint32_t mask = 0;             // lanes that meet
  const void* operand = nullptr;
  uint32_t barrier = 0, detail = 0;  // shared address of an mbarrier and the parity; or number and threads of a barrier
};

enum class State : uint8_t { ready, meeting, barrier, asleep, left };

struct Lane {
  Fiber fiber;
  Place place;
  Warp* warp;
  int index;  // in its warp
  State state;
  Doing doing;
  uint32_t loads;  // relaxed loads since it last gave way to another warp for that
  std::vector<std::pair<uint8_t*, const uint8_t*>> copies;  // of 16 bytes, under way: to, from
};

struct Warp {
  Block* block;
  int index;
  std::vector<Lane> lanes;
  uint32_t exists, live, ready, meeting;  // bit i: lane i
  bool runnable = false;         // is in Machine::runnable
  bool spins = false;            // a lane found in its last turn that it must wait
  uint64_t held_until = 0;       // turn
  Knowledge knowledge;
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;  // threads
  std::vector<Warp*> waiting;
  Clock clock;
};

struct Block {
  int index;
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  uint8_t* shared;  // followed by an inaccessible page
  int live_warps, copies;
};

// A bulk copy, or a store to global memory, that becomes visible in some later turn.
struct Event {
  uint8_t* to;
  const uint8_t* from;  // nullptr: a store of `value`
  uint64_t value;
  uint32_t bytes, barrier;
  Block* block;
  uint32_t time;  // race.h
};

constexpr int kHorizon = 4096;  // turns that an event may lie ahead

struct Machine {
  std::vector<Block> blocks;
  std::vector<Warp*> runnable;
  std::vector<Event> events[kHorizon];
  int pending = 0;                            // events
  std::multimap<uint64_t, Lane*> sleepers;    // by the time at which they wake
  Fiber main;
  const std::function<void()>* body = nullptr;
  Lane* running = nullptr;
  uint64_t turn = 0, last_progress = 0, clock = 1000000000, stall_turns = 0;  // clock: ns
  uint64_t random = 1;
  int live_lanes = 0;
  size_t shared_bytes = 0;
  const void* kernel = nullptr;
};
extern Machine machine __attribute__((visibility("hidden")));

// An mbarrier inside its 8 bytes of shared memory.
struct Mbarrier {
  uint64_t magic : 12, phase : 1, pending : 15, expected : 15;
  int64_t bytes : 21;  // still to come
};
static_assert(sizeof(Mbarrier) == 8);
constexpr uint64_t kMagic = 0xB4B;
constexpr uint32_t kSharedBase = 1024;  // address of the first byte of dynamic shared memory

// ---- between the files of the machine ------------------------------------------------------------------------------
#pragma GCC visibility push(hidden)
uint64_t draw();
uint64_t some_turns();  // log-uniform, so that some things happen at once and some much later
void make_ready(Warp& w, uint32_t lanes);
void leave(State state);  // the running lane lets others run; it goes on when it is ready again
void lane_left(Warp& w);
void run_events();  // that are due in this turn
// "function at file:line <- caller at file:line ...", through the functions that were inlined there.
std::string source(const void* site);
bool is_device_memory(const uint8_t* p);
bool shares_memory();  // with another process
// Of a device address that was accessed in vain: where it is beside the nearest allocation.
std::string nearest_allocation(const uint8_t* p);

// Writes `text`, the state of all blocks and ends the process.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
// Turns crashes and lanes that never give way into such reports.
struct Guard {
  Guard();
  ~Guard();
};
#pragma GCC visibility pop

}  // namespace emulator
