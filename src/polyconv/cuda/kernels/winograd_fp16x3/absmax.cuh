// Largest finite magnitude (absmax, as bits) of every image and group of a tensor, or of every filter: the scales of
// winograd_fp16x3/layout.cuh. Infinities and NaNs are skipped: they spread over their tile, and everything else keeps
// its precision.
//
// Each block writes the maximum of its part, and consumers reduce the parts of an image, so that nothing has to be
// cleared first and the order of blocks does not matter. Grid of its own launch: x = part, y = slot (an image and a
// group, or a filter). Trailing blocks of winograd_fp16x3/gemm.cuh compute parts for later slabs.
#pragma once

#include "common/common.cuh"

namespace polyconv {

struct Fp16x3AbsmaxParams {
  const float* source;
  u32* largest;
  i64 outer_stride, inner_stride;  // between slots: slot = outer * inner slots + inner
  i64 stride[3];                   // of the elements of a slot, nearest neighbours first
  u32 elements;
  FastDivisor inner_slots, extent[2];  // extent[0] is all elements if one stride reaches them all
};

// Absmax of some elements of a slot, for a thread of 256 neighbours: kLoads loads are issued before the first use. Past
// the end the last element is loaded again.
template <bool kOneRun, int kLoads>
__device__ __forceinline__ u32 largest_of(const Fp16x3AbsmaxParams& p, const float* from, u32 first, u32 end) {
  float values[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const u32 at = min(first + i * 256, end - 1);
    if constexpr (kOneRun) {
      values[i] = from[at * p.stride[0]];
    } else {
      const u32 row = p.extent[0].quotient(at), plane = p.extent[1].quotient(row);
      values[i] = from[(at - row * p.extent[0].divisor) * p.stride[0] +
                       (row - plane * p.extent[1].divisor) * p.stride[1] + plane * p.stride[2]];
    }
  }
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const u32 bits = __float_as_uint(values[i]) & 0x7fffffffu;
    if (bits < 0x7f800000u) found = max(found, bits);
  }
  return found;
}

// Absmax of a thread's elements. Behind another kernel a block may be alone on its multiprocessor and needs many loads
// in flight to keep the memory busy; few for the remainder, and for small images.
template <bool kOneRun>
__device__ __forceinline__ u32 largest_of_all(const Fp16x3AbsmaxParams& p, const float* from, u32 first, u32 end) {
  constexpr int kMany = 16, kFew = 4;
  u32 found = 0;
#pragma unroll 1
  for (; first + (kMany - 1) * 256 < end; first += kMany * 256)
    found = max(found, largest_of<kOneRun, kMany>(p, from, first, end));
#pragma unroll 1
  for (; first < end; first += kFew * 256) found = max(found, largest_of<kOneRun, kFew>(p, from, first, end));
  return found;
}

// One of `parts` parts of a slot, by a block of eight warps. A part is contiguous, so its reads are long runs.
__device__ __forceinline__ void find_magnitude(const Fp16x3AbsmaxParams& p, u32 slot, u32 part, u32 parts,
                                               u32* of_warps) {
  const u32 outer = p.inner_slots.quotient(slot), inner = slot - outer * p.inner_slots.divisor;
  const float* from = p.source + outer * p.outer_stride + inner * p.inner_stride;
  const u32 each = (p.elements + parts * 256 - 1) / (parts * 256) * 256;
  const u32 first = part * each + threadIdx.x, end = min((part + 1) * each, p.elements);
  u32 found = p.extent[0].divisor == p.elements ? largest_of_all<true>(p, from, first, end)
                                                : largest_of_all<false>(p, from, first, end);
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

__device__ __forceinline__ void winograd_fp16x3_absmax(const Fp16x3AbsmaxParams& p) {
  __shared__ u32 of_warps[8];
  find_magnitude(p, blockIdx.y, blockIdx.x, gridDim.x, of_warps);
}

}  // namespace polyconv
