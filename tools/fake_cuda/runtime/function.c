/* Kernels: registration, attributes, occupancy. */
#include "function.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* What nvcc's start-up code hands over: the fat binary lies behind it. */
typedef struct {
  int magic, version;
  const void* fat_binary;
  void* more;
} Wrapper;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t describing = PTHREAD_MUTEX_INITIALIZER;
static DescribeCallback on_describe;

/* Open addressing; PyTorch registers some forty thousand kernels. Never shrinks. */
static Function** table;
static size_t slots, taken;

API void fake_cuda_on_describe(DescribeCallback callback) {
  on_describe = callback;
}

static size_t slot_of(const void* host) {
  size_t at = (size_t)(((uintptr_t)host >> 4) * 0x9E3779B97F4A7C15ull) & (slots - 1);
  while (table[at] && table[at]->host != host) at = (at + 1) & (slots - 1);
  return at;
}

static void grow(void) {
  Function** old = table;
  const size_t before = slots;
  slots = before ? 2 * before : 4096;
  table = calloc(slots, sizeof *table);
  for (size_t i = 0; i < before; i++)
    if (old[i]) table[slot_of(old[i]->host)] = old[i];
  free(old);
}

Function* find_function(const void* host) {
  pthread_mutex_lock(&lock);
  Function* found = slots ? table[slot_of(host)] : NULL;
  pthread_mutex_unlock(&lock);
  return found;
}

cudaError_t described(Function* function) {
  cudaError_t result = cudaSuccess;
  if (__atomic_load_n(&function->is_described, __ATOMIC_ACQUIRE)) return result;
  /* Not under our lock: Python describes under its own, which another thread may hold while it waits for ours. */
  Description description = {.max_threads = THREADS};
  if (on_describe) result = (cudaError_t)on_describe(function->code, function->name, &description);
  if (result != cudaSuccess) return result;
  pthread_mutex_lock(&describing);
  if (!function->is_described) function->description = description;
  __atomic_store_n(&function->is_described, on_describe != NULL, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&describing);
  return result;
}

int max_dynamic_shared(const Function* function, int device) {
  const int set = function->dynamic_shared[device];
  return set ? set : SHARED - function->description.static_shared;
}

cudaError_t allow_dynamic_shared(Function* function, int bytes, int device) {
  const cudaError_t result = described(function);
  if (result != cudaSuccess) return result;
  const int room = profile_of(device)->shared_opt_in - function->description.static_shared;
  if (bytes < 0 || bytes > room) return cudaErrorInvalidValue;
  function->dynamic_shared[device] = bytes;
  COUNT(attributes_set);
  return cudaSuccess;
}

/* ---- registration, by the code that nvcc adds to every object file ---- */

API void** __cudaRegisterFatBinary(void* wrapper) {
  return (void**)((Wrapper*)wrapper)->fat_binary;
}

API void __cudaRegisterFatBinaryEnd(void** module) {
  (void)module;
}

API void __cudaUnregisterFatBinary(void** module) {
  (void)module;
}

API char __cudaInitModule(void** module) {
  (void)module;
  return 1;
}

API void __cudaRegisterFunction(void** module, const char* host, char* device, const char* name, int thread_limit,
                                uint3* thread, uint3* block, dim3* block_dim, dim3* grid_dim, int* warp_size) {
  (void)device, (void)thread_limit, (void)thread, (void)block, (void)block_dim, (void)grid_dim, (void)warp_size;
  Function* function = calloc(1, sizeof *function);
  function->host = host;
  function->name = name;
  function->code = module;
  pthread_mutex_lock(&lock);
  if (2 * taken >= slots) grow();
  const size_t at = slot_of(host);
  taken += table[at] == NULL;
  table[at] = function;
  pthread_mutex_unlock(&lock);
}

API void __cudaRegisterVar(void** module, char* host, char* device, const char* name, int is_external, size_t bytes,
                           int is_constant, int is_global) {
  (void)module, (void)host, (void)device, (void)name, (void)is_external, (void)bytes, (void)is_constant;
  (void)is_global; /* variables live in the machine code's own image, which the emulator loads */
}

/* ---- attributes ---- */

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* host) {
  REQUIRE_NO_FAULT();
  Function* function = find_function(host);
  REQUIRE(function, cudaErrorInvalidDeviceFunction);
  REQUIRE_SUCCESS(described(function));
  const Description* d = &function->description;
  memset(attributes, 0, sizeof *attributes);
  attributes->sharedSizeBytes = (size_t)d->static_shared;
  attributes->localSizeBytes = (size_t)d->local_bytes;
  attributes->maxThreadsPerBlock = d->max_threads;
  attributes->numRegs = d->registers;
  attributes->ptxVersion = attributes->binaryVersion = 70;
  attributes->maxDynamicSharedSizeBytes = max_dynamic_shared(function, current_device());
  attributes->preferredShmemCarveout = -1;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void* host, enum cudaFuncAttribute attribute, int value) {
  REQUIRE_NO_FAULT();
  Function* function = find_function(host);
  REQUIRE(function, cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  REQUIRE(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize, cudaErrorInvalidValue);
  return failed(allow_dynamic_shared(function, value, current_device()));
}

/* ---- occupancy ---- */

static int least(int a, int b) {
  return a < b ? a : b;
}

int resident_blocks(const Function* function, int threads, size_t dynamic_shared, int device) {
  const Profile* profile = profile_of(device);
  const Description* d = &function->description;
  const int warps = (threads + WARP - 1) / WARP;
  if (warps == 0 || threads > d->max_threads) return 0;
  int blocks = least(profile->blocks, profile->threads / WARP / warps);
  if (d->registers) {
    /* Each of the four schedulers has a quarter of the registers; a warp takes them in units of 256. */
    const int per_warp = (d->registers + 7) / 8 * 8 * WARP;
    blocks = least(blocks, 4 * (REGISTERS / 4 / per_warp) / warps);
  }
  const size_t shared = ((size_t)d->static_shared + dynamic_shared + 255) / 256 * 256;
  if (shared) blocks = least(blocks, (int)((size_t)profile->shared / shared));
  return blocks;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host, int threads,
                                                                       size_t dynamic_shared, unsigned flags) {
  (void)flags;
  REQUIRE_NO_FAULT();
  Function* function = find_function(host);
  REQUIRE(function, cudaErrorInvalidDeviceFunction);
  REQUIRE_SUCCESS(described(function));
  *blocks = resident_blocks(function, threads, dynamic_shared, current_device());
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads,
                                                              size_t dynamic_shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, dynamic_shared, 0);
}
