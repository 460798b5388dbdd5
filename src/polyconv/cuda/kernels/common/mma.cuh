// One matrix instruction of the tensor cores: its sizes, which lane holds what, and the multiplication itself.
//
// A kernel asks a struct of this file and nothing else, so that the instruction of another generation is another struct.
#pragma once

#include "common/common.cuh"

namespace polyconv {

// mma.sync.m8n8k4 of sm_70: four products of 8 x 4 by 4 x 8, one per pair of quads (lanes 4q to 4q + 3 and 16 + 4q to
// 16 + 4q + 3). All pairs get the same eight rows of A and columns of their own, so that a warp multiplies 8 x 4 by
// 4 x 32. A row of A, a column of B: four halves in two registers.
struct Mma884 {
  static constexpr int kRows = 8, kColumns = 32, kDepth = 4;
  static constexpr int kSums = 8;  // of a lane
  // Sums of how many rows neighbour in a half-warp, and of how many columns of each: whoever stores them keeps these
  // rows in different banks.
  static constexpr int kRowsAtOnce = 2, kColumnsAtOnce = 16;

  static __device__ __forceinline__ int row_of_a(int lane) { return lane % 4 + lane / 16 * 4; }
  static __device__ __forceinline__ int column_of_b(int lane) { return lane; }

  // Where sum i of a lane belongs.
  static __device__ __forceinline__ int row_of_sum(int lane, int i) { return (lane & 1) + (i & 2) + lane / 16 * 4; }
  static __device__ __forceinline__ int column_of_sum(int lane, int i) {
    return (lane >> 2 & 3) * 4 + (lane & 2) + (i & 1) + (i & 4) * 4;
  }

  // The product alone.
  static __device__ __forceinline__ void multiply(float (&sum)[kSums], uint2 a, uint2 b) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
        "{%12,%12,%12,%12,%12,%12,%12,%12};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3]), "=f"(sum[4]), "=f"(sum[5]), "=f"(sum[6]), "=f"(sum[7])
        : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y), "f"(0.f));
  }
  static __device__ __forceinline__ void multiply_add(float (&sum)[kSums], uint2 a, uint2 b) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},"
        "{%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y));
  }
};

// mma.sync.m16n8k16, from sm_80 on. In which order the reduction index runs is free as long as both operands agree, so
// it is that of quads: lane 4g + t has four neighbours of it, those of quad t, for rows g and g + 8 of A and for column
// g of B. So a lane loads both operands as they lie in memory, and no ldmatrix is needed.
struct Mma16816 {
  static constexpr int kRows = 16, kColumns = 8, kDepth = 16;
  static constexpr int kSums = 4;
  static constexpr int kRowsAtOnce = 4, kColumnsAtOnce = 8;

  static __device__ __forceinline__ int row_of_a(int lane) { return lane / 4; }  // and the row eight further down
  static __device__ __forceinline__ int column_of_b(int lane) { return lane / 4; }
  static __device__ __forceinline__ int quad(int lane) { return lane % 4; }

  static __device__ __forceinline__ int row_of_sum(int lane, int i) { return lane / 4 + (i & 2) * 4; }
  static __device__ __forceinline__ int column_of_sum(int lane, int i) { return lane % 4 * 2 + (i & 1); }

  static __device__ __forceinline__ void multiply_add(float (&sum)[kSums], uint2 upper, uint2 lower, uint2 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(upper.x), "r"(lower.x), "r"(upper.y), "r"(lower.y), "r"(b.x), "r"(b.y));
  }
};

}  // namespace polyconv
