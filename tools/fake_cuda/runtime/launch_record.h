/* One launch that every check accepted, as it is handed to Python: by this runtime, and by the stub driver of
 * tests/virtual_gpu. Mirrored by the ctypes structure in tools/fake_cuda/library.py. */
#ifndef LAUNCH_RECORD_H
#define LAUNCH_RECORD_H

#include <stdint.h>

typedef struct {
  const char* name;
  const unsigned char* cubin;
  uint64_t cubin_bytes;
  uint32_t grid[3], block[3];
  uint32_t dynamic_shared, max_dynamic_shared;
  uint64_t stream;
  int32_t device;
  uint32_t params_bytes;
  const unsigned char* params;
} LaunchRecord;

#endif
