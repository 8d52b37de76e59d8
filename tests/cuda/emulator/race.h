// Finds accesses to one place that nothing orders, in kernels compiled with -fsanitize=thread: the compiler then calls
// a function at every access, which race.cpp provides (the sanitizer's own library is not linked). A warp has a vector
// clock; machine.cpp, meet.cpp and memory.cpp say here what publishes and what learns. Lanes of a warp are ordered by
// __syncwarp and barriers only. Volatile accesses and relaxed atomics are never part of a race. Without such a kernel
// nothing here acts.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {
struct Lane;
struct Warp;
struct Block;

using Clock = std::vector<uint32_t>;  // by warp of the grid, then by block for its bulk copies

// What a warp knows, as part of Warp.
struct Knowledge {
  uint32_t id = 0, met = 1;  // met counts the times at which its lanes were ordered
  uint32_t met_at = 0;       // the warp's time at the last of them
  Clock known;               // done by others before what this warp does now; its own entry is its time
  Clock fenced, seen;        // known at the last fence; learned from relaxed loads since
};

namespace race {
void begin();  // of a launch whose blocks are set up
void end();    // fails when races were found
void publish(Warp& w, Clock& to);
void learn(Warp& w, const Clock& from);
void lanes_met(Warp& w);
void mbarrier_arrive(Warp& w, const void* bar);
void mbarrier_complete(const void* bar);
void mbarrier_waited(Warp& w, const void* bar);
// Returns the time of the copy.
uint32_t copy_begins(Block& b, const uint8_t* to, const uint8_t* from, uint32_t bytes, const void* bar,
                     const void* site);
void copy_ends(Block& b, const void* bar, uint32_t time);
void release(Warp& w, const void* to);
void acquire(Warp& w, const void* from);
void relaxed_store(Warp& w, const void* to);
void relaxed_load(Warp& w, const void* from);
void fence(Warp& w);
void proxy_fence(Lane& l, bool global);  // global: for copies out of global memory too
void access(const void* p, size_t bytes, bool writes, const void* site);  // by the running lane
}  // namespace race

}  // namespace emulator
