/* Primary contexts, each thread's stack of current contexts, and streams. */
#include "virtual_gpu.h"

#include <stdlib.h>

enum { STACK = 16 };

static struct Context primary[MAX_DEVICES];
static __thread CUcontext stack[STACK];
static __thread int depth;
struct Stream* streams;

CUcontext current_context(void) {
  return depth ? stack[depth - 1] : NULL;
}

static int is_context(CUcontext context) {
  return context >= primary && context < primary + device_count() && context->retained > 0;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  primary[device].device = device;
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

API CUresult cuCtxGetCurrent(CUcontext* context) {
  REQUIRE_INITIALISED();
  *context = current_context();
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  REQUIRE_INITIALISED();
  REQUIRE(!context || is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  if (depth == 0) depth = 1;
  stack[depth - 1] = context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  REQUIRE_INITIALISED();
  REQUIRE(is_context(context), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(depth < STACK, CUDA_ERROR_INVALID_VALUE);
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
  *device = current_context()->device;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  __atomic_add_fetch(&synchronisations, 1, __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}

/* ---- streams ---- */

/* Handles 0, 1 and 2 are the default stream, which runs in the thread's current context. Any other handle is looked up,
 * never followed: a stale or invented one is an error and not a crash. */
int find_context(CUstream stream, CUcontext* context) {
  if ((uintptr_t)stream <= 2) {
    *context = current_context();
    return 1;
  }
  int found = 0;
  pthread_mutex_lock(&lock);
  for (struct Stream* s = streams; s && !found; s = s->next)
    if (s == stream) {
      *context = s->context;
      found = 1;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  REQUIRE_INITIALISED();
  REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  struct Stream* s = malloc(sizeof *s);
  pthread_mutex_lock(&lock);
  *s = (struct Stream){.context = current_context(), .next = streams};
  streams = s;
  pthread_mutex_unlock(&lock);
  *stream = s;
  return CUDA_SUCCESS;
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
  REQUIRE_INITIALISED();
  CUresult result = CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  for (struct Stream** at = &streams; *at; at = &(*at)->next)
    if (*at == stream) {
      *at = stream->next; /* the memory is kept, so that no later stream gets the same handle */
      result = CUDA_SUCCESS;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

API CUresult cuStreamSynchronize(CUstream stream) {
  CUcontext context;
  REQUIRE_INITIALISED();
  REQUIRE(find_context(stream, &context), CUDA_ERROR_INVALID_HANDLE);
  __atomic_add_fetch(&synchronisations, 1, __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}
