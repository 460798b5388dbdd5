/* Kernels in fat binaries: registration, attributes, occupancy, launches. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

typedef struct {
  const void* host; /* the address of the compiler's stub, which identifies the kernel */
  const void* fat_binary;
  int is_described;
  Kernel kernel;
} Function;

/* The argument of __cudaRegisterFatBinary. */
typedef struct {
  int magic, version;
  const void* fat_binary;
  void* more;
} Wrapper;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t describing = PTHREAD_MUTEX_INITIALIZER;
static UnpackCallback on_unpack;

/* A hash table with open addressing, which never shrinks. PyTorch registers some forty thousand kernels. */
static Function** table;
static size_t slots, taken;

API void fake_cuda_on_unpack(UnpackCallback callback) {
  on_unpack = callback;
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

static CUresult describe(Function* function) {
  if (__atomic_load_n(&function->is_described, __ATOMIC_ACQUIRE)) return CUDA_SUCCESS;
  if (!on_unpack) return CUDA_SUCCESS;
  /* Without a lock: the callback waits for Python's GIL, and its holder may wait for the lock. */
  Kernel kernel = function->kernel; /* its name, and opt-ins that came before the callback */
  kernel.code = on_unpack(function->fat_binary);
  if (!kernel.code || !read_kernel(&kernel)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  kernel.code_bytes = cubin_bytes(kernel.code);
  pthread_mutex_lock(&describing);
  if (!function->is_described) function->kernel = kernel;
  __atomic_store_n(&function->is_described, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&describing);
  return CUDA_SUCCESS;
}

/* A registered kernel, with its attributes. */
static CUresult find_function(const void* host, Kernel** kernel) {
  pthread_mutex_lock(&lock);
  Function* found = slots ? table[slot_of(host)] : NULL;
  pthread_mutex_unlock(&lock);
  if (!found) return RUNTIME_INVALID_FUNCTION;
  *kernel = &found->kernel;
  return describe(found);
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
  *function = (Function){.host = host, .fat_binary = module, .kernel = {.name = name, .max_threads = THREADS}};
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
  (void)is_global; /* variables are in the machine code's image, which the emulator loads */
}

/* ---- attributes and occupancy ---- */

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* host) {
  Kernel* kernel;
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(find_function(host, &kernel));
  memset(attributes, 0, sizeof *attributes);
  attributes->sharedSizeBytes = (size_t)kernel->static_shared;
  attributes->localSizeBytes = (size_t)kernel->local_bytes;
  attributes->maxThreadsPerBlock = kernel->max_threads;
  attributes->numRegs = kernel->registers;
  attributes->ptxVersion = attributes->binaryVersion = kernel->code ? cubin_arch(kernel->code) : 70;
  attributes->maxDynamicSharedSizeBytes = max_dynamic_shared(kernel, current_device());
  attributes->preferredShmemCarveout = -1;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void* host, enum cudaFuncAttribute attribute, int value) {
  Kernel* kernel;
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(find_function(host, &kernel));
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  REQUIRE(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize, cudaErrorInvalidValue);
  return failed(allow_dynamic_shared(kernel, value, current_device()));
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host, int threads,
                                                                       size_t dynamic_shared, unsigned flags) {
  Kernel* kernel;
  (void)flags;
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(find_function(host, &kernel));
  *blocks = resident_blocks(kernel, threads, dynamic_shared, current_device());
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads,
                                                              size_t dynamic_shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, dynamic_shared, 0);
}

/* ---- launches ---- */

API cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** parameters, size_t dynamic_shared,
                                 cudaStream_t stream) {
  Kernel* kernel;
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(find_function(host, &kernel));
  LaunchRecord record = {
      .grid = {grid.x, grid.y, grid.z},
      .block = {block.x, block.y, block.z},
      .dynamic_shared = (uint32_t)dynamic_shared,
      .stream = (uintptr_t)stream,
  };
  const int is_stream = stream_device(stream, &record.device);
  REQUIRE(is_stream && record.device == working_device(), cudaErrorInvalidResourceHandle);
  return failed(launch(kernel, &record, parameters));
}

#if CUDART_VERSION >= 11080
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** parameters) {
  for (unsigned i = 0; i < config->numAttrs; i++) /* clusters and the like, which no 7.x GPU has */
    REQUIRE(config->attrs[i].id == cudaLaunchAttributeIgnore, cudaErrorNotSupported);
  return cudaLaunchKernel(host, config->gridDim, config->blockDim, parameters, config->dynamicSmemBytes,
                          config->stream);
}
#endif

/* nvcc compiles <<<grid, block, shared, stream>>> to these two. */
static __thread struct {
  dim3 grid, block;
  size_t dynamic_shared;
  cudaStream_t stream;
} configuration;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t dynamic_shared, struct CUstream_st* stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.dynamic_shared = dynamic_shared;
  configuration.stream = stream;
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* dynamic_shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *dynamic_shared = configuration.dynamic_shared;
  *(cudaStream_t*)stream = configuration.stream;
  return cudaSuccess;
}
