/* Checks a launch as the driver of the fake GPU would, then hands it over. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "function.h"

static LaunchCallback on_launch;

API void fake_cuda_on_launch(LaunchCallback callback) {
  on_launch = callback;
}

int poisoning(void) {
  return on_launch != NULL;
}

static int (*holds_gil)(void);

static void find_python(void) {
  *(void**)&holds_gil = dlsym(RTLD_DEFAULT, "PyGILState_Check");
}

cudaError_t launch_now(const LaunchRecord* launch) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find_python);
  COUNT(launches);
  if (holds_gil && holds_gil()) COUNT(launches_with_gil);
  const LaunchCallback callback = on_launch;
  return callback ? (cudaError_t)callback(launch) : cudaSuccess;
}

static int all_within(dim3 extents, unsigned x, unsigned y, unsigned z) {
  return extents.x - 1u < x && extents.y - 1u < y && extents.z - 1u < z; /* 0 wraps around */
}

static cudaError_t check(const Function* function, dim3 grid, dim3 block, size_t dynamic_shared, int device) {
  const Description* d = &function->description;
  if (!all_within(grid, 2147483647u, GRID_YZ, GRID_YZ)) return cudaErrorInvalidConfiguration;
  if (!all_within(block, THREADS, THREADS, BLOCK_Z)) return cudaErrorInvalidConfiguration;
  const uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (threads > THREADS) return cudaErrorInvalidConfiguration;
  if (threads > (uint64_t)d->max_threads) return cudaErrorLaunchOutOfResources;
  const uint64_t warps = (threads + WARP - 1) / WARP, registers = (uint64_t)(d->registers + 7) / 8 * 8;
  if (warps * WARP * registers > REGISTERS) return cudaErrorLaunchOutOfResources;
  if (dynamic_shared > (size_t)max_dynamic_shared(function, device)) return cudaErrorInvalidValue;
  return cudaSuccess;
}

cudaError_t launch(Function* function, dim3 grid, dim3 block, void** parameters, size_t dynamic_shared,
                   cudaStream_t stream, int device) {
  cudaError_t result = described(function);
  if (result == cudaSuccess) result = check(function, grid, block, dynamic_shared, device);
  Graph* graph = NULL;
  if (result == cudaSuccess) result = find_capture(stream, &graph);
  if (result != cudaSuccess) return result;

  const Description* d = &function->description;
  unsigned char bytes[PARAMETER_BYTES];
  memset(bytes, 0, d->params_bytes);
  for (int i = 0; i < d->parameters; i++) memcpy(bytes + d->parameter[i].offset, parameters[i], d->parameter[i].size);
  const LaunchRecord record = {
      .name = function->name,
      .cubin = d->cubin,
      .cubin_bytes = d->cubin_bytes,
      .grid = {grid.x, grid.y, grid.z},
      .block = {block.x, block.y, block.z},
      .dynamic_shared = (uint32_t)dynamic_shared,
      .max_dynamic_shared = (uint32_t)max_dynamic_shared(function, device),
      .stream = (uintptr_t)stream,
      .device = device,
      .params_bytes = d->params_bytes,
      .params = bytes,
  };
  return do_launch(graph, &record);
}

API cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** parameters, size_t dynamic_shared,
                                 cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  Function* function = find_function(host);
  REQUIRE(function, cudaErrorInvalidDeviceFunction);
  int device;
  REQUIRE(stream_device(stream, &device) && device == working_device(), cudaErrorInvalidResourceHandle);
  return failed(launch(function, grid, block, parameters, dynamic_shared, stream, device));
}

#if CUDART_VERSION >= 11080
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** parameters) {
  for (unsigned i = 0; i < config->numAttrs; i++) /* clusters and the like: no 7.x GPU has them */
    REQUIRE(config->attrs[i].id == cudaLaunchAttributeIgnore, cudaErrorNotSupported);
  return cudaLaunchKernel(host, config->gridDim, config->blockDim, parameters, config->dynamicSmemBytes,
                          config->stream);
}
#endif

/* ---- what nvcc makes of <<<grid, block, shared, stream>>> ---- */

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
