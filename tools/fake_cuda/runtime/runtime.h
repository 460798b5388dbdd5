/* A fake CUDA runtime on top of the fake driver (../driver), for a CUDA build of PyTorch on a machine without a GPU.
 *
 * Preloaded, it takes precedence over NVIDIA's libcudart. A function that is missing here is NVIDIA's, which finds no
 * driver and reports that. Structures and numbers are those of NVIDIA's headers of the version that is replaced.
 *
 *   error.c     the last error of a thread
 *   device.c    devices, and which one is current
 *   memory.c    allocations, copies and fills, each checked against the allocations
 *   stream.c    streams, events, graphs
 *   function.c  kernels in fat binaries: registration, attributes, occupancy, launches
 */
#ifndef RUNTIME_H
#define RUNTIME_H

#include <cuda_runtime_api.h>

cudaError_t failed(int status); /* remembers an error as the thread's last one */

#define FAILED(status) failed(status)
#include "../driver/driver.h"

int working_device(void); /* the current device; a thread without a context gets that of device 0 */

/* ---- the interface for Python; mirrored by ctypes structures in ../library.py ------------------------------------- */

/* A range of memory. `device` is -1 for pinned memory of the host, which every device reaches. */
typedef struct {
  uint64_t address, size;
  int32_t device;
} Allocation;

/* Returns the cubin inside a fat binary, which must stay valid; NULL if there is none for the emulator. */
typedef const unsigned char* (*UnpackCallback)(const void* fat_binary);

/* Without a callback no attributes of a registered kernel are known, and it is launched without parameters. */
API void fake_cuda_on_unpack(UnpackCallback callback);
/* Fills up to `room` allocations; returns how many there are. */
API uint64_t fake_cuda_allocations(Allocation* found, uint64_t room);

#endif
