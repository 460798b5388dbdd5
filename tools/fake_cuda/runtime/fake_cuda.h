/* A fake CUDA runtime: what a CUDA build of PyTorch finds instead of libcudart on a machine without a GPU. The
 * driver of the same GPUs is in ../driver, and in the same library: it has the same contexts, streams and memory.
 *
 * Preloaded, it answers the runtime's functions before NVIDIA's library does. Device memory is the process's own memory;
 * work is done at once, in the order in which it is asked for. A launch is checked against the limits of the device that
 * is pretended and then handed, with the kernel's machine code and the exact bytes of its parameters, to a callback that
 * may compute the result. A function that is not here is NVIDIA's, which finds no driver and says so.
 *
 *   device.c    which GPUs are pretended, and what they say about themselves
 *   error.c     errors: their names, the last one of a thread, and calls that fail because a test wants them to
 *   memory.c    allocations, copies and fills, each checked against what is allocated
 *   stream.c    streams and events
 *   graph.c     what is captured instead of done, and done later
 *   function.c  kernels: registration, attributes, occupancy
 *   launch.c    checks a launch and calls back
 *
 * The structures and numbers are those of NVIDIA's headers of the same version as the library that is replaced.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "launch_record.h"

#define API __attribute__((visibility("default")))

enum {
  MAX_DEVICES = 8,
  MAX_PARAMETERS = 64,
  PARAMETER_BYTES = 4096,
  WARP = 32,
  THREADS = 1024,
  BLOCK_Z = 64,
  GRID_YZ = 65535,
  REGISTERS = 65536,
  SHARED = 48 * 1024, /* without the opt-in */
};

/* What differs between the GPUs that can be pretended. */
typedef struct {
  const char *key, *name;
  int major, minor;
  int multiprocessors;
  int threads; /* per multiprocessor, as are the next two */
  int blocks;
  int shared;
  int shared_opt_in; /* per block */
  size_t memory;
  int clock_rate, memory_clock_rate; /* kHz */
  int bus_width;                     /* bits */
  int l2_bytes;
} Profile;

/* ---- what Python sees; mirrored by ctypes structures in library.py ------------------------------------------------- */

/* What the machine code of a kernel says about it. Filled by Python, which reads the cubin. */
typedef struct {
  const unsigned char* cubin;
  uint64_t cubin_bytes;
  int32_t registers, static_shared, local_bytes, max_threads;
  uint32_t params_bytes;
  int32_t parameters;
  struct {
    uint32_t offset, size;
  } parameter[MAX_PARAMETERS];
} Description;

/* A range of memory. `device` is -1 for pinned memory of the host, which every device reaches. */
typedef struct {
  uint64_t address, size;
  int32_t device;
} Allocation;

typedef struct {
  uint64_t launches, launches_with_gil; /* with Python's lock held: nobody else could run meanwhile */
  uint64_t synchronisations, allocations, attributes_set;
} Counts;

/* Both return a cudaError_t. */
typedef int (*DescribeCallback)(const void* code, const char* name, Description* description);
typedef int (*LaunchCallback)(const LaunchRecord* launch);

API void fake_cuda_on_describe(DescribeCallback callback);
/* Without a callback launches are checked and counted, and compute nothing. */
API void fake_cuda_on_launch(LaunchCallback callback);
API Counts fake_cuda_counts(void);
/* Fills up to `room` allocations; returns how many there are. */
API uint64_t fake_cuda_allocations(Allocation* found, uint64_t room);
/* From the n-th call of a function on (1 is the next), so many calls fail with a code, and do nothing else. Without a
 * name: no fault any more. Functions have the names of their symbols. */
API void fake_cuda_fail(const char* function, int nth, int count, int code);
API int fake_cuda_faults(void); /* how many calls have failed so since the last fake_cuda_fail */

/* ---- shared between the files ----------------------------------------------------------------------------------- */

typedef struct Function Function;
typedef struct Graph Graph;

extern Counts counts;

int device_count(void);
int current_device(void);
void make_current(int device);
int working_device(void); /* the current device, whose context the thread has from now on, as runtime calls do it */
const Profile* profile_of(int device);

cudaError_t failed(cudaError_t error); /* remembers it as the thread's last error */
cudaError_t fault_of(const char* function);

int poisoning(void); /* whether launches compute: then memory starts as NaN, so that reading what nobody wrote shows */

int stream_device(cudaStream_t stream, int* device); /* 0 for a handle that is no stream */
Graph** capture_of(cudaStream_t stream); /* the graph of the stream's last capture; NULL for one that cannot capture */
Graph* in_progress(Graph* graph);        /* NULL if nothing is captured into it any more */
/* The graph that a stream's work goes to, NULL if it is done at once. An error if the capture is no longer valid. */
cudaError_t find_capture(cudaStream_t stream, Graph** graph);
/* An error, and the end of the capture, where the thread may not do what cannot be captured: allocate, load, wait. */
cudaError_t forbidden_while_capturing(void);

/* A graph's nodes: done at once if `graph` is NULL. */
cudaError_t do_copy(Graph* graph, void* to, const void* from, size_t bytes);
cudaError_t do_fill(Graph* graph, void* at, int value, size_t bytes);
cudaError_t do_launch(Graph* graph, const LaunchRecord* launch);
cudaError_t launch_now(const LaunchRecord* launch);

#define COUNT(what) __atomic_add_fetch(&counts.what, 1, __ATOMIC_RELAXED)
#define REQUIRE(condition, error)             \
  do {                                        \
    if (!(condition)) return (failed(error)); \
  } while (0)
#define REQUIRE_NO_FAULT()                          \
  do {                                              \
    cudaError_t fault = fault_of(__func__);         \
    if (fault != cudaSuccess) return failed(fault); \
  } while (0)
#define REQUIRE_SUCCESS(call)                         \
  do {                                                \
    cudaError_t result = (call);                      \
    if (result != cudaSuccess) return failed(result); \
  } while (0)

#endif
