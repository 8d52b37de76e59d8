// Marks a function for both sides of a GPU program.
#pragma once

#if defined(__CUDACC__) || defined(MK_EMULATED)
#define MK_EVERYWHERE __host__ __device__
#else
#define MK_EVERYWHERE
#endif
