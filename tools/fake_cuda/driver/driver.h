/* A fake CUDA driver: libcuda.so.1 for a machine without a GPU.
 *
 * Device memory is host memory, and work is executed when it is enqueued. A launch is checked against the limits of its
 * device and then passed, with the kernel's machine code and the bytes of its parameters, to a callback that may execute
 * it. No NVIDIA header is needed: the part of the driver's ABI in use is declared here, with NVIDIA's names and numbers.
 * The fake runtime (../runtime) is optional and calls the driver; the driver never calls the runtime.
 *
 *   status.c   names of statuses, injected faults
 *   device.c   the GPUs and their attributes
 *   context.c  primary contexts, each thread's stack of current contexts
 *   stream.c   streams
 *   graph.c    stream capture, and the graphs that it records
 *   cubin.c    attributes of a kernel, from a cubin or PTX
 *   library.c  machine code loaded at run time
 *   kernel.c   attributes and occupancy of a kernel
 *   launch.c   checks a launch and calls back
 *   entry.c    functions by name; functions that are refused
 */
#ifndef DRIVER_H
#define DRIVER_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

/* ---- NVIDIA's numbers ------------------------------------------------------------------------------------------- */

/* Number, the driver's name, the runtime's name, text. Only the runtime returns the two RUNTIME_ statuses. */
#define STATUSES(X)                                                                                                    \
  X(0, CUDA_SUCCESS, cudaSuccess, "no error")                                                                          \
  X(1, CUDA_ERROR_INVALID_VALUE, cudaErrorInvalidValue, "invalid argument")                                            \
  X(2, CUDA_ERROR_OUT_OF_MEMORY, cudaErrorMemoryAllocation, "out of memory")                                           \
  X(3, CUDA_ERROR_NOT_INITIALIZED, cudaErrorInitializationError, "initialization error")                               \
  X(9, RUNTIME_INVALID_CONFIGURATION, cudaErrorInvalidConfiguration, "invalid configuration argument")                 \
  X(98, RUNTIME_INVALID_FUNCTION, cudaErrorInvalidDeviceFunction, "invalid device function")                           \
  X(100, CUDA_ERROR_NO_DEVICE, cudaErrorNoDevice, "no CUDA-capable device is detected")                                \
  X(101, CUDA_ERROR_INVALID_DEVICE, cudaErrorInvalidDevice, "invalid device ordinal")                                  \
  X(200, CUDA_ERROR_INVALID_IMAGE, cudaErrorInvalidKernelImage, "device kernel image is invalid")                      \
  X(201, CUDA_ERROR_INVALID_CONTEXT, cudaErrorDeviceUninitialized, "invalid device context")                           \
  X(209, CUDA_ERROR_NO_BINARY_FOR_GPU, cudaErrorNoKernelImageForDevice,                                                \
    "no kernel image is available for execution on the device")                                                        \
  X(218, CUDA_ERROR_INVALID_PTX, cudaErrorInvalidPtx, "a PTX JIT compilation failed")                                  \
  X(400, CUDA_ERROR_INVALID_HANDLE, cudaErrorInvalidResourceHandle, "invalid resource handle")                         \
  X(401, CUDA_ERROR_ILLEGAL_STATE, cudaErrorIllegalState, "the operation cannot be performed in the present state")    \
  X(500, CUDA_ERROR_NOT_FOUND, cudaErrorSymbolNotFound, "named symbol not found")                                      \
  X(600, CUDA_ERROR_NOT_READY, cudaErrorNotReady, "device not ready")                                                  \
  X(700, CUDA_ERROR_ILLEGAL_ADDRESS, cudaErrorIllegalAddress, "an illegal memory access was encountered")              \
  X(701, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, cudaErrorLaunchOutOfResources, "too many resources requested for launch") \
  X(719, CUDA_ERROR_LAUNCH_FAILED, cudaErrorLaunchFailure, "unspecified launch failure")                               \
  X(801, CUDA_ERROR_NOT_SUPPORTED, cudaErrorNotSupported, "operation not supported")                                   \
  X(900, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cudaErrorStreamCaptureUnsupported,                                     \
    "operation not permitted when stream is capturing")                                                                \
  X(901, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cudaErrorStreamCaptureInvalidated,                                     \
    "operation failed due to a previous error during capture")                                                         \
  X(903, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cudaErrorStreamCaptureUnmatched,                                         \
    "the capture was not initiated in this stream")                                                                    \
  X(905, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cudaErrorStreamCaptureIsolation,                                         \
    "dependency created on uncaptured work in another stream")                                                         \
  X(906, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cudaErrorStreamCaptureImplicit,                                           \
    "operation would make the legacy stream depend on a capturing blocking stream")                                    \
  X(907, CUDA_ERROR_CAPTURED_EVENT, cudaErrorCapturedEvent,                                                            \
    "operation not permitted on an event last recorded in a capturing stream")                                         \
  X(908, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, cudaErrorStreamCaptureWrongThread,                                    \
    "attempt to terminate a thread-local capture sequence from another thread")                                        \
  X(999, CUDA_ERROR_UNKNOWN, cudaErrorUnknown, "unknown error")

