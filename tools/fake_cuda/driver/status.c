/* The driver's names of errors; the words are the runtime's. */
#include <string.h>

#include "driver.h"

static const struct {
  int code;
  const char* name;
} statuses[] = {
    {0, "CUDA_SUCCESS"},
    {1, "CUDA_ERROR_INVALID_VALUE"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {801, "CUDA_ERROR_NOT_SUPPORTED"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
};

API CUresult cuGetErrorName(CUresult code, const char** name) {
  *name = NULL;
  for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
    if (statuses[i].code == (int)code) *name = statuses[i].name;
  return *name ? cudaSuccess : cudaErrorInvalidValue;
}

API CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = cudaGetErrorString(code);
  return cudaSuccess;
}
