// A stack to run a function on, and the switch between two stacks. What is saved is what a called function must keep.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
asm(R"(
.text
.type emulator_switch, %function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, .-emulator_switch
)");
#else
#error "no fiber switch for this processor"
#endif

// Keeps the running stack's pointer in *from and goes on where `to` was kept.
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** from, void* to);

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

struct Fiber {
  void* pointer = nullptr;  // where it goes on
  uint8_t* stack = nullptr;
  size_t bytes = 0;
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  const void* bottom = nullptr;  // of the thread's own stack, as the sanitizer knows it
#endif
};

// The fiber will start in `entry`, which must not return.
inline void prepare(Fiber& f, void (*entry)()) {
  uint64_t* top = (uint64_t*)(f.stack + f.bytes);
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(f.stack, f.bytes);  // frames of a lane that left
#endif
#if defined(__x86_64__)
  top -= 8;  // six registers, the address to return to, and what would be the caller's
  memset(top, 0, 64);
  top[6] = (uint64_t)entry;
#else
  top -= 20;
  memset(top, 0, 160);
  top[11] = (uint64_t)entry;
#endif
  f.pointer = top;
}

#ifdef __SANITIZE_ADDRESS__
inline void switch_fiber(Fiber& from, Fiber& to, bool last = false) {
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake, to.stack ? to.stack : to.bottom, to.bytes);
  emulator_switch(&from.pointer, to.pointer);
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
}
// First thing in a new fiber: main is the one that it came from.
inline void entered(Fiber& main) { __sanitizer_finish_switch_fiber(nullptr, &main.bottom, &main.bytes); }
#else
inline void switch_fiber(Fiber& from, Fiber& to, bool = false) { emulator_switch(&from.pointer, to.pointer); }
inline void entered(Fiber&) {}
#endif

}  // namespace emulator
