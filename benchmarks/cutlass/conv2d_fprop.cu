// CUTLASS's FP32 convolution without tensor cores, for the tile that the macros name. One of two kernels is compiled:
// the convolution, or (SETUP) one thread that fills its parameter block with CUTLASS's own code, so that the parameters
// need neither a host compiler nor a CUDA toolkit. Everything else is in CUTLASS's headers.
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/epilogue/thread/linear_combination.h"

using Layout = cutlass::layout::TensorNHWC;

using Kernel = cutlass::conv::kernel::DefaultConv2dFprop<
    float, Layout, float, Layout, float, Layout, float, cutlass::arch::OpClassSimt, cutlass::arch::Sm70,
    cutlass::gemm::GemmShape<BLOCK_M, BLOCK_N, 8>, cutlass::gemm::GemmShape<WARP_M, WARP_N, 8>,
    cutlass::gemm::GemmShape<1, 1, 1>, cutlass::epilogue::thread::LinearCombination<float, 1, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>,
    2,  // stages: the double buffer that sm_70 has
    cutlass::arch::OpMultiplyAdd, cutlass::conv::IteratorAlgorithm::kOptimized,
    cutlass::conv::StrideSupport::STRIDE>::Kernel;

#ifdef SETUP

// What a launch needs to know, as plain integers.
struct Launch {
  int params_bytes, threads, shared_bytes, grid[3];
};

extern "C" __global__ void setup(cutlass::conv::Conv2dProblemSize problem, float* x, float* w, float* y,
                                 Kernel::Params* params, Launch* launch) {
  auto packed = [](int h, int w, int c) { return Layout(cutlass::make_Coord(c, w * c, h * w * c)); };
  Layout y_layout = packed(problem.P, problem.Q, problem.K);
  Kernel::Arguments arguments(problem, {x, packed(problem.H, problem.W, problem.C)},
                              {w, packed(problem.R, problem.S, problem.C)}, {y, y_layout}, {y, y_layout}, {1.0f, 0.0f});
  *params = Kernel::Params(arguments);
  dim3 grid = Kernel::ThreadblockSwizzle().get_grid_shape(params->grid_tiled_shape);
  *launch = {int(sizeof(Kernel::Params)),
             Kernel::kThreadCount,
             int(sizeof(Kernel::SharedStorage)),
             {int(grid.x), int(grid.y), int(grid.z)}};
}

#else

// As CUTLASS's own entry point (device_kernel.h), under a plain name.
extern "C" __global__ void conv2d_fprop(Kernel::Params params) {
  extern __shared__ int shared[];
  Kernel()(params, *reinterpret_cast<Kernel::SharedStorage*>(shared));
}

#endif
