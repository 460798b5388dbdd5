/* Streams that are being captured, and what a thread may not do meanwhile.
 *
 * A captured launch is handed to the test at once, like any other: no graph is kept. */
#include "virtual_gpu.h"

static __thread int interaction = CAPTURE_GLOBAL;

/* The rules of cuThreadExchangeStreamCaptureMode. A call that breaks them fails, and the captures are lost. */
CUresult capture_forbids(void) {
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  for (struct Stream* s = streams; s; s = s->next) {
    if (s->capture == CAPTURE_NONE || interaction == CAPTURE_RELAXED || s->mode == CAPTURE_RELAXED) continue;
    int own = pthread_equal(s->thread, pthread_self());
    if (!own && (s->mode != CAPTURE_GLOBAL || interaction != CAPTURE_GLOBAL)) continue;
    s->capture = CAPTURE_INVALIDATED;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  REQUIRE_NO_FAULT();
  REQUIRE(*mode >= CAPTURE_GLOBAL && *mode <= CAPTURE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  int before = interaction;
  interaction = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

/* The stream of a handle, if it is not the default stream; with the lock held. */
static struct Stream* find(CUstream stream) {
  for (struct Stream* s = streams; s; s = s->next)
    if (s == stream) return s;
  return NULL;
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
  REQUIRE_INITIALISED();
  REQUIRE(mode >= CAPTURE_GLOBAL && mode <= CAPTURE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  REQUIRE((uintptr_t)stream > 2, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* the default stream cannot be captured */
  CUresult result = CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  struct Stream* s = find(stream);
  if (s) {
    result = s->capture == CAPTURE_NONE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) s->capture = CAPTURE_ACTIVE, s->mode = mode, s->thread = pthread_self();
  }
  pthread_mutex_unlock(&lock);
  return result;
}

API CUresult cuStreamEndCapture(CUstream stream, void** graph) {
  REQUIRE_INITIALISED();
  CUresult result = CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  struct Stream* s = find(stream);
  if (s) {
    *graph = s->capture == CAPTURE_ACTIVE ? s : NULL;
    result = s->capture == CAPTURE_ACTIVE        ? CUDA_SUCCESS
             : s->capture == CAPTURE_INVALIDATED ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                                                 : CUDA_ERROR_INVALID_VALUE;
    s->capture = CAPTURE_NONE;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

API CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  REQUIRE_INITIALISED();
  CUresult result = CUDA_SUCCESS;
  *status = CAPTURE_NONE;
  pthread_mutex_lock(&lock);
  if ((uintptr_t)stream > 2) {
    struct Stream* s = find(stream);
    if (s)
      *status = s->capture;
    else
      result = CUDA_ERROR_INVALID_HANDLE;
  }
  pthread_mutex_unlock(&lock);
  return result;
}
