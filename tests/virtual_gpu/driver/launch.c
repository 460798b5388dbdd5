/* Checks a launch as the GPU's driver does, then hands it to the test. */
#include "virtual_gpu.h"

#include <string.h>

static VirtualLaunchCallback on_launch;

API void virtual_gpu_on_launch(VirtualLaunchCallback callback) {
  on_launch = callback;
}

static CUresult check(const LaunchRecord* launch, CUkernel kernel, void** parameters) {
  for (int i = 0; i < 3; i++) REQUIRE(launch->grid[i] > 0 && launch->block[i] > 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(launch->grid[0] <= 2147483647u, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(launch->grid[1] <= GRID_YZ && launch->grid[2] <= GRID_YZ, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(launch->block[0] <= BLOCK_THREADS && launch->block[1] <= BLOCK_THREADS, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(launch->block[2] <= BLOCK_Z, CUDA_ERROR_INVALID_VALUE);

  uint64_t threads = (uint64_t)launch->block[0] * launch->block[1] * launch->block[2];
  REQUIRE(threads <= BLOCK_THREADS && threads <= (uint64_t)kernel->max_threads, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(launch->dynamic_shared <= launch->max_dynamic_shared, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(kernel->params_bytes <= MOST_PARAMS, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(parameters || !kernel->parameters, CUDA_ERROR_INVALID_VALUE);

  /* Registers are given to whole warps, in units of 256 per warp: 8 per thread. */
  uint64_t warps = (threads + 31) / 32, registers = (uint64_t)(kernel->registers + 7) / 8 * 8;
  REQUIRE(warps * 32 * registers <= BLOCK_REGISTERS, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  REQUIRE(resident_blocks(kernel, (int)threads, launch->dynamic_shared) > 0, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned dynamic_shared, CUstream stream,
                            void** parameters, void** extra) {
  CUcontext context;
  REQUIRE_INITIALISED();
  REQUIRE(is_kernel(kernel), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(find_context(stream, &context), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(context, CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(!extra, CUDA_ERROR_INVALID_VALUE); /* the other way to pass parameters: not modelled */

  unsigned char bytes[MOST_PARAMS];
  LaunchRecord launch = {
      .name = kernel->name,
      .cubin = kernel->library->code,
      .cubin_bytes = kernel->library->bytes,
      .grid = {grid_x, grid_y, grid_z},
      .block = {block_x, block_y, block_z},
      .dynamic_shared = dynamic_shared,
      .max_dynamic_shared = (uint32_t)kernel->max_dynamic_shared[context->device],
      .stream = (uintptr_t)stream,
      .device = context->device,
      .params_bytes = kernel->params_bytes,
      .params = bytes,
  };
  CUresult result = check(&launch, kernel, parameters);
  if (result == CUDA_SUCCESS) result = load_kernel(kernel, context->device);
  REQUIRE(result == CUDA_SUCCESS, result);

  memset(bytes, 0, sizeof bytes);
  for (int i = 0; i < kernel->parameters; i++)
    memcpy(bytes + kernel->parameter[i].offset, parameters[i], kernel->parameter[i].size);
  return on_launch ? on_launch(&launch) : CUDA_SUCCESS;
}
