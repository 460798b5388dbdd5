// Entry points of the NVIDIA driver that a launch needs. They are addresses that Python takes from the library it
// loaded, so the module is built without the CUDA toolkit and links nothing of it.
#pragma once

namespace polyconv {

// CUresult: 0 is success.
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
