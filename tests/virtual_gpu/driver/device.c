/* Errors, initialisation, and what the GPU says about itself. */
#include "virtual_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
int initialised;
uint64_t synchronisations;

static const struct {
  CUresult code;
  const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int error_index(CUresult code) {
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) return (int)i;
  return -1;
}

API CUresult cuGetErrorName(CUresult code, const char** name) {
  int i = error_index(code);
  *name = i < 0 ? NULL : errors[i].name;
  return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult code, const char** text) {
  int i = error_index(code);
  *text = i < 0 ? NULL : errors[i].text;
  return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

int device_count(void) {
  const char* text = getenv("VIRTUAL_GPU_DEVICES");
  int count = text ? atoi(text) : 1;
  return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : count;
}

API CUresult cuInit(unsigned flags) {
  REQUIRE_NO_FAULT();
  REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
  initialised = 1;
  return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int* version) {
  REQUIRE_NO_FAULT();
  *version = 12090;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* count) {
  REQUIRE_INITIALISED();
  *count = device_count();
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int index) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(index);
  *device = index;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  memset(name, '#', (size_t)size); /* a driver owes nothing behind the NUL */
  snprintf(name, (size_t)size, "%s   ", model()->name);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  *bytes = 16945512448ull;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  const struct Model* gpu = model();
  const int known[][2] = {
      {1, BLOCK_THREADS},                          /* MAX_THREADS_PER_BLOCK */
      {2, BLOCK_THREADS},                          /* MAX_BLOCK_DIM_X */
      {3, BLOCK_THREADS},                          /* MAX_BLOCK_DIM_Y */
      {4, BLOCK_Z},                                /* MAX_BLOCK_DIM_Z */
      {5, 2147483647},                             /* MAX_GRID_DIM_X */
      {6, GRID_YZ},                                /* MAX_GRID_DIM_Y */
      {7, GRID_YZ},                                /* MAX_GRID_DIM_Z */
      {8, BLOCK_SHARED},                           /* MAX_SHARED_MEMORY_PER_BLOCK */
      {10, 32},                                    /* WARP_SIZE */
      {12, BLOCK_REGISTERS},                       /* MAX_REGISTERS_PER_BLOCK */
      {13, gpu->clock_mhz * 1000},                 /* CLOCK_RATE, kHz */
      {16, gpu->sms},                              /* MULTIPROCESSOR_COUNT */
      {36, gpu->memory_mhz * 1000},                /* MEMORY_CLOCK_RATE, kHz */
      {37, gpu->bus_bits},                         /* GLOBAL_MEMORY_BUS_WIDTH, bits */
      {38, gpu->l2_mib << 20},                     /* L2_CACHE_SIZE */
      {39, gpu->sm_threads},                       /* MAX_THREADS_PER_MULTIPROCESSOR */
      {41, 1},                                     /* UNIFIED_ADDRESSING */
      {75, gpu->arch / 10},                        /* COMPUTE_CAPABILITY_MAJOR */
      {76, gpu->arch % 10},                        /* COMPUTE_CAPABILITY_MINOR */
      {81, gpu->sm_shared},                        /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
      {82, SM_REGISTERS},                          /* MAX_REGISTERS_PER_MULTIPROCESSOR */
      {97, gpu->sm_shared - gpu->reserved_shared}, /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
      {106, gpu->sm_blocks},                       /* MAX_BLOCKS_PER_MULTIPROCESSOR */
  };
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  *value = 0;
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i][0] == attribute) *value = known[i][1];
  return CUDA_SUCCESS;
}

API uint64_t virtual_gpu_synchronisations(void) {
  return __atomic_load_n(&synchronisations, __ATOMIC_RELAXED);
}
