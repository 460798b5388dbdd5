/* Streams and events. Work is done when it is asked for, so nobody ever waits; who wanted to is counted. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "fake_cuda.h"

enum { LOWEST_PRIORITY = 0, HIGHEST_PRIORITY = -5 };

struct CUstream_st {
  int device, priority;
  Graph* capture;
  struct CUstream_st* next;
};

struct CUevent_st {
  int device;
  struct timespec recorded;
  Graph* capture; /* that it was recorded in: who waits for it takes part */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st* streams;

/* Handles 0, 1 and 2 are the default streams of the current device. Any other handle is looked up, never followed: a
 * stale or invented one is an error and not a crash. */
int stream_device(cudaStream_t stream, int* device) {
  if ((uintptr_t)stream <= 2) {
    *device = current_device();
    return 1;
  }
  int found = 0;
  pthread_mutex_lock(&lock);
  for (struct CUstream_st* s = streams; s && !found; s = s->next)
    if (s == stream) {
      *device = s->device;
      found = 1;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

Graph** capture_of(cudaStream_t stream) {
  int device;
  return (uintptr_t)stream > 2 && stream_device(stream, &device) ? &stream->capture : NULL;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  REQUIRE_NO_FAULT();
  REQUIRE(flags <= cudaStreamNonBlocking, cudaErrorInvalidValue);
  struct CUstream_st* s = malloc(sizeof *s);
  pthread_mutex_lock(&lock);
  *s = (struct CUstream_st){working_device(), priority, NULL, streams};
  streams = s;
  pthread_mutex_unlock(&lock);
  *stream = s;
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, LOWEST_PRIORITY);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, LOWEST_PRIORITY);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  cudaError_t result = cudaErrorInvalidResourceHandle;
  pthread_mutex_lock(&lock);
  for (struct CUstream_st** at = &streams; *at; at = &(*at)->next)
    if (*at == stream) {
      *at = stream->next; /* the memory is kept, so that no later stream gets the same handle */
      result = cudaSuccess;
      break;
    }
  pthread_mutex_unlock(&lock);
  return failed(result);
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  int device;
  REQUIRE(stream_device(stream, &device), cudaErrorInvalidResourceHandle);
  *priority = (uintptr_t)stream <= 2 ? LOWEST_PRIORITY : stream->priority;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = LOWEST_PRIORITY;
  *highest = HIGHEST_PRIORITY;
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  int device;
  REQUIRE_NO_FAULT();
  REQUIRE(stream_device(stream, &device), cudaErrorInvalidResourceHandle);
  Graph* capture;
  REQUIRE_SUCCESS(find_capture(stream, &capture));
  REQUIRE(!capture, cudaErrorStreamCaptureUnsupported);
  REQUIRE_SUCCESS(forbidden_while_capturing());
  COUNT(synchronisations);
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  int device;
  REQUIRE(stream_device(stream, &device), cudaErrorInvalidResourceHandle);
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  int device;
  (void)flags;
  REQUIRE_NO_FAULT();
  REQUIRE(stream_device(stream, &device), cudaErrorInvalidResourceHandle);
  Graph *own, *others = in_progress(event->capture);
  REQUIRE_SUCCESS(find_capture(stream, &own));
  if (own) REQUIRE(others == own || !event->recorded.tv_sec, cudaErrorStreamCaptureIsolation);
  if (own || !others) return cudaSuccess;
  REQUIRE(capture_of(stream), cudaErrorStreamCaptureImplicit);
  *capture_of(stream) = others; /* takes part from now on */
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned flags) {
  (void)flags;
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}

/* ---- events ---- */

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  (void)flags;
  REQUIRE_NO_FAULT();
  *event = calloc(1, sizeof **event);
  (*event)->device = working_device();
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int device;
  REQUIRE_NO_FAULT();
  REQUIRE(stream_device(stream, &device) && device == event->device, cudaErrorInvalidResourceHandle);
  REQUIRE_SUCCESS(find_capture(stream, &event->capture));
  clock_gettime(CLOCK_MONOTONIC, &event->recorded);
  return cudaSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  REQUIRE(!in_progress(event->capture), cudaErrorCapturedEvent);
  return failed(forbidden_while_capturing());
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  REQUIRE_NO_FAULT();
  REQUIRE(!in_progress(event->capture), cudaErrorCapturedEvent);
  REQUIRE_SUCCESS(forbidden_while_capturing());
  COUNT(synchronisations);
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  REQUIRE(start->recorded.tv_sec && end->recorded.tv_sec, cudaErrorInvalidResourceHandle);
  *milliseconds = (float)(end->recorded.tv_sec - start->recorded.tv_sec) * 1e3f +
                  (float)(end->recorded.tv_nsec - start->recorded.tv_nsec) * 1e-6f;
  return cudaSuccess;
}
