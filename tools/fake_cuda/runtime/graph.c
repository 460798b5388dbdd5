/* What is captured instead of done, and done later: launches, copies and fills, in their order. And what is forbidden
 * meanwhile. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

typedef struct Node {
  enum { COPY, FILL, LAUNCH } kind;
  void* to;
  const void* from;
  int value;
  size_t bytes;
  LaunchRecord launch; /* its parameters are the graph's own copy */
  struct Node* next;
} Node;

struct Graph {
  Node *first, **end;
  size_t nodes;
  cudaStream_t origin; /* others take part once they wait for one of its events */
  pthread_t thread;
  enum cudaStreamCaptureMode mode;
  enum cudaStreamCaptureStatus status;
  unsigned long long id;
  Graph* next; /* in the list of those that are being captured */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Graph* captures;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

Graph* in_progress(Graph* graph) {
  return graph && graph->status != cudaStreamCaptureStatusNone ? graph : NULL;
}

static Graph* capture_in_progress(cudaStream_t stream) {
  Graph** place = capture_of(stream);
  return place ? in_progress(*place) : NULL;
}

cudaError_t find_capture(cudaStream_t stream, Graph** graph) {
  *graph = capture_in_progress(stream);
  const int is_invalid = *graph && (*graph)->status == cudaStreamCaptureStatusInvalidated;
  return is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

/* A global capture forbids it to every thread, a thread-local one to its own; a thread that said so is exempt. */
static int forbids(const Graph* capture) {
  if (thread_mode == cudaStreamCaptureModeRelaxed || capture->mode == cudaStreamCaptureModeRelaxed) return 0;
  if (pthread_equal(capture->thread, pthread_self())) return 1;
  return thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
}

cudaError_t forbidden_while_capturing(void) {
  cudaError_t result = cudaSuccess;
  pthread_mutex_lock(&lock);
  for (Graph* capture = captures; capture; capture = capture->next)
    if (forbids(capture)) {
      capture->status = cudaStreamCaptureStatusInvalidated;
      result = cudaErrorStreamCaptureUnsupported;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

static cudaError_t append(Graph* graph, Node node) {
  Node* kept = malloc(sizeof *kept);
  *kept = node;
  kept->next = NULL;
  pthread_mutex_lock(&lock); /* a backward pass captures from a thread of its own */
  *graph->end = kept;
  graph->end = &kept->next;
  graph->nodes++;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t do_copy(Graph* graph, void* to, const void* from, size_t bytes) {
  if (graph) return append(graph, (Node){.kind = COPY, .to = to, .from = from, .bytes = bytes});
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t do_fill(Graph* graph, void* at, int value, size_t bytes) {
  if (graph) return append(graph, (Node){.kind = FILL, .to = at, .value = value, .bytes = bytes});
  memset(at, value, bytes);
  return cudaSuccess;
}

cudaError_t do_launch(Graph* graph, const LaunchRecord* launch) {
  if (!graph) return launch_now(launch);
  Node node = {.kind = LAUNCH, .launch = *launch};
  unsigned char* params = malloc(launch->params_bytes + 1u);
  memcpy(params, launch->params, launch->params_bytes);
  node.launch.params = params;
  return append(graph, node);
}

static cudaError_t run(const Node* node) {
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

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static unsigned long long last_id;
  REQUIRE_NO_FAULT();
  Graph** place = capture_of(stream);
  REQUIRE(place && !capture_in_progress(stream), cudaErrorStreamCaptureUnsupported);
  Graph* graph = calloc(1, sizeof *graph);
  graph->end = &graph->first;
  graph->origin = stream;
  graph->thread = pthread_self();
  graph->mode = mode;
  graph->status = cudaStreamCaptureStatusActive;
  pthread_mutex_lock(&lock);
  graph->id = ++last_id;
  graph->next = captures;
  captures = graph;
  *place = graph;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  REQUIRE_NO_FAULT();
  *graph = NULL;
  Graph* capture = capture_in_progress(stream);
  REQUIRE(capture, cudaErrorIllegalState);
  REQUIRE(capture->origin == stream, cudaErrorStreamCaptureUnmatched);
  const int own = pthread_equal(capture->thread, pthread_self());
  REQUIRE(own || capture->mode == cudaStreamCaptureModeRelaxed, cudaErrorStreamCaptureWrongThread);
  pthread_mutex_lock(&lock);
  for (Graph** at = &captures; *at; at = &(*at)->next)
    if (*at == capture) {
      *at = capture->next;
      break;
    }
  const int was_valid = capture->status == cudaStreamCaptureStatusActive;
  capture->status = cudaStreamCaptureStatusNone;
  pthread_mutex_unlock(&lock);
  REQUIRE(was_valid, cudaErrorStreamCaptureInvalidated);
  *graph = (cudaGraph_t)capture;
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  const Graph* capture = capture_in_progress(stream);
  *status = capture ? capture->status : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

static unsigned long long id_of(const Graph* capture) {
  return capture ? capture->id : 0;
}

#if CUDART_VERSION < 12000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                         unsigned long long* id) {
  if (id) *id = id_of(capture_in_progress(stream));
  return cudaStreamIsCapturing(stream, status);
}
#elif CUDART_VERSION < 13000
/* The name is a macro for the second version, which can also hand out the graph. */
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         size_t* count) {
  if (id) *id = id_of(capture_in_progress(stream));
  if (graph) *graph = (cudaGraph_t)capture_in_progress(stream);
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
#endif

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  const enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

/* ---- graphs: the executable one is the captured one, and neither is ever freed ---- */

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
  REQUIRE(!nodes, cudaErrorNotSupported);
  *count = ((Graph*)graph)->nodes;
  return cudaSuccess;
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
  int device;
  REQUIRE_NO_FAULT();
  REQUIRE(stream_device(stream, &device), cudaErrorInvalidResourceHandle);
  REQUIRE(!capture_in_progress(stream), cudaErrorStreamCaptureUnsupported); /* a graph in a graph: not modelled */
  for (const Node* node = ((Graph*)executable)->first; node; node = node->next) REQUIRE_SUCCESS(run(node));
  return cudaSuccess;
}
