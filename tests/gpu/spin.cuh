// A kernel that keeps an SM to itself, where its launch takes all shared memory of it.
#pragma once

__global__ void spin(volatile int* begun, long long nanoseconds) {
  extern __shared__ char taken[];
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  if (threadIdx.x == 0) begun[blockIdx.x] = 1, __threadfence_system();
  do {
    taken[threadIdx.x]++;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while ((long long)(now - start) < nanoseconds);
}