#define DEFINE(number, name, runtime_name, text) name = number,
enum { STATUSES(DEFINE) };
#undef DEFINE

enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALIDATED };     /* the state of a stream */
enum { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED }; /* the mode of a capture, and of a thread */

typedef int CUresult;
typedef int CUdevice;
typedef struct Context* CUcontext;
typedef struct CUstream_st* CUstream; /* the tag is that of the runtime's headers */

/* ---- devices ---------------------------------------------------------------------------------------------------- */

enum {
  MAX_DEVICES = 8,
  MAX_PARAMETERS = 64,
  PARAMETER_BYTES = 4096,
  /* The same on all GPUs. */
  WARP = 32,
  THREADS = 1024,
  BLOCK_Z = 64,
  GRID_X = 2147483647,
  GRID_YZ = 65535,
  REGISTERS = 65536,
  SHARED = 48 * 1024, /* bytes per block without the opt-in */
};

typedef struct {
  const char *key, *name;
  int arch; /* 70 is compute capability 7.0 */
  int sms, clock_mhz, l2_mib;
  int memory_gib, memory_mhz, bus_bits;
  int sm_threads, sm_blocks, sm_shared;
  int reserved_shared; /* bytes of every block that the system takes */
  int shared_unit;     /* bytes in which shared memory is allocated */
} Profile;

/* ---- kernels ---------------------------------------------------------------------------------------------------- */

typedef struct Kernel {
  const char* name;
  const unsigned char* code; /* a cubin, or PTX with its closing NUL */
  size_t code_bytes;
  int registers, static_shared, local_bytes, max_threads;
  uint32_t params_bytes;
  int parameters;
  struct {
    uint32_t offset, size;
  } parameter[MAX_PARAMETERS];
  int dynamic_shared[MAX_DEVICES]; /* the opt-in, 0 if never set */
  int is_loaded[MAX_DEVICES];      /* lazily: at the first use on the device */
  struct Kernel* next;
} Kernel;

/* ---- the interface for Python; mirrored by ctypes structures in ../library.py ------------------------------------- */

/* A launch that has passed all checks. */
typedef struct {
  const char* name;
  const unsigned char* code;
  uint64_t code_bytes;
  uint32_t grid[3], block[3];
  uint32_t dynamic_shared, max_dynamic_shared;
  uint64_t stream;
  int32_t device;
  uint32_t params_bytes;
  const unsigned char* params;
} LaunchRecord;

typedef struct {
  uint64_t launches, launches_with_gil; /* with Python's GIL held, which blocks all other Python threads */
  uint64_t synchronisations, allocations, attributes_set;
} Counts;

typedef int (*LaunchCallback)(const LaunchRecord* launch); /* returns a status */

/* Without a callback launches are checked and counted, and compute nothing. `at_capture`: a launch is passed on when it
 * is captured, too, and not only when its graph runs. */
API void fake_cuda_on_launch(LaunchCallback callback, int at_capture);
API Counts fake_cuda_counts(void);
/* `count` calls of a function, from the nth call on (1 is the next), return `code` and do nothing else. No name ends
 * this. Functions have the names of their symbols: cuCtxPushCurrent_v2. */
API void fake_cuda_fail(const char* function, int nth, int count, int code);
API int fake_cuda_faults(void); /* number of calls that failed since the last fake_cuda_fail */

/* ---- shared between the files, and with the runtime --------------------------------------------------------------- */

