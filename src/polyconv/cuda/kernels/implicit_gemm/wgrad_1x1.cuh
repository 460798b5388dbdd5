// wgrad of a pointwise convolution: dw = dy * x^T, summed over the pixels of all images. Like implicit_gemm/wgrad.cuh,
// but both operands are rows of dense pixels with one moving pointer per row, so that hardly anything but the
// multiplications uses the FP32 pipe. Grid and partial sums as in implicit_gemm/wgrad.cuh.
#pragma once

#include "implicit_gemm/wgrad.cuh"

namespace polyconv {

// Rows of one operand: a quad of pixels per thread and row, kRows rows in all. kOnes: with `ones`, the row after the
// last one is all ones (its products with dy sum to the bias gradient).
template <int kRows, int kThreads, bool kOnes>
struct PixelQuads {
  static constexpr int kQuads = kDepth / 4;                  // per row and step
  static constexpr int kStep = kThreads / kQuads;            // rows that the block loads at once
  static constexpr int kEach = (kRows + kStep - 1) / kStep;  // rows of one thread
  static constexpr int kPitch = kRows + 4;
  static_assert(kRows % kStep == 0, "the block must divide the rows");

  const float* at;
  i64 next_row;
  int rows;  // existing rows from this thread's first on
  float4 carried[kEach];

  __device__ __forceinline__ PixelQuads(const float* plane, i64 channel, int rows)
      : at(plane + i64(threadIdx.x / kQuads) * channel),
        next_row(channel * kStep),
        rows(rows - int(threadIdx.x) / kQuads) {}

  __device__ __forceinline__ void load(bool inside, bool ones = false) {
    const float* from = at;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const float other = kOnes && ones && e * kStep == rows ? 1.f : 0.f;
      carried[e] = inside && e * kStep < rows ? load4(from) : make_float4(other, other, other, other);
      if (e + 1 < kEach) from = opaque(from + next_row);
    }
  }

  __device__ __forceinline__ void store(float* tile) const {
    float* to = tile + threadIdx.x % kQuads * 4 * kPitch + threadIdx.x / kQuads;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      to[e * kStep] = carried[e].x;
      to[e * kStep + kPitch] = carried[e].y;
      to[e * kStep + 2 * kPitch] = carried[e].z;
      to[e * kStep + 3 * kPitch] = carried[e].w;
    }
  }
};

template <class Tile>
struct PixelLoader {
  using QuadsA = PixelQuads<Tile::kM, Tile::kThreads, false>;
  using QuadsB = PixelQuads<Tile::kN, Tile::kThreads, true>;
  static constexpr int kPitchM = QuadsA::kPitch, kPitchN = QuadsB::kPitch;

  const WgradParams& p;
  int left;      // pixels of the slice from this thread's quad on
  int in_plane;  // pixels of the image before it
  int plane;
  QuadsA a;
  QuadsB b;

  __device__ __forceinline__ PixelLoader(const WgradParams& p, int first_k, int first_column, int first, int end)
      : p(p),
        plane(p.out_height.divisor * p.out_width.divisor),
        a(p.dy + (i64(blockIdx.y) * p.k + first_k) * p.dy_channel, p.dy_channel, p.k - first_k),
        b(p.x + (i64(blockIdx.y) * p.channels + first_column) * p.x_channel, p.x_channel, p.channels - first_column) {
    const int pixel = first + threadIdx.x % QuadsA::kQuads * 4;
    const int image = p.out_height.quotient(p.out_width.quotient(pixel));
    left = end - pixel;
    in_plane = pixel - image * plane;
    a.at += image * p.dy_batch + in_plane;
    b.at += image * p.x_batch + in_plane;
  }

  __device__ __forceinline__ void load() {
    a.load(left > 0);
    b.load(left > 0, p.bias);
    left -= kDepth;
    in_plane += kDepth;
    a.at += kDepth;
    b.at += kDepth;
    if (in_plane >= plane) {
      in_plane -= plane;
      a.at += p.dy_batch - plane;
      b.at += p.x_batch - plane;
    }
  }

  __device__ __forceinline__ void store(float* tile_a, float* tile_b) const {
    a.store(tile_a);
    b.store(tile_b);
  }
};

template <class Tile>
__device__ __forceinline__ void implicit_gemm_wgrad_1x1(const WgradParams& p) {
  const int column_tile = p.k_tiles.quotient(blockIdx.x), k_tile = blockIdx.x - column_tile * p.k_tiles.divisor;
  const int first = blockIdx.z * p.pixels_per_slice, end = min(first + p.pixels_per_slice, p.pixels);
  PixelLoader<Tile> loader(p, k_tile * Tile::kM, column_tile * Tile::kN, first, end);
  wgrad_slice<Tile>(p, loader, end - first);
}

}  // namespace polyconv
