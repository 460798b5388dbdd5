/* NCCL among the fake GPUs of one process, as torch.nn.DataParallel uses it: broadcasts and sums.
 *
 * A collective is one call per rank, between ncclGroupStart and ncclGroupEnd. It is executed when the group ends. */
#include <stdlib.h>
#include <string.h>

#include "../driver/driver.h"

typedef enum { ncclSuccess = 0, ncclInvalidArgument = 4, ncclInvalidUsage = 5 } ncclResult_t;
typedef enum { ncclSum = 0 } ncclRedOp_t;
typedef enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES } ncclDataType_t;

static const size_t size_of[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

typedef struct Clique {
  int ranks;
} Clique;

typedef struct ncclComm {
  Clique* clique;
  int rank;
}* ncclComm_t;

typedef struct {
  enum { BROADCAST, REDUCE } kind;
  const void* from;
  void* to;
  size_t count;
  ncclDataType_t type;
  int root;
  ncclComm_t rank;
} Call;

static __thread Call calls[MAX_DEVICES];
static __thread int called, depth;

API ncclResult_t ncclGetVersion(int* version) {
  *version = 22105;
  return ncclSuccess;
}

API ncclResult_t ncclCommInitAll(ncclComm_t* ranks, int count, const int* devices) {
  (void)devices;
  Clique* clique = malloc(sizeof *clique);
  clique->ranks = count;
  for (int i = 0; i < count; i++) {
    ranks[i] = malloc(sizeof **ranks);
    *ranks[i] = (struct ncclComm){clique, i};
  }
  return ncclSuccess;
}

API ncclResult_t ncclCommCount(ncclComm_t rank, int* count) {
  *count = rank->clique->ranks;
  return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(ncclComm_t rank, int* number) {
  *number = rank->rank;
  return ncclSuccess;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t rank, ncclResult_t* error) {
  (void)rank;
  *error = ncclSuccess;
  return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t rank) {
  free(rank);
  return ncclSuccess;
}

API const char* ncclGetErrorString(ncclResult_t error) {
  return error == ncclSuccess ? "no error" : "a call that fake_cuda/nccl does not know";
}

/* ---- a group ---- */

static ncclResult_t broadcast(const Call* root) {
  for (int i = 0; i < called; i++) memmove(calls[i].to, root->from, root->count * size_of[root->type]);
  return ncclSuccess;
}

#define SUM(type)                                                             \
  for (size_t at = 0; at < root->count; at++) {                               \
    type sum = 0;                                                             \
    for (int i = 0; i < called; i++) sum += ((const type*)calls[i].from)[at]; \
    ((type*)root->to)[at] = sum;                                              \
  }

static ncclResult_t reduce(const Call* root) {
  if (root->type == FLOAT32) {
    SUM(float)
  } else if (root->type == FLOAT64) {
    SUM(double)
  } else {
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

static ncclResult_t run_group(void) {
  const Call* root = NULL;
  for (int i = 0; i < called; i++) {
    const Call *a = &calls[i], *b = &calls[0];
    if (a->kind != b->kind || a->count != b->count || a->type != b->type || a->root != b->root ||
        a->rank->clique != b->rank->clique)
      return ncclInvalidUsage;
    if (a->rank->rank == a->root) root = a;
  }
  if (!root || called != root->rank->clique->ranks) return ncclInvalidUsage;
  return root->kind == BROADCAST ? broadcast(root) : reduce(root);
}

static ncclResult_t add(Call call) {
  if (depth == 0 || called == MAX_DEVICES || call.type >= TYPES) return ncclInvalidUsage;
  calls[called++] = call;
  return ncclSuccess;
}

API ncclResult_t ncclGroupStart(void) {
  depth++;
  return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
  if (depth == 0) return ncclInvalidUsage;
  if (--depth > 0 || called == 0) return ncclSuccess;
  const ncclResult_t result = run_group();
  called = 0;
  return result;
}

API ncclResult_t ncclBcast(void* at, size_t count, ncclDataType_t type, int root, ncclComm_t rank, CUstream stream) {
  (void)stream;
  return add((Call){BROADCAST, at, at, count, type, root, rank});
}

API ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                            ncclComm_t rank, CUstream stream) {
  (void)stream;
  if (op != ncclSum) return ncclInvalidArgument;
  return add((Call){REDUCE, from, to, count, type, root, rank});
}
