/* The last error of a thread, and the runtime's names of errors. */
#include "runtime.h"

static __thread cudaError_t last;

cudaError_t failed(int status) {
  if (status != cudaSuccess) last = (cudaError_t)status;
  return (cudaError_t)status;
}

API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError(void) {
  return last;
}

static const char* known(const char* text) {
  return text ? text : "unrecognized error code";
}

API const char* cudaGetErrorName(cudaError_t error) {
  return known(status_text((int)error, 1));
}

API const char* cudaGetErrorString(cudaError_t error) {
  return known(status_text((int)error, 0));
}
