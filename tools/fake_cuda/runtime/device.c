/* Which GPUs are pretended, and what they say about themselves. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

static const Profile profiles[] = {
    {"v100", "Pretended Tesla V100-SXM2-16GB", 7, 0, 80, 2048, 32, 96 << 10, 96 << 10, 16945512448ull, 1530000, 877000,
     4096, 6 << 20},
    {"t4", "Pretended Tesla T4", 7, 5, 40, 1024, 16, 64 << 10, 64 << 10, 15843721216ull, 1590000, 5001000, 256,
     4 << 20},
};

static const Profile* devices[MAX_DEVICES];
static int found;
static pthread_once_t once = PTHREAD_ONCE_INIT;
Counts counts;

/* PRETENDED_CUDA_DEVICES in the environment: keys of profiles with commas between them, "v100" if absent. */
static void read_devices(void) {
  const char* text = getenv("PRETENDED_CUDA_DEVICES");
  char keys[256];
  snprintf(keys, sizeof keys, "%s", text ? text : "v100");
  char* rest = keys;
  for (char* key; (key = strsep(&rest, ",")) && found < MAX_DEVICES;) {
    const Profile* profile = NULL;
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++)
      if (!strcmp(key, profiles[i].key)) profile = &profiles[i];
    if (profile) {
      devices[found++] = profile;
    } else if (*key) {
      fprintf(stderr, "PRETENDED_CUDA_DEVICES: there is no profile '%s' in fake_cuda/runtime/device.c\n", key);
      exit(1);
    }
  }
}

int device_count(void) {
  pthread_once(&once, read_devices);
  return found;
}

const Profile* profile_of(int device) {
  return device >= 0 && device < device_count() ? devices[device] : NULL;
}

API Counts fake_cuda_counts(void) {
  return counts;
}

API cudaError_t cudaGetDeviceCount(int* count) {
  REQUIRE_NO_FAULT();
  *count = device_count();
  REQUIRE(*count, cudaErrorNoDevice);
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  REQUIRE_NO_FAULT();
  *device = current_device();
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  REQUIRE_NO_FAULT();
  REQUIRE(profile_of(device), cudaErrorInvalidDevice);
  make_current(device);
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  REQUIRE_NO_FAULT();
  const Profile* profile = profile_of(device);
  REQUIRE(profile, cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", profile->name);
  properties->totalGlobalMem = profile->memory;
  properties->sharedMemPerBlock = SHARED;
  properties->sharedMemPerBlockOptin = (size_t)profile->shared_opt_in;
  properties->sharedMemPerMultiprocessor = (size_t)profile->shared;
  properties->regsPerBlock = properties->regsPerMultiprocessor = REGISTERS;
  properties->warpSize = WARP;
  properties->maxThreadsPerBlock = THREADS;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = THREADS;
  properties->maxThreadsDim[2] = BLOCK_Z;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = GRID_YZ;
  properties->major = profile->major;
  properties->minor = profile->minor;
  properties->multiProcessorCount = profile->multiprocessors;
  properties->maxThreadsPerMultiProcessor = profile->threads;
  properties->maxBlocksPerMultiProcessor = profile->blocks;
  properties->memoryBusWidth = profile->bus_width;
  properties->l2CacheSize = profile->l2_bytes;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  REQUIRE_NO_FAULT();
  const Profile* profile = profile_of(device);
  REQUIRE(profile, cudaErrorInvalidDevice);
  const struct {
    enum cudaDeviceAttr attribute;
    int value;
  } known[] = {
      {cudaDevAttrMaxThreadsPerBlock, THREADS},
      {cudaDevAttrMaxBlockDimX, THREADS},
      {cudaDevAttrMaxBlockDimY, THREADS},
      {cudaDevAttrMaxBlockDimZ, BLOCK_Z},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, GRID_YZ},
      {cudaDevAttrMaxGridDimZ, GRID_YZ},
      {cudaDevAttrMaxSharedMemoryPerBlock, SHARED},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, profile->shared_opt_in},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, profile->shared},
      {cudaDevAttrMaxRegistersPerBlock, REGISTERS},
      {cudaDevAttrMaxRegistersPerMultiprocessor, REGISTERS},
      {cudaDevAttrWarpSize, WARP},
      {cudaDevAttrMultiProcessorCount, profile->multiprocessors},
      {cudaDevAttrMaxThreadsPerMultiProcessor, profile->threads},
      {cudaDevAttrMaxBlocksPerMultiprocessor, profile->blocks},
      {cudaDevAttrComputeCapabilityMajor, profile->major},
      {cudaDevAttrComputeCapabilityMinor, profile->minor},
      {cudaDevAttrClockRate, profile->clock_rate},
      {cudaDevAttrMemoryClockRate, profile->memory_clock_rate},
      {cudaDevAttrGlobalMemoryBusWidth, profile->bus_width},
      {cudaDevAttrL2CacheSize, profile->l2_bytes},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrConcurrentKernels, 1},
  };
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == attribute) *value = known[i].value;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  REQUIRE(profile_of(device), cudaErrorInvalidDevice);
  snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  REQUIRE(profile_of(device) && profile_of(peer), cudaErrorInvalidDevice);
  *can = 0; /* a kernel that reaches into another device's memory is then a mistake that shows */
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize(void) {
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(forbidden_while_capturing());
  COUNT(synchronisations);
  return cudaSuccess;
}
