/* Functions by name, as the CUDA bindings look them up through cuGetProcAddress; and functions that are refused. */
#include <string.h>

#include "driver.h"

/* Loading and linking of code that PyTorch or Triton compile at run time. PyTorch links these names, so they must
 * exist. */
#define REFUSED(name)                \
  API CUresult name(void) {          \
    return CUDA_ERROR_NOT_SUPPORTED; \
  }
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuTensorMapEncodeTiled)

/* NVRTC finds this library and requests a private table. It copes with an error, but crashes if the function is absent. */
API CUresult cuGetExportTable(const void** table, const void* id) {
  (void)id;
  *table = NULL;
  return CUDA_ERROR_NOT_FOUND;
}

/* Name that the bindings look up, and its symbol. */
#define ENTRY_POINTS(X)                                                                       \
  X(cuGetErrorName, cuGetErrorName)                                                           \
  X(cuGetErrorString, cuGetErrorString)                                                       \
  X(cuInit, cuInit)                                                                           \
  X(cuDriverGetVersion, cuDriverGetVersion)                                                   \
  X(cuDeviceGetCount, cuDeviceGetCount)                                                       \
  X(cuDeviceGet, cuDeviceGet)                                                                 \
  X(cuDeviceGetName, cuDeviceGetName)                                                         \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2)                                                    \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute)                                               \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                                       \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)                                  \
  X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState)                                   \
  X(cuCtxGetCurrent, cuCtxGetCurrent)                                                         \
  X(cuCtxSetCurrent, cuCtxSetCurrent)                                                         \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2)                                                    \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2)                                                      \
  X(cuCtxGetDevice, cuCtxGetDevice)                                                           \
  X(cuCtxSynchronize, cuCtxSynchronize)                                                       \
  X(cuStreamCreate, cuStreamCreate)                                                           \
  X(cuStreamDestroy, cuStreamDestroy_v2)                                                      \
  X(cuStreamSynchronize, cuStreamSynchronize)                                                 \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2)                                            \
  X(cuStreamEndCapture, cuStreamEndCapture)                                                   \
  X(cuStreamIsCapturing, cuStreamIsCapturing)                                                 \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode)                     \
  X(cuLibraryLoadData, cuLibraryLoadData)                                                     \
  X(cuLibraryUnload, cuLibraryUnload)                                                         \
  X(cuLibraryGetKernel, cuLibraryGetKernel)                                                   \
  X(cuKernelGetFunction, cuKernelGetFunction)                                                 \
  X(cuFuncLoad, cuFuncLoad)                                                                   \
  X(cuKernelGetAttribute, cuKernelGetAttribute)                                               \
  X(cuKernelSetAttribute, cuKernelSetAttribute)                                               \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor) \
  X(cuLaunchKernel, cuLaunchKernel)                                                           \
  X(cuGetExportTable, cuGetExportTable)                                                       \
  X(cuGetProcAddress, cuGetProcAddress_v2)

/* Only the addresses matter here, so every function is declared as bytes under its symbol's name. */
#define DECLARE(name, symbol) extern char symbol##_address[] __asm__(#symbol);
ENTRY_POINTS(DECLARE)

API CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  static const struct {
    const char* name;
    void* address;
  } table[] = {
#define ROW(name, symbol) {#name, symbol##_address},
      ENTRY_POINTS(ROW)};
  (void)version, (void)flags;
  *function = NULL;
  for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(table[i].name, name)) *function = table[i].address;
  if (status) *status = *function ? 0 : 1; /* found, or no such symbol */
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
