/* Errors: their names, the last one of a thread, and calls that fail because a test wants them to. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "fake_cuda.h"

static const struct {
  cudaError_t code;
  const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorInvalidKernelImage, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "the capture was not initiated in this stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
};

static __thread cudaError_t last;

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError(void) {
  return last;
}

API const char* cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == error) return errors[i].name;
  return "an error that fake_cuda/runtime/error.c does not name";
}

API const char* cudaGetErrorString(cudaError_t error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == error) return errors[i].text;
  return "an error that fake_cuda/runtime/error.c does not name";
}

/* ---- calls that fail because a test wants them to ---- */

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static char failing[64];
static int before, left, with, faults;

API void fake_cuda_fail(const char* function, int nth, int count, int code) {
  pthread_mutex_lock(&guard);
  snprintf(failing, sizeof failing, "%s", function ? function : "");
  before = nth - 1;
  left = count;
  with = code;
  faults = 0;
  pthread_mutex_unlock(&guard);
}

API int fake_cuda_faults(void) {
  return __atomic_load_n(&faults, __ATOMIC_SEQ_CST);
}

cudaError_t fault_of(const char* function) {
  if (!__atomic_load_n(&failing[0], __ATOMIC_RELAXED)) return cudaSuccess; /* the usual case, at no cost */
  cudaError_t fault = cudaSuccess;
  pthread_mutex_lock(&guard);
  if (!strcmp(function, failing) && before-- <= 0 && left > 0) {
    left--;
    faults++;
    fault = (cudaError_t)with;
  }
  pthread_mutex_unlock(&guard);
  return fault;
}
