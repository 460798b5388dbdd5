// The largest finite magnitude of every image of a tensor and group of a convolution (or of every filter), in bits: what
// the pipeline of tensor_layout.cuh scales by. Infinities and NaNs are passed over: they spread over their tile, and
// everything else keeps its precision.
//
// Each block writes the maximum of its part; consumers take the largest of an image's, so that nothing has to be
// cleared first and no order of blocks matters. A launch of its own has the grid x = part, y = slot (an image and a group,
// or a filter); other kernels have blocks that find a part of what comes after them (tensor_product.cuh).
#pragma once

#include "common.cuh"

namespace polyconv {

struct TensorMagnitudeParams {
  const float* source;
  u32* largest;
  i64 outer_stride, inner_stride;  // from slot to slot: slot = outer * inner slots + inner
  i64 stride[3];                   // of the elements of a slot, the nearest neighbours first
  u32 elements;
  FastDivisor inner_slots, extent[2];  // the first has all elements where the same stride leads to all of them
};

// The largest of every so-many-th element of a slot, whose elements begin at `from`. Behind another kernel a block may be
// alone on its multiprocessor, so that a thread asks for many elements before it looks at the first; past the last
// element it asks for that once more.
template <bool kOneRun>
__device__ __forceinline__ u32 largest_of(const TensorMagnitudeParams& p, const float* from, u32 first, u32 apart) {
  constexpr int kLoads = 16;
  u32 found = 0;
#pragma unroll 1
  for (; first < p.elements; first += kLoads * apart) {
    float values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const u32 at = min(first + i * apart, p.elements - 1);
      if constexpr (kOneRun) {
        values[i] = from[at * p.stride[0]];
      } else {
        const u32 row = p.extent[0].quotient(at), plane = p.extent[1].quotient(row);
        values[i] = from[(at - row * p.extent[0].divisor) * p.stride[0] +
                         (row - plane * p.extent[1].divisor) * p.stride[1] + plane * p.stride[2]];
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const u32 bits = __float_as_uint(values[i]) & 0x7fffffffu;
      if (bits < 0x7f800000u) found = max(found, bits);
    }
  }
  return found;
}

// One part of so many of a slot, by a block of eight warps.
__device__ __forceinline__ void find_magnitude(const TensorMagnitudeParams& p, u32 slot, u32 part, u32 parts,
                                               u32* of_warps) {
  const u32 outer = p.inner_slots.quotient(slot), inner = slot - outer * p.inner_slots.divisor;
  const float* from = p.source + outer * p.outer_stride + inner * p.inner_stride;
  const u32 first = part * blockDim.x + threadIdx.x, apart = parts * blockDim.x;
  u32 found = p.extent[0].divisor == p.elements ? largest_of<true>(p, from, first, apart)
                                                : largest_of<false>(p, from, first, apart);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) found = max(found, __shfl_xor_sync(~0u, found, lanes));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < 8; warp++) found = max(found, of_warps[warp]);
    p.largest[slot * parts + part] = found;
  }
}

__device__ __forceinline__ void tensor_magnitude(const TensorMagnitudeParams& p) {
  __shared__ u32 of_warps[8];
  find_magnitude(p, blockIdx.y, blockIdx.x, gridDim.x, of_warps);
}

}  // namespace polyconv
