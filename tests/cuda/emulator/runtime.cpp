// Device memory and what the emulated GPU says of itself.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include "machine.h"

namespace {

struct Allocation {
  uint8_t* mapping;
  size_t mapped, bytes;
  int file = -1;        // that holds it, once other processes may open it
  bool theirs = false;  // another process's
};
std::map<uint8_t*, Allocation>& allocations() {
  static auto* all = new std::map<uint8_t*, Allocation>;
  return *all;
}
std::map<const void*, size_t>& allowed_shared() {
  static auto* all = new std::map<const void*, size_t>;
  return *all;
}
constexpr size_t kSharedUnasked = 48 << 10;

bool owned(const void* p, size_t bytes) {
  auto at = allocations().upper_bound((uint8_t*)p);
  if (at == allocations().begin()) return bytes == 0;
  --at;
  return (uint8_t*)p + bytes <= at->first + at->second.bytes;
}
size_t number(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}
size_t shared_limit() { return number("MK_EMULATOR_SHARED", 227 << 10); }
size_t memory() { return number("MK_EMULATOR_MEMORY", size_t{1} << 40); }

}  // namespace

// An allocation ends (rounded up to 256 bytes, as on the GPU) at an inaccessible page.
cudaError_t cudaMalloc(void** p, size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), rounded = (bytes + 255) / 256 * 256,
               mapped = (rounded + page - 1) / page * page + 2 * page;
  void* m = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return cudaErrorMemoryAllocation;
  uint8_t* base = (uint8_t*)m;
  mprotect(base, page, PROT_NONE);
  mprotect(base + mapped - page, page, PROT_NONE);
  *p = base + mapped - page - rounded;
  memset(*p, 0xFF, std::min<size_t>(bytes, 16 << 20));  // a NaN in every format
  allocations()[(uint8_t*)*p] = {base, mapped, bytes};
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  auto at = allocations().find((uint8_t*)p);
  if (at == allocations().end() || at->second.theirs) return cudaErrorInvalidValue;
  munmap(at->second.mapping, at->second.mapped);
  if (at->second.file >= 0) close(at->second.file);
  allocations().erase(at);
  return cudaSuccess;
}

// ---- memory of several processes ---------------------------------------------------------------------------------------
// A handle names a file in memory, which its process keeps open. Mappings outlive that process.
namespace {
struct Handle {
  uint32_t magic;
  int pid, file;
  uint64_t bytes;
};
constexpr uint32_t kHandle = 0x1BCED;
}  // namespace

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* p) {
  constexpr size_t kWhole = 2 << 20;  // smaller allocations share a piece of memory on a GPU, and would be seen with it
  auto at = allocations().find((uint8_t*)p);
  if (at == allocations().end() || at->second.theirs || at->second.bytes % kWhole) return cudaErrorInvalidValue;
  Allocation& a = at->second;
  if (a.file < 0) {
    const int file = memfd_create("emulated GPU", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)a.bytes) || pwrite(file, p, a.bytes, 0) != (ssize_t)a.bytes ||
        mmap(p, a.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
      return cudaErrorMemoryAllocation;
    a.file = file;
  }
  const Handle h{kHandle, getpid(), a.file, a.bytes};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &h, sizeof h);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t handle, unsigned flags) {
  Handle h;
  memcpy(&h, &handle, sizeof h);
  if (h.magic != kHandle || h.pid == getpid() || flags != cudaIpcMemLazyEnablePeerAccess) return cudaErrorInvalidValue;
  const std::string name = "/proc/" + std::to_string(h.pid) + "/fd/" + std::to_string(h.file);
  const int file = open(name.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return cudaErrorMapBufferObjectFailed;
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), mapped = h.bytes + 2 * page;
  uint8_t* base = (uint8_t*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const bool failed = base == MAP_FAILED || mmap(base + page, h.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                                                 0) == MAP_FAILED;
  close(file);
  if (failed) return cudaErrorMapBufferObjectFailed;
  *p = base + page;
  allocations()[base + page] = {base, mapped, h.bytes, -1, true};
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* p) {
  auto at = allocations().find((uint8_t*)p);
  if (at == allocations().end() || !at->second.theirs) return cudaErrorInvalidValue;
  munmap(at->second.mapping, at->second.mapped);
  allocations().erase(at);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
             from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if ((to_device && !owned(to, bytes)) || (from_device && !owned(from, bytes))) return cudaErrorInvalidValue;
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  if (!owned(p, bytes)) return cudaErrorInvalidValue;
  memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* n) {
  *n = (int)number("MK_EMULATOR_GPUS", 1);
  return *n ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* d, int) {
  const int capability = (int)number("MK_EMULATOR_CAPABILITY", 90);
  *d = {};
  snprintf(d->name, sizeof d->name, "emulated GPU");
  d->major = capability / 10;
  d->minor = capability % 10;
  d->multiProcessorCount = (int)number("MK_EMULATOR_SMS", 160);
  d->cooperativeLaunch = (int)number("MK_EMULATOR_COOPERATIVE", 1);
  d->sharedMemPerBlockOptin = shared_limit();
  d->totalGlobalMem = memory();
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = memory();
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "the emulator refuses this"; }
const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorMapBufferObjectFailed: return "cudaErrorMapBufferObjectFailed";
    case cudaErrorPeerAccessAlreadyEnabled: return "cudaErrorPeerAccessAlreadyEnabled";
    case cudaErrorCooperativeLaunchTooLarge: return "cudaErrorCooperativeLaunchTooLarge";
  }
  return "unknown";
}

namespace emulator {

bool is_device_memory(const uint8_t* p) {
  static const uint8_t *start = nullptr, *end = nullptr;  // the last one found
  static size_t count = 0;
  if (p >= start && p < end && count == allocations().size()) return true;
  auto at = allocations().upper_bound((uint8_t*)p);
  if (at == allocations().begin()) return false;
  --at;
  if (p >= at->first + at->second.bytes) return false;
  start = at->first, end = start + at->second.bytes, count = allocations().size();
  return true;
}
bool shares_memory() {
  for (const auto& [start, a] : allocations())
    if (a.theirs) return true;
  return false;
}
std::string nearest_allocation(const uint8_t* p) {
  for (const auto& [start, a] : allocations())
    if (p >= a.mapping && p < a.mapping + a.mapped)
      return ", byte " + std::to_string(p - start) + " of an allocation of " + std::to_string(a.bytes) + " bytes";
  return "";
}

cudaError_t allow_shared(const void* kernel, size_t bytes) {
  if (bytes > shared_limit()) return cudaErrorInvalidValue;
  allowed_shared()[kernel] = bytes;
  return cudaSuccess;
}
cudaError_t launchable(const void* kernel, dim3 blocks, dim3 threads, size_t shared, bool together) {
  const uint64_t count = (uint64_t)blocks.x * blocks.y * blocks.z, size = (uint64_t)threads.x * threads.y * threads.z;
  const auto allowed = allowed_shared().find(kernel);
  if (count == 0 || size == 0 || size > 1024) return cudaErrorInvalidConfiguration;
  if (shared > (allowed == allowed_shared().end() ? kSharedUnasked : allowed->second)) return cudaErrorInvalidValue;
  if (together && count > number("MK_EMULATOR_SMS", 160)) return cudaErrorCooperativeLaunchTooLarge;
  return cudaSuccess;
}

}  // namespace emulator
