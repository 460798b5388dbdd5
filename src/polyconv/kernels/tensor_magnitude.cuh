// The largest finite magnitude of every image of a tensor and group of a convolution (or of every filter), in bits: what
// the pipeline of tensor_layout.cuh scales by. Infinities and NaNs are passed over: they spread over their tile, and
// everything else keeps its precision.
//
// Each block writes the maximum of its part; consumers take the largest of an image's, so that nothing has to be
// cleared first and no order of blocks matters. Grid: x = part, y = slot (an image and a group, or a filter).
#pragma once

#include "common.cuh"

namespace polyconv {

struct TensorMagnitudeParams {
  const float* source;
  u32* largest;
  i64 outer_stride, inner_stride;  // from slot to slot: slot = outer * inner slots + inner
  i64 stride[3];                   // of the elements of a slot, the nearest neighbours first
  u32 elements;
  FastDivisor inner_slots, extent[2];
};

__device__ __forceinline__ void tensor_magnitude(const TensorMagnitudeParams& p) {
  __shared__ u32 of_warps[8];
  const u32 outer = p.inner_slots.quotient(blockIdx.y), inner = blockIdx.y - outer * p.inner_slots.divisor;
  const float* from = p.source + outer * p.outer_stride + inner * p.inner_stride;
  u32 found = 0;
#pragma unroll 4
  for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < p.elements; at += gridDim.x * blockDim.x) {
    const u32 row = p.extent[0].quotient(at), plane = p.extent[1].quotient(row);
    const float value = from[(at - row * p.extent[0].divisor) * p.stride[0] +
                             (row - plane * p.extent[1].divisor) * p.stride[1] + plane * p.stride[2]];
    const u32 bits = __float_as_uint(value) & 0x7fffffffu;
    if (bits < 0x7f800000u) found = max(found, bits);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) found = max(found, __shfl_xor_sync(~0u, found, apart));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < 8; warp++) found = max(found, of_warps[warp]);
    p.largest[blockIdx.y * gridDim.x + blockIdx.x] = found;
  }
}

}  // namespace polyconv
