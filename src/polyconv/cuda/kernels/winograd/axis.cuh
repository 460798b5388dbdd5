// Helpers of the generated transforms (cuda/planner/winograd/axis.py).
#pragma once

#include "common/common.cuh"

#define POLYCONV_INLINE __device__ __forceinline__

namespace polyconv {

__device__ __forceinline__ float mul_add(float x, float c, float y) {
  return fmaf(x, c, y);
}
__device__ __forceinline__ float mul_sub(float x, float c, float y) {
  return fmaf(x, c, -y);
}

}  // namespace polyconv
