/* The CUDA driver of the same fake GPUs: what polyconv, and PyTorch in places, ask of libcuda.
 *
 *   status.c    the driver's names of errors
 *   context.c   contexts, and which device is current: to the driver and to the runtime alike
 *   library.c   machine code that is loaded at run time, and its launches
 *   entry.c     finds the functions by name; what is refused
 *
 * No header of NVIDIA's is needed beyond the runtime's: that of CUDA 11 does not know all of it. */
#ifndef DRIVER_H
#define DRIVER_H

#include "../runtime/function.h"

typedef cudaError_t CUresult; /* the driver's statuses have the runtime's numbers, under other names */
typedef int CUdevice;
typedef struct Context* CUcontext;

/* Two that the runtime has no name for. */
#define CUDA_ERROR_INVALID_CONTEXT ((CUresult)201)
#define CUDA_ERROR_NOT_FOUND ((CUresult)500)

CUcontext current_context(void); /* NULL if the thread has none */

/* As the runtime's, but nobody asks the driver for the last error. */
#undef REQUIRE
#undef REQUIRE_NO_FAULT
#undef REQUIRE_SUCCESS
#define REQUIRE(condition, error)     \
  do {                                \
    if (!(condition)) return (error); \
  } while (0)
#define REQUIRE_SUCCESS(call)                 \
  do {                                        \
    CUresult result = (call);                 \
    if (result != cudaSuccess) return result; \
  } while (0)
#define REQUIRE_NO_FAULT() REQUIRE_SUCCESS(fault_of(__func__))
#define REQUIRE_DEVICE(device) REQUIRE(profile_of(device), cudaErrorInvalidDevice)

#endif
