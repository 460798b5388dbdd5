// A block's tile of C += A * B from shared memory for 16-bit elements: tensor-core instructions, sums in float.
//
// Buffers as in implicit_gemm/tile.cuh, with 16-bit elements:   a[kDepth][M + padding]   b[kDepth][N + padding]
// A warp owns kUnitsM x kUnitsN products of 16 x 16.
#pragma once

#include "common/async_copy.cuh"
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

// ---- Tiles with operands in a ring of stages, copied from channels_last tensors in chunks of 16 bytes ---------------

constexpr int kChunk = 8;            // channels of 16 bytes
constexpr int kPipelinedDepth = 32;  // reduction steps per stage

template <class Element, int kWarpsM, int kWarpsN, int kUnitsM, int kUnitsN, int kStages_>
struct PipelinedTile : MatrixTile<Element, kWarpsM, kWarpsN, kUnitsM, kUnitsN> {
  using Base = MatrixTile<Element, kWarpsM, kWarpsN, kUnitsM, kUnitsN>;
  using Base::kM, Base::kN;
  static constexpr int kDepth = kPipelinedDepth, kStages = kStages_;
  static constexpr int kBytesA = 2 * kDepth * kM, kBytesB = 2 * kDepth * kN, kStageBytes = kBytesA + kBytesB;
  static constexpr int kRingBytes = kStages * kStageBytes;
};

// Offset of a chunk in a buffer with kChunks chunks per row, in bytes. The chunks of a row are permuted by an XOR with
// the row, so that eight rows at one chunk, which a matrix of ldmatrix reads, lie in different banks. If a chunk is a
// multiple of 2 n, adding 2 i < 2 n to it is an XOR of the offset with 32 i.
template <int kChunks>
__device__ __forceinline__ u32 swizzled(int row, int chunk) {
  constexpr int kRowsPerLine = kChunks < 8 ? 8 / kChunks : 1, kMask = (kChunks < 8 ? kChunks : 8) - 1;
  return 16 * (row * kChunks + (chunk ^ (row / kRowsPerLine & kMask)));
}

// Runs steps with their copies kStages - 1 steps ahead: start(stage) starts the next step's copies to a stage, and
// multiply(stage) uses those that have arrived. Stages are addresses in shared memory.
template <class Tile, class Start, class Multiply>
__device__ __forceinline__ void pipeline(u32 ring, int steps, const Start& start, const Multiply& multiply) {
  const u32 end = ring + Tile::kRingBytes;
  u32 read = ring, write = ring;
  int ahead = steps;
  const auto next = [&] {
    if (ahead > 0) start(write);
    ahead--;
    close_copies();  // a group may be empty: their number is that of the steps
    write += Tile::kStageBytes;
    if (write == end) write = ring;
  };
#pragma unroll
  for (int stage = 0; stage < Tile::kStages - 1; stage++) next();
#pragma unroll 1
  for (int left = steps; left > 0; left--) {
    wait_for_copies<Tile::kStages - 2>();
    __syncthreads();  // the copies of all threads have arrived, and the stage read last is free
    next();
    multiply(read);
    read += Tile::kStageBytes;
    if (read == end) read = ring;
  }
  wait_for_copies<0>();
  __syncthreads();  // the ring is free
}

}  // namespace polyconv
