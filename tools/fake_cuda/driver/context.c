/* Primary contexts, and each thread's stack of current contexts. The runtime has the same current device. */
#include "driver.h"

enum { DEPTH = 16 };

struct Context {
  int retained;
  int is_runtimes; /* the runtime has used it, and never releases it */
};

static struct Context primary[MAX_DEVICES];
static __thread CUcontext stack[DEPTH];
static __thread int depth;

CUcontext current_context(void) {
  return depth ? stack[depth - 1] : NULL;
}

static void replace_top(CUcontext context) {
  if (depth == 0) depth = 1;
  stack[depth - 1] = context;
}

int current_device(void) {
  const CUcontext context = current_context();
  return context ? (int)(context - primary) : 0;
}

void make_current(int device) {
  __atomic_store_n(&primary[device].is_runtimes, 1, __ATOMIC_RELAXED);
  replace_top(&primary[device]);
}

static int is_active(int device) {
  const struct Context* context = &primary[device];
  return __atomic_load_n(&context->retained, __ATOMIC_RELAXED) > 0 ||
         __atomic_load_n(&context->is_runtimes, __ATOMIC_RELAXED);
}

static int is_context(CUcontext context) {
  return context >= primary && context < primary + device_count() && is_active((int)(context - primary));
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  __atomic_add_fetch(&primary[device].retained, 1, __ATOMIC_SEQ_CST);
  *context = &primary[device];
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  REQUIRE(primary[device].retained > 0, CUDA_ERROR_INVALID_CONTEXT);
  __atomic_sub_fetch(&primary[device].retained, 1, __ATOMIC_SEQ_CST);
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  *flags = 0;
  *active = is_active(device);
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
  REQUIRE_INITIALISED();
  *context = current_context();
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  REQUIRE_INITIALISED();
  REQUIRE(!context || is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  replace_top(context);
  return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  REQUIRE_INITIALISED();
  REQUIRE(is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(depth < DEPTH, CUDA_ERROR_INVALID_VALUE);
  stack[depth++] = context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  REQUIRE_INITIALISED();
  REQUIRE(depth > 0, CUDA_ERROR_INVALID_CONTEXT);
  depth--;
  if (context) *context = stack[depth];
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  *device = current_device();
  return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE_SUCCESS(forbidden_while_capturing());
  COUNT(synchronisations);
  return CUDA_SUCCESS;
}
