// A CUDA runtime without a GPU, linked under csrc/cuda/model.cu instead of the real one, so that the host side runs as
// it is: memory is the host's, and decode_kernel is replaced by its contract. The fake cache remembers which token is
// at which position; the token chosen next depends on all of them, so a wrong position, cache or order shows in the
// tokens. Whatever decode_kernel relies on is checked at every launch; mk_fake_problem() tells the first thing that was
// wrong.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include "kernel.cuh"

using namespace mk;

namespace {

struct State {
  std::map<std::string, long long> set{{"sms", kGrid},     {"capability", model::compute_capability},
                                       {"devices", 1},     {"resident", 1},
                                       {"cooperative", 1}, {"free", 1ll << 40},
                                       {"expire_at", -1},  {"expire_phase", 0},
                                       {"fail_at", -1}};
  std::map<const void*, std::string> kernels;
  std::map<uint8_t*, size_t> memory;
  std::string problem;
  int launches = 0;
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
  cudaError_t sticky = cudaSuccess;
};
State& state() {
  static State* s = new State;
  return *s;
}
void require(bool good, const char* what) {
  if (!good && state().problem.empty()) state().problem = what;
}
bool owned(const void* p, size_t bytes) {
  auto at = state().memory.upper_bound((uint8_t*)p);
  if (at == state().memory.begin()) return false;
  --at;
  return (uint8_t*)p + bytes <= at->first + at->second;
}
std::string kernel_name(const void* function) {
  auto at = state().kernels.find(function);
  return at == state().kernels.end() ? "" : at->second;
}

void decode(const Params& p) {
  State& s = state();
  require(owned(p.dense, (size_t)kLayers * kDenseLayerBytes) && owned(p.head, (size_t)kVocab * kHidden * 2) &&
              owned(p.experts, (size_t)kLayers * kExperts * kExpertBytes) &&
              owned(p.routers, (size_t)kLayers * kRouterBytes) && owned(p.embedding, (size_t)kVocab * kHidden * 2) &&
              owned(p.norms, ((size_t)kLayers * kNormLayer + kHidden) * 4) &&
              owned(p.expert_scales, (size_t)kLayers * kExperts * 8) &&
              owned(p.rope, (size_t)kMaxContext * kHeadDim * 4) && owned(p.kv, kKvBytes) &&
              owned(p.exchange, kExchangeWords * 8) && owned(p.report, sizeof(Report)) &&
              owned(p.tokens, (p.steps + 1) * 4),
          "a pointer of the launch is outside what was allocated");
  require(p.embedding[0] == 0x1234 && p.norms[kLayers * kNormLayer] == 2.5f,
          "sections are not where the blob has them");
  require(p.steps >= 1 && p.position >= 0 && p.position + p.steps <= kMaxContext, "positions outside the cache");
  require(p.log_splits >= 0 && (kKvHeads << p.log_splits) <= kMaxUnits &&
              p.attention_stride == kGrid / (kKvHeads << p.log_splits),
          "KV splits");
  require(p.qkv_flight >= 1 && p.dense_flight >= 1 && p.head_flight >= 1 && p.qkv_flight <= kDenseSlots &&
              p.dense_flight <= kDenseSlots && p.head_flight <= kDenseSlots && p.expert_flight >= 1 &&
              p.expert_flight <= kExpertSlots,
          "pages under way");
  require(p.wait_limit_ns == 2500000000ull, "wait limit");
  for (int i : {0, 1, 63}) {
    const float2 r = p.rope[(size_t)p.position * (kHeadDim / 2) + i];
    const double angle = (double)p.position * model::inv_freq[i];
    require(std::fabs(r.x - model::rope_attention_factor * std::cos(angle)) < 1e-3 &&
                std::fabs(r.y - model::rope_attention_factor * std::sin(angle)) < 1e-3,
            "RoPE table");
  }
  uint64_t* out = p.exchange + kXOut;
  const uint32_t newest = (uint32_t)std::max(out[0] >> 32, out[kXWords] >> 32);
  require(p.first_epoch == newest, "epochs do not follow each other");
  int32_t* cache = (int32_t*)p.kv;
  for (int step = 0; step < p.steps; step++) {
    cache[p.position + step] = p.tokens[step];
    uint64_t hash = 1;
    for (int i = 0; i <= p.position + step; i++) hash = (hash * 31 + (uint64_t)cache[i] + 1) % 1000003;
    p.tokens[step + 1] = (int32_t)(hash % kVocab);
    const uint32_t epoch = p.first_epoch + (step + 1) * kLayers;
    const float chosen = (float)p.tokens[step + 1];
    uint32_t bits;
    memcpy(&bits, &chosen, 4);
    out[(epoch & 1) * kXWords] = (uint64_t)epoch << 32 | bits;
  }
  if (s.launches == s.set["expire_at"]) *p.report = {1, (uint32_t)s.set["expire_phase"], 17, p.first_epoch + 1};
  s.launches++;
}

// The chosen token's logit is 0, every other one's its distance below that.
void logits(void** args) {
  const uint64_t* hidden = *(const uint64_t**)args[0];
  require(**(const float**)args[1] == 2.5f, "the logits kernel has another norm than the final one");
  float* out = *(float**)args[3];
  require(owned(out, kVocab * 4) && owned(hidden, kHidden * 8), "a pointer of the logits kernel");
  const uint32_t bits = (uint32_t)hidden[0];
  float chosen;
  memcpy(&chosen, &bits, 4);
  for (int i = 0; i < kVocab; i++) out[i] = -std::fabs(i - chosen);
}

cudaError_t launch(const void* function, void** args, size_t shared) {
  if (kernel_name(function).find("logits_kernel") != std::string::npos) logits(args);
  if (kernel_name(function).find("read_all") != std::string::npos) require(shared == 8 * 16384, "read_all's memory");
  return cudaSuccess;
}

}  // namespace