typedef struct Graph Graph;

extern Counts counts;
extern int initialised;

int device_count(void);
const Profile* profile_of(int device); /* NULL if there is no such device */
CUcontext current_context(void);       /* NULL if the thread has none */
int current_device(void);              /* 0 if the thread has no context */
void make_current(int device);         /* as the runtime does it, which retains the context for ever */

const char* status_text(CUresult status, int is_runtime_name); /* name in the runtime, or text; NULL if unknown */
CUresult fault_of(const char* function);

CUresult create_stream(CUstream* stream, unsigned flags, int priority); /* on the current device */
int stream_device(CUstream stream, int* device);                        /* 0 for a handle that is no stream */
Graph** capture_of(CUstream stream); /* the graph of the stream's last capture; NULL for one that cannot capture */
Graph* in_progress(Graph* graph);    /* NULL if its capture has ended */
/* The graph that records the stream's work; NULL if work is executed at once. An error if the capture is invalid. */
CUresult find_capture(CUstream stream, Graph** graph);
/* For calls that cannot be captured: allocate, load, wait. An error, which invalidates the capture, if it forbids them. */
CUresult forbidden_while_capturing(void);

/* Nodes of a graph; executed at once if `graph` is NULL. */
CUresult do_copy(Graph* graph, void* to, const void* from, size_t bytes);
CUresult do_fill(Graph* graph, void* at, int value, size_t bytes);
CUresult do_launch(Graph* graph, const LaunchRecord* launch);

size_t cubin_bytes(const unsigned char* cubin);
int cubin_arch(const unsigned char* cubin); /* 70 is compute capability 7.0 */
int read_kernel(Kernel* kernel); /* fills in the attributes of name and code; 0 if the code has no such kernel */
Kernel* find_kernel(const void* handle);
CUresult load_kernel(Kernel* kernel, int device);
int max_dynamic_shared(const Kernel* kernel, int device);
CUresult allow_dynamic_shared(Kernel* kernel, int bytes, int device);
int resident_blocks(const Kernel* kernel, int threads, size_t dynamic_shared, int device); /* per multiprocessor */

int is_executing(void); /* there is a callback: new memory is then NaN, so that reads of unwritten memory show */
CUresult launch_now(const LaunchRecord* launch);
/* Checks a launch whose grid, block, dynamic_shared, stream and device are set, fills in the rest and enqueues it. */
CUresult launch(const Kernel* kernel, LaunchRecord* record, void** parameters);

/* The runtime calls these. */
API CUresult cuInit(unsigned flags);
API CUresult cuDriverGetVersion(int* version);
API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device);
API CUresult cuStreamDestroy_v2(CUstream stream);
API CUresult cuStreamGetPriority(CUstream stream, int* priority);
API CUresult cuStreamSynchronize(CUstream stream);
API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
API CUresult cuStreamEndCapture(CUstream stream, Graph** graph);
API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int* status, uint64_t* id, Graph** graph, const void** nodes,
                                       size_t* count);
API CUresult cuThreadExchangeStreamCaptureMode(int* mode);
API CUresult cuGraphGetNodes(Graph* graph, void* nodes, size_t* count);
API CUresult cuGraphLaunch(Graph* graph, CUstream stream);

#ifndef FAILED /* the runtime remembers the last error of a thread */
#define FAILED(status) (status)
#endif
#define COUNT(what) __atomic_add_fetch(&counts.what, 1, __ATOMIC_RELAXED)
#define REQUIRE(condition, status)             \
  do {                                         \
    if (!(condition)) return (FAILED(status)); \
  } while (0)
#define REQUIRE_SUCCESS(call)                                \
  do {                                                       \
    const CUresult status_of_call = (call);                  \
    REQUIRE(status_of_call == CUDA_SUCCESS, status_of_call); \
  } while (0)
#define REQUIRE_NO_FAULT() REQUIRE_SUCCESS(fault_of(__func__))
#define REQUIRE_INITIALISED()                         \
  do {                                                \
    REQUIRE_NO_FAULT();                               \
    REQUIRE(initialised, CUDA_ERROR_NOT_INITIALIZED); \
  } while (0)
#define REQUIRE_DEVICE(device) REQUIRE(profile_of(device), CUDA_ERROR_INVALID_DEVICE)

#endif
