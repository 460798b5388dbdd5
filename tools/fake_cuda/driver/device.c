/* The GPUs and their attributes. Limits are from the CUDA programming guide's table of compute capabilities. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define SM_70 2048, 32, 96 << 10, 0, 256
#define SM_75 1024, 16, 64 << 10, 0, 256
#define SM_80 2048, 32, 164 << 10, 1024, 128
#define SM_86 1536, 16, 100 << 10, 1024, 128
#define SM_87 1536, 16, 164 << 10, 1024, 128
#define SM_89 1536, 24, 100 << 10, 1024, 128
#define SM_90 2048, 32, 228 << 10, 1024, 128

static const Profile profiles[] = {
    {"v100", "Virtual Tesla V100-SXM2-16GB", 70, 80, 1530, 6, 16, 877, 4096, SM_70},
    {"t4", "Virtual Tesla T4", 75, 40, 1590, 4, 15, 5001, 256, SM_75},
    {"a100", "Virtual A100-SXM4-40GB", 80, 108, 1410, 40, 40, 1215, 5120, SM_80},
    {"a30", "Virtual A30", 80, 56, 1440, 24, 24, 1215, 3072, SM_80},
    {"rtx3090", "Virtual GeForce RTX 3090", 86, 82, 1695, 6, 24, 9751, 384, SM_86},
    {"a10", "Virtual A10", 86, 72, 1695, 6, 24, 6251, 384, SM_86},
    {"orin", "Virtual Orin", 87, 16, 1300, 4, 32, 3200, 256, SM_87},
    {"rtx4090", "Virtual GeForce RTX 4090", 89, 128, 2520, 72, 24, 10501, 384, SM_89},
    {"l40s", "Virtual L40S", 89, 142, 2520, 96, 48, 9001, 384, SM_89},
    {"l4", "Virtual L4", 89, 58, 2040, 48, 24, 6251, 192, SM_89},
    {"h100", "Virtual H100 80GB HBM3", 90, 132, 1980, 50, 80, 2619, 5120, SM_90},
    {"b200", "Virtual B200", 100, 148, 1850, 126, 180, 3996, 8192, SM_90},
    {"b300", "Virtual B300", 103, 148, 1850, 126, 270, 3996, 8192, SM_90},
    {"rtx5090", "Virtual GeForce RTX 5090", 120, 170, 2407, 96, 32, 14001, 512, SM_89},
    /* Integrated: the driver reports neither memory clock nor bus width. */
    {"gb10", "Virtual GB10", 121, 48, 2418, 24, 128, 0, 0, SM_89},
    /* Newer than any compiler. */
    {"unborn", "Virtual GPU of tomorrow", 190, 200, 2000, 128, 192, 4000, 8192, SM_90},
};

int initialised;
Counts counts;
static const Profile* devices[MAX_DEVICES];
static int found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* FAKE_CUDA_DEVICES in the environment: keys of profiles, separated by commas; "v100" if absent. */
static void read_devices(void) {
  const char* text = getenv("FAKE_CUDA_DEVICES");
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
      fprintf(stderr, "FAKE_CUDA_DEVICES: there is no profile '%s' in tools/fake_cuda/driver/device.c\n", key);
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

/* Compute capability of the oldest of the GPUs, 70 for 7.0. */
API int fake_cuda_oldest_arch(void) {
  int oldest = 1000;
  for (int i = 0; i < device_count(); i++)
    if (devices[i]->arch < oldest) oldest = devices[i]->arch;
  return oldest;
}

API Counts fake_cuda_counts(void) {
  return counts;
}

API CUresult cuInit(unsigned flags) {
  REQUIRE_NO_FAULT();
  REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(device_count(), CUDA_ERROR_NO_DEVICE);
  initialised = 1;
  return CUDA_SUCCESS;
}

/* FAKE_CUDA_VERSION in the environment: 12020 for a driver of CUDA 12.2; 12.9 if absent. */
API CUresult cuDriverGetVersion(int* version) {
  REQUIRE_NO_FAULT();
  const char* text = getenv("FAKE_CUDA_VERSION");
  *version = text ? atoi(text) : 12090;
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

API CUresult cuDeviceGetName(char* name, int room, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  memset(name, '#', (size_t)room); /* bytes after the NUL are undefined */
  snprintf(name, (size_t)room, "%s   ", profile_of(device)->name);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  *bytes = (size_t)profile_of(device)->memory_gib << 30;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  const Profile* gpu = profile_of(device);
  const int known[][2] = {
      {1, THREADS},                                /* MAX_THREADS_PER_BLOCK */
      {2, THREADS},                                /* MAX_BLOCK_DIM_X */
      {3, THREADS},                                /* MAX_BLOCK_DIM_Y */
      {4, BLOCK_Z},                                /* MAX_BLOCK_DIM_Z */
      {5, GRID_X},                                 /* MAX_GRID_DIM_X */
      {6, GRID_YZ},                                /* MAX_GRID_DIM_Y */
      {7, GRID_YZ},                                /* MAX_GRID_DIM_Z */
      {8, SHARED},                                 /* MAX_SHARED_MEMORY_PER_BLOCK */
      {10, WARP},                                  /* WARP_SIZE */
      {12, REGISTERS},                             /* MAX_REGISTERS_PER_BLOCK */
      {13, gpu->clock_mhz * 1000},                 /* CLOCK_RATE, kHz */
      {16, gpu->sms},                              /* MULTIPROCESSOR_COUNT */
      {31, 1},                                     /* CONCURRENT_KERNELS */
      {36, gpu->memory_mhz * 1000},                /* MEMORY_CLOCK_RATE, kHz */
      {37, gpu->bus_bits},                         /* GLOBAL_MEMORY_BUS_WIDTH, bits */
      {38, gpu->l2_mib << 20},                     /* L2_CACHE_SIZE */
      {39, gpu->sm_threads},                       /* MAX_THREADS_PER_MULTIPROCESSOR */
      {41, 1},                                     /* UNIFIED_ADDRESSING */
      {75, gpu->arch / 10},                        /* COMPUTE_CAPABILITY_MAJOR */
      {76, gpu->arch % 10},                        /* COMPUTE_CAPABILITY_MINOR */
      {81, gpu->sm_shared},                        /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
      {82, REGISTERS},                             /* MAX_REGISTERS_PER_MULTIPROCESSOR */
      {97, gpu->sm_shared - gpu->reserved_shared}, /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
      {106, gpu->sm_blocks},                       /* MAX_BLOCKS_PER_MULTIPROCESSOR */
  };
  *value = 0;
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i][0] == attribute) *value = known[i][1];
  return CUDA_SUCCESS;
}
