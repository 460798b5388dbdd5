// A block's tile of C += A * B from shared memory for 16-bit elements: tensor-core instructions, sums in float.
//
// Buffers as in implicit_gemm/tile.cuh, with 16-bit elements:   a[kDepth][M + padding]   b[kDepth][N + padding]
// A warp owns kUnitsM x kUnitsN products of 16 x 16.
#pragma once

#include "common/warp_mma.cuh"
#include "implicit_gemm/tile.cuh"

namespace polyconv {

constexpr int kMatrixDepth = 16;  // reduction steps per shared-memory tile

template <class Element_, int kWarpsM_, int kWarpsN_, int kUnitsM_, int kUnitsN_>
struct MatrixTile {
  using Element = Element_;
  using Instruction = MatrixInstruction<Element>;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kUnitsM = kUnitsM_, kUnitsN = kUnitsN_;
  static constexpr int kM = kWarpsM * kUnitsM * kMatrix;
  static constexpr int kN = kWarpsN * kUnitsN * kMatrix;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kDepth = kMatrixDepth;
  static constexpr int kPitchM = kM + Instruction::kPadding, kPitchN = kN + Instruction::kPadding;
};

// First row and column of a thread's warp within the block's tile.
template <class Element, int kWarpsM, int kWarpsN, int kUnitsM, int kUnitsN>
struct TilePlace<MatrixTile<Element, kWarpsM, kWarpsN, kUnitsM, kUnitsN>> {
  int m, n;

  __device__ __forceinline__ explicit TilePlace(u32 thread)
      : m(thread / 32 % kWarpsM * kUnitsM * kMatrix), n(thread / 32 / kWarpsM * kUnitsN * kMatrix) {}
};

template <class Element, int kWarpsM, int kWarpsN, int kUnitsM, int kUnitsN>
struct Accumulators<MatrixTile<Element, kWarpsM, kWarpsN, kUnitsM, kUnitsN>> {
  using Instruction = MatrixInstruction<Element>;
  float sum[kUnitsM][kUnitsN][8];

  __device__ __forceinline__ Accumulators() {
#pragma unroll
    for (int m = 0; m < kUnitsM; m++)
#pragma unroll
      for (int n = 0; n < kUnitsN; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) sum[m][n][i] = 0.f;
  }

  // a and b point at this warp's rows and columns of the two buffers.
  template <int kPitchM, int kPitchN>
  __device__ __forceinline__ void multiply_add(const Element* a, const Element* b) {
    a += Instruction::place_a(threadIdx.x % 32, kPitchM);
    b += Instruction::place_b(threadIdx.x % 32, kPitchN);
#pragma unroll
    for (int k = 0; k < kMatrixDepth; k += Instruction::kDepth) {
      typename Instruction::Fragment rows[kUnitsM], columns[kUnitsN];
#pragma unroll
      for (int m = 0; m < kUnitsM; m++) rows[m] = Instruction::load_a(a + k * kPitchM + m * kMatrix);
#pragma unroll
      for (int n = 0; n < kUnitsN; n++) columns[n] = Instruction::load_b(b + k * kPitchN + n * kMatrix);
#pragma unroll
      for (int m = 0; m < kUnitsM; m++)
#pragma unroll
        for (int n = 0; n < kUnitsN; n++) Instruction::multiply_add(sum[m][n], rows[m], columns[n]);
    }
  }
};

}  // namespace polyconv