#ifndef __CUDA_ARCH__  // the compiler's device pass has functions of these names
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void mk_fake_set(const char* what, long long value) {
  if (std::string(what) == "expire_at" || std::string(what) == "fail_at") value += state().launches;
  state().set[what] = value;
}
EXPORT const char* mk_fake_problem() { return state().problem.c_str(); }
EXPORT int mk_fake_launches() { return state().launches; }
EXPORT int mk_fake_allocations() { return (int)state().memory.size(); }

extern "C" {
void** __cudaRegisterFatBinary(void*) { return (void**)&state; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  state().kernels[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  State& s = state();
  s.grid = grid, s.block = block, s.shared = shared, s.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  State& s = state();
  *grid = s.grid, *block = s.block, *shared = s.shared, *(cudaStream_t*)stream = s.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** args, size_t shared, cudaStream_t) {
  return launch((const void*)kernel, args, shared);
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** args, size_t shared, cudaStream_t) {
  return launch(function, args, shared);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared,
                                        cudaStream_t stream) {
  if (state().launches == state().set["fail_at"]) return cudaErrorCooperativeLaunchTooLarge;
  require(kernel_name(function).find("decode_kernel") != std::string::npos, "another kernel is launched");
  require(grid.x == kGrid && block.x == kThreads && shared == sizeof(Shared) && stream, "launch shape");
  require(*(uint32_t*)args[1] == 0, "the kernel's zero");
  decode(*(const Params*)args[0]);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** p, size_t n) {
  *p = calloc(n, 1);
  memset(*p, 0xA5, std::min<size_t>(n, 1 << 20));  // not what the code must not rely on
  state().memory[(uint8_t*)*p] = n;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  require(!p || state().memory.erase((uint8_t*)p) == 1, "freed twice");
  free(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  require(owned(kind == cudaMemcpyHostToDevice ? to : from, n), "a copy outside of GPU memory");
  memcpy(to, from, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, n, kind);
}
cudaError_t cudaMemset(void* p, int value, size_t n) {
  require(owned(p, n), "clears what is not GPU memory");
  memset(p, value, std::min<size_t>(n, 16 << 20));  // the rest is zero as it came
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) { return cudaMemset(p, value, n); }
cudaError_t cudaGetDeviceCount(int* n) {
  *n = (int)state().set["devices"];
  return *n ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* d, int) {
  memset(d, 0, sizeof *d);
  strcpy(d->name, "Fake GPU");
  d->major = (int)state().set["capability"] / 10;
  d->minor = (int)state().set["capability"] % 10;
  d->multiProcessorCount = (int)state().set["sms"];
  d->cooperativeLaunch = (int)state().set["cooperative"];
  d->sharedMemPerBlockOptin = 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = (size_t)state().set["free"];
  *total = (size_t)1 << 40;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int threads, size_t shared,
                                                                   unsigned) {
  require(threads == kThreads && shared == sizeof(Shared), "residency of another launch");
  *n = (int)state().set["resident"];
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "fake error"; }
const char* cudaGetErrorName(cudaError_t) { return "fakeError"; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  *s = (cudaStream_t)&state;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 0.1f;
  return cudaSuccess;
}
}
#endif
