/* A virtual GPU behind the interface of the CUDA driver: a Tesla V100, or another that the environment names.
 *
 * Device memory is the process's own memory. A launch is checked against the limits of the GPU and then handed, with
 * the kernel's machine code and the exact bytes of its parameters, to a callback that may compute the result. No CUDA
 * header is needed: what we use of the driver's binary interface is declared here, with NVIDIA's names and numbers.
 *
 *   device.c    errors, initialisation, attributes
 *   model.c     the GPUs that it can be, with their limits
 *   context.c   primary contexts, the stack of current contexts, streams
 *   capture.c   streams that are being captured, and what is forbidden meanwhile
 *   library.c   libraries and kernels: what is loaded, and what is asked of it
 *   cubin.c     reads the ELF file that a cubin is
 *   ptx.c       reads the text that PTX is
 *   launch.c    checks a launch and calls back
 *   fault.c     calls that fail because a test wants them to
 *   entry.c     finds the functions above by name
 */
#ifndef VIRTUAL_GPU_H
#define VIRTUAL_GPU_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "launch_record.h" /* of tools/fake_cuda */

#define API __attribute__((visibility("default")))

/* ---- NVIDIA's numbers ------------------------------------------------------------------------------------------- */

typedef enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_UNKNOWN = 999,
} CUresult;

enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALIDATED };     /* the state of a stream */
enum { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED }; /* how much a capture, and a thread, is on its guard */

typedef int CUdevice;
typedef struct Context* CUcontext;
typedef struct Stream* CUstream;
typedef struct Library* CUlibrary;
typedef struct Kernel* CUkernel;
typedef struct Kernel* CUfunction; /* the driver takes a kernel wherever it takes a function */

/* ---- the GPU ---------------------------------------------------------------------------------------------------- */

/* The same on all of them. */
enum {
  BLOCK_THREADS = 1024,
  BLOCK_Z = 64,
  GRID_YZ = 65535,
  BLOCK_SHARED = 48 * 1024, /* without opting in to more */
  BLOCK_REGISTERS = 65536,
  SM_REGISTERS = 65536,
  MOST_PARAMS = 4096,
  MAX_DEVICES = 8,
};

struct Model {
  const char *key, *name;
  int arch; /* 70 */
  int sms, clock_mhz, l2_mib;
  int memory_mhz, bus_bits;
  int sm_threads, sm_blocks, sm_shared;
  int reserved_shared; /* that the system takes of every block's share */
  int shared_unit;
};

/* ---- our objects ------------------------------------------------------------------------------------------------ */

struct Context {
  CUdevice device;
  int retained;
};

struct Stream {
  CUcontext context;
  struct Stream* next;
  int capture, mode;
  pthread_t thread; /* that began the capture */
};

struct Kernel {
  char name[256];
  int registers, static_shared, max_threads;
  int parameters;
  struct {
    uint32_t offset, size;
  } parameter[64];
  uint32_t params_bytes;
  int max_dynamic_shared[MAX_DEVICES];
  int loaded[MAX_DEVICES]; /* lazily: not with its library, but when it is first wanted there */
  struct Library* library;
  struct Kernel* next;
};

struct Library {
  unsigned char* code; /* a cubin, or PTX with its closing NUL */
  size_t bytes;
  struct Kernel* kernels;
  struct Library* next;
};

/* ---- what the tests see ----------------------------------------------------------------------------------------- */

typedef CUresult (*VirtualLaunchCallback)(const LaunchRecord* launch);

API void virtual_gpu_on_launch(VirtualLaunchCallback callback);
API uint64_t virtual_gpu_synchronisations(void); /* how often the host waited for the GPU: our code never should */

/* From the n-th call of a function on (1 is the next), so many calls fail with a code, and do nothing else. Without a
 * name: no fault any more. Functions have the names of their symbols: cuCtxPushCurrent_v2. */
API void virtual_gpu_fail(const char* function, int nth, int count, int code);
API int virtual_gpu_faults(void); /* how many calls have failed so since the last virtual_gpu_fail */

/* ---- shared between the files ----------------------------------------------------------------------------------- */

extern pthread_mutex_t lock; /* guards the lists of streams and libraries */
extern int initialised;
extern uint64_t synchronisations;
extern struct Stream* streams;

int device_count(void);          /* VIRTUAL_GPU_DEVICES in the environment, 1 if absent */
const struct Model* model(void); /* VIRTUAL_GPU_MODEL in the environment, a V100 if absent: all devices are alike */
struct Kernel* new_kernel(struct Library* library, const char* name, size_t length);
void read_cubin(struct Library* library);
void read_ptx(struct Library* library);
int resident_blocks(CUkernel kernel, int threads, size_t dynamic_shared);
CUcontext current_context(void);
int find_context(CUstream stream, CUcontext* context); /* 0 for a handle that is no stream */
int is_kernel(CUkernel kernel);
CUresult load_kernel(CUkernel kernel, CUdevice device);
CUresult capture_forbids(void);          /* what is unsafe while a stream is captured */
CUresult fault_of(const char* function); /* counts a call */

#define REQUIRE(condition, error)     \
  do {                                \
    if (!(condition)) return (error); \
  } while (0)
#define REQUIRE_NO_FAULT()                   \
  do {                                       \
    CUresult fault = fault_of(__func__);     \
    if (fault != CUDA_SUCCESS) return fault; \
  } while (0)
#define REQUIRE_INITIALISED()                         \
  do {                                                \
    REQUIRE_NO_FAULT();                               \
    REQUIRE(initialised, CUDA_ERROR_NOT_INITIALIZED); \
  } while (0)
#define REQUIRE_NO_CAPTURE()                         \
  do {                                               \
    CUresult forbidden = capture_forbids();          \
    if (forbidden != CUDA_SUCCESS) return forbidden; \
  } while (0)
#define REQUIRE_DEVICE(device) REQUIRE((device) >= 0 && (device) < device_count(), CUDA_ERROR_INVALID_DEVICE)

#endif
