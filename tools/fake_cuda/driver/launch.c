/* Checks a launch as a GPU's driver does, then calls back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "driver.h"

static LaunchCallback on_launch;
static int is_called_at_capture;
static int (*holds_gil)(void);

API void fake_cuda_on_launch(LaunchCallback callback, int at_capture) {
  is_called_at_capture = at_capture;
  on_launch = callback;
}

int is_executing(void) {
  return on_launch != NULL;
}

static void find_python(void) {
  *(void**)&holds_gil = dlsym(RTLD_DEFAULT, "PyGILState_Check");
}

CUresult launch_now(const LaunchRecord* launch) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find_python);
  COUNT(launches);
  if (holds_gil && holds_gil()) COUNT(launches_with_gil);
  const LaunchCallback callback = on_launch;
  return callback ? callback(launch) : CUDA_SUCCESS;
}

static int all_within(const uint32_t* extents, uint32_t x, uint32_t y, uint32_t z) {
  return extents[0] - 1u < x && extents[1] - 1u < y && extents[2] - 1u < z; /* 0 wraps around */
}

static uint64_t threads_of(const LaunchRecord* record) {
  return (uint64_t)record->block[0] * record->block[1] * record->block[2];
}

static CUresult check(const Kernel* kernel, const LaunchRecord* record, void** parameters) {
  REQUIRE(all_within(record->grid, GRID_X, GRID_YZ, GRID_YZ), RUNTIME_INVALID_CONFIGURATION);
  REQUIRE(all_within(record->block, THREADS, THREADS, BLOCK_Z), RUNTIME_INVALID_CONFIGURATION);
  const uint64_t threads = threads_of(record);
  REQUIRE(threads <= THREADS, RUNTIME_INVALID_CONFIGURATION);
  REQUIRE(record->dynamic_shared <= record->max_dynamic_shared, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(parameters || !kernel->parameters, CUDA_ERROR_INVALID_VALUE);
  const int blocks = resident_blocks(kernel, (int)threads, record->dynamic_shared, record->device);
  REQUIRE(blocks > 0, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  return CUDA_SUCCESS;
}

CUresult launch(const Kernel* kernel, LaunchRecord* record, void** parameters) {
  unsigned char bytes[PARAMETER_BYTES];
  Graph* graph;
  record->name = kernel->name;
  record->code = kernel->code;
  record->code_bytes = kernel->code_bytes;
  record->max_dynamic_shared = (uint32_t)max_dynamic_shared(kernel, record->device);
  record->params_bytes = kernel->params_bytes;
  record->params = bytes;
  REQUIRE_SUCCESS(check(kernel, record, parameters));
  REQUIRE_SUCCESS(find_capture((CUstream)(uintptr_t)record->stream, &graph));
  memset(bytes, 0, kernel->params_bytes);
  for (int i = 0; i < kernel->parameters; i++)
    memcpy(bytes + kernel->parameter[i].offset, parameters[i], kernel->parameter[i].size);
  if (graph && is_called_at_capture) REQUIRE_SUCCESS(launch_now(record));
  return do_launch(graph, record);
}

/* The context is that of the stream; that of a default stream is the current one. */
API CUresult cuLaunchKernel(const void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned dynamic_shared, CUstream stream,
                            void** parameters, void** extra) {
  REQUIRE_INITIALISED();
  REQUIRE(!extra, CUDA_ERROR_NOT_SUPPORTED); /* the other way to pass parameters */
  Kernel* kernel = find_kernel(handle);
  LaunchRecord record = {
      .grid = {grid_x, grid_y, grid_z},
      .block = {block_x, block_y, block_z},
      .dynamic_shared = dynamic_shared,
      .stream = (uintptr_t)stream,
  };
  REQUIRE(kernel && stream_device(stream, &record.device), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE((uintptr_t)stream > 2 || current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(threads_of(&record) <= (uint64_t)kernel->max_threads, CUDA_ERROR_INVALID_VALUE);
  REQUIRE_SUCCESS(load_kernel(kernel, record.device));
  const CUresult result = launch(kernel, &record, parameters);
  return result == RUNTIME_INVALID_CONFIGURATION ? CUDA_ERROR_INVALID_VALUE : result;
}
