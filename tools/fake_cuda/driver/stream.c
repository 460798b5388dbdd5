/* Streams. Work is executed when it is enqueued, so a synchronisation never waits; it is counted. */
#include <pthread.h>
#include <stdlib.h>

#include "driver.h"

struct CUstream_st {
  int device, priority;
  Graph* capture;
  struct CUstream_st* next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUstream streams;

/* Handles 0, 1 and 2 are the default streams of the current device. Other handles are looked up before they are
 * dereferenced, so that a stale or invalid one is an error and not a crash. */
int stream_device(CUstream stream, int* device) {
  if ((uintptr_t)stream <= 2) {
    *device = current_device();
    return 1;
  }
  int found = 0;
  pthread_mutex_lock(&lock);
  for (CUstream s = streams; s && !found; s = s->next)
    if (s == stream) {
      *device = s->device;
      found = 1;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

Graph** capture_of(CUstream stream) {
  int device;
  return (uintptr_t)stream > 2 && stream_device(stream, &device) ? &stream->capture : NULL;
}

CUresult create_stream(CUstream* stream, unsigned flags, int priority) {
  REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
  CUstream s = malloc(sizeof *s);
  pthread_mutex_lock(&lock);
  *s = (struct CUstream_st){current_device(), priority, NULL, streams};
  streams = s;
  pthread_mutex_unlock(&lock);
  *stream = s;
  return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  return create_stream(stream, flags, 0);
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
  REQUIRE_INITIALISED();
  CUresult result = CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  for (CUstream* at = &streams; *at; at = &(*at)->next)
    if (*at == stream) {
      *at = stream->next; /* never freed, so that no later stream gets the same handle */
      result = CUDA_SUCCESS;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

API CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  int device;
  REQUIRE_INITIALISED();
  REQUIRE(stream_device(stream, &device), CUDA_ERROR_INVALID_HANDLE);
  *priority = (uintptr_t)stream <= 2 ? 0 : stream->priority;
  return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream) {
  int device;
  Graph* capture;
  REQUIRE_INITIALISED();
  REQUIRE(stream_device(stream, &device), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE_SUCCESS(find_capture(stream, &capture));
  REQUIRE(!capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  REQUIRE_SUCCESS(forbidden_while_capturing());
  COUNT(synchronisations);
  return CUDA_SUCCESS;
}
