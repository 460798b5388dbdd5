// The half-transformed tensors of the nonfused pipeline, which computes a dense correlation in both axes as
//   winograd_nonfused_filter   U = weights, transformed along H and W
//   winograd_nonfused_input      X = source, transformed along H, in the layout below
//   winograd_nonfused_gemm           Y = per point of H: sum over channels of U * (X transformed along W), transformed back along W
//   winograd_nonfused_output        written = Y, transformed back along H, plus bias
//
// A row is one tile of kM output rows of one phase of one image: row = (image * dilation_h + phase) * tiles + tile.
// Along W the positions i = phase + dilation * q are dense in q within a phase. A unit is the kOutputs outputs that the
// W algorithm computes together; q = kOutputs * unit + kVector * part + v, and column u = unit * dilation + phase. So
//   X[row][point of H][group][channel][part][u][v]       Y[point of H][group][k][part][row * columns + u][v]
// and a thread that owns one column finds kVector consecutive inputs of its phase as one vector, its neighbour in the
// warp the next vector in memory, and the inputs of the next unit `dilation` columns further.
//
// Residue classes of a strided convolution (algebra/polyphase.py: TapClass) and, along H, segments of taps are further
// channels: channel = (part of H * classes of W + class of W) * source channels + source channel.
#pragma once

#include "winograd/axis.cuh"

namespace polyconv {

// Channels that winograd/nonfused_gemm.cuh sums between two barriers. X and U are filled up to whole chunks.
enum : int { kChannelChunk = 8 };

// Classes per axis, times segments along H, that fit into one launch. An exported file has as many as it needs.
constexpr int kMaxParts = 16;

// Where the taps of one class (and segment) begin to read, and the end of what any output needs of the image: what lies
// beyond is not read, so that an infinity there cannot reach a tile that juts out.
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

// The same for data that is read once: past L1.
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

// The same under a predicate of the instruction. An `if` around it would draw everything that leads to the store into
// its branch, and the loads of several such stores could not overlap.
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

// Four floats that no thread of the launch writes; left as they are if not wanted.
__device__ __forceinline__ void load4_if(bool wanted, const float* from, float* to) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];}"
               : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
               : "l"(from), "r"(int(wanted)));
}

}  // namespace polyconv
