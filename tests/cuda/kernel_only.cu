// The decode kernel without a host side, so that the build's report can be tested on any model.h.
#include "kernel.cuh"

template __global__ void mk::decode_kernel<false>(__grid_constant__ const mk::Params p, uint32_t zero);

#ifndef __CUDA_ARCH__
__attribute__((section(".mkpack.shared"), used)) static const uint32_t launch_shared = sizeof(mk::Shared);
#endif
