// Nonfused Winograd pipeline for dense correlations, and its half-transformed tensors:
//   winograd_nonfused_filter   U = weights, transformed along H and W
//   winograd_nonfused_input    X = source, transformed along H, in the layout below
//   winograd_nonfused_gemm     Y = per point of H: sum over channels of U * (X transformed along W), inverse along W
//   winograd_nonfused_output   written = inverse along H of Y, plus bias
//
// A row is one tile of kM output rows of one phase of one image: row = (image * dilation_h + phase) * tiles + tile.
// Along W the positions i = phase + dilation * q are dense in q within a phase. A unit is the kOutputs outputs that the
// W algorithm computes together; q = kOutputs * unit + kVector * part + v, and column u = unit * dilation + phase.
//   X[row][point of H][group][channel][part][u][v]       Y[point of H][group][k][part][row * columns + u][v]
// So a thread that owns one column finds kVector consecutive inputs of its phase as one vector, its neighbour in the
// warp the next vector in memory, and the inputs of the next unit `dilation` columns further.
//
// Residue classes of a strided convolution (algebra/polyphase.py: TapClass) and, along H, segments of taps are further
// channels: channel = (part of H * classes of W + class of W) * source channels + source channel.
#pragma once

#include "winograd/axis.cuh"

namespace polyconv {

// Channels that winograd/nonfused_gemm.cuh sums between two barriers. X and U are padded to whole chunks.
enum : int { kChannelChunk = 8 };

// Classes per axis, times segments along H, in one launch. An exported file has as many as it needs.
constexpr int kMaxParts = 16;

// First position that the taps of one class (and segment) read, and the end of what any output needs of the image.
// Positions beyond are not read, so that an infinity there cannot reach a tile that extends beyond the outputs.
struct SourcePart {
  int read_first, read_end;
};

template <int kCount>
__device__ __forceinline__ void load_vector(const float* from, float* to) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "one load instruction");
  if constexpr (kCount == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (kCount == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *from;
  }
}

// Loads data that is read once, bypassing L1.
template <int kCount>
__device__ __forceinline__ void load_stream(const float* from, float* to) {
  static_assert(kCount == 2 || kCount == 4, "one load instruction");
  if constexpr (kCount == 4) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
    to[0] = v.x, to[1] = v.y;
  }
}

template <int kCount>
__device__ __forceinline__ void store_vector(float* to, const float* from) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "one store instruction");
  if constexpr (kCount == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
  } else {
    *to = *from;
  }
}

// Predicated store. With an `if`, the compiler would move all computations of the value into its branch, and the loads
// of several such stores could not overlap.
template <int kCount>
__device__ __forceinline__ void store_vector_if(bool wanted, float* to, const float* from) {
  static_assert(kCount == 2 || kCount == 4, "one store instruction");
  if constexpr (kCount == 4) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
                 "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]), "r"(int(wanted))
                 : "memory");
  } else {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p st.global.v2.f32 [%0], {%1, %2};}" ::"l"(to), "f"(from[0]),
                 "f"(from[1]), "r"(int(wanted))
                 : "memory");
  }
}

// Predicated load of four floats that no thread of the launch writes. Leaves `to` unchanged if not wanted.
__device__ __forceinline__ void load4_if(bool wanted, const float* from, float* to) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];}"
               : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
               : "l"(from), "r"(int(wanted)));
}

}  // namespace polyconv
