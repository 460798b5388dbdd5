/* Devices, and which one is current: the device of the driver's current context. */
#include <stdio.h>
#include <string.h>

#include "runtime.h"

/* Every runtime call initialises the driver; here, the library does when it is loaded. */
__attribute__((constructor)) static void initialise(void) {
  cuInit(0);
}

int working_device(void) {
  if (!current_context() && device_count()) make_current(0);
  return current_device();
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
  REQUIRE_DEVICE(device);
  make_current(device);
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
  return failed(cuDriverGetVersion(version));
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  REQUIRE_NO_FAULT();
  REQUIRE_DEVICE(device);
  const Profile* gpu = profile_of(device);
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", gpu->name);
  properties->totalGlobalMem = (size_t)gpu->memory_gib << 30;
  properties->sharedMemPerBlock = SHARED;
  properties->sharedMemPerBlockOptin = (size_t)(gpu->sm_shared - gpu->reserved_shared);
  properties->sharedMemPerMultiprocessor = (size_t)gpu->sm_shared;
  properties->regsPerBlock = properties->regsPerMultiprocessor = REGISTERS;
  properties->warpSize = WARP;
  properties->maxThreadsPerBlock = THREADS;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = THREADS;
  properties->maxThreadsDim[2] = BLOCK_Z;
  properties->maxGridSize[0] = GRID_X;
  properties->maxGridSize[1] = properties->maxGridSize[2] = GRID_YZ;
  properties->major = gpu->arch / 10;
  properties->minor = gpu->arch % 10;
  properties->multiProcessorCount = gpu->sms;
  properties->maxThreadsPerMultiProcessor = gpu->sm_threads;
  properties->maxBlocksPerMultiProcessor = gpu->sm_blocks;
  properties->memoryBusWidth = gpu->bus_bits;
  properties->l2CacheSize = gpu->l2_mib << 20;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  REQUIRE_NO_FAULT();
  return failed(cuDeviceGetAttribute(value, (int)attribute, device)); /* the numbers are the same */
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  REQUIRE_DEVICE(device);
  snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  REQUIRE_DEVICE(device);
  REQUIRE_DEVICE(peer);
  *can = 0; /* a kernel that accesses another device's memory is then a fault */
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize(void) {
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(forbidden_while_capturing());
  COUNT(synchronisations);
  return cudaSuccess;
}
