/* Stream capture, and the graphs that it records: launches, copies and fills in their order. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

typedef struct Node {
  enum { COPY, FILL, LAUNCH } kind;
  void* to;
  const void* from;
  int value;
  size_t bytes;
  LaunchRecord launch; /* its parameters are a copy */
  struct Node* next;
} Node;

/* Never freed. An executable graph of the runtime is the captured graph. */
struct Graph {
  Node *first, **end;
  size_t nodes;
  CUstream origin; /* another stream joins the capture when it waits for one of its events */
  pthread_t thread;
  int mode, status;
  uint64_t id;
  Graph* next; /* in the list of captures in progress */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Graph* captures;
static __thread int thread_mode = CAPTURE_GLOBAL;

Graph* in_progress(Graph* graph) {
  return graph && graph->status != CAPTURE_NONE ? graph : NULL;
}

static Graph* capture_in_progress(CUstream stream) {
  Graph** place = capture_of(stream);
  return place ? in_progress(*place) : NULL;
}

CUresult find_capture(CUstream stream, Graph** graph) {
  *graph = capture_in_progress(stream);
  const int is_invalid = *graph && (*graph)->status == CAPTURE_INVALIDATED;
  return is_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

/* The rules of cuThreadExchangeStreamCaptureMode: a global capture concerns every thread, a thread-local one its own. */
static int forbids(const Graph* capture) {
  if (thread_mode == CAPTURE_RELAXED || capture->mode == CAPTURE_RELAXED) return 0;
  if (pthread_equal(capture->thread, pthread_self())) return 1;
  return thread_mode == CAPTURE_GLOBAL && capture->mode == CAPTURE_GLOBAL;
}

CUresult forbidden_while_capturing(void) {
  CUresult result = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  for (Graph* capture = captures; capture; capture = capture->next)
    if (forbids(capture)) {
      capture->status = CAPTURE_INVALIDATED;
      result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

static CUresult append(Graph* graph, Node node) {
  Node* kept = malloc(sizeof *kept);
  *kept = node;
  kept->next = NULL;
  pthread_mutex_lock(&lock); /* autograd captures a backward pass from another thread */
  *graph->end = kept;
  graph->end = &kept->next;
  graph->nodes++;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

CUresult do_copy(Graph* graph, void* to, const void* from, size_t bytes) {
  if (graph) return append(graph, (Node){.kind = COPY, .to = to, .from = from, .bytes = bytes});
  memmove(to, from, bytes);
  return CUDA_SUCCESS;
}

CUresult do_fill(Graph* graph, void* at, int value, size_t bytes) {
  if (graph) return append(graph, (Node){.kind = FILL, .to = at, .value = value, .bytes = bytes});
  memset(at, value, bytes);
  return CUDA_SUCCESS;
}

CUresult do_launch(Graph* graph, const LaunchRecord* launch) {
  if (!graph) return launch_now(launch);
  Node node = {.kind = LAUNCH, .launch = *launch};
  unsigned char* params = malloc(launch->params_bytes + 1u);
  memcpy(params, launch->params, launch->params_bytes);
  node.launch.params = params;
  return append(graph, node);
}

static CUresult run(const Node* node) {
  switch (node->kind) {
    case COPY:
      return do_copy(NULL, node->to, node->from, node->bytes);
    case FILL:
      return do_fill(NULL, node->to, node->value, node->bytes);
    default:
      return do_launch(NULL, &node->launch);
  }
}

/* ---- capture ---- */

API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
  static uint64_t last_id;
  REQUIRE_INITIALISED();
  REQUIRE(mode >= CAPTURE_GLOBAL && mode <= CAPTURE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  Graph** place = capture_of(stream);
  REQUIRE(place && !in_progress(*place), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  Graph* graph = calloc(1, sizeof *graph);
  graph->end = &graph->first;
  graph->origin = stream;
  graph->thread = pthread_self();
  graph->mode = mode;
  graph->status = CAPTURE_ACTIVE;
  pthread_mutex_lock(&lock);
  graph->id = ++last_id;
  graph->next = captures;
  captures = graph;
  *place = graph;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream stream, Graph** graph) {
  REQUIRE_INITIALISED();
  *graph = NULL;
  Graph* capture = capture_in_progress(stream);
  REQUIRE(capture, CUDA_ERROR_ILLEGAL_STATE);
  REQUIRE(capture->origin == stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  const int own = pthread_equal(capture->thread, pthread_self());
  REQUIRE(own || capture->mode == CAPTURE_RELAXED, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  pthread_mutex_lock(&lock);
  for (Graph** at = &captures; *at; at = &(*at)->next)
    if (*at == capture) {
      *at = capture->next;
      break;
    }
  const int was_valid = capture->status == CAPTURE_ACTIVE;
  capture->status = CAPTURE_NONE;
  pthread_mutex_unlock(&lock);
  REQUIRE(was_valid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  *graph = capture;
  return CUDA_SUCCESS;
}

API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int* status, uint64_t* id, Graph** graph, const void** nodes,
                                       size_t* count) {
  int device;
  REQUIRE_INITIALISED();
  REQUIRE(stream_device(stream, &device), CUDA_ERROR_INVALID_HANDLE);
  Graph* capture = capture_in_progress(stream);
  *status = capture ? capture->status : CAPTURE_NONE;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture;
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  REQUIRE_NO_FAULT();
  return cuStreamGetCaptureInfo_v2(stream, status, NULL, NULL, NULL, NULL);
}

API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  REQUIRE_NO_FAULT();
  REQUIRE(*mode >= CAPTURE_GLOBAL && *mode <= CAPTURE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  const int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

/* ---- graphs ---- */

API CUresult cuGraphGetNodes(Graph* graph, void* nodes, size_t* count) {
  REQUIRE_INITIALISED();
  REQUIRE(!nodes, CUDA_ERROR_NOT_SUPPORTED);
  *count = graph->nodes;
  return CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(Graph* graph, CUstream stream) {
  int device;
  REQUIRE_INITIALISED();
  REQUIRE(stream_device(stream, &device), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(!capture_in_progress(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* nested graphs are not modelled */
  for (const Node* node = graph->first; node; node = node->next) REQUIRE_SUCCESS(run(node));
  return CUDA_SUCCESS;
}
