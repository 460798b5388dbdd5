/* Streams, events and graphs: the driver's, under the runtime's names. */
#include <stdlib.h>
#include <time.h>

#include "runtime.h"

enum { LOWEST_PRIORITY = 0, HIGHEST_PRIORITY = -5 };

struct CUevent_st {
  int device;
  struct timespec recorded;
  Graph* capture; /* in which it was recorded: a stream that waits for the event joins it */
};

/* ---- streams ---- */

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  REQUIRE_NO_FAULT();
  working_device();
  return failed(create_stream(stream, flags, priority));
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, LOWEST_PRIORITY);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, LOWEST_PRIORITY);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  return failed(cuStreamDestroy_v2(stream));
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return failed(cuStreamGetPriority(stream, priority));
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = LOWEST_PRIORITY;
  *highest = HIGHEST_PRIORITY;
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  return failed(cuStreamSynchronize(stream));
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
  *capture_of(stream) = others; /* joins the capture */
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

/* ---- capture and graphs ---- */

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                cudaGraph_t* graph) {
  int found;
  uint64_t number;
  Graph* capture;
  REQUIRE_SUCCESS(cuStreamGetCaptureInfo_v2(stream, &found, &number, &capture, NULL, NULL));
  *status = (enum cudaStreamCaptureStatus)found;
  if (id) *id = number;
  if (graph) *graph = (cudaGraph_t)capture;
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  return capture_info(stream, status, NULL, NULL);
}

#if CUDART_VERSION < 12000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                         unsigned long long* id) {
  return capture_info(stream, status, id, NULL);
}
#elif CUDART_VERSION < 13000
/* The name is a macro for the second version, which can return the graph, too. */
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         size_t* count) {
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return capture_info(stream, status, id, graph);
}
#endif

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  REQUIRE_NO_FAULT();
  return failed(cuStreamBeginCapture_v2(stream, (int)mode));
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  REQUIRE_NO_FAULT();
  return failed(cuStreamEndCapture(stream, (Graph**)graph));
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  return failed(cuThreadExchangeStreamCaptureMode((int*)mode));
}

#if CUDART_VERSION < 12000
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, cudaGraphNode_t* bad, char* log,
                                     size_t room) {
  (void)bad, (void)log, (void)room;
#else
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  (void)flags;
#endif
  *executable = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                              unsigned long long flags) {
  (void)flags;
  *executable = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return failed(cuGraphGetNodes((Graph*)graph, nodes, count));
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  (void)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  (void)executable;
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  return failed(cuGraphLaunch((Graph*)executable, stream));
}
