// Filter transform for winograd/fused.cuh, along both axes, zero-padded to whole tiles of written channels and whole
// chunks of source channels. The layout makes a warp's loads consecutive:
//   [group][k tile][channel][warp][its points][quad][lanes that own a point][lane of k][4]
// Grid: x = k tile, y = channel, z = group. Block: one thread per k of a tile.
#pragma once

#include "winograd/axis.cuh"

namespace polyconv {

// Taps of one axis: kernel element tap_first + t * tap_stride for t < taps, zero for others.
struct FusedTaps {
  int taps, tap_first, tap_stride;
};

struct FusedFilterParams {
  const float* w;
  float* transformed;
  i64 w_group, w_output, w_channel, w_row, w_column;
  int channels, outputs;
  FusedTaps h, w_taps;
};

// One weight of a filter k of a group, zero beyond its filters, channels and taps.
__device__ __forceinline__ float fused_weight(const FusedFilterParams& p, int group, int k, int c, int i, int j) {
  if (k >= p.outputs || c >= p.channels || i >= p.h.taps || j >= p.w_taps.taps) return 0.f;
  const float* from = p.w + i64(group) * p.w_group + k * p.w_output + c * p.w_channel;
  return from[(p.h.tap_first + i * p.h.tap_stride) * p.w_row +
              (p.w_taps.tap_first + j * p.w_taps.tap_stride) * p.w_column];
}

template <class H, class W, int kLanesPoint, int kEach, int kLanesK, int kThreadK>
__device__ __forceinline__ void winograd_fused_filter(const FusedFilterParams& p) {
  constexpr int kPoints = H::kPoints * W::kPoints, kK = kLanesK * kThreadK, kLine = kLanesPoint * kLanesK * 4;
  const int k = blockIdx.x * kK + threadIdx.x, c = blockIdx.y;
  float along_w[W::kPoints][H::kLongest];
#pragma unroll
  for (int i = 0; i < H::kLongest; i++) {
    float taps[W::kLongest], points[W::kPoints];
#pragma unroll
    for (int j = 0; j < W::kLongest; j++) taps[j] = fused_weight(p, blockIdx.z, k, c, i, j);
    W::weights(taps, points);
#pragma unroll
    for (int j = 0; j < W::kPoints; j++) along_w[j][i] = points[j];
  }
  float* to = p.transformed + ((i64(blockIdx.z) * gridDim.x + blockIdx.x) * gridDim.y + c) * kPoints * kK +
              threadIdx.x / (kLanesK * 4) * kLine + threadIdx.x % (kLanesK * 4);
#pragma unroll
  for (int j = 0; j < W::kPoints; j++) {
    float points[H::kPoints];
    H::weights(along_w[j], points);
#pragma unroll
    for (int i = 0; i < H::kPoints; i++) {
      const int point = i * W::kPoints + j;
      const int lane = point / kEach, each = point % kEach;  // lanes across all warps, point within a lane
      to[(lane / kLanesPoint * kEach + each) * (kLanesPoint * kK) + lane % kLanesPoint * (kLanesK * 4)] = points[i];
    }
  }
}

}  // namespace polyconv
