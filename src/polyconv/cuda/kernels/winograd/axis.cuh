// What the emitted transforms (cuda/planner/winograd/axis.py) are written with.
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
