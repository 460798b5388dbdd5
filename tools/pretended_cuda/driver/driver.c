/* What PyTorch links of libcuda, for a process in which the CUDA runtime is pretended.
 *
 * It asks whether a device has a context, and gets yes: with the pretended runtime there is nothing to initialise. The
 * rest serves code that PyTorch compiles at run time, which is refused.
 */
#define API __attribute__((visibility("default")))

typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_SUPPORTED = 801 } CUresult;

API CUresult cuInit(unsigned flags) {
  (void)flags;
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(void** context) {
  static char primary;
  *context = &primary;
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = code == CUDA_SUCCESS ? "no error" : "not supported by the pretended driver";
  return CUDA_SUCCESS;
}

#define REFUSED(name)                \
  API CUresult name(void) {          \
    return CUDA_ERROR_NOT_SUPPORTED; \
  }

REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
