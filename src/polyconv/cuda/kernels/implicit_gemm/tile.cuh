// FP32 outer-product core of all implicit-GEMM kernels: a block's tile of C += A * B from shared memory.
//
// Shared memory, per buffer:   a[kDepth][M + pad]   b[kDepth][N + pad]     (both with the reduction index slowest)
// A thread owns TM x TN accumulators in groups of four, the groups a whole warp row apart, so that each fragment is one
// conflict-free LDS.128: with 8 x 8 accumulators, 4 loads feed 64 FFMAs.
#pragma once

#include "common/common.cuh"

namespace polyconv {

constexpr int kDepth = 8;                 // reduction steps per shared-memory tile
constexpr int kPaddingRow = -2147483647;  // marks a padding entry of a table

template <int kWarpsM_, int kWarpsN_, int kLanesM_, int kThreadM_, int kThreadN_>
struct GemmTile {
  using Element = float;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kLanesM = kLanesM_, kLanesN = 32 / kLanesM_;
  static constexpr int kThreadM = kThreadM_, kThreadN = kThreadN_;
  static constexpr int kM = kWarpsM * kLanesM * kThreadM;
  static constexpr int kN = kWarpsN * kLanesN * kThreadN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kDepth = polyconv::kDepth;
  static constexpr int kPitchM = kM, kPitchN = kN;  // from one row of a buffer to the next
  static_assert(kThreadM % 4 == 0 && kThreadN % 4 == 0, "accumulators come in groups of four");
};

// First row and column of a thread within the block's tile.
template <class Tile>
struct TilePlace {
  int m, n;

  __device__ __forceinline__ explicit TilePlace(u32 thread) {
    const int lane = thread % 32, warp = thread / 32;
    m = (warp % Tile::kWarpsM) * Tile::kLanesM * Tile::kThreadM + (lane % Tile::kLanesM) * 4;
    n = (warp / Tile::kWarpsM) * Tile::kLanesN * Tile::kThreadN + (lane / Tile::kLanesM) * 4;
  }
};

template <class Tile>
struct Accumulators {
  float sum[Tile::kThreadM][Tile::kThreadN];

  __device__ __forceinline__ Accumulators() {
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i++)
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++) sum[i][j] = 0.f;
  }

  // Row or column of accumulator i relative to the thread's place.
  static __device__ __forceinline__ constexpr int offset_m(int i) { return (i / 4) * Tile::kLanesM * 4 + i % 4; }
  static __device__ __forceinline__ constexpr int offset_n(int j) { return (j / 4) * Tile::kLanesN * 4 + j % 4; }

  // a and b point at this thread's rows and columns of the two buffers.
  template <int kPitchM, int kPitchN>
  __device__ __forceinline__ void multiply_add(const float* a, const float* b) {
#pragma unroll
    for (int k = 0; k < kDepth; k++) {
      float row[Tile::kThreadM], column[Tile::kThreadN];
#pragma unroll
      for (int i = 0; i < Tile::kThreadM; i += 4) {
        const float4 v = load4(a + k * kPitchM + offset_m(i));
        row[i] = v.x, row[i + 1] = v.y, row[i + 2] = v.z, row[i + 3] = v.w;
      }
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j += 4) {
        const float4 v = load4(b + k * kPitchN + offset_n(j));
        column[j] = v.x, column[j + 1] = v.y, column[j + 2] = v.z, column[j + 3] = v.w;
      }
#pragma unroll
      for (int i = 0; i < Tile::kThreadM; i++)
#pragma unroll
        for (int j = 0; j < Tile::kThreadN; j++) sum[i][j] = fmaf(row[i], column[j], sum[i][j]);
    }
  }
};

}  // namespace polyconv
