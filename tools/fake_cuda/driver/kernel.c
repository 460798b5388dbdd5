/* Attributes and occupancy of a kernel. Handles of kernels are accepted as functions, as the driver accepts them. */
#include "driver.h"

enum {
  ATTRIBUTE_MAX_THREADS = 0,
  ATTRIBUTE_STATIC_SHARED = 1,
  ATTRIBUTE_LOCAL_BYTES = 3,
  ATTRIBUTE_REGISTERS = 4,
  ATTRIBUTE_DYNAMIC_SHARED = 8,
  ATTRIBUTE_CARVEOUT = 9,
};

CUresult load_kernel(Kernel* kernel, int device) {
  if (__atomic_load_n(&kernel->is_loaded[device], __ATOMIC_ACQUIRE)) return CUDA_SUCCESS;
  REQUIRE_SUCCESS(forbidden_while_capturing());
  __atomic_store_n(&kernel->is_loaded[device], 1, __ATOMIC_RELEASE);
  return CUDA_SUCCESS;
}

int max_dynamic_shared(const Kernel* kernel, int device) {
  const int set = kernel->dynamic_shared[device];
  return set ? set : SHARED - kernel->static_shared;
}

CUresult allow_dynamic_shared(Kernel* kernel, int bytes, int device) {
  const Profile* gpu = profile_of(device);
  const int room = gpu->sm_shared - gpu->reserved_shared - kernel->static_shared;
  REQUIRE(bytes >= 0 && bytes <= room, CUDA_ERROR_INVALID_VALUE);
  kernel->dynamic_shared[device] = bytes;
  COUNT(attributes_set);
  return CUDA_SUCCESS;
}

static int least(int a, int b) {
  return a < b ? a : b;
}

/* Shared memory is allocated in whole units. A warp takes registers in units of 256, from the quarter of them that its
 * scheduler has. */
int resident_blocks(const Kernel* kernel, int threads, size_t dynamic_shared, int device) {
  const Profile* gpu = profile_of(device);
  const int warps = (threads + WARP - 1) / WARP, per_warp = (kernel->registers + 7) / 8 * 8 * WARP;
  if (warps == 0 || threads > kernel->max_threads) return 0;
  int blocks = least(gpu->sm_blocks, gpu->sm_threads / WARP / warps);
  if (per_warp) blocks = least(blocks, 4 * (REGISTERS / 4 / per_warp) / warps);
  const int used = kernel->static_shared + (int)dynamic_shared + gpu->reserved_shared;
  const int shared = (used + gpu->shared_unit - 1) / gpu->shared_unit * gpu->shared_unit;
  return shared ? least(blocks, gpu->sm_shared / shared) : blocks;
}

API CUresult cuKernelGetFunction(const void** function, const void* kernel) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(find_kernel(kernel), CUDA_ERROR_INVALID_HANDLE);
  *function = kernel;
  return CUDA_SUCCESS;
}

API CUresult cuFuncLoad(const void* function) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  Kernel* kernel = find_kernel(function);
  REQUIRE(kernel, CUDA_ERROR_INVALID_HANDLE);
  return load_kernel(kernel, current_device());
}

API CUresult cuKernelGetAttribute(int* value, int attribute, const void* handle, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  const Kernel* kernel = find_kernel(handle);
  REQUIRE(kernel, CUDA_ERROR_INVALID_HANDLE);
  const int known[][2] = {
      {ATTRIBUTE_MAX_THREADS, kernel->max_threads},
      {ATTRIBUTE_STATIC_SHARED, kernel->static_shared},
      {ATTRIBUTE_LOCAL_BYTES, kernel->local_bytes},
      {ATTRIBUTE_REGISTERS, kernel->registers},
      {ATTRIBUTE_DYNAMIC_SHARED, max_dynamic_shared(kernel, device)},
  };
  *value = 0;
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i][0] == attribute) *value = known[i][1];
  return CUDA_SUCCESS;
}

API CUresult cuKernelSetAttribute(int attribute, int value, const void* handle, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  Kernel* kernel = find_kernel(handle);
  REQUIRE(kernel, CUDA_ERROR_INVALID_HANDLE);
  if (attribute == ATTRIBUTE_CARVEOUT) return CUDA_SUCCESS;
  REQUIRE(attribute == ATTRIBUTE_DYNAMIC_SHARED, CUDA_ERROR_INVALID_VALUE);
  return allow_dynamic_shared(kernel, value, device);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* handle, int threads, size_t shared) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  const Kernel* kernel = find_kernel(handle);
  REQUIRE(kernel, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(threads > 0, CUDA_ERROR_INVALID_VALUE);
  *blocks = resident_blocks(kernel, threads, shared, current_device());
  return CUDA_SUCCESS;
}
