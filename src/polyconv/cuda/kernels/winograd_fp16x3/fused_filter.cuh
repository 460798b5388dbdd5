// Filter transform for winograd_fp16x3/fused.cuh along both axes: scaled by a power of two per filter, split into two
// halves, and zero-padded to whole tiles of written channels and whole chunks of source channels, as quads
//   [group][k tile][point][part of k][quad of channels][fragment][row]
// Grid: x = k tile, y = quad of channels, z = group. Block: one thread per k of a tile.
#pragma once

#include "winograd/fused_filter.cuh"
#include "winograd_fp16x3/fused.cuh"

namespace polyconv {

struct Fp16x3FusedFilterParams : FusedFilterParams {
  const u32* largest;  // absmax of every filter
  int headroom;        // bits by which a transformed weight may exceed the absmax
};

template <class Tile>
__device__ __forceinline__ void winograd_fp16x3_fused_filter(const Fp16x3FusedFilterParams& p) {
  using H = typename Tile::H;
  using W = typename Tile::W;
  const int k = blockIdx.x * Tile::kK + threadIdx.x;
  const float scale = k < p.outputs ? scale_of(p.largest[blockIdx.z * i64(p.outputs) + k], p.headroom) : 0.f;
  float along_w[W::kPoints][kTensorChannels][H::kLongest];
#pragma unroll
  for (int n = 0; n < kTensorChannels; n++) {
    const int c = blockIdx.y * kTensorChannels + n;
#pragma unroll
    for (int i = 0; i < H::kLongest; i++) {
      float taps[W::kLongest], points[W::kPoints];
#pragma unroll
      for (int j = 0; j < W::kLongest; j++) taps[j] = scale * fused_weight(p, blockIdx.z, k, c, i, j);
      W::weights(taps, points);
#pragma unroll
      for (int j = 0; j < W::kPoints; j++) along_w[j][n][i] = points[j];
    }
  }
  uint4* to = reinterpret_cast<uint4*>(p.transformed) + (i64(blockIdx.z) * gridDim.x + blockIdx.x) * Tile::kWeights +
              blockIdx.y * Tile::kPartK;
#pragma unroll
  for (int j = 0; j < W::kPoints; j++) {
    float points[H::kPoints][kTensorChannels];
#pragma unroll
    for (int n = 0; n < kTensorChannels; n++) {
      float of_channel[H::kPoints];
      H::weights(along_w[j][n], of_channel);
#pragma unroll
      for (int i = 0; i < H::kPoints; i++) points[i][n] = of_channel[i];
    }
    uint4* const of_point = to + Tile::place_of_weight(j, threadIdx.x);
#pragma unroll
    for (int i = 0; i < H::kPoints; i++) of_point[i * Tile::kNextWeights] = split(points[i]);
  }
}

}  // namespace polyconv
