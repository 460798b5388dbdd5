// Warp-level matrix product on tensor cores:   C[16][16] += A[16][kDepth] * B[kDepth][16]
//
// Both operands are in shared memory with the reduction index slowest, as all GEMMs here store them: a row of A's
// buffer holds neighbouring m, a row of B's neighbouring n. A lane has eight accumulators; row() and column() give
// their positions in C.
//
//   sm_70           mma.m8n8k4: four products of 8 x 8, one per pair of quads, tile C as 2 x 2
//   sm_75           mma.m16n8k8, fragments by ldmatrix
//   from sm_80 on   mma.m16n8k16, the same fragments
//
// bfloat16 has tensor cores from sm_80 on. Before, a lane multiplies its 4 x 2 part of C itself, in float.
#pragma once

#include "common/elements.cuh"

namespace polyconv {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
#define POLYCONV_HAS_LDMATRIX 0
#else
#define POLYCONV_HAS_LDMATRIX 1
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define POLYCONV_HAS_K16 0
#else
#define POLYCONV_HAS_K16 1
#endif

// Side of C.
constexpr int kMatrix = 16;

#if POLYCONV_HAS_LDMATRIX
// Loads four 8 x 8 matrices of 16 bits, transposed. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
}

// Fragments loaded by ldmatrix.
template <class Element>
struct WarpFragments {
  static constexpr int kDepth = 16;
  static constexpr int kPadding = 8;  // of a row of a buffer: eight rows of a matrix are then in different banks

  struct Fragment {
    u32 pair[4];
  };

  // Address of a lane's row: matrices in the order of the instruction's registers.
  static __device__ __forceinline__ int place_a(int lane, int pitch) {
    return (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8;
  }
  static __device__ __forceinline__ int place_b(int lane, int pitch) {
    return (lane / 8 % 2 * 8 + lane % 8) * pitch + lane / 16 * 8;
  }
  static __device__ __forceinline__ Fragment load_a(const Element* from) {
    Fragment found;
    load_matrices(found.pair, from);
    return found;
  }
  static __device__ __forceinline__ Fragment load_b(const Element* from) { return load_a(from); }

  // Row and column of accumulator i.
  static __device__ __forceinline__ int row(int lane, int i) { return lane / 4 + (i & 2) * 4; }
  static __device__ __forceinline__ int column(int lane, int i) { return (i & 4) * 2 + lane % 4 * 2 + (i & 1); }
};
#endif

template <class Element>
struct MatrixInstruction;

#if !POLYCONV_HAS_LDMATRIX
template <>
struct MatrixInstruction<Half> {
  static constexpr int kDepth = 4;
  static constexpr int kPadding = 16;  // four rows, and both halves of 16 elements of each, are in different banks

  struct Fragment {
    uint2 four;  // neighbours along m, or along n
  };

  static __device__ __forceinline__ int place_a(int lane, int pitch) {
    return lane % 4 * pitch + lane / 4 % 2 * 8 + lane / 16 * 4;
  }
  static __device__ __forceinline__ int place_b(int lane, int pitch) {
    return lane % 4 * pitch + lane / 8 % 2 * 8 + lane / 16 * 4;
  }
  static __device__ __forceinline__ Fragment load_a(const Half* from) {
    return {*reinterpret_cast<const uint2*>(from)};
  }
  static __device__ __forceinline__ Fragment load_b(const Half* from) { return load_a(from); }

  static __device__ __forceinline__ int row(int lane, int i) {
    return lane / 4 % 2 * 8 + lane / 16 * 4 + (i & 2) + lane % 2;
  }
  static __device__ __forceinline__ int column(int lane, int i) {
    return lane / 8 % 2 * 8 + (i & 4) + (lane & 2) + (i & 1);
  }

  static __device__ __forceinline__ void multiply_add(float (&c)[8], Fragment a, Fragment b) {
    asm("mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a.four.x), "r"(a.four.y), "r"(b.four.x), "r"(b.four.y));
  }
};
#else
template <>
struct MatrixInstruction<Half> : WarpFragments<Half> {
  static __device__ __forceinline__ void multiply_add(float (&c)[8], const Fragment& a, const Fragment& b) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
#if POLYCONV_HAS_K16
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
          : "r"(a.pair[0]), "r"(a.pair[1]), "r"(a.pair[2]), "r"(a.pair[3]), "r"(b.pair[i / 2]), "r"(b.pair[i / 2 + 1]));
#else
#pragma unroll
      for (int k = 0; k < 2; k++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
            : "r"(a.pair[2 * k]), "r"(a.pair[2 * k + 1]), "r"(b.pair[i / 2 + k]));
#endif
    }
  }
};
#endif

#if POLYCONV_HAS_K16
template <>
struct MatrixInstruction<BFloat16> : WarpFragments<BFloat16> {
  static __device__ __forceinline__ void multiply_add(float (&c)[8], const Fragment& a, const Fragment& b) {
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
          : "r"(a.pair[0]), "r"(a.pair[1]), "r"(a.pair[2]), "r"(a.pair[3]), "r"(b.pair[i / 2]), "r"(b.pair[i / 2 + 1]));
  }
};
#else
template <>
struct MatrixInstruction<BFloat16> {
  static constexpr int kDepth = 1;
  static constexpr int kPadding = 8;

  struct Fragment {
    float value[4];
  };

  static __device__ __forceinline__ int place_a(int lane, int) { return lane % 4 * 4; }
  static __device__ __forceinline__ int place_b(int lane, int) { return lane / 4 * 2; }
  static __device__ __forceinline__ Fragment load_a(const BFloat16* from) {
    const float4 v = widened4<BFloat16>(load4(from));
    return {v.x, v.y, v.z, v.w};
  }
  static __device__ __forceinline__ Fragment load_b(const BFloat16* from) {
    const u32 both = *reinterpret_cast<const u32*>(from);
    return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
  }

  static __device__ __forceinline__ int row(int lane, int i) { return lane % 4 * 4 + i % 4; }
  static __device__ __forceinline__ int column(int lane, int i) { return lane / 4 * 2 + i / 4; }

  static __device__ __forceinline__ void multiply_add(float (&c)[8], const Fragment& a, const Fragment& b) {
#pragma unroll
    for (int i = 0; i < 8; i++) c[i] = fmaf(a.value[i % 4], b.value[i / 4], c[i]);
  }
};
#endif

}  // namespace polyconv
