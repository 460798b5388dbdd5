/* Contexts, and which device is current: to the driver and to the runtime alike.
 *
 * Each device has one context, its primary one, which everybody shares. A thread has a stack of contexts; the device of
 * the topmost is current. A new thread has none until it sets a device, or until the runtime gives it work to do. */
#include <stdio.h>
#include <string.h>

#include "driver.h"

enum { DEPTH = 16 };

struct Context {
  int is_active; /* somebody has used it */
};

static struct Context primary[MAX_DEVICES];
static __thread CUcontext stack[DEPTH];
static __thread int depth;

CUcontext current_context(void) {
  return depth ? stack[depth - 1] : NULL;
}

static CUcontext activated(int device) {
  __atomic_store_n(&primary[device].is_active, 1, __ATOMIC_RELAXED);
  return &primary[device];
}

static void replace_top(CUcontext context) {
  if (depth == 0) depth = 1;
  stack[depth - 1] = context;
}

/* ---- for the runtime ---- */

int current_device(void) {
  const CUcontext context = current_context();
  return context ? (int)(context - primary) : 0;
}

void make_current(int device) {
  replace_top(activated(device));
}

int working_device(void) {
  if (!current_context() && device_count()) make_current(0);
  return current_device();
}

/* ---- contexts ---- */

static int is_context(CUcontext context) {
  return context >= primary && context < primary + device_count() && context->is_active;
}

API CUresult cuInit(unsigned flags) {
  REQUIRE_NO_FAULT();
  REQUIRE(flags == 0, cudaErrorInvalidValue);
  REQUIRE(device_count(), cudaErrorNoDevice);
  return cudaSuccess;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  REQUIRE_NO_FAULT();
  REQUIRE_DEVICE(device);
  *context = activated(device);
  return cudaSuccess;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  REQUIRE_DEVICE(device); /* the runtime keeps it all the same */
  return cudaSuccess;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  REQUIRE_DEVICE(device);
  *flags = 0;
  *active = __atomic_load_n(&primary[device].is_active, __ATOMIC_RELAXED);
  return cudaSuccess;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
  REQUIRE_NO_FAULT();
  *context = current_context();
  return cudaSuccess;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  REQUIRE_NO_FAULT();
  REQUIRE(!context || is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  replace_top(context);
  return cudaSuccess;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  REQUIRE_NO_FAULT();
  REQUIRE(is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(depth < DEPTH, cudaErrorInvalidValue);
  stack[depth++] = context;
  return cudaSuccess;
}

API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  REQUIRE_NO_FAULT();
  REQUIRE(depth > 0, CUDA_ERROR_INVALID_CONTEXT);
  depth--;
  if (context) *context = stack[depth];
  return cudaSuccess;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  *device = current_device();
  return cudaSuccess;
}

API CUresult cuCtxSynchronize(void) {
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  return cudaDeviceSynchronize();
}

/* ---- devices: numbers and attributes are the runtime's ---- */

API CUresult cuDriverGetVersion(int* version) {
  return cudaDriverGetVersion(version);
}

API CUresult cuDeviceGetCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}

API CUresult cuDeviceGet(CUdevice* device, int index) {
  REQUIRE_NO_FAULT();
  REQUIRE_DEVICE(index);
  *device = index;
  return cudaSuccess;
}

API CUresult cuDeviceGetName(char* name, int room, CUdevice device) {
  REQUIRE_DEVICE(device);
  snprintf(name, (size_t)room, "%s", profile_of(device)->name);
  return cudaSuccess;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  REQUIRE_DEVICE(device);
  *bytes = profile_of(device)->memory;
  return cudaSuccess;
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

/* ---- streams: those of the runtime ---- */

API CUresult cuStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  return cudaStreamIsCapturing(stream, status);
}

API CUresult cuThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  return cudaThreadExchangeStreamCaptureMode(mode);
}

API CUresult cuStreamSynchronize(cudaStream_t stream) {
  return cudaStreamSynchronize(stream);
}
