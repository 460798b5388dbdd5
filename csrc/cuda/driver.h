// The functions of the NVIDIA driver that launching takes, as addresses: nothing is linked with CUDA, and no header of
// its toolkit is needed. Python hands over those of the library that it has loaded itself.
#pragma once

namespace polyconv {

// Zero where all is well: NVIDIA's CUresult.
using Status = int;

struct Driver {
  Status (*ctx_get_current)(void** context);
  Status (*ctx_push_current)(void* context);
  Status (*ctx_pop_current)(void** context);
  Status (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned dynamic_shared, void* stream, void** parameters,
                          void** extra);
};

}  // namespace polyconv
