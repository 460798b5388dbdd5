/* What is captured instead of done, and done later: launches, copies and fills, in their order. */
#include <stdlib.h>
#include <string.h>

#include "pretended.h"

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
};

/* One capture at a time and thread, as PyTorch does it. */
static __thread cudaStream_t capturing_stream;
static __thread Graph* capturing;

Graph* captured_into(cudaStream_t stream) {
  return capturing && stream == capturing_stream ? capturing : NULL;
}

static cudaError_t append(Graph* graph, Node node) {
  Node* kept = malloc(sizeof *kept);
  *kept = node;
  kept->next = NULL;
  *graph->end = kept;
  graph->end = &kept->next;
  graph->nodes++;
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
  (void)mode;
  REQUIRE_NO_FAULT();
  REQUIRE(stream && !capturing, cudaErrorStreamCaptureUnsupported);
  capturing_stream = stream;
  capturing = calloc(1, sizeof *capturing);
  capturing->end = &capturing->first;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  REQUIRE_NO_FAULT();
  REQUIRE(captured_into(stream), cudaErrorStreamCaptureInvalidated);
  *graph = (cudaGraph_t)capturing;
  capturing = NULL;
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = captured_into(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

#if CUDART_VERSION < 12000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                         unsigned long long* id) {
  if (id) *id = (uintptr_t)captured_into(stream);
  return cudaStreamIsCapturing(stream, status);
}
#elif CUDART_VERSION < 13000
/* The name is a macro for the second version, which can also hand out the graph. */
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         size_t* count) {
  if (id) *id = (uintptr_t)captured_into(stream);
  if (graph) *graph = (cudaGraph_t)captured_into(stream);
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
#endif

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  static __thread enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  const enum cudaStreamCaptureMode before = current;
  current = *mode;
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
  for (const Node* node = ((Graph*)executable)->first; node; node = node->next) REQUIRE_SUCCESS(run(node));
  return cudaSuccess;
}
