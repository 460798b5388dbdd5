// Tensor-core instructions for winograd_fp16x3: sizes, fragment layout and the multiplication. Kernels depend on these
// structs only, so that the instruction of another generation is another struct.
#pragma once

#include "common/common.cuh"

namespace polyconv {

// mma.sync.m8n8k4 of sm_70: four products of 8 x 4 by 4 x 8, one per pair of quads (lanes 4q to 4q + 3 and 16 + 4q to
// 16 + 4q + 3). All pairs get the same eight rows of A and their own columns of B, so a warp multiplies 8 x 4 by 4 x
// 32. A row of A or a column of B is four halves in two registers.
struct Mma884 {
  static constexpr int kRows = 8, kColumns = 32, kDepth = 4;
  static constexpr int kSums = 8;  // per lane
  // Extent of the sums that a half-warp stores at once. A store to shared memory keeps these rows in different banks.
  static constexpr int kRowsAtOnce = 2, kColumnsAtOnce = 16;

  static __device__ __forceinline__ int row_of_a(int lane) { return lane % 4 + lane / 16 * 4; }
  static __device__ __forceinline__ int column_of_b(int lane) { return lane; }

  // Row and column of sum i of a lane.
  static __device__ __forceinline__ int row_of_sum(int lane, int i) { return (lane & 1) + (i & 2) + lane / 16 * 4; }
  static __device__ __forceinline__ int column_of_sum(int lane, int i) {
    return (lane >> 2 & 3) * 4 + (lane & 2) + (i & 1) + (i & 4) * 4;
  }

  // sum = a * b.
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

// mma.sync.m16n8k16, from sm_80 on. The order of the reduction index is free if both operands agree. Here it is that of
// quads: lane 4g + t has four consecutive indices, those of quad t, for rows g and g + 8 of A and for column g of B. So
// a lane loads both operands as they are in memory, without ldmatrix.
struct Mma16816 {
  static constexpr int kRows = 16, kColumns = 8, kDepth = 16;
  static constexpr int kSums = 4;
  static constexpr int kRowsAtOnce = 4, kColumnsAtOnce = 8;

  static __device__ __forceinline__ int row_of_a(int lane) { return lane / 4; }  // and that row + 8
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
