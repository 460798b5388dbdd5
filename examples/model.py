# ruff: noqa: E501, UP006, UP035
"""KernelBench level 1, problem 80, on CUDA kernels of its own.

    model = ModelNew().cuda()
    y = model(torch.rand(8, 32, 512, 512, device="cuda"))

Written by polyconv 0.1.0: polyconv export kb80

Needs PyTorch 2.0.1 or newer and its CUDA compiler (nvcc 11.8 or newer), a GPU of compute capability 7.0 or higher, and
nothing else. The kernels are compiled by the first ModelNew() of a process. Any batch, image size and strides will do;
the kernels were chosen for the input above and a Tesla V100.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int32, c_int64, c_uint32, c_uint64
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, prod
from typing import Any, NamedTuple, NoReturn, Protocol, Tuple

import torch
from torch import Tensor

# ---- CUDA kernels.

CUDA_SOURCE = r"""
// ---- common.cuh -----------------------------------------------------------------------------------------------------
// What every kernel shares: index types, division by an invariant, the lattice of one axis, borders.
//
// Device headers include neither torch nor the standard library, so that NVRTC, nvcc and the emulator's toolchain all
// read the same text. Plain-old-data only: each Params struct is filled byte by byte on the host (plan/layout.py), and
// every generated source asserts where its fields are, and the numbers that the host counts with (plan/assertions.py).

namespace polyconv {

using i64 = long long;
using u32 = unsigned int;

// Blocks per multiprocessor that a kernel's registers must allow. From sm_100 on ptxas holds more loads in flight and
// would spill at the occupancy that fits the others exactly: ask for a quarter less there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define POLYCONV_MIN_BLOCKS(blocks) ((blocks) - ((blocks) > 1) * ((blocks) + 3) / 4)
#else
#define POLYCONV_MIN_BLOCKS(blocks) (blocks)
#endif

// Quotient by a divisor known on the host: one high multiplication and one shift, for dividends below 2^31.
struct FastDivisor {
  u32 divisor;
  u32 multiplier;
  u32 shift;

  __device__ __forceinline__ u32 quotient(u32 dividend) const {
    return divisor == 1 ? dividend : __umulhi(dividend, multiplier) >> shift;
  }
};

// One residue class ("phase") of positions along one axis: a dense, unit-stride problem on a sub-lattice.
// Position i is written at     written_first + i * written_step,             0 <= i < count.
// Its tap j reads the source   read_first + i * read_step + j * tap_step,    0 <= j < taps,
// with the kernel's element    tap_first + j * tap_stride.
// fprop has one phase per axis; dgrad has one per residue of the stride (algebra/lattice.py derives the numbers).
// All phases of an axis share tap_step, which lies in the kernel's Params.
struct AxisPhase {
  int written_first, written_step;
  int read_first, read_step;
  int taps, tap_first, tap_stride;
  FastDivisor count;
};

// Phases per axis that fit into one launch; larger strides take several launches.
constexpr int kMaxPhases = 8;

// What lies outside the image.
enum class Border : int { kZeros = 0, kReflect = 1, kReplicate = 2, kCircular = 3 };

// The coordinate inside the image that stands for a coordinate outside it. Valid for pads that torch allows
// (reflect: less than the extent; circular: at most the extent), so one fold suffices.
__device__ __forceinline__ int fold_into(int at, int extent, Border border) {
  if (border == Border::kReflect) {
    at = at < 0 ? -at : at;
    return at >= extent ? 2 * (extent - 1) - at : at;
  }
  if (border == Border::kReplicate) return min(max(at, 0), extent - 1);
  if (border == Border::kCircular) {
    at = at < 0 ? at + extent : at;
    return at >= extent ? at - extent : at;
  }
  return at;
}

// The inverse of fold_into: image number `fold` of coordinate `at` outside the image, or false where there is none.
// Fold 0 is the coordinate itself. Reflect and circular have one image before and one after; replicate has one image
// of the first coordinate per padded position before it, then one of the last per padded position after it.
__device__ __forceinline__ bool unfold(int at, int fold, int extent, int before, int after, Border border, int& image) {
  image = at;
  if (fold == 0) return true;
  if (border == Border::kReflect) {
    image = fold == 1 ? -at : 2 * (extent - 1) - at;
    return fold == 1 ? (at > 0 && at <= before) : (at < extent - 1 && image < extent + after);
  }
  if (border == Border::kCircular) {
    image = fold == 1 ? at - extent : at + extent;
    return fold == 1 ? image >= -before : image < extent + after;
  }
  image = fold <= before ? -fold : extent - 1 + (fold - before);
  return fold <= before ? at == 0 : at == extent - 1;
}

// Special registers read anew at each call. What an epilogue derives from these the compiler cannot keep alive across
// the main loop, where every register is an accumulator.
__device__ __forceinline__ u32 fresh_thread() {
  u32 v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
__device__ __forceinline__ u32 fresh_block_x() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
}
__device__ __forceinline__ u32 fresh_block_y() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(v));
  return v;
}
__device__ __forceinline__ u32 fresh_block_z() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(v));
  return v;
}

// The same pointer, of unknown origin to the compiler: it cannot turn a chain of additions back into multiples of the
// stride, which would be computed on the FP32 pipe.
__device__ __forceinline__ const float* opaque(const float* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

__device__ __forceinline__ const float* add_bytes(const float* pointer, i64 bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(pointer) + bytes);
}
__device__ __forceinline__ float* add_bytes(float* pointer, i64 bytes) {
  return reinterpret_cast<float*>(reinterpret_cast<char*>(pointer) + bytes);
}

__device__ __forceinline__ float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void store4(float* to, float4 v) {
  *reinterpret_cast<float4*>(to) = v;
}

// Four floats to global memory in one instruction. Written as PTX because the compiler prefers four scalar stores to
// moving accumulators into neighbouring registers, at four times the memory transactions.
__device__ __forceinline__ void store4_global(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace polyconv

// ---- toom.cuh -------------------------------------------------------------------------------------------------------
// What the emitted transforms (plan/toom.py) are written with.

#define POLYCONV_INLINE __device__ __forceinline__

namespace polyconv {

__device__ __forceinline__ float mul_add(float x, float c, float y) {
  return fmaf(x, c, y);
}
__device__ __forceinline__ float mul_sub(float x, float c, float y) {
  return fmaf(x, c, -y);
}

}  // namespace polyconv

// ---- half_layout.cuh ------------------------------------------------------------------------------------------------
// The half-transformed tensors of the separable pipeline, which computes a dense correlation in both axes as
//   transform_weights   U = weights, transformed along H and W
//   half_transform      X = source, transformed along H, in the layout below
//   half_gemm           Y = per point of H: sum over channels of U * (X transformed along W), transformed back along W
//   half_inverse        written = Y, transformed back along H, plus bias
//
// A row is one tile of kM output rows of one phase of one image: row = (image * dilation_h + phase) * tiles + tile.
// Along W the positions i = phase + dilation * q are dense in q within a phase. A unit is the kOutputs outputs that the
// W algorithm computes together; q = kOutputs * unit + kVector * part + v, and column u = unit * dilation + phase. So
//   X[row][point of H][group][channel][part][u][v]       Y[point of H][group][k][part][row * columns + u][v]
// and a thread that owns one column finds kVector consecutive inputs of its phase as one vector, its neighbour in the
// warp the next vector in memory, and the inputs of the next unit `dilation` columns further.
//
// Residue classes of a strided convolution (algebra/lattice.py: TapClass) and, along H, segments of taps are further
// channels: channel = (part of H * classes of W + class of W) * source channels + source channel.

namespace polyconv {

// Classes per axis, times segments along H, that fit into one launch.
constexpr int kMaxParts = 16;

// Channels that half_gemm.cuh sums between two barriers. X and U are filled up to whole chunks.
enum : int { kChannelChunk = 8 };

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

// ---- transform_weights.cuh ------------------------------------------------------------------------------------------
// The weights of the separable pipeline (half_layout.cuh), transformed along both axes, in the order in which half_gemm
// reads them: U[point of H][group][k tile][chunk][point of W][8 channels][k of the tile]. Chunks of 8 channels come
// segment by segment; if segments are nested, first all of U0 + U1, then U0 and U1 of each chunk in turn. Channels and
// k are filled up with zeros.
//
// A thread transforms the taps of one (k, channel); lanes are neighbours in k, so every store is coalesced.
// Grid: x = (group * k tiles + k tile) * channels / 8 + chunk. Block: 32 lanes x 8 channels.

namespace polyconv {

// Taps of one class (and segment).
struct TapPart {
  int taps, tap_first, tap_stride;
};

struct TransformWeightsParams {
  const float* w;
  float* u;
  i64 w_group, w_output, w_channel;
  int w_row, w_column;
  int channels;                  // of the source, per group
  int channels_all;              // times classes and segments
  int chunks;                    // of 8 of these, the last filled up
  int outputs, k_tile, k_tiles;  // written channels of a group, of a tile; tiles
  int groups, segments;          // along W
  FastDivisor source_channels, classes_w;
  TapPart part_h[kMaxParts], class_w[kMaxParts];
};

template <class H, class W>
struct WeightTransform {
  // The taps of one segment along W, transformed along H.
  static __device__ __forceinline__ void along_h(const TransformWeightsParams& p, const float* w, const TapPart& h,
                                                 const TapPart& class_w, int segment,
                                                 float (&t)[H::kPoints][W::kLongest]) {
    const int first = segment * W::kM;
    const int last = segment + 1 < p.segments ? first + W::kM : class_w.taps;
#pragma unroll
    for (int j = 0; j < W::kLongest; j++) {
      float column[H::kLongest], points[H::kPoints];
#pragma unroll
      for (int i = 0; i < H::kLongest; i++)
        column[i] = w && i < h.taps && first + j < last
                        ? w[i64(h.tap_first + i * h.tap_stride) * p.w_row +
                            i64(class_w.tap_first + (first + j) * class_w.tap_stride) * p.w_column]
                        : 0.f;
      H::weights(column, points);
#pragma unroll
      for (int i = 0; i < H::kPoints; i++) t[i][j] = points[i];
    }
  }

  static __device__ __forceinline__ void store(float* to, int next_point, const float* points) {
#pragma unroll
    for (int point = 0; point < W::kPoints; point++) to[point * next_point] = points[point];
  }
};

template <class H, class W>
__device__ __forceinline__ void transform_weights(const TransformWeightsParams& p) {
  using Transform = WeightTransform<H, W>;
  const int chunk = blockIdx.x % p.chunks, k_tile = blockIdx.x / p.chunks % p.k_tiles;
  const int group = blockIdx.x / p.chunks / p.k_tiles;
  const int in_chunk = threadIdx.x / 32, channel = chunk * kChannelChunk + in_chunk;
  const int by_class = p.source_channels.quotient(channel), part_h = p.classes_w.quotient(by_class);
  const TapPart& h = p.part_h[min(part_h, kMaxParts - 1)];
  const TapPart& w = p.class_w[by_class - part_h * p.classes_w.divisor];
  const int next_w = kChannelChunk * p.k_tile;  // from point to point of W
  const i64 plane = i64(W::kPoints) * next_w;   // one chunk
  const i64 slice = i64(p.chunks) * (W::kTiles == 2 ? 3 : p.segments) * plane;
  const i64 next_point = i64(p.groups) * p.k_tiles * slice;
  float* u = p.u + (i64(group) * p.k_tiles + k_tile) * slice + in_chunk * p.k_tile;

  for (int in_tile = threadIdx.x % 32; in_tile < p.k_tile; in_tile += 32) {
    const int k = k_tile * p.k_tile + in_tile;
    const float* from = nullptr;
    if (channel < p.channels_all && k < p.outputs)
      from = p.w + group * p.w_group + k * p.w_output + i64(channel - by_class * p.channels) * p.w_channel;
    float t[H::kPoints][W::kLongest], points[W::kPoints];
    if constexpr (W::kTiles == 2) {
      float second[H::kPoints][W::kLongest];
      Transform::along_h(p, from, h, w, 0, t);
      Transform::along_h(p, from, h, w, 1, second);
#pragma unroll
      for (int i = 0; i < H::kPoints; i++) {
        float* to = u + i * next_point + in_tile;
        float other[W::kPoints], both[W::kPoints];
        W::weights(t[i], points);
        W::weights(second[i], other);
#pragma unroll
        for (int point = 0; point < W::kPoints; point++) both[point] = points[point] + other[point];
        Transform::store(to + chunk * plane, next_w, both);
        Transform::store(to + (p.chunks + 2 * chunk) * plane, next_w, points);
        Transform::store(to + (p.chunks + 2 * chunk + 1) * plane, next_w, other);
      }
    } else {
      for (int segment = 0; segment < p.segments; segment++) {
        Transform::along_h(p, from, h, w, segment, t);
#pragma unroll
        for (int i = 0; i < H::kPoints; i++) {
          W::weights(t[i], points);
          Transform::store(u + i * next_point + in_tile + (segment * p.chunks + chunk) * plane, next_w, points);
        }
      }
    }
  }
}

}  // namespace polyconv

// ---- half_transform.cuh ---------------------------------------------------------------------------------------------
// The source, transformed along H, in the layout of half_layout.cuh. Bound by memory bandwidth.
//
// A thread makes one position: it reads H::kPoints rows of it and writes H::kPoints elements. Neighbouring threads write
// neighbouring elements; what they read lies in short runs, interleaved, if the convolution is dilated or units are
// wider than a vector, and the rest of a sector is soon asked for by another warp. Tiles of rows overlap: they
// follow one another, so that the second reading comes from L2.
// Grid: x covers all (group, channel, row, vector, element) of the slab.

namespace polyconv {

struct HalfTransformParams {
  const float* source;
  float* x;
  i64 source_batch, source_channel;
  int source_row, source_column;
  int first_row;                // of the slab
  u32 items;                    // elements of one point of H in the slab
  FastDivisor vectors, pitch;   // of a channel; of a part of it
  FastDivisor rows;             // of the slab
  int channels;                 // of a row: groups * filled-up channels
  FastDivisor channels_filled;  // of a group
  FastDivisor source_channels, classes_w;
  int channels_all;  // of a group, not filled up
  FastDivisor tiles, dilation_h, dilation_w;
  int read_step_h, read_step_w;
  int outputs_w;  // of a unit
  SourcePart part_h[kMaxParts], class_w[kMaxParts];
};

template <class H, int kVector>
__device__ __forceinline__ void half_transform(const HalfTransformParams& p) {
  const u32 item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= p.items) return;
  const u32 of_all = item / kVector, line = p.vectors.quotient(of_all), vector = of_all - line * p.vectors.divisor;
  const u32 of_row = p.rows.quotient(line), row = line - of_row * p.rows.divisor;
  const u32 group = p.channels_filled.quotient(of_row), channel = of_row - group * p.channels_filled.divisor;

  float in[H::kPoints], out[H::kPoints];
#pragma unroll
  for (int i = 0; i < H::kPoints; i++) in[i] = 0.f;
  if (channel < p.channels_all) {
    const u32 by_class = p.source_channels.quotient(channel), part = p.classes_w.quotient(by_class);
    const SourcePart h = p.part_h[part], w = p.class_w[by_class - part * p.classes_w.divisor];
    const u32 place = p.first_row + row, phases = p.tiles.quotient(place), image = p.dilation_h.quotient(phases);
    const int tile = place - phases * p.tiles.divisor, phase_h = phases - image * p.dilation_h.divisor;
    const u32 piece = p.pitch.quotient(vector), column = vector - piece * p.pitch.divisor;
    const int unit = p.dilation_w.quotient(column), phase_w = column - unit * p.dilation_w.divisor;
    const int q = unit * p.outputs_w + piece * kVector + item % kVector;

    const int step_h = p.read_step_h * p.dilation_h.divisor;
    const int at_w = w.read_first + p.read_step_w * (phase_w + int(p.dilation_w.divisor) * q);
    int at_h = h.read_first + p.read_step_h * phase_h + step_h * tile * H::kM;
    const float* from =
        p.source + image * p.source_batch +
        (i64(group) * p.source_channels.divisor + channel - by_class * p.source_channels.divisor) * p.source_channel +
        i64(at_h) * p.source_row + i64(at_w) * p.source_column;
    const i64 next_row = i64(step_h) * p.source_row;
    const bool column_there = at_w >= 0 && at_w < w.read_end;
#pragma unroll
    for (int i = 0; i < H::kPoints; i++, at_h += step_h, from += next_row)
      if (column_there && at_h >= 0 && at_h < h.read_end) in[i] = *from;
  }
  H::input(in, out);
  const i64 next_point = i64(p.channels) * p.vectors.divisor * kVector;
  float* x =
      p.x + row * H::kPoints * next_point + (i64(of_row) * p.vectors.divisor + vector) * kVector + item % kVector;
#pragma unroll
  for (int i = 0; i < H::kPoints; i++, x += next_point) *x = out[i];
}

}  // namespace polyconv

// ---- half_gemm.cuh --------------------------------------------------------------------------------------------------
// The heart of the separable pipeline (half_layout.cuh): for each point of H a matrix product over channels,
//   Y[k, u] = A^T sum over channels c of  U[k, c] * (B^T X[c, u])        (elementwise over the points of W)
// with the transform along W fused into the load of X and the transform back into the epilogue.
//
// One warp per point of W; a warp owns kK x kU accumulators, 8 x 8 per thread. Blocks are persistent and walk over tiles
// (point of H, group, columns, k tile), the point of H slowest, so that its slice of U stays in L2.
// Segments of the taps are further chunks of channels whose columns lie `next` further on. Nested segments (F(2,2),
// algebra/segments.py) compute two neighbouring tiles of outputs at once, in two sets of accumulators:
//   P = (U0 + U1) V1 into the first set; copy it to the second; then U0 (V0 - V1) on the first, U1 (V2 - V1) on the second.
//
// The reduction runs in chunks of 8 channels. While a chunk is multiplied, the next one, loaded into registers a chunk
// ago, goes into the other buffers: weights as they are, into the warp's own, columns through the transform; and the
// loads of the one after it are issued. One barrier per chunk; after the last chunk of a tile comes the first of the
// next tile.
// Shared memory:  v[2][8][kPoints][kU]   u[2][kPoints][8][kK]   exchange[kPoints][rows of a part][kU]

namespace polyconv {

struct HalfGemmParams {
  const float* x;
  const float* u;
  float* y;
  int tiles;
  FastDivisor k_tiles, column_tiles;  // tile = (hg * column tiles + column tile) * k tiles + k tile, hg = point, group
  FastDivisor row_columns;
  int columns, columns_filled;  // of the slab
  int row_stride;               // elements of X from row to row, from group to group, from channel to channel
  int group_stride, channel_stride;
  int part_stride, next;  // from part to part, from unit to unit
  int chunks, segments;
  int outputs;  // written channels of a group
  int zero;     // 0
};

template <class W, int kK_>
struct HalfGemm {
  static constexpr int kPoints = W::kPoints, kVector = W::kM, kParts = W::kTiles;
  static constexpr bool kNested = W::kTiles == 2;
  static_assert(!kNested || W::kSegments == 2, "only F(2,2) is nested");
  static constexpr int kSets = W::kTiles;
  static constexpr int kThreads = 32 * kPoints;
  static constexpr int kK = kK_, kLanesK = kK / 8, kLanesU = 32 / kLanesK, kU = 8 * kLanesU;
  static_assert(kChannelChunk == 8, "a chunk is multiplied in two halves of four channels");
  static constexpr int kChunkV = kChannelChunk * kPoints * kU, kChunkU = kChannelChunk * kK;  // the latter of one warp
  static constexpr int kWeightVectors = kChunkU / 128;                                        // float4 per lane
  // Columns are transformed by the warp, 32 at a time: `kTasks` per warp and chunk, some of the last ones idle.
  static constexpr int kStrips = kU / 32, kTaskCount = kChannelChunk * kStrips;
  static constexpr int kTasks = (kTaskCount + kPoints - 1) / kPoints;
  static constexpr int kOwnStrips = kStrips == 4 && kPoints % 4 ? 2 : 1;  // different strips that a warp works on
  static_assert(kPoints % 2 == 0, "the strips of a warp repeat");
  static constexpr int kInputs = (kPoints + kVector - 1) / kVector;  // vectors of one tile
  // The exchange of accumulators goes in parts of kPartRows rows per thread.
  static constexpr int kPartRows = kU == 128 || kPoints < 8 ? 2 : 4;
  static constexpr int kExchangeRows = kLanesK * kPartRows;
  static constexpr int kExchange = kPoints * kExchangeRows * kU;
  static constexpr int kSharedFloats = 2 * kChunkV + 2 * kPoints * kChunkU + kExchange;

  struct Accumulators {
    float sum[kSets][8][8];
  };

  // A thread's places in the two V buffers and in the two U buffers of its warp.
  struct Buffers {
    float *v, *write_u;
    const float *read_v, *read_u;
    int parity = 0;  // which ones are read

    __device__ __forceinline__ explicit Buffers(float* shared) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      float* u = shared + 2 * kChunkV + warp * kChunkU;
      v = shared, read_v = v + warp * kU + lane % kLanesU * 4;
      write_u = u + lane * 4, read_u = u + lane / kLanesU * 4;
    }
  };

  // This lane's weights, on their way from memory into the warp's shared memory, two chunks ahead.
  struct Weights {
    int tile, chunks_left;
    const float* from;
    float4 u[kWeightVectors];

    __device__ __forceinline__ void begin_tile(const HalfGemmParams& p, int chunks) {
      const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const u32 rest = p.k_tiles.quotient(tile), k_tile = tile - rest * p.k_tiles.divisor;
      const u32 hg = p.column_tiles.quotient(rest);
      from = p.u + i64(hg * p.k_tiles.divisor + k_tile) * chunks * kPoints * kChunkU + warp * kChunkU + lane * 4;
      chunks_left = chunks;
    }

    __device__ __forceinline__ void advance(const HalfGemmParams& p, int chunks) {
      from += kPoints * kChunkU;
      if (--chunks_left) return;
      if (tile + gridDim.x < p.tiles) tile += gridDim.x;
      begin_tile(p, chunks);
    }

    __device__ __forceinline__ void load(int number) { u[number] = load4(from + number * 128); }
    __device__ __forceinline__ void store(float* to, int number) { store4(to + number * 128, u[number]); }
  };

  // This lane's columns of the next chunk, on their way from memory through the transform into the other V buffer.
  struct Columns {
    int tile, chunks_left, channels_left;
    int kind, loaded_kind;  // 0 a tile as it is, 1 V0 - V1, 2 V2 - V1
    u32 at[kOwnStrips];
    float v[kTasks][kInputs + kNested][kVector];

    __device__ __forceinline__ void begin_tile(const HalfGemmParams& p, int chunks) {
      const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const u32 rest = p.k_tiles.quotient(tile);
      const u32 hg = p.column_tiles.quotient(rest), column_tile = rest - hg * p.column_tiles.divisor;
#pragma unroll
      for (int i = 0; i < kOwnStrips; i++) {
        const u32 strip = (warp + i * kPoints) % kStrips;
        // Columns past the end repeat the last one: they are not written.
        const u32 n = min(column_tile * kU + strip * 32 + lane, u32(p.columns - 1));
        const u32 row = p.row_columns.quotient(n), column = n - row * p.row_columns.divisor;
        at[i] = row * p.row_stride + hg * p.group_stride + column * kVector;
      }
      chunks_left = chunks, channels_left = p.chunks, kind = 0;
    }

    // To the next chunk; past the last tile, the last one once more, which nobody uses.
    __device__ __forceinline__ void advance(const HalfGemmParams& p, int chunks) {
      loaded_kind = kind;
      if (--chunks_left == 0) {
        if (tile + gridDim.x < p.tiles) tile += gridDim.x;
        begin_tile(p, chunks);
        return;
      }
      int by = kChannelChunk * p.channel_stride;
      if constexpr (kNested) {
        if (kind == 1) {
          kind = 2, by = 0;
        } else if (kind == 2) {
          kind = 1;
        } else if (--channels_left == 0) {
          kind = 1, by = -(p.chunks - 1) * kChannelChunk * p.channel_stride;
        }
      } else if (--channels_left == 0) {
        channels_left = p.chunks, by = p.next - (p.chunks - 1) * kChannelChunk * p.channel_stride;
      }
#pragma unroll
      for (int i = 0; i < kOwnStrips; i++) at[i] += by;
    }

    static __device__ __forceinline__ int task(int number) { return threadIdx.x / 32 + number * kPoints; }

    __device__ __forceinline__ void load(const HalfGemmParams& p, int number) {
      if (kTaskCount % kPoints && number == kTasks - 1 && task(number) >= kTaskCount) return;
      const float* from = p.x + (at[number % kOwnStrips] + u32(task(number) / kStrips) * p.channel_stride);
      if constexpr (kNested) {
        // Vectors 1 and 2 are the middle tile; its neighbour to the left has 0 and 1, to the right 2 and 3.
        load_vector<kVector>(from + p.part_stride, v[number][0]);
        load_vector<kVector>(from + p.next, v[number][1]);
        static_assert(!kNested || kVector == 4, "one load instruction");
        load4_if(kind != 0, from + (kind == 2 ? p.part_stride + p.next : 0), v[number][2]);
      } else {
#pragma unroll
        for (int i = 0; i < kInputs; i++) load_vector<kVector>(from + i * p.next, v[number][i]);
      }
    }

    __device__ __forceinline__ void store(float* to, int number) {
      if (kTaskCount % kPoints && number == kTasks - 1 && task(number) >= kTaskCount) return;
      float in[kInputs * kVector], out[kPoints];
      if constexpr (kNested) {
        static_assert(!kNested || kInputs == 2, "a tile is two vectors");
#pragma unroll
        for (int i = 0; i < kVector; i++) {
          const float middle = v[number][0][i], after = v[number][1][i], outer = v[number][2][i];
          in[i] = loaded_kind == 0 ? middle : (loaded_kind == 1 ? outer : after) - middle;
          in[kVector + i] = loaded_kind == 0 ? after : (loaded_kind == 1 ? middle : outer) - after;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kInputs * kVector; i++) in[i] = v[number][i / kVector][i % kVector];
      }
      W::input(in, out);
      to += task(number) / kStrips * kPoints * kU + task(number) % kStrips * 32 + threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kPoints; i++) to[i * kU] = out[i];
    }
  };

  // One half of a chunk: four outer products.
  template <int kSet, class Beside>
  static __device__ __forceinline__ void multiply(Accumulators& c, const float* u, const float* v, Beside beside) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      float row[8], column[8];
      load_vector<4>(u + step * kK, row), load_vector<4>(u + step * kK + kK / 2, row + 4);
      load_vector<4>(v + step * kPoints * kU, column), load_vector<4>(v + step * kPoints * kU + kU / 2, column + 4);
      beside(step);
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) c.sum[kSet][i][j] = fmaf(row[i], column[j], c.sum[kSet][i][j]);
    }
  }

  // Multiplies the chunk in one buffer into accumulator set kSet, and brings the next one into the other buffer. The
  // cursors move on between the two halves: their branches keep the compiler from using what was loaded too early.
  // Loads are spread out: a burst would fill the queues of L1, and the loads from shared memory wait behind it.
  template <int kSet>
  static __device__ __forceinline__ void multiply_chunk(Accumulators& c, Columns& columns, Weights& weights,
                                                        const HalfGemmParams& p, int chunks, Buffers& buffers) {
    const float* v = buffers.read_v + buffers.parity * kChunkV;
    const float* u = buffers.read_u + buffers.parity * kPoints * kChunkU;
    buffers.parity ^= 1;
    float* next_v = buffers.v + buffers.parity * kChunkV;
    float* next_u = buffers.write_u + buffers.parity * kPoints * kChunkU;
    multiply<kSet>(c, u, v, [&](int step) {
#pragma unroll
      for (int i = 0; i < kWeightVectors; i++)
        if (step == i * 4 / kWeightVectors) weights.store(next_u, i);
    });
    columns.advance(p, chunks);
    weights.advance(p, chunks);
    multiply<kSet>(c, u + 4 * kK, v + 4 * kPoints * kU, [&](int step) {
#pragma unroll
      for (int task = 0; task < kTasks; task++)
        if (step == task * 4 / kTasks) columns.store(next_v, task), columns.load(p, task);
#pragma unroll
      for (int i = 0; i < kWeightVectors; i++)
        if (step == i * 4 / kWeightVectors) weights.load(i);
    });
    __syncthreads();
  }

  // The accumulators of one set meet in shared memory, go back along W, and out to Y.
  template <int kSet>
  static __device__ __forceinline__ void write(const Accumulators& c, const HalfGemmParams& p, float* exchange,
                                               int tile) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, lane_k = lane / kLanesU, lane_u = lane % kLanesU;
    const u32 rest = p.k_tiles.quotient(tile), k_tile = tile - rest * p.k_tiles.divisor;
    const u32 hg = p.column_tiles.quotient(rest), column_tile = rest - hg * p.column_tiles.divisor;
#pragma unroll
    for (int part = 0; part < 8 / kPartRows; part++) {
      if (kSet > 0 || part > 0) __syncthreads();
      // Rows of neighbouring lanes lie in the same banks if a row has 32 columns: swap their halves.
      float* to = exchange + (warp * kExchangeRows + lane_k * kPartRows) * kU;
      const u32 swap = kU == 32 ? lane_k % 2 * 16 : 0;
#pragma unroll
      for (int i = 0; i < kPartRows; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          // Through an OR with a zero that the compiler does not know: a direct vector store would tie accumulators to
          // neighbouring registers, and cost bank conflicts of the register file in the main loop.
          const float* sum = c.sum[kSet][part * kPartRows + i] + half * 4;
          store4(to + i * kU + ((lane_u * 4 + half * (kU / 2)) ^ swap),
                 make_float4(
                     __int_as_float(__float_as_int(sum[0]) | p.zero), __int_as_float(__float_as_int(sum[1]) | p.zero),
                     __int_as_float(__float_as_int(sum[2]) | p.zero), __int_as_float(__float_as_int(sum[3]) | p.zero)));
        }
      __syncthreads();
#pragma unroll
      for (int first = 0; first < kExchangeRows * kStrips; first += kPoints) {
        const u32 task = first + warp;
        if (kExchangeRows * kStrips % kPoints && task >= kExchangeRows * kStrips) continue;
        const u32 row = task / kStrips, of_lane_k = row / kPartRows, i = part * kPartRows + row % kPartRows;
        const u32 u = task % kStrips * 32 + lane;
        const float* from = exchange + row * kU + (kU == 32 ? u ^ (of_lane_k % 2 * 16) : u);
        float points[kPoints], out[W::kM];
#pragma unroll
        for (int point = 0; point < kPoints; point++) points[point] = from[point * kExchangeRows * kU];
        W::output(points, out);
        // Columns past the end are written, too: Y is filled up to whole tiles.
        const u32 k = k_tile * kK + i / 4 * (kK / 2) + of_lane_k * 4 + i % 4, n = column_tile * kU + u;
        store_vector_if<kVector>(
            k < p.outputs, p.y + ((i64(hg) * p.outputs + k) * kParts + kSet) * p.columns_filled * kVector + n * kVector,
            out);
      }
    }
  }
};

template <class W, int kK>
__device__ __forceinline__ void half_gemm(const HalfGemmParams& p) {
  using Gemm = HalfGemm<W, kK>;
  extern __shared__ __align__(16) float shared[];
  float* const exchange = shared + 2 * Gemm::kChunkV + 2 * Gemm::kPoints * Gemm::kChunkU;
  typename Gemm::Buffers buffers(shared);
  const int chunks = p.chunks * (Gemm::kNested ? 3 : p.segments);

  typename Gemm::Columns columns;
  typename Gemm::Weights weights;
  columns.tile = weights.tile = blockIdx.x;
  columns.begin_tile(p, chunks);
  weights.begin_tile(p, chunks);
#pragma unroll
  for (int i = 0; i < Gemm::kTasks; i++) columns.load(p, i);
#pragma unroll
  for (int i = 0; i < Gemm::kWeightVectors; i++) weights.load(i), weights.store(buffers.write_u, i);
  columns.advance(p, chunks);
  weights.advance(p, chunks);
#pragma unroll
  for (int i = 0; i < Gemm::kWeightVectors; i++) weights.load(i);
#pragma unroll
  for (int i = 0; i < Gemm::kTasks; i++) columns.store(buffers.v, i), columns.load(p, i);
  __syncthreads();

  typename Gemm::Accumulators c;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) c.sum[0][i][j] = 0.f;
#pragma unroll 1
    for (int chunk = Gemm::kNested ? p.chunks : chunks; chunk > 0; chunk--)
      Gemm::template multiply_chunk<0>(c, columns, weights, p, chunks, buffers);
    if constexpr (Gemm::kNested) {
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) c.sum[1][i][j] = c.sum[0][i][j];
#pragma unroll 1
      for (int chunk = p.chunks; chunk > 0; chunk--) {
        Gemm::template multiply_chunk<0>(c, columns, weights, p, chunks, buffers);
        Gemm::template multiply_chunk<1>(c, columns, weights, p, chunks, buffers);
      }
    }
    Gemm::template write<0>(c, p, exchange, tile);
    if constexpr (Gemm::kNested) Gemm::template write<1>(c, p, exchange, tile);
  }
}

}  // namespace polyconv

// ---- epilogue.cuh ---------------------------------------------------------------------------------------------------
// What a forward kernel does with a finished sum before it stores it:   y = activation(sum + residual)
//
// A kernel's parameters say whether it has an epilogue: an instance that takes WithEpilogue<Params> has one, an instance
// that takes Params has none, and its machine code knows nothing of this file. Which activation is a number, and whether
// there is a residual an address: both are the same for all threads, so the branches cost one instruction each.

namespace polyconv {

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2 };

template <class Params>
struct WithEpilogue : Params {
  const float* residual;  // laid out as `written`; null: none
  int activation;

  // Bytes from an element of `written` to the residual's.
  __device__ __forceinline__ i64 residual_bytes() const {
    return reinterpret_cast<i64>(residual) - reinterpret_cast<i64>(this->written);
  }
};

template <class Params>
struct EpilogueOf {
  static constexpr bool kExists = false;
};
template <class Params>
struct EpilogueOf<WithEpilogue<Params>> {
  static constexpr bool kExists = true;
};

// A NaN stays one.
__device__ __forceinline__ float relu(float z) {
  return z < 0.f ? 0.f : z;
}

// z / (1 + exp(-z)) from the two approximations that the special function units have. They err by at most 2^-22 and
// 2^-23 of their values (PTX ISA: ex2.approx, rcp.approx), the rounded exponent shifts the exponential by less than
// |z| * 8e-8, and two operations round: together less than 3.2e-7 * |z|. An infinite exponential leaves -0, or of z =
// -infinity a NaN, as z / (1 + exp(-z)) does in torch.
__device__ __forceinline__ float silu(float z) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.442695041f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return z * inverse;
}

template <int kCount>
__device__ __forceinline__ void activate(float (&values)[kCount], int activation) {
  if (Activation(activation) == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = relu(values[i]);
  } else if (Activation(activation) == Activation::kSilu) {
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = silu(values[i]);
  }
}

// The sum that is stored at `to`, finished; as it is where there is no epilogue.
template <class Params>
__device__ __forceinline__ float finished(const Params& p, float sum, const float* to) {
  if constexpr (EpilogueOf<Params>::kExists) {
    float value[1] = {p.residual ? sum + *add_bytes(to, p.residual_bytes()) : sum};
    activate(value, p.activation);
    return value[0];
  } else {
    return sum;
  }
}

// Four neighbours at once.
template <class Params>
__device__ __forceinline__ float4 finished(const Params& p, float4 sums, const float* to) {
  if constexpr (EpilogueOf<Params>::kExists) {
    const float4 add = p.residual ? load4(add_bytes(to, p.residual_bytes())) : make_float4(0.f, 0.f, 0.f, 0.f);
    float value[4] = {sums.x + add.x, sums.y + add.y, sums.z + add.z, sums.w + add.w};
    activate(value, p.activation);
    return make_float4(value[0], value[1], value[2], value[3]);
  } else {
    return sums;
  }
}

}  // namespace polyconv

// ---- half_inverse.cuh -----------------------------------------------------------------------------------------------
// The last step of the separable pipeline (half_layout.cuh): back along H, plus bias, to where the result belongs.
// Bound by memory bandwidth.
//
// A block makes whole stretches of positions for some written channels: vectors come in column by column, phase beside
// phase, and meet in shared memory, from where H::kM dense rows per channel go out.
// Grid: x = ((group * blocks of channels + block) * rows + row) * stretches + stretch, so that blocks that run at the same
// time read and write neighbouring memory. Shared: lines * kM * stretch.

namespace polyconv {

struct HalfInverseParams {
  const float* y;
  const float* bias;  // null: none
  float* written;
  i64 written_batch, written_channel;
  int written_row, written_column;
  int first_row;        // of the slab
  int outputs;          // written channels of a group
  int lines;            // channels of a block
  int stretch_columns;  // of a block
  FastDivisor line_blocks, stretches, rows;
  int groups;
  FastDivisor vectors;  // of a stretch and channel
  FastDivisor columns;  // of a stretch
  int row_columns;      // of a row
  int columns_filled;   // of Y
  FastDivisor tiles, dilation_h, dilation_w;
  int outputs_w;         // of a unit
  int parts;             // vectors of a unit
  FastDivisor stretch;   // positions of a stretch
  int count_h, count_w;  // positions
  int written_first_h, written_step_h, written_first_w, written_step_w;
  int vector;  // rows may be written by four
};

template <class H, int kVector, class Params>
__device__ __forceinline__ void half_inverse(const Params& p) {
  extern __shared__ __align__(16) float rows[];
  u32 block = blockIdx.x, rest = p.stretches.quotient(block);
  const int stretch = block - rest * p.stretches.divisor;
  block = rest, rest = p.rows.quotient(block);
  const int row = block - rest * p.rows.divisor;
  const int group = p.line_blocks.quotient(rest), first_k = (rest - group * p.line_blocks.divisor) * p.lines;
  const int lines = min(p.lines, p.outputs - first_k);

  const i64 next_point = i64(p.groups) * p.outputs * p.parts * p.columns_filled * kVector;
  const int first_column = stretch * p.stretch_columns;
  for (u32 item = threadIdx.x; item < lines * p.vectors.divisor; item += blockDim.x) {
    const u32 line = p.vectors.quotient(item), vector = item - line * p.vectors.divisor;
    const u32 part = p.columns.quotient(vector), column = vector - part * p.columns.divisor;
    if (first_column + int(column) >= p.row_columns) continue;
    const i64 k = group * p.outputs + first_k + line;
    const float* y =
        p.y + ((k * p.parts + part) * p.columns_filled + i64(row) * p.row_columns + first_column + column) * kVector;
    float points[H::kPoints][kVector];
#pragma unroll
    for (int i = 0; i < H::kPoints; i++) load_stream<kVector>(y + i * next_point, points[i]);
    const float bias = p.bias ? p.bias[k] : 0.f;
    const u32 unit = p.dilation_w.quotient(column), phase = column - unit * p.dilation_w.divisor;
    float* to =
        rows + line * H::kM * p.stretch.divisor + (unit * p.outputs_w + part * kVector) * p.dilation_w.divisor + phase;
#pragma unroll
    for (int v = 0; v < kVector; v++) {
      float in[H::kPoints], out[H::kM];
#pragma unroll
      for (int i = 0; i < H::kPoints; i++) in[i] = points[i][v];
      H::output(in, out);
#pragma unroll
      for (int i = 0; i < H::kM; i++) to[i * p.stretch.divisor + v * p.dilation_w.divisor] = out[i] + bias;
    }
  }
  __syncthreads();

  const u32 place = p.first_row + row, phases = p.tiles.quotient(place), image = p.dilation_h.quotient(phases);
  const int first_h =
      phases - image * p.dilation_h.divisor + (place - phases * p.tiles.divisor) * H::kM * p.dilation_h.divisor;
  const int first_w = stretch * p.stretch.divisor;
  float* written = p.written + image * p.written_batch + i64(group * p.outputs + first_k) * p.written_channel;
  const u32 per_line = p.stretch.divisor * H::kM;
  if (p.vector) {
    for (u32 at = threadIdx.x * 4; at < lines * per_line; at += blockDim.x * 4) {
      const u32 of_all = p.stretch.quotient(at), line = of_all / H::kM, i = of_all % H::kM;
      const int h = first_h + i * p.dilation_h.divisor, w = first_w + at - of_all * p.stretch.divisor;
      if (h >= p.count_h || w >= p.count_w) continue;
      float* to = written + line * p.written_channel + i64(p.written_first_h + h * p.written_step_h) * p.written_row +
                  p.written_first_w + w;
      if (w + 4 <= p.count_w) {
        store4(to, finished(p, load4(rows + at), to));
      } else {
        for (int v = 0; w + v < p.count_w; v++) to[v] = finished(p, rows[at + v], to + v);
      }
    }
    return;
  }
  for (u32 at = threadIdx.x; at < lines * per_line; at += blockDim.x) {
    const u32 of_all = p.stretch.quotient(at), line = of_all / H::kM, i = of_all % H::kM;
    const int h = first_h + i * p.dilation_h.divisor, w = first_w + at - of_all * p.stretch.divisor;
    if (h < p.count_h && w < p.count_w) {
      const float sum = rows[at];
      float* to = &written[line * p.written_channel + i64(p.written_first_h + h * p.written_step_h) * p.written_row +
                           i64(p.written_first_w + w * p.written_step_w) * p.written_column];
      *to = finished(p, sum, to);
    }
  }
}

}  // namespace polyconv

// ---- gemm_tile.cuh --------------------------------------------------------------------------------------------------
// The FP32 outer-product core of all implicit-GEMM kernels: a block's tile of C += A * B from shared memory.
//
// Shared memory, per buffer:   a[kDepth][M + pad]   b[kDepth][N + pad]     (both with the reduction index slowest)
// A thread owns TM x TN accumulators in groups of four, the groups a whole warp row apart, so that each fragment is one
// conflict-free LDS.128: with 8 x 8 accumulators 4 loads feed 64 FFMAs.

namespace polyconv {

constexpr int kDepth = 8;                 // reduction steps per shared-memory tile
constexpr int kPaddingRow = -2147483647;  // marks a table entry that stands for no row or column

template <int kWarpsM_, int kWarpsN_, int kLanesM_, int kThreadM_, int kThreadN_>
struct GemmTile {
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kLanesM = kLanesM_, kLanesN = 32 / kLanesM_;
  static constexpr int kThreadM = kThreadM_, kThreadN = kThreadN_;
  static constexpr int kM = kWarpsM * kLanesM * kThreadM;
  static constexpr int kN = kWarpsN * kLanesN * kThreadN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static_assert(kThreadM % 4 == 0 && kThreadN % 4 == 0, "accumulators come in groups of four");
};

// First row and column of a thread inside the block's tile.
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

  // a and b point at this thread's own rows and columns of the two buffers.
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

// ---- pack_weights.cuh -----------------------------------------------------------------------------------------------
// Lays the weights out as gather_gemm reads them: packed[group][row][n], rows (tap, channel) of each phase in turn,
// every phase padded with zero rows to a multiple of kDepth and every row with zeros to whole tiles. Any strides of w
// are read, so channels_last weights, and the transposed roles of dgrad (n = input channel), are only other numbers.
//
// Optionally writes the table that RowLoader follows: per row {dy, dx, element offset}; dy = kPaddingRow for padding.
//
// Grid: x = group * n tiles + n tile, y = tile of 8 channels, z = phase. Block: 32 n x 8 channels, looping over the
// taps: a tap's neighbours in memory are read by the same block, so L1 serves all but the first.

namespace polyconv {

struct PackParams {
  const float* w;
  float* packed;
  int4* table;  // null: not wanted
  i64 w_group, w_output, w_channel, w_row, w_column;
  i64 table_channel;  // element offset per channel, row and column of the gathered tensor
  int table_row, table_column;
  int channels, outputs, outputs_padded, output_tiles, packed_rows;
  int phases_w;
  int tap_step_h, tap_step_w;
  int first_row[kMaxPhases * kMaxPhases];
  AxisPhase phase_h[kMaxPhases], phase_w[kMaxPhases];
};

__device__ __forceinline__ void pack_weights(const PackParams& p) {
  const AxisPhase& h = p.phase_h[blockIdx.z / p.phases_w];
  const AxisPhase& w = p.phase_w[blockIdx.z % p.phases_w];
  const int group = blockIdx.x / p.output_tiles;
  const int n = blockIdx.x % p.output_tiles * 32 + threadIdx.x % 32;
  const int c = blockIdx.y * 8 + threadIdx.x / 32;
  const int first_row = p.first_row[blockIdx.z];
  const bool tabulates = p.table && group == 0 && n == 0;
  float* to = p.packed + (i64(group) * p.packed_rows + first_row) * p.outputs_padded + n;

  if (c < p.channels) {
    const float* from = p.w + group * p.w_group + n * p.w_output + c * p.w_channel;
    int row = c;
    for (int i = 0; i < h.taps; i++)
      for (int j = 0; j < w.taps; j++, row += p.channels) {
        if (n < p.outputs_padded)
          to[i64(row) * p.outputs_padded] =
              n < p.outputs
                  ? from[(h.tap_first + i * h.tap_stride) * p.w_row + (w.tap_first + j * w.tap_stride) * p.w_column]
                  : 0.f;
        if (tabulates) {
          const int dy = i * p.tap_step_h, dx = j * p.tap_step_w;
          const i64 offset = c * p.table_channel + i64(dy) * p.table_row + i64(dx) * p.table_column;
          p.table[first_row + row] = make_int4(dy, dx, int(offset), int(offset >> 32));
        }
      }
  }
  // The rows that fill the phase up to a multiple of kDepth.
  const int taps = h.taps * w.taps, row = taps * p.channels + threadIdx.x / 32;
  if (blockIdx.y == 0 && row < (taps * p.channels + kDepth - 1) / kDepth * kDepth) {
    if (n < p.outputs_padded) to[i64(row) * p.outputs_padded] = 0.f;
    if (tabulates) p.table[first_row + row] = make_int4(kPaddingRow, 0, 0, 0);
  }
}

}  // namespace polyconv

// ---- gather_loaders.cuh ---------------------------------------------------------------------------------------------
// What gather_gemm.cuh is asked, and the ways in which it gathers: parameters, a block's share of the work, loaders.

namespace polyconv {

struct GatherParams {
  const float* source;
  const float* packed;
  const int4* table;  // per row {dy, dx, element offset as i64}; only read by the row-by-row loaders
  const float* bias;  // null: none
  float* written;
  i64 source_batch, source_channel;  // element strides
  i64 source_channel_bytes;
  i64 next_tap_bytes;  // from behind the last channel under one tap to the first under the next
  i64 written_batch, written_channel;
  i64 packed_step_bytes;  // kDepth rows of `packed`
  int source_row, source_column;
  int written_row, written_column;
  int source_height, source_width;
  int batch, channels;          // images; source channels of one group
  int outputs, outputs_padded;  // written channels of one group; row length of `packed`
  FastDivisor channel_tiles;
  int packed_rows;     // rows of one group in `packed`
  int written_vector;  // 0: scalar stores, 1: four pixels at a time, 2: four channels at a time
  int phases_w;
  int tap_step_h, tap_step_w;
  // Only for the gradient of a padded border (GatherFolded):
  int border;
  int image_top, image_left, image_height, image_width;  // the part of `written` that the border folds into
  int pad_top, pad_bottom, pad_left, pad_right;
  FastDivisor stride_h, stride_w;
  int first_row[kMaxPhases * kMaxPhases];  // of each phase, in `packed` and `table`
  AxisPhase phase_h[kMaxPhases], phase_w[kMaxPhases];
};

// Where a flattened pixel of the block's phase lies.
struct Pixel {
  int image, i, j;

  __device__ __forceinline__ Pixel(u32 index, const AxisPhase& h, const AxisPhase& w) {
    const u32 line = w.count.quotient(index);
    const u32 n = h.count.quotient(line);
    image = n;
    i = line - n * h.count.divisor;
    j = index - line * w.count.divisor;
  }
};

// What a block works on.
template <class Tile>
struct GatherBlock {
  const u32 phase;
  const AxisPhase &h, &w;
  u32 first_pixel, pixels;
  int group, first_output;
  int first_row, rows;

  __device__ __forceinline__ explicit GatherBlock(const GatherParams& p)
      : phase(fresh_block_z()), h(p.phase_h[phase / p.phases_w]), w(p.phase_w[phase % p.phases_w]) {
    const u32 x = fresh_block_x(), tile = p.channel_tiles.quotient(x);
    first_pixel = tile * Tile::kM;
    first_output = (x - tile * p.channel_tiles.divisor) * Tile::kN;
    pixels = p.batch * h.count.divisor * w.count.divisor;
    group = fresh_block_y();
    first_row = p.first_row[phase];
    rows = (h.taps * w.taps * p.channels + kDepth - 1) / kDepth * kDepth;
  }
};

// ---- How a tile of pixels x kDepth rows travels from global memory to shared memory --------------------------------
// A loader keeps this thread's place in the gather. load(more) reads the current kDepth rows into registers (zeros if
// there are no more), store() puts them into a buffer from this thread's place() on, advance() goes on to the next rows.

// What loaders with whole pixels per thread share: each thread carries kRows rows of kPixels pixels.
template <class Tile>
struct PixelRows {
  static constexpr int kPixels = Tile::kM > Tile::kThreads ? Tile::kM / Tile::kThreads : 1;
  static constexpr int kSplit = Tile::kThreads > Tile::kM ? Tile::kThreads / Tile::kM : 1;  // threads per pixel
  static constexpr int kRows = kDepth / kSplit;

  float value[kPixels][kRows];

  static __device__ __forceinline__ int first_row() { return threadIdx.x / Tile::kM * kRows; }
  static __device__ __forceinline__ int place() { return first_row() * Tile::kM + threadIdx.x % Tile::kM; }

  // Flattened pixel number q of this thread.
  static __device__ __forceinline__ u32 pixel(const GatherBlock<Tile>& block, int q) {
    return block.first_pixel + threadIdx.x % Tile::kM + q * Tile::kThreads;
  }

  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int q = 0; q < kPixels; q++)
#pragma unroll
      for (int r = 0; r < kRows; r++) to[r * Tile::kM + q * Tile::kThreads] = value[q][r];
  }
};

// Rows in tap-major order with channels a multiple of kDepth: all rows of a step share one tap, so one bounds check
// serves them all. kVector: the channel stride is 1 and everything is aligned, so four channels come in one load.
template <class Tile, bool kVector>
struct TapMajorLoader : PixelRows<Tile> {
  using PixelRows<Tile>::kPixels, PixelRows<Tile>::kRows, PixelRows<Tile>::value;
  static_assert(!kVector || kRows % 4 == 0, "vector loads take four channels");

  const GatherParams& p;
  const GatherBlock<Tile>& block;
  const float* at[kPixels];    // may point outside while not `inside`: then it is not read
  int y[kPixels], x[kPixels];  // source coordinates under the current tap
  bool inside[kPixels];
  int channels_left, taps_left;  // until the next tap; until the next row of taps

  __device__ __forceinline__ TapMajorLoader(const GatherParams& p, const GatherBlock<Tile>& block)
      : p(p), block(block), channels_left(p.channels), taps_left(block.w.taps) {
    const int first_channel = block.group * p.channels + this->first_row();
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      const u32 index = this->pixel(block, q);
      const Pixel pixel(index, block.h, block.w);
      y[q] = block.h.read_first + pixel.i * block.h.read_step;
      x[q] = block.w.read_first + pixel.j * block.w.read_step;
      at[q] = p.source + pixel.image * p.source_batch + first_channel * p.source_channel + i64(y[q]) * p.source_row +
              i64(x[q]) * p.source_column;
      if (index >= block.pixels) y[q] = -(1 << 30);  // past the end: outside under every tap
    }
    look();
  }

  __device__ __forceinline__ void look() {
#pragma unroll
    for (int q = 0; q < kPixels; q++) inside[q] = u32(y[q]) < u32(p.source_height) && u32(x[q]) < u32(p.source_width);
  }

  // Leaves `at` behind the rows read: one chain of 64-bit additions, which unlike multiples of the stride cost the FP32
  // pipe nothing. Behind the last tap it reads on wherever that lies inside the image; nobody uses those values.
  __device__ __forceinline__ void load(bool) {
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      if constexpr (kVector) {
#pragma unroll
        for (int r = 0; r < kRows; r += 4, at[q] += 4) {
          const float4 v = inside[q] ? load4(at[q]) : make_float4(0.f, 0.f, 0.f, 0.f);
          value[q][r] = v.x, value[q][r + 1] = v.y, value[q][r + 2] = v.z, value[q][r + 3] = v.w;
        }
      } else {
#pragma unroll
        for (int r = 0; r < kRows; r++, at[q] = opaque(add_bytes(at[q], p.source_channel_bytes)))
          value[q][r] = inside[q] ? __ldg(at[q]) : 0.f;
      }
    }
  }

  __device__ __forceinline__ void advance() {
    if constexpr (kRows < kDepth) move((kDepth - kRows) * p.source_channel_bytes);  // past the other threads' rows
    channels_left -= kDepth;
    if (channels_left == 0) {
      channels_left = p.channels;
      move(p.next_tap_bytes);
#pragma unroll
      for (int q = 0; q < kPixels; q++) x[q] += p.tap_step_w;
      if (--taps_left == 0) {
        taps_left = block.w.taps;
        const int back = taps_left * p.tap_step_w;
        move(4 * (i64(p.tap_step_h) * p.source_row - i64(back) * p.source_column));
#pragma unroll
        for (int q = 0; q < kPixels; q++) x[q] -= back, y[q] += p.tap_step_h;
      }
      look();
    }
  }

  __device__ __forceinline__ void move(i64 bytes) {
#pragma unroll
    for (int q = 0; q < kPixels; q++) at[q] = add_bytes(at[q], bytes);
  }
};

enum class Gather { kZeros, kBordered, kFolded };

// Rows one by one, each with its own tap from the table: any number of channels without waste, and every border.
// kZeros: outside reads zero. kBordered: outside reads the folded coordinate (fprop with padding_mode).
// kFolded: dgrad of such a border: a pixel collects from each of its images outside; `fold` says which, all taps and
// the stride's divisibility are checked one by one, and a block skips the folds that none of its pixels has.
template <class Tile, Gather kGather>
struct RowLoader : PixelRows<Tile> {
  using PixelRows<Tile>::kPixels, PixelRows<Tile>::kRows, PixelRows<Tile>::value;

  const GatherParams& p;
  const GatherBlock<Tile>& block;
  const float* image[kPixels];
  const int4* row;
  int y[kPixels], x[kPixels];
  bool inside[kPixels];

  __device__ __forceinline__ RowLoader(const GatherParams& p, const GatherBlock<Tile>& block) : p(p), block(block) {
    rewind();
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      const u32 index = this->pixel(block, q);
      const Pixel pixel(index, block.h, block.w);
      inside[q] = index < block.pixels;
      y[q] = block.h.read_first + pixel.i * block.h.read_step;
      x[q] = block.w.read_first + pixel.j * block.w.read_step;
      image[q] = p.source + pixel.image * p.source_batch + block.group * p.channels * p.source_channel;
      if constexpr (kGather == Gather::kZeros) image[q] += i64(y[q]) * p.source_row + i64(x[q]) * p.source_column;
    }
  }

  __device__ __forceinline__ void rewind() { row = p.table + block.first_row + this->first_row(); }

  // kFolded: moves every pixel to its image; false where no pixel of the block has one.
  __device__ __forceinline__ bool aim(int fold_h, int fold_w) {
    bool any = false;
    rewind();
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      const u32 index = this->pixel(block, q);
      const Pixel pixel(index, block.h, block.w);
      const Border border = Border(p.border);
      inside[q] = index < block.pixels;
      const int i = pixel.i - p.image_top, j = pixel.j - p.image_left;
      inside[q] &= u32(i) < u32(p.image_height) && u32(j) < u32(p.image_width);
      inside[q] &= unfold(i, fold_h, p.image_height, p.pad_top, p.pad_bottom, border, y[q]);
      inside[q] &= unfold(j, fold_w, p.image_width, p.pad_left, p.pad_right, border, x[q]);
      y[q] += p.pad_top;
      x[q] += p.pad_left;
      any |= inside[q];
    }
    return __syncthreads_or(any);
  }

  __device__ __forceinline__ void load(bool more) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int4 entry = more ? row[r] : make_int4(kPaddingRow, 0, 0, 0);
      const i64 offset = i64(u32(entry.z)) | i64(entry.w) << 32;
#pragma unroll
      for (int q = 0; q < kPixels; q++) {
        int v = y[q] + entry.x, u = x[q] + entry.y;
        bool valid = inside[q] && entry.x != kPaddingRow;
        const float* at = image[q] + offset;
        if constexpr (kGather == Gather::kBordered) {
          v = fold_into(v, p.source_height, Border(p.border));
          u = fold_into(u, p.source_width, Border(p.border));
        }
        if constexpr (kGather == Gather::kFolded) {
          const int quotient_v = p.stride_h.quotient(v), quotient_u = p.stride_w.quotient(u);
          valid = valid && v >= 0 && u >= 0 && quotient_v * int(p.stride_h.divisor) == v &&
                  quotient_u * int(p.stride_w.divisor) == u;
          v = quotient_v, u = quotient_u;
        }
        if constexpr (kGather != Gather::kZeros) at += i64(v) * p.source_row + i64(u) * p.source_column;
        valid = valid && u32(v) < u32(p.source_height) && u32(u) < u32(p.source_width);
        value[q][r] = valid ? *at : 0.f;
      }
    }
  }

  __device__ __forceinline__ void advance() { row += kDepth; }
};

// The packed weights: rows are dense and padded to whole tiles, and the workspace goes on for one step behind the last
// of them, so quads without any check.
template <class Tile>
struct PackedLoader {
  static constexpr int kQuads = kDepth * Tile::kN / 4;
  static constexpr int kEach = (kQuads + Tile::kThreads - 1) / Tile::kThreads;

  const GatherParams& p;
  const float* at[kEach];
  float4 value[kEach];

  __device__ __forceinline__ PackedLoader(const GatherParams& p, const GatherBlock<Tile>& block) : p(p) {
    const float* group = p.packed + (i64(block.group) * p.packed_rows + block.first_row) * p.outputs_padded;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int quad = threadIdx.x + e * Tile::kThreads;
      at[e] = group + (quad / (Tile::kN / 4)) * i64(p.outputs_padded) + block.first_output + quad % (Tile::kN / 4) * 4;
    }
  }

  static __device__ __forceinline__ bool mine(int e) {
    return kQuads % Tile::kThreads == 0 || threadIdx.x + e * Tile::kThreads < kQuads;
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (mine(e)) value[e] = load4(at[e]);
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int e = 0; e < kEach; e++) at[e] = add_bytes(at[e], p.packed_step_bytes);
  }

  static __device__ __forceinline__ int place() { return threadIdx.x * 4; }

  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (mine(e)) store4(to + e * Tile::kThreads * 4, value[e]);
  }
};

}  // namespace polyconv

// ---- gather_gemm.cuh ------------------------------------------------------------------------------------------------
// fprop and dgrad as one implicit GEMM:
//   written[pixel, n] = bias[n] + sum over rows k of  gathered[pixel, k] * packed[k, n]
//
// A row k of the reduction is a (tap, channel) pair; a pixel is a position of one phase of the lattice (common.cuh).
// fprop gathers x and writes y; dgrad gathers dy and writes dx, one phase per residue of the stride, so that no tap is
// ever multiplied by a structural zero. The weights come packed as packed[group][row][n] by pack_weights.cuh.
//
// Grid: x = pixel tile * channel tiles + channel tile (neighbours share the gathered pixels in L2),
//       y = group, z = phase.
// Shared memory: a = 2 x 8 x M pixels, b = 2 x 8 x N channels; one barrier per 8 rows: while one buffer is multiplied,
// the next 8 rows travel from global memory through registers into the other.

namespace polyconv {

// A thread's place in two buffers of equal size, one behind the other: flips from one to the other with a single XOR.
// (An index of the buffer would be multiplied by the size in every step, on the FP32 pipe.)
template <int kElements>
struct Flip {
  static_assert((kElements & (kElements - 1)) == 0, "a bit of the offset must tell the buffers apart");
  int bytes;

  __device__ __forceinline__ explicit Flip(int place) : bytes(place * 4) {}
  __device__ __forceinline__ void operator()() { bytes ^= kElements * 4; }
  __device__ __forceinline__ float* in(float* buffers) const { return add_bytes(buffers, bytes); }
};

// Accumulates all rows of the block's phase, double-buffered.
template <class Tile, class Loader>
__device__ __forceinline__ void accumulate(Accumulators<Tile>& c, Loader& source, PackedLoader<Tile> packed, int rows,
                                           float* a, float* b) {
  if (rows == 0) return;
  const TilePlace<Tile> place(threadIdx.x);
  Flip<kDepth * Tile::kM> read_a(place.m), write_a(Loader::place());
  Flip<kDepth * Tile::kN> read_b(place.n), write_b(PackedLoader<Tile>::place());
  source.load(true);
  packed.load();
  source.store(write_a.in(a));
  packed.store(write_b.in(b));
  __syncthreads();
#pragma unroll 1
  for (int left = rows - kDepth; left >= 0; left -= kDepth) {
    source.advance();
    packed.advance();
    source.load(left > 0);  // what the last step loads is never used: cheaper than a branch
    packed.load();
    c.template multiply_add<Tile::kM, Tile::kN>(read_a.in(a), read_b.in(b));
    read_a(), read_b(), write_a(), write_b();
    source.store(write_a.in(a));
    packed.store(write_b.in(b));
    __syncthreads();
  }
}

// The element of channel 0 of the group that a flattened pixel is written to.
template <class Tile>
__device__ __forceinline__ float* written_at(u32 index, const GatherParams& p, const GatherBlock<Tile>& block) {
  const Pixel pixel(index, block.h, block.w);
  return p.written + block.group * p.outputs * p.written_channel + pixel.image * p.written_batch +
         i64(block.h.written_first + pixel.i * block.h.written_step) * p.written_row +
         i64(block.w.written_first + pixel.j * block.w.written_step) * p.written_column;
}

// What is done with the sums of a tile, one or four at a time.
struct StoreSums {
  __device__ __forceinline__ void operator()(float* at, float a) const { *at = a; }
  __device__ __forceinline__ void operator()(float* at, float a, float b, float c, float d) const {
    store4_global(at, a, b, c, d);
  }
};

struct AddResidual {
  i64 bytes;  // from a sum's place to its residual

  __device__ __forceinline__ void operator()(const float* at, float& a) const { a += *add_bytes(at, bytes); }
  __device__ __forceinline__ void operator()(const float* at, float& a, float& b, float& c, float& d) const {
    const float4 v = load4(add_bytes(at, bytes));
    a += v.x, b += v.y, c += v.z, d += v.w;
  }
};

// Shows every sum of the tile that is written, and where, four at a time along whichever axis is dense.
template <class Tile, class Visit>
__device__ __forceinline__ void visit_written(Accumulators<Tile>& c, const GatherParams& p,
                                              const GatherBlock<Tile>& block, u32 first_pixel, int first_output,
                                              const Visit& visit) {
  if (p.written_vector == 1) {
    const i64 to_next_group = (Tile::kLanesN * 4 - 3) * p.written_channel;
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i += 4) {
      if (first_pixel + c.offset_m(i) >= block.pixels) continue;
      float* at = written_at(first_pixel + c.offset_m(i), p, block) + first_output * p.written_channel;
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++) {
        if (first_output + c.offset_n(j) < p.outputs)
          visit(at, c.sum[i][j], c.sum[i + 1][j], c.sum[i + 2][j], c.sum[i + 3][j]);
        at += j % 4 == 3 ? to_next_group : p.written_channel;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Tile::kThreadM; i++) {
    if (first_pixel + c.offset_m(i) >= block.pixels) continue;
    float* at = written_at(first_pixel + c.offset_m(i), p, block) + first_output * p.written_channel;
    if (p.written_vector == 2) {
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j += 4)
        if (first_output + c.offset_n(j) < p.outputs)
          visit(at + c.offset_n(j), c.sum[i][j], c.sum[i][j + 1], c.sum[i][j + 2], c.sum[i][j + 3]);
    } else {
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++)
        if (first_output + c.offset_n(j) < p.outputs) visit(at + c.offset_n(j) * p.written_channel, c.sum[i][j]);
    }
  }
}

// Adds the bias, finishes the sums if there is an epilogue, and writes the tile.
template <class Tile, class Params>
__device__ __forceinline__ void write(Accumulators<Tile>& c, const Params& p) {
  const GatherBlock<Tile> block(p);
  const TilePlace<Tile> place(fresh_thread());
  const u32 first_pixel = block.first_pixel + place.m;
  const int first_output = block.first_output + place.n;
  if (p.bias) {
    const float* bias = p.bias + block.group * p.outputs + first_output;
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; j++) {
      const float add = first_output + c.offset_n(j) < p.outputs ? bias[c.offset_n(j)] : 0.f;
#pragma unroll
      for (int i = 0; i < Tile::kThreadM; i++) c.sum[i][j] += add;
    }
  }
  if constexpr (EpilogueOf<Params>::kExists) {
    // Before the first store, so that the loads need not wait for one another.
    if (p.residual) visit_written(c, p, block, first_pixel, first_output, AddResidual{p.residual_bytes()});
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i++) activate(c.sum[i], p.activation);
  }
  visit_written(c, p, block, first_pixel, first_output, StoreSums{});
}

template <class Tile, class Loader, class Params>
__device__ __forceinline__ void gather_gemm(const Params& p) {
  __shared__ __align__(16) float a[2 * kDepth * Tile::kM];
  __shared__ __align__(16) float b[2 * kDepth * Tile::kN];
  const GatherBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;  // phases differ in size; the grid is made for the largest

  Accumulators<Tile> c;
  Loader source(p, block);
  accumulate<Tile>(c, source, PackedLoader<Tile>(p, block), block.rows, a, b);
  write(c, p);
}

}  // namespace polyconv

// ---- toom_wgrad.cuh -------------------------------------------------------------------------------------------------
// The weight gradient in its own fast form: along both axes dW = G^T [(A dy) * (B^T x)], summed over all tiles.
//
// For each product of the H algorithm (a point of a segment), each segment and each point of the W algorithm this is a
// matrix product over the tiles, sums[k][c] = sum D[k][tile] V[c][tile]. A block owns one product of H, kTileK output
// channels, kTileC source channels and a slice of the rows of tiles; a warp owns one point of W (or a part of its
// channels, or every other tile). Everything from dy and x to the products happens here, in three stages that work on
// successive chunks of kChunk tiles, so that one barrier per chunk suffices and nothing waits for memory:
//   1. rows of dy and x are combined along H, lanes = positions along W (coalesced), into `staged`;
//   2. each tile of `staged` is transformed along W, lanes = channels, into `operands`: the transposition is free;
//   3. outer products: fragments of 16 bytes, 64 to 128 accumulators per thread.
// Tiles of neighbouring phases of a dilated convolution are neighbours here (`interleave`), so that what a warp reads
// is dense in memory.
//
// Accumulators are added to the block's own part of `partial` every `flush` chunks: rounding errors grow with the
// longest sequence of additions, not with the number of tiles. Slices are added by toom_wgrad_finish.cuh.
//
// Grid: x = ((slice * groups + group) * channel tiles + channel tile) * products + product. All products of a slice run
// at about the same time and share what they read in L2.
// Shared memory, two of each:  operands = D[point][tile][k], V[segment][point][tile][c];
//                              staged = dy[k][4 * tile], x[c][4 * block], a block being 4 positions of one phase.

namespace polyconv {

constexpr int kChunk = 8;             // tiles that are multiplied between two barriers
constexpr int kMaxInterleave = 3;     // phases along W that share a chunk; more would not fit into shared memory
constexpr int kFirstFlush = 1 << 20;  // marks the first one
constexpr int kMaxWarps = 16;
constexpr int kMaxClasses = 8;  // residue classes of taps per axis

struct ToomWgradParams {
  const float* x;
  const float* dy;
  float* partial;       // [slice * kSplit][group][channel tile][product][segment][point][kTileK][kTileC]
  float* bias_partial;  // [slice][group * outputs], or null
  i64 x_batch, x_channel, dy_batch, dy_channel;
  i64 x_next_row, dy_next_row;                               // bytes between rows of a tile
  i64 x_next_channel, dy_next_channel;                       // bytes between channels of a warp
  i64 x_first_h[kMaxClasses], x_first_w[kMaxClasses];        // elements from x to position 0, by class of taps
  int read_first_h[kMaxClasses], read_first_w[kMaxClasses];  // rows and columns
  int x_row, x_column, dy_row, dy_column;                    // elements from one lattice position to the next
  int read_step_h, read_step_w;                              // rows and columns
  int height, width;                                         // of x, as far as any output reads it
  int count_h, count_w;                                      // outputs
  int dilation_h, dilation_w, interleave;
  int channels, outputs;  // of a group; channels are (channel, class along H, class along W)
  int rows, tiles;        // rows of tiles, and tiles in each
  int slices, flush;
  FastDivisor channel_tiles, k_tiles, groups;
  FastDivisor outer_phases, tiles_h, phases_h, interleaved;
  FastDivisor classes, classes_w;  // of a channel; along W
};

// kTileK x kTileC channels per block, cut among kWarpsK x kWarpsC warps per point. The segments of W are cut among
// kWarpsPass warps, and kSplit warps take every kSplit-th tile. A warp's lanes form kLanesK x (32 / kLanesK).
template <int kTileK_, int kTileC_, int kWarpsK_, int kWarpsC_, int kWarpsPass_, int kSplit_, int kLanesK_>
struct WgradTile {
  static constexpr int kTileK = kTileK_, kTileC = kTileC_, kWarpsK = kWarpsK_, kWarpsC = kWarpsC_, kSplit = kSplit_;
  static constexpr int kWarpsPass = kWarpsPass_;
  static constexpr int kLanesK = kLanesK_, kLanesC = 32 / kLanesK_;
  static constexpr int kThreadK = kTileK / kWarpsK / kLanesK, kThreadC = kTileC / kWarpsC / kLanesC;
  static constexpr int kWarpsPerPoint = kWarpsK * kWarpsC * kWarpsPass * kSplit;
  static_assert(kThreadK % 4 == 0 && kThreadC % 4 == 0, "fragments are loaded in quads");
};

template <class H, class W, class Tile>
struct ToomWgradSizes {
  static_assert(W::kM == 4 && H::kTiles == 1 && W::kTiles == 1, "tiles of four along W; segments are not nested");
  static constexpr int kProducts = H::kPoints * H::kSegments;
  static constexpr int kPasses = W::kSegments;
  // Rows of x that a product needs: 0, 2, 4, ... for the point 0, 1, 3, 5, ... for infinity, 1, 2, 3, ... for the others.
  static constexpr int kRowsX = H::kPoints > 2 ? H::kPoints - 2 : H::kPoints;
  static constexpr int kWarps = W::kPoints * Tile::kWarpsPerPoint, kThreads = 32 * kWarps;
  static constexpr int kSteps = kChunk / Tile::kSplit;
  static constexpr int kBeyond = (W::kSpan + 3) / 4 - 1;  // blocks (per phase) that the last tile reads after its own
  static constexpr int kOperandD = W::kPoints * kChunk * Tile::kTileK;
  static constexpr int kOperandV = kPasses * W::kPoints * kChunk * Tile::kTileC;
  static constexpr int kOperands = kOperandD + kOperandV;
  // Stage 1 by items: kItemsD channels of dy and kItemsX of x per warp; kItemsHead quads per thread at a row's begin.
  static constexpr int kItemsD = (Tile::kTileK + kWarps - 1) / kWarps;
  static constexpr int kItemsX = (Tile::kTileC + kWarps - 1) / kWarps;
  // Each item of stage 1 has its row of `staged`, even where the channels end before the warps do.
  static constexpr int kStagedD = kItemsD * kWarps * kChunk * 4;
  static constexpr int kPitchX = 4 * ((kChunk + kBeyond * kMaxInterleave) | 1);
  static constexpr int kStaged = kStagedD + kItemsX * kWarps * kPitchX;
  static constexpr int kHeadBlocks = kThreads / (4 * Tile::kTileC);
  static constexpr int kBatches = kSteps - 1;
  static constexpr int kTasksD = Tile::kTileK * kChunk, kTasksV = kPasses * Tile::kTileC * kChunk;
  static constexpr int kRoundsD = (kTasksD + kThreads - 1) / kThreads;
  static constexpr int kRoundsV = (kTasksV + kThreads - 1) / kThreads;
  static_assert(kThreads % Tile::kTileK == 0, "a thread transforms one channel of dy, whatever the tile");
};

// Row `point` of the matrix of a transform, found by applying it to unit vectors (constants, once compiled).
template <class Axis, int kInputs, bool kSpread>
__device__ __forceinline__ void coefficients(int point, float* row) {
#pragma unroll
  for (int n = 0; n < kInputs; n++) {
    float unit[kInputs], values[Axis::kPoints];
#pragma unroll
    for (int i = 0; i < kInputs; i++) unit[i] = i == n ? 1.f : 0.f;
    if (kSpread)
      Axis::spread(unit, values);
    else
      Axis::input(unit, values);
    row[n] = 0.f;
#pragma unroll
    for (int i = 0; i < Axis::kPoints; i++) row[n] = i == point ? values[i] : row[n];
  }
}

// What a block works on. Made anew wherever it is needed, from the special register: the accumulators need the room.
template <class Sizes, class Tile>
struct ToomWgradBlock {
  int product, slice, group, channel_tile, k_tile, c_tile;

  __device__ __forceinline__ explicit ToomWgradBlock(const ToomWgradParams& p) {
    const u32 number = fresh_block_x(), pair = number / Sizes::kProducts;
    const u32 above = p.channel_tiles.quotient(pair), run = p.groups.quotient(above);
    product = number % Sizes::kProducts;
    channel_tile = pair - above * p.channel_tiles.divisor;
    slice = run;
    group = above - run * p.groups.divisor;
    c_tile = p.k_tiles.quotient(channel_tile);
    k_tile = channel_tile - c_tile * int(p.k_tiles.divisor);
  }

  __device__ __forceinline__ int first_row(const ToomWgradParams& p) const {
    return int(i64(p.rows) * slice / p.slices);
  }
  __device__ __forceinline__ int end_row(const ToomWgradParams& p) const {
    return int(i64(p.rows) * (slice + 1) / p.slices);
  }
};

// A row of tiles, as all threads of a block see it. Lies in shared memory, one for each of two successive rows.
struct ToomWgradRow {
  const float *x, *dy;  // first row of the tiles, of the block's first channels
  int phase;            // first phase along W
  u32 rows;             // bit n: row n of dy, bit 8 + n: row n of x is inside the image and counts
  int x_first;          // first row of x, as a lattice position
  int beyond;           // 1 after the block's last row
};

// What a block keeps in shared memory behind its buffers.
struct ToomWgradState {
  float of_dy[4], of_x[8];  // factors of the block's product along H
  ToomWgradRow row[2];
  int x_from, x_step;                         // first row of x that the product needs, and distance of the next
  i64 x_next_row;                             // the same distance in bytes
  int end_row;                                // of the block
  i64 dy_warp[kMaxWarps], x_warp[kMaxWarps];  // elements to the first channel of each warp
};

// Stages 1 and 2 of a block: walks over its chunks and leaves transformed operands in shared memory.
template <class H, class W, class Tile, bool kClassed>
struct ToomWgradLoader {
  using Sizes = ToomWgradSizes<H, W, Tile>;
  using Block = ToomWgradBlock<Sizes, Tile>;
  static constexpr int kRowsD = H::kM, kRowsX = Sizes::kRowsX;

  const ToomWgradParams& p;
  ToomWgradState& state;
  float* staged;  // where stage 1 writes
  u32 more;       // bit i: item i of dy, bit 16 + i: item i of x is not the last that has a channel

  // The chunk that stage 1 works on.
  int row, tile;
  int x_place;                // this lane's position of x along W (with classes)
  const float *x_at, *dy_at;  // there, of the channel in turn
  u32 mask;
  float dy_loaded[Sizes::kItemsD][kRowsD], x_loaded[Sizes::kItemsX][kRowsX];

  __device__ __forceinline__ ToomWgradLoader(const ToomWgradParams& params, ToomWgradState& shared_state,
                                             float* scratch)
      : p(params), state(shared_state), tile(0) {
    const Block block(p);
    const int warp = threadIdx.x / 32;
    const int left_d = min(Tile::kTileK, p.outputs - block.k_tile * Tile::kTileK) - 1 - warp;
    const int left_x = min(Tile::kTileC, p.channels - block.c_tile * Tile::kTileC) - 1 - warp;
    more = 0;
#pragma unroll
    for (int item = 0; item < 16; item++) {
      more |= u32((item + 1) * Sizes::kWarps <= left_d) << item;
      more |= u32((item + 1) * Sizes::kWarps <= left_x) << (16 + item);
    }
    row = block.first_row(p);
    if (threadIdx.x % 32 == 0) {
      state.dy_warp[warp] = (warp + min(left_d, 0)) * p.dy_channel;
      state.x_warp[warp] = (warp + min(left_x, 0)) * p.x_channel;
    }
    if (threadIdx.x == 0) {
      float of_dy[kRowsD], of_x[H::kPoints];
      coefficients<H, kRowsD, true>(block.product % H::kPoints, of_dy);
      coefficients<H, H::kPoints, false>(block.product % H::kPoints, of_x);
      state.end_row = block.end_row(p);
      state.x_from = of_x[0] == 0.f;
      state.x_step = steps_of_two(of_x) ? 2 : 1;
      state.x_next_row = state.x_step * p.x_next_row;
#pragma unroll
      for (int n = 0; n < H::kPoints; n++) scratch[n] = of_x[n];
#pragma unroll
      for (int n = 0; n < 4; n++) state.of_dy[n] = n < kRowsD ? of_dy[n] : 0.f;
#pragma unroll 1
      for (int n = 0; n < 8; n++) {
        const int from = state.x_from + n * state.x_step;
        state.of_x[n] = n < kRowsX && from < H::kPoints ? scratch[from] : 0.f;
      }
      aim_row();
    }
    __syncthreads();
  }

  static __device__ __forceinline__ bool steps_of_two(const float* of_x) {
    return H::kPoints > 2 && (of_x[1] == 0.f || of_x[H::kPoints > 2 ? 2 : 0] == 0.f);
  }

  // Decodes `row` = ((image * phases + phase) * tiles + tile along H) * outer phases + outer phase along W.
  __device__ __forceinline__ void aim_row() {
    const Block block(p);
    ToomWgradRow& to = state.row[row & 1];
    const u32 above = p.outer_phases.quotient(row), column = p.tiles_h.quotient(above);
    const int image = p.phases_h.quotient(column);
    to.phase = (row - int(above * p.outer_phases.divisor)) * p.interleave;
    const int first =
        int(column - image * p.phases_h.divisor) + p.dilation_h * H::kM * int(above - column * p.tiles_h.divisor);
    const int x_first = first + (H::offset(block.product / H::kPoints) + state.x_from) * p.dilation_h;
    to.dy = p.dy + (i64(block.group) * p.outputs + block.k_tile * Tile::kTileK) * p.dy_channel + image * p.dy_batch +
            i64(first) * p.dy_row;
    const float* x = p.x + i64(block.group) * p.classes.quotient(p.channels) * p.x_channel + image * p.x_batch +
                     i64(x_first) * p.x_row;
    to.x = kClassed ? x : x + block.c_tile * Tile::kTileC * p.x_channel + p.x_first_h[0] + p.x_first_w[0];
    to.x_first = x_first;
    to.beyond = row >= state.end_row;
    u32 rows = 0;
#pragma unroll
    for (int n = 0; n < kRowsD; n++) rows |= u32(first + n * p.dilation_h < p.count_h && state.of_dy[n] != 0.f) << n;
    if (!kClassed) rows |= rows_inside(x_first, p.read_first_h[0]);
    to.rows = to.beyond ? 0 : rows;
  }

  __device__ __forceinline__ u32 rows_inside(int x_first, int read_first) const {
    u32 found = 0;
#pragma unroll
    for (int n = 0; n < kRowsX; n++) {
      const int at = read_first + p.read_step_h * (x_first + n * state.x_step * p.dilation_h);
      found |= u32(u32(at) < u32(p.height) && state.of_x[n] != 0.f) << (8 + n);
    }
    return found;
  }

  // Lattice position along W of element j of block number `number`, in the first of the row's phases.
  __device__ __forceinline__ int position(int number, int j) const {
    const int unit = p.interleaved.quotient(number);
    return number - unit * p.interleave + p.dilation_w * (4 * unit + j);
  }

  __device__ __forceinline__ bool column_inside(int read_first, int at) const {
    return u32(read_first + p.read_step_w * at) < u32(p.width);
  }

  __device__ __forceinline__ void aim_chunk() {
    const ToomWgradRow& at = state.row[row & 1];
    const u32 thread = fresh_thread();
    const int here = at.phase + position(tile + thread % 32 / 4, thread % 4);
    const int x_here = here + Sizes::kBeyond * 4 * p.dilation_w;
    dy_at = at.dy + state.dy_warp[thread / 32] + i64(here) * p.dy_column;
    mask = here < p.count_w ? at.rows & 0xff : 0;
    if (kClassed) x_place = x_here;
    if (!kClassed) {
      x_at = at.x + state.x_warp[thread / 32] + i64(x_here) * p.x_column;
      mask |= column_inside(p.read_first_w[0], x_here) ? at.rows & 0xff00 : 0;
    }
  }

  // To the next chunk. A new row is there for all threads after the next barrier.
  __device__ __forceinline__ void advance() {
    tile += kChunk;
    if (tile >= p.tiles) {
      tile = 0;
      row++;
      if (fresh_thread() == 0) aim_row();
    }
  }

  template <int kRows>
  static __device__ __forceinline__ void load_rows(const float* at, i64 step, u32 inside, float* loaded) {
#pragma unroll
    for (int n = 0; n < kRows; n++) {
      loaded[n] = (inside >> n & 1) ? __ldg(at) : 0.f;
      at = opaque(add_bytes(at, step));
    }
  }

  // One position of channel number c of the tile.
  __device__ __forceinline__ void load_x(int c, int here, float* loaded) const {
    const ToomWgradRow& at = state.row[row & 1];
    const int first = Block(p).c_tile * Tile::kTileC;
    c = min(c, p.channels - first - 1);
    const float* from = at.x + i64(here) * p.x_column;
    u32 inside;
    if (kClassed) {
      c += first;
      const int channel = p.classes.quotient(c), number = c - channel * int(p.classes.divisor);
      const int h = p.classes_w.quotient(number), w = number - h * int(p.classes_w.divisor);
      from += channel * p.x_channel + p.x_first_h[h] + p.x_first_w[w];
      inside = !at.beyond && column_inside(p.read_first_w[w], here) ? rows_inside(at.x_first, p.read_first_h[h]) : 0;
    } else {
      from += c * p.x_channel;
      inside = column_inside(p.read_first_w[0], here) ? at.rows : 0;
    }
    load_rows<kRowsX>(from, state.x_next_row, inside >> 8, loaded);
  }

  // The first blocks of a chunk are the last ones of the chunk before; at the beginning of a row they are loaded.
  __device__ __forceinline__ void head(const float* before) const {
    const u32 thread = fresh_thread();
    const int blocks = Sizes::kBeyond * p.interleave;
    const u32 c = thread / 4 / Sizes::kHeadBlocks, j = thread % 4;
    const u32 to = Sizes::kStagedD + c * Sizes::kPitchX + j;
#pragma unroll 1
    for (int number = thread / 4 % Sizes::kHeadBlocks; number < blocks; number += Sizes::kHeadBlocks) {
      if (c >= Tile::kTileC) break;
      float value;
      if (tile > 0) {
        value = before[to + (kChunk + number) * 4];
      } else {
        float loaded[kRowsX], of_x[8];
        load_x(c, state.row[row & 1].phase + position(number, j), loaded);
        fragment(state.of_x, (kRowsX + 3) / 4, of_x);
        value = dot<kRowsX>(of_x, loaded);
      }
      staged[to + number * 4] = value;
    }
  }

  // Stage 1 in batches of items, spread evenly and so that dy and x alternate where there are fewer items than batches.
  static __device__ __forceinline__ constexpr int first_d(int batch) {
    return Sizes::kItemsD * batch / Sizes::kBatches;
  }
  static __device__ __forceinline__ constexpr int first_x(int batch) {
    return (Sizes::kItemsX * batch + Sizes::kBatches - 2) / Sizes::kBatches;
  }

  // First half: loads.
  __device__ __forceinline__ void load(int batch) {
#pragma unroll
    for (int item = first_d(batch); item < first_d(batch + 1); item++) {
      load_rows<kRowsD>(dy_at, p.dy_next_row, mask, dy_loaded[item]);
      if (more >> item & 1) dy_at = add_bytes(dy_at, p.dy_next_channel);
    }
#pragma unroll
    for (int item = first_x(batch); item < first_x(batch + 1); item++) {
      if (kClassed) {
        load_x(fresh_thread() / 32 + item * Sizes::kWarps, x_place, x_loaded[item]);
      } else {
        load_rows<kRowsX>(x_at, state.x_next_row, mask >> 8, x_loaded[item]);
        if (more >> (16 + item) & 1) x_at = add_bytes(x_at, p.x_next_channel);
      }
    }
  }

  // Second half: the product of the H transform, into `staged`. The quads of a row of dy are permuted by channel, the
  // rows of x have an odd number of quads: stage 2 reads both with its lanes in successive channels.
  __device__ __forceinline__ void combine(int batch) const {
    const u32 thread = fresh_thread(), lane = thread % 32, warp = thread / 32;
    float of_dy[4], of_x[8];
    fragment(state.of_dy, 1, of_dy);
    fragment(state.of_x, (kRowsX + 3) / 4, of_x);
#pragma unroll
    for (int item = first_d(batch); item < first_d(batch + 1); item++) {
      const u32 k = warp + item * Sizes::kWarps;
      staged[k * 4 * kChunk + (lane ^ (k % 8 * 4))] = dot<kRowsD>(of_dy, dy_loaded[item]);
    }
    float* const to = staged + Sizes::kStagedD + Sizes::kBeyond * p.interleave * 4 + lane;
#pragma unroll
    for (int item = first_x(batch); item < first_x(batch + 1); item++) {
      const u32 c = warp + item * Sizes::kWarps;
      to[c * Sizes::kPitchX] = dot<kRowsX>(of_x, x_loaded[item]);
    }
  }

  static __device__ __forceinline__ void fragment(const float* at, int quads, float* values) {
#pragma unroll
    for (int i = 0; i < quads; i++) {
      const float4 v = load4(at + 4 * i);
      values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
  }

  template <int kRows>
  static __device__ __forceinline__ float dot(const float* a, const float* b) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int n = 1; n < kRows; n++) sum = fmaf(a[n], b[n], sum);
    return sum;
  }

  // Stage 2, one round: a tile of one channel per thread, dy in the first rounds and x after them.
  __device__ __forceinline__ void transform(int round, const float* from, float* operands, float& bias) const {
    const u32 thread = fresh_thread();
    if (round < Sizes::kRoundsD) {
      const u32 task = thread + round * Sizes::kThreads;
      if (Sizes::kTasksD % Sizes::kThreads != 0 && task >= Sizes::kTasksD) return;
      const u32 k = task % Tile::kTileK, u = task / Tile::kTileK;
      float dy_tile[4], d[W::kPoints];
      fragment(from + k * 4 * kChunk + (u ^ k % 8) * 4, 1, dy_tile);
      W::spread(dy_tile, d);
#pragma unroll
      for (int i = 0; i < W::kPoints; i++) operands[(i * kChunk + u) * Tile::kTileK + k] = d[i];
      bias += d[1];
      return;
    }
    const u32 task = thread + (round - Sizes::kRoundsD) * Sizes::kThreads;
    if (Sizes::kTasksV % Sizes::kThreads != 0 && task >= Sizes::kTasksV) return;
    const u32 c = task % Tile::kTileC, u = task / Tile::kTileC % kChunk, pass = task / (Tile::kTileC * kChunk);
    const float* at = from + Sizes::kStagedD + c * Sizes::kPitchX + (u + pass * p.interleave) * 4;
    float inputs[8], v[W::kPoints];
    fragment(at, 1, inputs);
    fragment(at + p.interleave * 4, 1, inputs + 4);
    W::input(inputs, v);
    float* to = operands + Sizes::kOperandD + (pass * W::kPoints * kChunk + u) * Tile::kTileC + c;
#pragma unroll
    for (int i = 0; i < W::kPoints; i++) to[i * kChunk * Tile::kTileC] = v[i];
  }
};

// Stage 3: the accumulators of a thread, for one point of W and its segments.
template <class W, class Tile>
struct ToomWgradSums {
  static constexpr int kPasses = W::kSegments / Tile::kWarpsPass;
  float sum[kPasses][Tile::kThreadK][Tile::kThreadC];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kPasses; s++)
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++)
#pragma unroll
        for (int j = 0; j < Tile::kThreadC; j++) sum[s][i][j] = 0.f;
  }

  static __device__ __forceinline__ void fragment(const float* at, int quads, int apart, float* values) {
#pragma unroll
    for (int i = 0; i < quads; i++) {
      const float4 v = load4(at + i * apart);
      values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
  }

  // d and v point at this thread's channels of one tile.
  __device__ __forceinline__ void multiply_add(const float* d, const float* v) {
    float row[Tile::kThreadK], column[Tile::kThreadC];
    fragment(d, Tile::kThreadK / 4, Tile::kLanesK * 4, row);
#pragma unroll
    for (int s = 0; s < kPasses; s++) {
      fragment(v + s * W::kPoints * kChunk * Tile::kTileC, Tile::kThreadC / 4, Tile::kLanesC * 4, column);
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++)
#pragma unroll
        for (int j = 0; j < Tile::kThreadC; j++) sum[s][i][j] = fmaf(row[i], column[j], sum[s][i][j]);
    }
  }

  // Adds the sums to those of `partial`, or begins them.
  __device__ __forceinline__ void flush(float* partial, bool begin) {
#pragma unroll
    for (int s = 0; s < kPasses; s++)
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++) {
        float* at = partial + (s * W::kPoints * Tile::kTileK + (i / 4) * Tile::kLanesK * 4 + i % 4) * Tile::kTileC;
#pragma unroll
        for (int j = 0; j < Tile::kThreadC; j += 4) {
          float* to = at + j * Tile::kLanesC;
          const float4 old = begin ? make_float4(0.f, 0.f, 0.f, 0.f) : load4(to);
          store4_global(to, old.x + sum[s][i][j], old.y + sum[s][i][j + 1], old.z + sum[s][i][j + 2],
                        old.w + sum[s][i][j + 3]);
        }
      }
  }
};

// Keeps the compiler from moving loads far ahead, into spills. From sm_90 on the barrier itself takes registers, which
// sixteen warps do not have.
template <int kWarps>
__device__ __forceinline__ void keep_order() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (kWarps < 16) __syncwarp();
#else
  __syncwarp();
#endif
}

// The step of a chunk in which a round of transforms runs: spread evenly. On sm_90 eight points along H leave no
// register for a round in the first step.
template <class H>
__device__ __forceinline__ constexpr int step_of(int round, int rounds, int steps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return H::kPoints == 8 ? (round + 1) * steps / (rounds + 1) : round * steps / rounds;
#else
  return round * steps / rounds;
#endif
}

// A thread's channels inside the block's tile, and its point and share of the tiles.
template <class W, class Tile>
struct ToomWgradPlace {
  u32 point, split, k, c, pass;

  __device__ __forceinline__ explicit ToomWgradPlace(u32 thread) {
    const u32 lane = thread % 32, warp = thread / 32, part = warp / W::kPoints;
    point = warp % W::kPoints;
    split = part % Tile::kSplit;
    k = part / Tile::kSplit % Tile::kWarpsK * (Tile::kTileK / Tile::kWarpsK) + lane % Tile::kLanesK * 4;
    const u32 column = part / Tile::kSplit / Tile::kWarpsK;
    c = column % Tile::kWarpsC * (Tile::kTileC / Tile::kWarpsC) + lane / Tile::kLanesK * 4;
    pass = column / Tile::kWarpsC * (W::kSegments / Tile::kWarpsPass);
  }
};

// Where a thread's sums lie.
template <class Sizes, class Tile, class W>
__device__ __forceinline__ float* partial_of(const ToomWgradParams& p) {
  const ToomWgradBlock<Sizes, Tile> block(p);
  const ToomWgradPlace<W, Tile> place(fresh_thread());
  const i64 run = (i64(block.slice) * Tile::kSplit + place.split) * p.groups.divisor + block.group;
  const i64 product = (run * p.channel_tiles.divisor + block.channel_tile) * Sizes::kProducts + block.product;
  return p.partial + product * (Sizes::kPasses * W::kPoints * Tile::kTileK * Tile::kTileC) +
         ((place.pass * W::kPoints + place.point) * Tile::kTileK + place.k) * Tile::kTileC + place.c;
}

template <class H, class W, class Tile, bool kClassed>
__device__ __forceinline__ void toom_wgrad(const ToomWgradParams& p) {
  using Sizes = ToomWgradSizes<H, W, Tile>;
  extern __shared__ __align__(16) float shared[];

  constexpr int kBuffer = Sizes::kOperands + Sizes::kStaged;
  ToomWgradLoader<H, W, Tile, kClassed> loader(p, *reinterpret_cast<ToomWgradState*>(shared + 2 * kBuffer), shared);
  int chunks;
  {
    const ToomWgradBlock<Sizes, Tile> block(p);
    chunks = (block.end_row(p) - block.first_row(p)) * ((p.tiles + kChunk - 1) / kChunk);
  }

  // The first chunk through stages 1 and 2, the second through stage 1. Chunks are counted backwards, and the parity of
  // a chunk's number tells its buffers.
  const int odd = chunks % 2;
  float bias = 0.f;
#pragma unroll 1
  for (int ahead = 0; ahead < 2; ahead++) {
    loader.staged = shared + (ahead == odd ? 0 : kBuffer) + Sizes::kOperands;
    loader.aim_chunk();
#pragma unroll
    for (int batch = 0; batch < Sizes::kBatches; batch++) loader.load(batch), loader.combine(batch);
    loader.head(shared + (odd ? kBuffer : 0) + Sizes::kOperands);
    loader.advance();
    __syncthreads();
    if (ahead == 0) {
#pragma unroll
      for (int round = 0; round < Sizes::kRoundsD + Sizes::kRoundsV; round++)
        loader.transform(round, loader.staged, loader.staged - Sizes::kOperands, bias);
    }
  }
  __syncthreads();

  ToomWgradSums<W, Tile> sums;
  sums.clear();
  int until_flush = p.flush + kFirstFlush;
#pragma unroll 1
  for (; chunks > 0; chunks--) {
    // The chunk after next goes where this one was staged; the next is transformed into the other operands.
    float* const now = shared + (chunks % 2 ? kBuffer : 0);
    float* const next = shared + (chunks % 2 ? 0 : kBuffer);
    loader.staged = now + Sizes::kOperands;
    const ToomWgradPlace<W, Tile> place(fresh_thread());
    const float* d = now + (place.point * kChunk + place.split) * Tile::kTileK + place.k;
    const float* v = now + Sizes::kOperandD +
                     ((place.pass * W::kPoints + place.point) * kChunk + place.split) * Tile::kTileC + place.c;
    constexpr int kRounds = Sizes::kRoundsD + Sizes::kRoundsV;
    loader.head(next + Sizes::kOperands);
    loader.aim_chunk();
#pragma unroll
    for (int step = 0; step < Sizes::kSteps; step++) {
      // Whatever waits for memory comes before the last products: behind them is nothing that could hide it.
      if (step > 0) keep_order<Sizes::kWarps>();
      if (step > 0) loader.combine(step - 1);
      if (step < Sizes::kBatches) loader.load(step);
#pragma unroll
      for (int round = 0; round < kRounds; round++)
        if (step_of<H>(round, kRounds, Sizes::kSteps) == step)
          loader.transform(round, next + Sizes::kOperands, next, bias);
      if (step == Sizes::kSteps - 1) loader.advance();
      sums.multiply_add(d + step * Tile::kSplit * Tile::kTileK, v + step * Tile::kSplit * Tile::kTileC);
    }
    if (--until_flush % kFirstFlush == 0 || chunks == 1) {
      sums.flush(partial_of<Sizes, Tile, W>(p), until_flush >= kFirstFlush);
      sums.clear();
      until_flush = p.flush;
    }
    __syncthreads();
  }

  // The sum of dy is the product of the points 1 of both axes, where dy enters with factors 1.
  const ToomWgradBlock<Sizes, Tile> block(p);
  if (p.bias_partial && block.product == (H::kPoints > 1 ? 1 : 0) && block.c_tile == 0) {
    shared[threadIdx.x] = bias;
    __syncthreads();
    const int channel = block.k_tile * Tile::kTileK + threadIdx.x;
    if (threadIdx.x < Tile::kTileK && channel < p.outputs) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Sizes::kThreads / Tile::kTileK; i++) sum += shared[threadIdx.x + i * Tile::kTileK];
      p.bias_partial[(i64(block.slice) * p.groups.divisor + block.group) * p.outputs + channel] = sum;
    }
  }
}

}  // namespace polyconv

// ---- toom_wgrad_finish.cuh ------------------------------------------------------------------------------------------
// What follows toom_wgrad.cuh: the slices' partial sums are added, always in the same order, then transformed to taps.
//
// toom_wgrad_sum: one thread per four elements of `partial[slice]`. Slices are added in groups and the groups' sums
// after them, so that no element goes through more than about 2 sqrt(slices) additions in sequence.
// toom_wgrad_finish: one thread per pair of channels: G^T along W, then along H, and dw is written wherever its strides
// and the classes of taps (of a strided convolution) want it. The bias gradient's partial sums are added here.

namespace polyconv {

constexpr int kSlicesPerGroup = 8;
constexpr int kMaxTapClasses = 8;

struct ToomWgradSumParams {
  float* partial;  // [slice][elements]; slice 0 becomes the sum
  i64 elements;
  int slices;
};

struct ToomWgradFinishParams {
  const float* partial;       // [group][channel tile][product][segment][point][tile_k][tile_c]
  const float* bias_partial;  // [slice][group * outputs]
  float* dw;
  float* db;  // null: no bias gradient
  i64 dw_k, dw_channel;
  int dw_row, dw_column;
  int slices, outputs, all_outputs, pairs;  // outputs of a group, of all groups; pairs of channels
  FastDivisor channels, outputs_divisor;    // of a group
  FastDivisor tile_k, tile_c;
  int k_tiles, channel_tiles;
  FastDivisor classes, classes_w;
  int taps_h[kMaxTapClasses], tap_first_h[kMaxTapClasses];  // of each class; one stride for all
  int taps_w[kMaxTapClasses], tap_first_w[kMaxTapClasses];
  int tap_stride_h, tap_stride_w;
};

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ void toom_wgrad_sum(const ToomWgradSumParams& p) {
  const i64 element = 4 * (i64(blockIdx.x) * blockDim.x + threadIdx.x);
  if (element >= p.elements) return;
  float* const to = p.partial + element;
  const float* from = to;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int first = 0; first < p.slices; first += kSlicesPerGroup) {
    float4 group = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kSlicesPerGroup; i++) {
      if (first + i < p.slices) group = add4(group, load4(from));
      from += p.elements;
    }
    sum = add4(sum, group);
  }
  store4(to, sum);
}

// Adds up the bias gradient's partial sums of one channel.
__device__ __forceinline__ float sum_of_bias(const ToomWgradFinishParams& p, int channel) {
  const float* from = p.bias_partial + channel;
  float sum = 0.f;
#pragma unroll 1
  for (int first = 0; first < p.slices; first += kSlicesPerGroup) {
    float group = 0.f;
#pragma unroll
    for (int i = 0; i < kSlicesPerGroup; i++) {
      if (first + i < p.slices) group += *from;
      from += p.all_outputs;
    }
    sum += group;
  }
  return sum;
}

template <class H, class W>
__device__ __forceinline__ void toom_wgrad_finish(const ToomWgradFinishParams& p) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (p.db && pair < p.all_outputs) p.db[pair] = sum_of_bias(p, pair);
  if (pair >= p.pairs) return;

  const int output = p.channels.quotient(pair), c = pair - output * int(p.channels.divisor);
  const int group = p.outputs_divisor.quotient(output), k = output - group * p.outputs;
  const int k_tile = p.tile_k.quotient(k), c_tile = p.tile_c.quotient(c);
  const int point_size = p.tile_k.divisor * p.tile_c.divisor, product_size = W::kSegments * W::kPoints * point_size;
  const float* from =
      p.partial +
      i64(group * p.channel_tiles + c_tile * p.k_tiles + k_tile) * (H::kSegments * H::kPoints * product_size) +
      (k - k_tile * int(p.tile_k.divisor)) * int(p.tile_c.divisor) + c - c_tile * int(p.tile_c.divisor);

  const int channel = p.classes.quotient(c), number = c - channel * int(p.classes.divisor);
  const int class_h = p.classes_w.quotient(number), class_w = number - class_h * int(p.classes_w.divisor);
  float* const dw = p.dw + output * p.dw_k + channel * p.dw_channel + i64(p.tap_first_h[class_h]) * p.dw_row +
                    i64(p.tap_first_w[class_w]) * p.dw_column;
  const int taps_h = p.taps_h[class_h], taps_w = p.taps_w[class_w];

  // Segment by segment along both axes, so that the values of one pair of them fit into registers.
#pragma unroll 1
  for (int segment = 0; segment < H::kSegments; segment++) {
#pragma unroll 1
    for (int pass = 0; pass < W::kSegments; pass++) {
      const float* const sums_at = from + pass * W::kPoints * point_size;
      float along_w[W::kLongest][H::kPoints];
#pragma unroll
      for (int product = 0; product < H::kPoints; product++) {
        float sums[W::kPoints], taps[W::kLongest];
#pragma unroll
        for (int i = 0; i < W::kPoints; i++) sums[i] = sums_at[product * product_size + i * point_size];
        W::collect(sums, taps);
#pragma unroll
        for (int t = 0; t < W::kLongest; t++) along_w[t][product] = taps[t];
      }
#pragma unroll
      for (int j = 0; j < W::kLongest; j++) {
        float taps[H::kLongest];
        H::collect(along_w[j], taps);
        const int s = W::first_tap(pass) + j;
#pragma unroll
        for (int t = 0; t < H::kLongest; t++) {
          const int r = H::first_tap(segment) + t;
          if (t < H::taps(segment) && j < W::taps(pass) && r < taps_h && s < taps_w)
            dw[i64(r * p.tap_stride_h) * p.dw_row + i64(s * p.tap_stride_w) * p.dw_column] = taps[t];
        }
      }
    }
    from += H::kPoints * product_size;
  }
}

}  // namespace polyconv

// ---- wgrad_gemm.cuh -------------------------------------------------------------------------------------------------
// wgrad as an implicit GEMM:
//   dw[k, column] = sum over pixels of  dy[pixel, k] * x[pixel shifted by the column's tap, the column's channel]
//
// A column is (channel, kernel row, kernel column) of one group; with a bias one more column sees x = 1 everywhere, and
// so collects the bias gradient. Pixels are the flattened (image, row, column) of y. Each block sums one slice of them
// and writes a partial sum; reduce_partials.cuh adds the slices in a fixed order, so the result is the same every time.
//
// Grid: x = column tile * k tiles + k tile, y = group, z = slice.
// Shared memory: a = 2 x 8 pixels x (M + 4), b = 2 x 8 x (N + 4), column table N x 16 bytes. Eight neighbouring lanes
// read eight neighbouring pixels; a pitch of 4 mod 32 makes their transposed stores conflict-free.

namespace polyconv {

struct WgradParams {
  const float* x;
  const float* dy;
  float* partial;  // [slice][group][k][columns_padded]
  i64 x_batch, x_channel, dy_batch, dy_channel;
  int x_row, x_column, dy_row, dy_column;
  int height, width;   // of x
  int k, channels;     // per group
  int columns;         // channels * kernel area, without the bias column
  int columns_padded;  // row length of `partial`
  int groups;
  int bias;  // 1: column number `columns` is the bias
  int border;
  int pixels, pixels_per_slice;
  int stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  FastDivisor k_tiles, out_height, out_width, kernel_area, kernel_width;
};

constexpr int kOnes = kPaddingRow + 1;  // marks the bias column in the column table

// A column's shift against the pixel {dy, dx, element offset as i64}, computed once per block.
__device__ __forceinline__ int4 wgrad_column(int column, const WgradParams& p, bool bordered) {
  if (column > p.columns || (column == p.columns && !p.bias)) return make_int4(kPaddingRow, 0, 0, 0);
  if (column == p.columns) return make_int4(kOnes, 0, 0, 0);
  const int channel = p.kernel_area.quotient(column), tap = column - channel * p.kernel_area.divisor;
  const int r = p.kernel_width.quotient(tap), s = tap - r * p.kernel_width.divisor;
  const int dy = r * p.dilation_h, dx = s * p.dilation_w;
  i64 offset = (i64(blockIdx.y) * p.channels + channel) * p.x_channel;
  if (!bordered) offset += i64(dy) * p.x_row + i64(dx) * p.x_column;
  return make_int4(dy, dx, int(offset), int(offset >> 32));
}

// kVector: four neighbouring pixels of dy come in one load. kBordered: outside the image stands the folded coordinate.
template <class Tile, bool kVector, bool kBordered>
struct WgradLoader {
  static constexpr int kPitchM = Tile::kM + 4, kPitchN = Tile::kN + 4;
  static constexpr int kStep = Tile::kThreads / kDepth;  // rows or columns that the block loads at once
  static constexpr int kRows = Tile::kM / kStep, kColumns = Tile::kN / kStep;
  static_assert(Tile::kM % kStep == 0 && Tile::kN % kStep == 0, "the block must divide the tile");
  static constexpr int kQuadStep = Tile::kThreads / (kDepth / 4);
  static constexpr int kQuads = kVector ? (Tile::kM + kQuadStep - 1) / kQuadStep : 0;

  const WgradParams& p;
  const int4* table;  // of the block's columns, in shared memory
  int first_k, pixel, end;
  float a[kVector ? 4 * kQuads : kRows];
  float b[kColumns];

  __device__ __forceinline__ WgradLoader(const WgradParams& p, const int4* table, int first_k, int first, int end)
      : p(p), table(table), first_k(first_k), pixel(first), end(end) {}

  __device__ __forceinline__ void load() {
    const int index = pixel + threadIdx.x % kDepth;
    const int line = p.out_width.quotient(index), image = p.out_height.quotient(line);
    const int i = line - image * p.out_height.divisor, j = index - line * p.out_width.divisor;
    const i64 group_k = i64(blockIdx.y) * p.k + first_k;

    if constexpr (kVector) {
      const int quad = pixel + threadIdx.x % (kDepth / 4) * 4;
      const int quad_line = p.out_width.quotient(quad), quad_image = p.out_height.quotient(quad_line);
      const float* at = p.dy + quad_image * p.dy_batch + group_k * p.dy_channel +
                        (quad - i64(quad_image) * p.out_height.divisor * p.out_width.divisor);
#pragma unroll
      for (int e = 0; e < kQuads; e++) {
        const int k = threadIdx.x / (kDepth / 4) + e * kQuadStep;
        const float4 v =
            quad < end && first_k + k < p.k ? load4(at + k * p.dy_channel) : make_float4(0.f, 0.f, 0.f, 0.f);
        a[4 * e] = v.x, a[4 * e + 1] = v.y, a[4 * e + 2] = v.z, a[4 * e + 3] = v.w;
      }
    } else {
      const float* at = p.dy + image * p.dy_batch + group_k * p.dy_channel + i64(i) * p.dy_row + i64(j) * p.dy_column;
#pragma unroll
      for (int e = 0; e < kRows; e++) {
        const int k = threadIdx.x / kDepth + e * kStep;
        a[e] = index < end && first_k + k < p.k ? at[k * p.dy_channel] : 0.f;
      }
    }

    const int y = i * p.stride_h - p.pad_top, x = j * p.stride_w - p.pad_left;
    const float* origin = p.x + image * p.x_batch;
    if constexpr (!kBordered) origin += i64(y) * p.x_row + i64(x) * p.x_column;
#pragma unroll
    for (int e = 0; e < kColumns; e++) {
      const int4 column = table[threadIdx.x / kDepth + e * kStep];
      int v = y + column.x, u = x + column.y;
      const float* at = origin + (i64(u32(column.z)) | i64(column.w) << 32);
      if constexpr (kBordered) {
        v = fold_into(v, p.height, Border(p.border));
        u = fold_into(u, p.width, Border(p.border));
        at += i64(v) * p.x_row + i64(u) * p.x_column;
      }
      const bool inside = index < end && column.x > kOnes && u32(v) < u32(p.height) && u32(u) < u32(p.width);
      b[e] = inside ? *at : column.x == kOnes ? 1.f : 0.f;
    }
    pixel += kDepth;
  }

  __device__ __forceinline__ void store(float* tile_a, float* tile_b) const {
    if constexpr (kVector) {
#pragma unroll
      for (int e = 0; e < kQuads; e++) {
        const int k = threadIdx.x / (kDepth / 4) + e * kQuadStep;
        if (Tile::kM % kQuadStep == 0 || k < Tile::kM)
#pragma unroll
          for (int f = 0; f < 4; f++) tile_a[(threadIdx.x % (kDepth / 4) * 4 + f) * kPitchM + k] = a[4 * e + f];
      }
    } else {
#pragma unroll
      for (int e = 0; e < kRows; e++) tile_a[threadIdx.x % kDepth * kPitchM + threadIdx.x / kDepth + e * kStep] = a[e];
    }
#pragma unroll
    for (int e = 0; e < kColumns; e++) tile_b[threadIdx.x % kDepth * kPitchN + threadIdx.x / kDepth + e * kStep] = b[e];
  }
};

// The block's slice of the sum, whatever loads its operands, and its partial sums.
template <class Tile, class Loader>
__device__ __forceinline__ void wgrad_slice(const WgradParams& p, Loader& loader, int pixels) {
  __shared__ __align__(16) float a[2][kDepth * Loader::kPitchM];
  __shared__ __align__(16) float b[2][kDepth * Loader::kPitchN];
  Accumulators<Tile> c;
  loader.load();
  loader.store(a[0], b[0]);
  __syncthreads();
  int buffer = 0;
#pragma unroll 1
  for (int left = pixels; left > 0; left -= kDepth) {
    loader.load();  // past the end: zeros
    const TilePlace<Tile> place(threadIdx.x);
    c.template multiply_add<Loader::kPitchM, Loader::kPitchN>(a[buffer] + place.m, b[buffer] + place.n);
    buffer ^= 1;
    loader.store(a[buffer], b[buffer]);
    __syncthreads();
  }

  // Four columns at a time; the padding columns are written too and never read.
  const TilePlace<Tile> place(fresh_thread());
  const u32 x = fresh_block_x(), column_tile = p.k_tiles.quotient(x);
  const int k = (x - column_tile * p.k_tiles.divisor) * Tile::kM + place.m, column = column_tile * Tile::kN + place.n;
  float* to = p.partial + ((i64(blockIdx.z) * p.groups + fresh_block_y()) * p.k + k) * p.columns_padded + column;
#pragma unroll
  for (int i = 0; i < Tile::kThreadM; i++)
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; j += 4)
      if (k + c.offset_m(i) < p.k && column + c.offset_n(j) < p.columns_padded)
        store4_global(to + i64(c.offset_m(i)) * p.columns_padded + c.offset_n(j), c.sum[i][j], c.sum[i][j + 1],
                      c.sum[i][j + 2], c.sum[i][j + 3]);
}

template <class Tile, bool kVector, bool kBordered>
__device__ __forceinline__ void wgrad_gemm(const WgradParams& p) {
  __shared__ __align__(16) int4 table[Tile::kN];
  {
    const int first_column = p.k_tiles.quotient(blockIdx.x) * Tile::kN;
    for (int n = threadIdx.x; n < Tile::kN; n += Tile::kThreads)
      table[n] = wgrad_column(first_column + n, p, kBordered);
  }
  __syncthreads();

  const int first = blockIdx.z * p.pixels_per_slice, end = min(first + p.pixels_per_slice, p.pixels);
  const int first_k = (blockIdx.x - p.k_tiles.quotient(blockIdx.x) * p.k_tiles.divisor) * Tile::kM;
  WgradLoader<Tile, kVector, kBordered> loader(p, table, first_k, first, end);
  wgrad_slice<Tile>(p, loader, end - first);
}

}  // namespace polyconv

// ---- reduce_partials.cuh --------------------------------------------------------------------------------------------
// The second stage of every weight gradient: adds the slices' partial sums in ascending order, always the same, and
// writes them where dw's strides (and db) want them.
//
// Grid: x covers the elements of `partial[slice]`, one thread each, so that all reads are coalesced.

namespace polyconv {

struct ReduceParams {
  const float* partial;  // [slice][group * k][columns_padded]
  float* dw;
  float* db;  // null: no bias gradient
  i64 dw_k, dw_channel, dw_row, dw_column;
  i64 elements;  // of one slice
  int slices;
  int columns;  // of dw; column number `columns` is the bias
  FastDivisor columns_padded, kernel_area, kernel_width;
};

__device__ __forceinline__ void reduce_partials(const ReduceParams& p) {
  const i64 element = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (element >= p.elements) return;
  const int k = p.columns_padded.quotient(u32(element)), column = int(element) - k * int(p.columns_padded.divisor);
  const bool is_bias = column == p.columns && p.db;
  if (column >= p.columns && !is_bias) return;

  float sum = 0.f;
  const float* from = p.partial + element;
#pragma unroll 4
  for (int slice = 0; slice < p.slices; slice++, from += p.elements) sum += *from;

  if (is_bias) {
    p.db[k] = sum;
    return;
  }
  const int channel = p.kernel_area.quotient(column), tap = column - channel * p.kernel_area.divisor;
  const int r = p.kernel_width.quotient(tap), s = tap - r * p.kernel_width.divisor;
  p.dw[k * p.dw_k + channel * p.dw_channel + r * p.dw_row + s * p.dw_column] = sum;
}

}  // namespace polyconv

// ---- The instances that this file uses ------------------------------------------------------------------------------
namespace polyconv {
// F(4,5)
struct Toom4_5_1 {
  static constexpr int kM = 4;
  static constexpr int kLongest = 5;
  static constexpr int kPoints = 8;
  static constexpr int kSegments = 1;
  static constexpr int kTiles = 1;
  static constexpr int kPasses = 1;
  static constexpr int kOuterInputs = 1;
  static constexpr int kOutputs = 4;
  static constexpr int kSpan = 8;
  static POLYCONV_INLINE constexpr int offset(int) { return 0; }
  static POLYCONV_INLINE constexpr int first_tap(int) { return 0; }
  static POLYCONV_INLINE constexpr int taps(int) { return 5; }
  // 8 from 8 in 22 operations (8 add, 0 mul, 14 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void input(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x4 - x2;
    const T t1 = x0 - x6;
    y[0] = mul_add(t0, 5.25f, t1);
    const T t2 = x2 + x6;
    const T t3 = mul_add(x4, -5.0f, t2);
    const T t4 = mul_add(x4, 0.75f, t3);
    const T t5 = x1 + x5;
    const T t6 = mul_add(x3, -5.0f, t5);
    const T t7 = mul_add(x3, 0.75f, t6);
    y[1] = t4 + t7;
    y[2] = t4 - t7;
    const T t8 = mul_add(x5, 3.0f, t6);
    const T t9 = mul_add(x6, 3.0f, t3);
    y[3] = mul_add(t8, 2.0f, t9);
    y[4] = mul_add(t8, -2.0f, t9);
    const T t10 = mul_add(x2, 3.0f, t3);
    const T t11 = mul_add(x1, 3.0f, t6);
    y[5] = mul_add(t10, 2.0f, t11);
    y[6] = mul_sub(t10, 2.0f, t11);
    const T t12 = x3 - x5;
    const T t13 = x7 - x1;
    y[7] = mul_add(t12, 5.25f, t13);
  }
  // 4 from 8 in 16 operations (10 add, 0 mul, 6 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void output(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x1 + x2;
    const T t1 = x0 + t0;
    const T t2 = x3 + x4;
    const T t3 = x5 + x6;
    const T t4 = t2 + t3;
    y[0] = t1 + t4;
    const T t5 = x3 - x4;
    const T t6 = x5 - x6;
    const T t7 = x1 - x2;
    const T t8 = mul_add(t6, 0.5f, t7);
    y[1] = mul_add(t5, 2.0f, t8);
    const T t9 = mul_add(t3, 0.25f, t0);
    y[2] = mul_add(t2, 4.0f, t9);
    const T t10 = x7 + t7;
    const T t11 = mul_add(t6, 0.125f, t10);
    y[3] = mul_add(t5, 8.0f, t11);
  }
  // 8 from 5 in 18 operations (3 add, 3 mul, 12 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void weights(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T t0 = x1 + x3;
    const T t1 = x0 + x2;
    const T t2 = x4 + t1;
    const T t3 = t2 * -0.22222222f;
    y[1] = mul_add(t0, -0.22222222f, t3);
    y[2] = mul_add(t0, 0.22222222f, t3);
    const T t4 = mul_add(x3, 4.0f, x1);
    const T t5 = x0 * 0.0027777778f;
    const T t6 = mul_add(x2, 0.011111111f, t5);
    const T t7 = mul_add(x4, 0.044444446f, t6);
    y[3] = mul_add(t4, 0.0055555557f, t7);
    y[4] = mul_add(t4, -0.0055555557f, t7);
    const T t8 = mul_add(x1, 4.0f, x3);
    const T t9 = x4 * 0.022222223f;
    const T t10 = mul_add(x2, 0.08888889f, t9);
    const T t11 = mul_add(x0, 0.35555556f, t10);
    y[5] = mul_add(t8, 0.044444446f, t11);
    y[6] = mul_add(t8, -0.044444446f, t11);
    y[0] = x0;
    y[7] = x4;
  }
  // 8 from 4 in 12 operations (4 add, 0 mul, 8 fma), depth 2.
  template <class T>
  static POLYCONV_INLINE void spread(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T t0 = x0 + x2;
    const T t1 = x1 + x3;
    y[1] = t0 + t1;
    y[2] = t0 - t1;
    const T t2 = mul_add(x3, 4.0f, x1);
    const T t3 = mul_add(x2, 4.0f, x0);
    y[3] = mul_add(t2, 2.0f, t3);
    y[4] = mul_add(t2, -2.0f, t3);
    const T t4 = mul_add(x1, 4.0f, x3);
    const T t5 = mul_add(x2, 0.25f, x0);
    y[5] = mul_add(t4, 0.125f, t5);
    y[6] = mul_add(t4, -0.125f, t5);
    y[0] = x0;
    y[7] = x3;
  }
  // 5 from 8 in 21 operations (6 add, 3 mul, 12 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void collect(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x5 + x6;
    const T t1 = x1 + x2;
    const T t2 = x3 + x4;
    const T t3 = mul_add(t2, 0.0027777778f, x0);
    const T t4 = mul_add(t1, -0.22222222f, t3);
    y[0] = mul_add(t0, 0.35555556f, t4);
    const T t5 = x1 - x2;
    const T t6 = x5 - x6;
    const T t7 = x3 - x4;
    const T t8 = t7 * 0.0055555557f;
    const T t9 = mul_add(t6, 0.17777778f, t8);
    y[1] = mul_add(t5, -0.22222222f, t9);
    const T t10 = t2 * 0.011111111f;
    const T t11 = mul_add(t0, 0.08888889f, t10);
    y[2] = mul_add(t1, -0.22222222f, t11);
    const T t12 = t7 * 0.022222223f;
    const T t13 = mul_add(t6, 0.044444446f, t12);
    y[3] = mul_add(t5, -0.22222222f, t13);
    const T t14 = mul_add(t0, 0.022222223f, x7);
    const T t15 = mul_add(t2, 0.044444446f, t14);
    y[4] = mul_add(t1, -0.22222222f, t15);
  }
};
}  // namespace polyconv

namespace polyconv {
// F(4,5) taps 4+5 nested F(2,2)
struct Toom4_4_5_2 {
  static constexpr int kM = 4;
  static constexpr int kLongest = 5;
  static constexpr int kPoints = 8;
  static constexpr int kSegments = 2;
  static constexpr int kTiles = 2;
  static constexpr int kPasses = 3;
  static constexpr int kOuterInputs = 3;
  static constexpr int kOutputs = 8;
  static constexpr int kSpan = 16;
  static POLYCONV_INLINE constexpr int offset(int i) { return i == 0 ? 0 : i == 1 ? 4 : 8; }
  static POLYCONV_INLINE constexpr int first_tap(int i) { return i == 0 ? 0 : 4; }
  static POLYCONV_INLINE constexpr int taps(int i) { return i == 0 ? 4 : 5; }
  // 8 from 8 in 22 operations (8 add, 0 mul, 14 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void input(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x4 - x2;
    const T t1 = x0 - x6;
    y[0] = mul_add(t0, 5.25f, t1);
    const T t2 = x2 + x6;
    const T t3 = mul_add(x4, -5.0f, t2);
    const T t4 = mul_add(x4, 0.75f, t3);
    const T t5 = x1 + x5;
    const T t6 = mul_add(x3, -5.0f, t5);
    const T t7 = mul_add(x3, 0.75f, t6);
    y[1] = t4 + t7;
    y[2] = t4 - t7;
    const T t8 = mul_add(x5, 3.0f, t6);
    const T t9 = mul_add(x6, 3.0f, t3);
    y[3] = mul_add(t8, 2.0f, t9);
    y[4] = mul_add(t8, -2.0f, t9);
    const T t10 = mul_add(x2, 3.0f, t3);
    const T t11 = mul_add(x1, 3.0f, t6);
    y[5] = mul_add(t10, 2.0f, t11);
    y[6] = mul_sub(t10, 2.0f, t11);
    const T t12 = x3 - x5;
    const T t13 = x7 - x1;
    y[7] = mul_add(t12, 5.25f, t13);
  }
  // 4 from 8 in 16 operations (10 add, 0 mul, 6 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void output(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x1 + x2;
    const T t1 = x0 + t0;
    const T t2 = x3 + x4;
    const T t3 = x5 + x6;
    const T t4 = t2 + t3;
    y[0] = t1 + t4;
    const T t5 = x3 - x4;
    const T t6 = x5 - x6;
    const T t7 = x1 - x2;
    const T t8 = mul_add(t6, 0.5f, t7);
    y[1] = mul_add(t5, 2.0f, t8);
    const T t9 = mul_add(t3, 0.25f, t0);
    y[2] = mul_add(t2, 4.0f, t9);
    const T t10 = x7 + t7;
    const T t11 = mul_add(t6, 0.125f, t10);
    y[3] = mul_add(t5, 8.0f, t11);
  }
  // 8 from 5 in 18 operations (3 add, 3 mul, 12 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void weights(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T t0 = x1 + x3;
    const T t1 = x0 + x2;
    const T t2 = x4 + t1;
    const T t3 = t2 * -0.22222222f;
    y[1] = mul_add(t0, -0.22222222f, t3);
    y[2] = mul_add(t0, 0.22222222f, t3);
    const T t4 = mul_add(x3, 4.0f, x1);
    const T t5 = x0 * 0.0027777778f;
    const T t6 = mul_add(x2, 0.011111111f, t5);
    const T t7 = mul_add(x4, 0.044444446f, t6);
    y[3] = mul_add(t4, 0.0055555557f, t7);
    y[4] = mul_add(t4, -0.0055555557f, t7);
    const T t8 = mul_add(x1, 4.0f, x3);
    const T t9 = x4 * 0.022222223f;
    const T t10 = mul_add(x2, 0.08888889f, t9);
    const T t11 = mul_add(x0, 0.35555556f, t10);
    y[5] = mul_add(t8, 0.044444446f, t11);
    y[6] = mul_add(t8, -0.044444446f, t11);
    y[0] = x0;
    y[7] = x4;
  }
  // 8 from 4 in 12 operations (4 add, 0 mul, 8 fma), depth 2.
  template <class T>
  static POLYCONV_INLINE void spread(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T t0 = x0 + x2;
    const T t1 = x1 + x3;
    y[1] = t0 + t1;
    y[2] = t0 - t1;
    const T t2 = mul_add(x3, 4.0f, x1);
    const T t3 = mul_add(x2, 4.0f, x0);
    y[3] = mul_add(t2, 2.0f, t3);
    y[4] = mul_add(t2, -2.0f, t3);
    const T t4 = mul_add(x1, 4.0f, x3);
    const T t5 = mul_add(x2, 0.25f, x0);
    y[5] = mul_add(t4, 0.125f, t5);
    y[6] = mul_add(t4, -0.125f, t5);
    y[0] = x0;
    y[7] = x3;
  }
  // 5 from 8 in 21 operations (6 add, 3 mul, 12 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void collect(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x5 + x6;
    const T t1 = x1 + x2;
    const T t2 = x3 + x4;
    const T t3 = mul_add(t2, 0.0027777778f, x0);
    const T t4 = mul_add(t1, -0.22222222f, t3);
    y[0] = mul_add(t0, 0.35555556f, t4);
    const T t5 = x1 - x2;
    const T t6 = x5 - x6;
    const T t7 = x3 - x4;
    const T t8 = t7 * 0.0055555557f;
    const T t9 = mul_add(t6, 0.17777778f, t8);
    y[1] = mul_add(t5, -0.22222222f, t9);
    const T t10 = t2 * 0.011111111f;
    const T t11 = mul_add(t0, 0.08888889f, t10);
    y[2] = mul_add(t1, -0.22222222f, t11);
    const T t12 = t7 * 0.022222223f;
    const T t13 = mul_add(t6, 0.044444446f, t12);
    y[3] = mul_add(t5, -0.22222222f, t13);
    const T t14 = mul_add(t0, 0.022222223f, x7);
    const T t15 = mul_add(t2, 0.044444446f, t14);
    y[4] = mul_add(t1, -0.22222222f, t15);
  }
};
}  // namespace polyconv

namespace polyconv {
// F(4,5) taps 4+5
struct Toom4_4_5_1 {
  static constexpr int kM = 4;
  static constexpr int kLongest = 5;
  static constexpr int kPoints = 8;
  static constexpr int kSegments = 2;
  static constexpr int kTiles = 1;
  static constexpr int kPasses = 2;
  static constexpr int kOuterInputs = 2;
  static constexpr int kOutputs = 4;
  static constexpr int kSpan = 12;
  static POLYCONV_INLINE constexpr int offset(int i) { return i == 0 ? 0 : 4; }
  static POLYCONV_INLINE constexpr int first_tap(int i) { return i == 0 ? 0 : 4; }
  static POLYCONV_INLINE constexpr int taps(int i) { return i == 0 ? 4 : 5; }
  // 8 from 8 in 22 operations (8 add, 0 mul, 14 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void input(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x4 - x2;
    const T t1 = x0 - x6;
    y[0] = mul_add(t0, 5.25f, t1);
    const T t2 = x2 + x6;
    const T t3 = mul_add(x4, -5.0f, t2);
    const T t4 = mul_add(x4, 0.75f, t3);
    const T t5 = x1 + x5;
    const T t6 = mul_add(x3, -5.0f, t5);
    const T t7 = mul_add(x3, 0.75f, t6);
    y[1] = t4 + t7;
    y[2] = t4 - t7;
    const T t8 = mul_add(x5, 3.0f, t6);
    const T t9 = mul_add(x6, 3.0f, t3);
    y[3] = mul_add(t8, 2.0f, t9);
    y[4] = mul_add(t8, -2.0f, t9);
    const T t10 = mul_add(x2, 3.0f, t3);
    const T t11 = mul_add(x1, 3.0f, t6);
    y[5] = mul_add(t10, 2.0f, t11);
    y[6] = mul_sub(t10, 2.0f, t11);
    const T t12 = x3 - x5;
    const T t13 = x7 - x1;
    y[7] = mul_add(t12, 5.25f, t13);
  }
  // 4 from 8 in 16 operations (10 add, 0 mul, 6 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void output(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x1 + x2;
    const T t1 = x0 + t0;
    const T t2 = x3 + x4;
    const T t3 = x5 + x6;
    const T t4 = t2 + t3;
    y[0] = t1 + t4;
    const T t5 = x3 - x4;
    const T t6 = x5 - x6;
    const T t7 = x1 - x2;
    const T t8 = mul_add(t6, 0.5f, t7);
    y[1] = mul_add(t5, 2.0f, t8);
    const T t9 = mul_add(t3, 0.25f, t0);
    y[2] = mul_add(t2, 4.0f, t9);
    const T t10 = x7 + t7;
    const T t11 = mul_add(t6, 0.125f, t10);
    y[3] = mul_add(t5, 8.0f, t11);
  }
  // 8 from 5 in 18 operations (3 add, 3 mul, 12 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void weights(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T t0 = x1 + x3;
    const T t1 = x0 + x2;
    const T t2 = x4 + t1;
    const T t3 = t2 * -0.22222222f;
    y[1] = mul_add(t0, -0.22222222f, t3);
    y[2] = mul_add(t0, 0.22222222f, t3);
    const T t4 = mul_add(x3, 4.0f, x1);
    const T t5 = x0 * 0.0027777778f;
    const T t6 = mul_add(x2, 0.011111111f, t5);
    const T t7 = mul_add(x4, 0.044444446f, t6);
    y[3] = mul_add(t4, 0.0055555557f, t7);
    y[4] = mul_add(t4, -0.0055555557f, t7);
    const T t8 = mul_add(x1, 4.0f, x3);
    const T t9 = x4 * 0.022222223f;
    const T t10 = mul_add(x2, 0.08888889f, t9);
    const T t11 = mul_add(x0, 0.35555556f, t10);
    y[5] = mul_add(t8, 0.044444446f, t11);
    y[6] = mul_add(t8, -0.044444446f, t11);
    y[0] = x0;
    y[7] = x4;
  }
  // 8 from 4 in 12 operations (4 add, 0 mul, 8 fma), depth 2.
  template <class T>
  static POLYCONV_INLINE void spread(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T t0 = x0 + x2;
    const T t1 = x1 + x3;
    y[1] = t0 + t1;
    y[2] = t0 - t1;
    const T t2 = mul_add(x3, 4.0f, x1);
    const T t3 = mul_add(x2, 4.0f, x0);
    y[3] = mul_add(t2, 2.0f, t3);
    y[4] = mul_add(t2, -2.0f, t3);
    const T t4 = mul_add(x1, 4.0f, x3);
    const T t5 = mul_add(x2, 0.25f, x0);
    y[5] = mul_add(t4, 0.125f, t5);
    y[6] = mul_add(t4, -0.125f, t5);
    y[0] = x0;
    y[7] = x3;
  }
  // 5 from 8 in 21 operations (6 add, 3 mul, 12 fma), depth 4.
  template <class T>
  static POLYCONV_INLINE void collect(const T* x, T* y) {
    const T x0 = x[0];
    const T x1 = x[1];
    const T x2 = x[2];
    const T x3 = x[3];
    const T x4 = x[4];
    const T x5 = x[5];
    const T x6 = x[6];
    const T x7 = x[7];
    const T t0 = x5 + x6;
    const T t1 = x1 + x2;
    const T t2 = x3 + x4;
    const T t3 = mul_add(t2, 0.0027777778f, x0);
    const T t4 = mul_add(t1, -0.22222222f, t3);
    y[0] = mul_add(t0, 0.35555556f, t4);
    const T t5 = x1 - x2;
    const T t6 = x5 - x6;
    const T t7 = x3 - x4;
    const T t8 = t7 * 0.0055555557f;
    const T t9 = mul_add(t6, 0.17777778f, t8);
    y[1] = mul_add(t5, -0.22222222f, t9);
    const T t10 = t2 * 0.011111111f;
    const T t11 = mul_add(t0, 0.08888889f, t10);
    y[2] = mul_add(t1, -0.22222222f, t11);
    const T t12 = t7 * 0.022222223f;
    const T t13 = mul_add(t6, 0.044444446f, t12);
    y[3] = mul_add(t5, -0.22222222f, t13);
    const T t14 = mul_add(t0, 0.022222223f, x7);
    const T t15 = mul_add(t2, 0.044444446f, t14);
    y[4] = mul_add(t1, -0.22222222f, t15);
  }
};
}  // namespace polyconv

static_assert(sizeof(polyconv::TransformWeightsParams) == 488, "host and device disagree about polyconv::TransformWeightsParams");
static_assert(sizeof(polyconv::HalfTransformParams) == 432, "host and device disagree about polyconv::HalfTransformParams");
static_assert(sizeof(polyconv::HalfGemmParams) == 112, "host and device disagree about polyconv::HalfGemmParams");
static_assert(sizeof(polyconv::HalfInverseParams) == 224, "host and device disagree about polyconv::HalfInverseParams");
static_assert(sizeof(polyconv::PackParams) == 1008, "host and device disagree about polyconv::PackParams");
static_assert(sizeof(polyconv::GatherParams) == 1128, "host and device disagree about polyconv::GatherParams");
static_assert(sizeof(polyconv::ToomWgradParams) == 472, "host and device disagree about polyconv::ToomWgradParams");
static_assert(sizeof(polyconv::ToomWgradSumParams) == 24, "host and device disagree about polyconv::ToomWgradSumParams");
static_assert(sizeof(polyconv::ToomWgradFinishParams) == 288, "host and device disagree about polyconv::ToomWgradFinishParams");
static_assert(sizeof(polyconv::WgradParams) == 200, "host and device disagree about polyconv::WgradParams");
static_assert(sizeof(polyconv::ReduceParams) == 112, "host and device disagree about polyconv::ReduceParams");

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(1))
transform_weights_toom4_5_1_toom4_4_5_2(const __grid_constant__ polyconv::TransformWeightsParams params) {
  polyconv::transform_weights<polyconv::Toom4_5_1, polyconv::Toom4_4_5_2>(params);
}

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(2))
half_transform_toom4_5_1_by4(const __grid_constant__ polyconv::HalfTransformParams params) {
  polyconv::half_transform<polyconv::Toom4_5_1, 4>(params);
}

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(1))
half_gemm_toom4_4_5_2_64(const __grid_constant__ polyconv::HalfGemmParams params) {
  polyconv::half_gemm<polyconv::Toom4_4_5_2, 64>(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(5))
half_inverse_toom4_5_1_by4(const __grid_constant__ polyconv::HalfInverseParams params) {
  polyconv::half_inverse<polyconv::Toom4_5_1, 4>(params);
}

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(1))
pack_weights(const __grid_constant__ polyconv::PackParams params) {
  polyconv::pack_weights(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(4))
gather_taps_128x64(const __grid_constant__ polyconv::GatherParams params) {
  polyconv::gather_gemm<polyconv::GemmTile<4, 1, 4, 8, 8>, polyconv::TapMajorLoader<polyconv::GemmTile<4, 1, 4, 8, 8>, false>>(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(3))
gather_rows_128x64(const __grid_constant__ polyconv::GatherParams params) {
  polyconv::gather_gemm<polyconv::GemmTile<4, 1, 4, 8, 8>, polyconv::RowLoader<polyconv::GemmTile<4, 1, 4, 8, 8>, polyconv::Gather::kZeros>>(params);
}

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(1))
half_gemm_toom4_4_5_2_32(const __grid_constant__ polyconv::HalfGemmParams params) {
  polyconv::half_gemm<polyconv::Toom4_4_5_2, 32>(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(3))
gather_taps_256x32(const __grid_constant__ polyconv::GatherParams params) {
  polyconv::gather_gemm<polyconv::GemmTile<4, 1, 8, 8, 8>, polyconv::TapMajorLoader<polyconv::GemmTile<4, 1, 8, 8, 8>, false>>(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(2))
gather_rows_256x32(const __grid_constant__ polyconv::GatherParams params) {
  polyconv::gather_gemm<polyconv::GemmTile<4, 1, 8, 8, 8>, polyconv::RowLoader<polyconv::GemmTile<4, 1, 8, 8, 8>, polyconv::Gather::kZeros>>(params);
}

extern "C" __global__ void __launch_bounds__(512, POLYCONV_MIN_BLOCKS(1))
toom_wgrad_Toom4_5_1_Toom4_4_5_1_64x32(const __grid_constant__ polyconv::ToomWgradParams params) {
  polyconv::toom_wgrad<polyconv::Toom4_5_1, polyconv::Toom4_4_5_1, polyconv::WgradTile<64, 32, 1, 1, 2, 1, 8>, false>(params);
}

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(1))
toom_wgrad_sum(const __grid_constant__ polyconv::ToomWgradSumParams params) {
  polyconv::toom_wgrad_sum(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(1))
toom_wgrad_finish_Toom4_5_1_Toom4_4_5_1(const __grid_constant__ polyconv::ToomWgradFinishParams params) {
  polyconv::toom_wgrad_finish<polyconv::Toom4_5_1, polyconv::Toom4_4_5_1>(params);
}

extern "C" __global__ void __launch_bounds__(64, POLYCONV_MIN_BLOCKS(4))
wgrad_64x64_vector(const __grid_constant__ polyconv::WgradParams params) {
  polyconv::wgrad_gemm<polyconv::GemmTile<2, 1, 4, 8, 8>, true, false>(params);
}

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(1))
reduce_partials(const __grid_constant__ polyconv::ReduceParams params) {
  polyconv::reduce_partials(params);
}

extern "C" __global__ void __launch_bounds__(64, POLYCONV_MIN_BLOCKS(4))
wgrad_64x64(const __grid_constant__ polyconv::WgradParams params) {
  polyconv::wgrad_gemm<polyconv::GemmTile<2, 1, 4, 8, 8>, false, false>(params);
}

// ---- Launching ------------------------------------------------------------------------------------------------------
#ifndef __CUDACC_RTC__
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <string>
#include <vector>

namespace {
struct Kernel {
  const void* entry;
  size_t params_bytes;
};

const std::map<std::string, Kernel> kernels = {
    {"transform_weights_toom4_5_1_toom4_4_5_2", {reinterpret_cast<const void*>(&transform_weights_toom4_5_1_toom4_4_5_2), sizeof(polyconv::TransformWeightsParams)}},
    {"half_transform_toom4_5_1_by4", {reinterpret_cast<const void*>(&half_transform_toom4_5_1_by4), sizeof(polyconv::HalfTransformParams)}},
    {"half_gemm_toom4_4_5_2_64", {reinterpret_cast<const void*>(&half_gemm_toom4_4_5_2_64), sizeof(polyconv::HalfGemmParams)}},
    {"half_inverse_toom4_5_1_by4", {reinterpret_cast<const void*>(&half_inverse_toom4_5_1_by4), sizeof(polyconv::HalfInverseParams)}},
    {"pack_weights", {reinterpret_cast<const void*>(&pack_weights), sizeof(polyconv::PackParams)}},
    {"gather_taps_128x64", {reinterpret_cast<const void*>(&gather_taps_128x64), sizeof(polyconv::GatherParams)}},
    {"gather_rows_128x64", {reinterpret_cast<const void*>(&gather_rows_128x64), sizeof(polyconv::GatherParams)}},
    {"half_gemm_toom4_4_5_2_32", {reinterpret_cast<const void*>(&half_gemm_toom4_4_5_2_32), sizeof(polyconv::HalfGemmParams)}},
    {"gather_taps_256x32", {reinterpret_cast<const void*>(&gather_taps_256x32), sizeof(polyconv::GatherParams)}},
    {"gather_rows_256x32", {reinterpret_cast<const void*>(&gather_rows_256x32), sizeof(polyconv::GatherParams)}},
    {"toom_wgrad_Toom4_5_1_Toom4_4_5_1_64x32", {reinterpret_cast<const void*>(&toom_wgrad_Toom4_5_1_Toom4_4_5_1_64x32), sizeof(polyconv::ToomWgradParams)}},
    {"toom_wgrad_sum", {reinterpret_cast<const void*>(&toom_wgrad_sum), sizeof(polyconv::ToomWgradSumParams)}},
    {"toom_wgrad_finish_Toom4_5_1_Toom4_4_5_1", {reinterpret_cast<const void*>(&toom_wgrad_finish_Toom4_5_1_Toom4_4_5_1), sizeof(polyconv::ToomWgradFinishParams)}},
    {"wgrad_64x64_vector", {reinterpret_cast<const void*>(&wgrad_64x64_vector), sizeof(polyconv::WgradParams)}},
    {"reduce_partials", {reinterpret_cast<const void*>(&reduce_partials), sizeof(polyconv::ReduceParams)}},
    {"wgrad_64x64", {reinterpret_cast<const void*>(&wgrad_64x64), sizeof(polyconv::WgradParams)}},
};
}  // namespace

// Enqueues a kernel on the current stream of a device. Waits for nothing; a launch that is refused raises.
void launch(const std::string& name, int64_t device, const std::vector<int64_t>& grid,
            const std::vector<int64_t>& block, int64_t shared_bytes, const std::string& params) {
  const auto found = kernels.find(name);
  TORCH_CHECK(found != kernels.end(), "there is no kernel ", name);
  const Kernel& kernel = found->second;
  TORCH_CHECK(params.size() == kernel.params_bytes, name, " takes ", kernel.params_bytes, " bytes of parameters, not ",
              params.size());
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  void* arguments[] = {const_cast<char*>(params.data())};
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 48 * 1024)
    status = cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (status == cudaSuccess)
    status = cudaLaunchKernel(kernel.entry, dim3(grid.at(0), grid.at(1), grid.at(2)),
                              dim3(block.at(0), block.at(1), block.at(2)), arguments, shared_bytes, stream);
  if (status != cudaSuccess) cudaGetLastError();  // told here: the next call must not find it again
  TORCH_CHECK(status == cudaSuccess, "could not launch ", name, " with grid ", grid, ", block ", block, " and ",
              shared_bytes, " bytes of shared memory: ", cudaGetErrorString(status));
}
#endif
"""


# ---- What is asked: one pass of one convolution over one to three axes, described by numbers alone.

DEFAULT_TOLERANCE = 1e-4
"""The error budget of a caller who says nothing."""

Pair = Tuple[int, int]
Extents = Tuple[int, ...]
"""One number per axis, the slowest axis of a dense image first: (height, width) of a picture."""
Sides = Tuple[int, ...]
"""Before and after, of each axis: (top, bottom, left, right) of a picture."""
Shape = Tuple[int, ...]
"""Batch (of a weight: output channels), channels, extents."""
Strides = Tuple[int, ...]
"""Element strides in the order of a :data:`Shape`, whatever the order in memory."""

AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""What the axes are called, by their number."""


class Moves(Protocol):
    """How a kernel moves over an image, axis by axis."""

    @property
    def stride(self) -> Extents: ...
    @property
    def padding(self) -> Sides: ...
    @property
    def dilation(self) -> Extents: ...


class Word(str, Enum):
    """One of a few words: equal to its text, and printed as it."""

    __hash__ = str.__hash__  # of the value, as equality is; and not in Python, because problems are keys everywhere

    def __str__(self) -> str:
        return str(self.value)


class Pass(Word):
    """Which of the three passes of a convolution is asked for."""

    FPROP = "fprop"
    """Output from input and weight (and bias)."""
    DGRAD = "dgrad"
    """Gradient of the input from the gradient of the output; also what a transposed convolution computes."""
    WGRAD = "wgrad"
    """Gradient of the weight (and of the bias) from the input and the gradient of the output."""


class PaddingMode(Word):
    """What stands outside the image. Named as in ``torch.nn.Conv2d``."""

    ZEROS = "zeros"
    REFLECT = "reflect"
    REPLICATE = "replicate"
    CIRCULAR = "circular"


class Activation(Word):
    """What a forward pass applies to its sums before it stores them."""

    NONE = "none"
    RELU = "relu"
    SILU = "silu"


def output_extent(extent: int, before: int, after: int, kernel: int, stride: int, dilation: int) -> int:
    """Number of outputs along one axis: the kernel's positions that fit into the padded extent."""
    return (extent + before + after - dilation * (kernel - 1) - 1) // stride + 1


def output_size(in_size: Sequence[int], kernel: Sequence[int], moves: Moves) -> Extents:
    """The extents of the output; zero or less where the kernel does not fit."""
    before, after = moves.padding[::2], moves.padding[1::2]
    return tuple(map(output_extent, in_size, before, after, kernel, moves.stride, moves.dilation))


@dataclass(frozen=True)
class Problem:
    """One pass of a convolution. Build it with :meth:`make`, which fills in dense strides."""

    kind: Pass
    batch: int
    in_channels: int
    out_channels: int
    in_size: Extents
    kernel: Extents
    stride: Extents
    padding: Sides
    dilation: Extents
    groups: int
    padding_mode: PaddingMode
    bias: bool
    """FPROP: a bias is added. WGRAD: the bias gradient is wanted too. DGRAD: ignored."""
    x_strides: Strides
    w_strides: Strides
    y_strides: Strides
    vector_aligned: bool
    """The first elements of x, y and the residual lie on 16-byte boundaries."""
    dtype: str
    tolerance: float = DEFAULT_TOLERANCE
    """The error, relative to the output's scale, that a fast algorithm may be expected to make; 0: none may run."""
    activation: Activation = Activation.NONE
    """FPROP: applied to the sums, bias and residual included. The gradient passes know none."""
    residual: bool = False
    """FPROP: a tensor laid out as y is added before the activation."""

    @property
    def out_size(self) -> Extents:
        """The extents of the output; zero or less where the kernel does not fit."""
        return output_size(self.in_size, self.kernel, self)

    @property
    def x_shape(self) -> Shape:
        return (self.batch, self.in_channels, *self.in_size)

    @property
    def w_shape(self) -> Shape:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def y_shape(self) -> Shape:
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def channels_per_group(self) -> Pair:
        """Input and output channels of one group."""
        return (self.in_channels // self.groups, self.out_channels // self.groups)

    @property
    def depthwise(self) -> bool:
        """Every input channel is its own group (each may feed several output channels)."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def multiplications(self) -> int:
        """Multiply-adds of the direct method, padding counted as if it were data."""
        return prod(self.y_shape) * prod(self.w_shape[1:])

    def for_pass(self, kind: Pass) -> Problem:
        """The same convolution, another pass. Only the forward pass has an epilogue."""
        if kind is Pass.FPROP:
            return replace(self, kind=kind)
        return replace(self, kind=kind, activation=Activation.NONE, residual=False)

    def __str__(self) -> str:
        parts = [
            f"{self.kind} {_times(self.x_shape)}",
            f"{self.out_channels} channels",
            f"kernel {_times(self.kernel)}",
        ]
        if max(self.stride) > 1:
            parts.append(f"stride {_times(self.stride)}")
        if any(self.padding):
            before, after = self.padding[::2], self.padding[1::2]
            sides = _times(before) if before == after else ",".join(map(str, self.padding))
            mode = "" if self.padding_mode is PaddingMode.ZEROS else f" {self.padding_mode}"
            parts.append(f"padding {sides}{mode}")
        if max(self.dilation) > 1:
            parts.append(f"dilation {_times(self.dilation)}")
        if self.groups != 1:
            parts.append(f"{self.groups} groups")
        if self.bias:
            parts.append("bias")
        if self.residual:
            parts.append("residual")
        if self.activation is not Activation.NONE:
            parts.append(str(self.activation))
        return ", ".join(parts)


def _times(numbers: Sequence[int], by: str = "x") -> str:
    return by.join(map(str, numbers))


# ---- What a fork waits for.


def _taken_by_forks() -> Any:
    """A lock that is held while the process is copied. Reentrant: a handler of signals may fork amid all this."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


whole = _taken_by_forks()  # after the other: a fork takes what was registered last first, and this is the right order


# ---- What the caller wrote, in one form: ``stride=2`` and ``stride=(2, 2)`` become the same Geometry.


class Geometry(NamedTuple):
    """How the kernel moves over the image, and how exact the result is to be.

    Immutable; a named tuple because one is built on every call.
    """

    stride: Extents = (1, 1)
    padding: Sides = (0, 0, 0, 0)
    """Before and after, of each axis: top, bottom, left, right. A negative side crops the image."""
    dilation: Extents = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"
    tolerance: float | None = None
    """The error budget; None is the one of :func:`polyconv.set_tolerance`."""

    def out_size(self, in_size: Sequence[int], kernel: Sequence[int]) -> Extents:
        """The extents of the output; zero or less where the kernel does not fit."""
        return output_size(in_size, kernel, self)


def statically(condition: bool, otherwise: bool = False) -> bool:
    """A condition on sizes; ``otherwise`` where it hangs on one that is not known before the program runs.

    While a program is traced, sizes may be symbols. Most have an example to decide by, and the decision becomes a guard
    of the traced program. A size that comes out of the data (an unbacked symbol) has none: what is checked here is then
    checked when the operator runs.
    """
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental import symbolic_shapes  # here, because only a traced program comes this far

    name = "guard_or_true" if otherwise else "guard_or_false"
    return bool(getattr(symbolic_shapes, name, bool)(condition))  # the first versions of PyTorch 2 do not have it


def check_shapes(x: Sequence[int], w: Sequence[int], bias: Sequence[int] | None, geometry: Geometry) -> None:
    """Raise as torch does unless an input, a weight and a bias of these shapes fit together, and to the geometry."""
    rank = len(geometry.stride)
    if len(x) != rank + 2 or len(w) != rank + 2:
        axes = ", ".join(AXES[rank])
        raise RuntimeError(
            f"conv{rank}d needs an input of (batch, channels, {axes}) and a weight of (out_channels, "
            f"in_channels/groups, {axes}); got an input of size {list(x)} and a weight of size {list(w)}"
        )
    groups = geometry.groups
    if statically(w[0] < groups):
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0 (out_channels), "
            f"but got weight of size {list(w)}"
        )
    if statically(w[0] % groups != 0):
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0 (out_channels), "
            f"but got weight of size {list(w)}"
        )
    if statically(x[1] != w[1] * groups):
        raise RuntimeError(
            f"Given groups={groups} and a weight of size {list(w)}, expected an input with {w[1] * groups} channels, "
            f"but got {x[1]} channels in an input of size {list(x)}"
        )
    if bias is not None and (len(bias) != 1 or statically(bias[0] != w[0])):
        raise RuntimeError(
            f"Given a weight of size {list(w)}, expected bias to be 1-dimensional with {w[0]} elements, "
            f"but got bias of size {list(bias)}"
        )
    check_extents(x[2:], w[2:], geometry)


def check_extents(in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> None:
    """Raise unless the kernel fits into the padded image and the padding mode can fill the sides."""
    padding, dilation = geometry.padding, geometry.dilation
    if any(statically(taps <= 0) for taps in kernel):
        raise RuntimeError(f"Kernel size should be greater than zero, but got {_by(kernel)}")
    for axis, name in enumerate(AXES[len(kernel)]):
        size, before, after = in_size[axis], padding[2 * axis], padding[2 * axis + 1]
        if type(before) is type(after) is int and before + after > 2**61:
            _check_padding(name, size, before, after)
        if before < 0 or after < 0:
            _check_crop(name, size, before, after, geometry.padding_mode)
        if statically(size + before + after < dilation[axis] * (kernel[axis] - 1) + 1):
            _kernel_does_not_fit(in_size, kernel, geometry)
        if statically(size <= 0):
            raise RuntimeError(f"Only the batch and the channels may be empty: got an input of {_by(in_size)} pixels")
        if geometry.padding_mode == "reflect" and statically(max(before, after) >= size):
            raise RuntimeError(
                f"padding_mode='reflect' needs a padding smaller than the image: "
                f"got {before} and {after} along a {name} of {size}"
            )
        if geometry.padding_mode == "circular" and statically(max(before, after) > size):
            raise RuntimeError(
                f"padding_mode='circular' needs a padding no larger than the image (it may wrap around once): "
                f"got {before} and {after} along a {name} of {size}"
            )


def _check_padding(name: str, size: int, before: int, after: int) -> None:
    """Sides that 64 bits may not count, if only in the sum."""
    largest = 2**62 - 1
    if max(before, after) > largest or statically(size + before + after >= 2**63):
        raise RuntimeError(
            f"expected padding to be at most {largest}, and the padded {name} to be counted in 64 bits; "
            f"got {before} and {after} along a {name} of {size}"
        )


def _check_crop(name: str, size: int, before: int, after: int, padding_mode: str) -> None:
    if statically(max(-before, 0) + max(-after, 0) > size):
        raise RuntimeError(f"negative padding crops more than there is: {before} and {after} along a {name} of {size}")
    if padding_mode != "zeros":
        raise RuntimeError(
            f"the operator takes negative padding with padding_mode='zeros' only; got {before} and {after} along the "
            f"{name} with {padding_mode!r}. polyconv.conv2d takes it with every mode"
        )


def _kernel_does_not_fit(in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> NoReturn:
    padded = list(map(sum, zip(in_size, geometry.padding[::2], geometry.padding[1::2], strict=True)))
    reach = [step * (taps - 1) + 1 for taps, step in zip(kernel, geometry.dilation, strict=True)]
    raise RuntimeError(
        f"Kernel size can't be greater than actual input size: the padded image is {_by(padded)}, "
        f"the kernel of {_by(kernel)} with dilation {geometry.dilation} spans {_by(reach)}"
    )


def _by(extents: Sequence[int]) -> str:
    return " x ".join(map(str, extents))


def suggests_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch would take a 4-D tensor of these strides for channels_last (also where it is not dense).

    This is ``c10::is_channels_last_strides_2d``, ambiguous cases included, so that our outputs get the memory format
    that torch's convolution would give them.
    """
    if statically(strides[1] == 0):
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        extent, stride = shape[axis], strides[axis]
        if statically(stride < least, otherwise=True) or statically(extent == 0):
            return False
        if axis == 0 and statically(least == strides[1]):
            return False
        least = stride * extent if statically(extent > 1, otherwise=True) else stride
    return True


# ---- From what could run a problem to what does run, and why nothing else does: the same on every device.


class PlanError(RuntimeError):
    """No kernel of polyconv can solve this problem; the message says why."""


# ---- How a fast kernel computes one axis, in the few numbers that its launches need, and the C++ of its transforms.


@dataclass(frozen=True)
class ToomAxis:
    """F(m, longest segment) along one axis; segments of taps added up, or nested by F(tiles, segments).

    ``ToomAxis(4, (4, 5), 2)`` is F(4,5) for nine taps, cut 4 + 5, nested by F(2,2). ``ToomAxis(1, (3,))`` is direct.
    """

    m: int
    segments: tuple[int, ...]
    """Taps of each segment."""
    tiles: int = 1
    """Tiles of m outputs that are computed together: more than one where segments are nested."""

    @cached_property
    def taps(self) -> int:
        return sum(self.segments)

    @cached_property
    def longest(self) -> int:
        return max(self.segments)

    @cached_property
    def points(self) -> int:
        """Products of the inner algorithm, and inputs of its tile."""
        return self.m + self.longest - 1

    @cached_property
    def passes(self) -> int:
        """Products of the outer algorithm, over segments and tiles."""
        return self.tiles + len(self.segments) - 1 if self.tiles > 1 else len(self.segments)

    @cached_property
    def outputs(self) -> int:
        """Outputs that are computed together."""
        return self.m * self.tiles

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the input tiles of the outer algorithm begin."""
        if self.tiles > 1:
            return tuple(tile * self.m for tile in range(self.passes))
        return tuple(sum(self.segments[:s]) for s in range(len(self.segments)))

    @cached_property
    def span(self) -> int:
        """Inputs that are read for the outputs that are computed together."""
        return self.offsets[-1] + self.points

    @cached_property
    def struct(self) -> str:
        """The C++ name of the emitted transforms."""
        return "Toom" + "_".join(map(str, (self.m, *self.segments, self.tiles)))

    @property
    def cpp(self) -> str:
        return f"polyconv::{self.struct}"


# ---- What will run: the answer of the planner to a Problem.

Dim3 = Tuple[int, int, int]


@dataclass(frozen=True)
class KernelSpec:
    """One instance of a device kernel: a stem in ``polyconv/kernels`` and its template arguments."""

    stem: str
    """The header ``kernels/<stem>.cuh`` that defines the kernel's body."""
    symbol: str
    """Plain name of the ``extern "C"`` entry point, readable and unique per instance."""
    body: str
    """The call that the entry point makes, for example ``polyconv::gather_gemm<polyconv::GemmTile<...>>(params);``."""
    params: str
    """C++ type of the one by-value parameter, for example ``polyconv::GatherParams``."""
    params_bytes: int
    threads: int
    min_blocks: int = 1
    """Blocks per multiprocessor that the registers must allow: the second launch bound."""
    axes: tuple[ToomAxis, ...] = ()
    """Fast algorithms whose transforms the body names; their text is emitted from the exact matrices."""
    facts: tuple[tuple[str, int], ...] = ()
    """What launches of this instance count with, as its header has it, and the value that they have for it."""
    twin: str = ""
    """Of a kernel with an epilogue: the symbol of the one without, whose counts hold for both (plan/cost.py)."""

    @classmethod
    def of(
        cls,
        struct: type[ctypes.Structure],
        function: str,
        *arguments: object,
        threads: int,
        symbol: str = "",
        stem: str = "",
        min_blocks: int = 1,
        axes: tuple[ToomAxis, ...] = (),
        facts: Mapping[str, int] | None = None,
    ) -> KernelSpec:
        """One of our own: it hands a struct of plan/layout.py to a function, or to a template with its arguments.

        Unless something else is said, header and entry point are called after the function, and the axes are those
        among the arguments.
        """
        template = f"<{', '.join(map(_cpp, arguments))}>" if arguments else ""
        return cls(
            stem=stem or function,
            symbol=symbol or function,
            body=f"polyconv::{function}{template}(params);",
            params=f"polyconv::{struct.__name__}",
            params_bytes=ctypes.sizeof(struct),
            threads=threads,
            min_blocks=min_blocks,
            axes=axes or tuple(argument for argument in arguments if isinstance(argument, ToomAxis)),
            facts=tuple((facts or {}).items()),
        )


def _cpp(argument: object) -> str:
    """A template argument: a number, a flag, a text, or something that knows what it is called."""
    if isinstance(argument, bool):
        return "true" if argument else "false"
    return str(getattr(argument, "cpp", argument))


@dataclass(frozen=True)
class PointerSlot:
    """Where in the parameter bytes a buffer's address goes."""

    offset: int
    buffer: str
    """``x``, ``w``, ``y``, ``bias``, ``residual``, ``dw``, ``db`` or ``workspace``."""
    byte_offset: int = 0


@dataclass(frozen=True)
class Work:
    """How much a launch does, in the units that its kernel's instructions are counted in (plan/cost.py)."""

    blocks: int = 0
    """Blocks that do anything."""
    tiles: int = 0
    """Tiles that they walk over, all blocks together; for kernels whose blocks do one each, as many as blocks."""
    steps: int = 0
    """Rounds of the innermost loop that loads, all blocks together."""
    dram_bytes: int = 0
    """Memory traffic if each element is read and written once."""
    scattered_lines: int = 0
    """Lines of the L1 that the kernel touches because its elements are not neighbours: of a dilated row, say."""
    scattered_sectors: int = 0
    """Sectors of the L2, for the same reason."""
    finished: int = 0
    """Elements that an epilogue adds to and activates before they are stored."""


@dataclass(frozen=True)
class Task:
    """A launch in counts: which kernel, how many blocks of it, how much work. That is enough to weigh it (plan/cost.py)
    and costs next to nothing, so every candidate has its tasks; launches are made for the one that is chosen."""

    kernel: KernelSpec
    grid: Dim3
    work: Work
    times: int = 1
    """Launches that differ in their parameters alone: slabs of an image, phases of a stride."""

    def launch(self, params: bytes, pointers: tuple[PointerSlot, ...], dynamic_shared: int = 0) -> Launch:
        """One of the launches."""
        return Launch(self.kernel, self.grid, (self.kernel.threads, 1, 1), dynamic_shared, params, pointers, self.work)


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan."""

    kernel: KernelSpec
    grid: Dim3
    block: Dim3
    dynamic_shared: int
    params: bytes = field(repr=False)
    pointers: tuple[PointerSlot, ...] = field(repr=False)
    work: Work = field(default=Work(), repr=False)

    def bind(self, addresses: Mapping[str, int]) -> bytes:
        """The parameter bytes with the addresses of this call's buffers in place. An absent buffer becomes null."""
        blob = bytearray(self.params)
        for slot in self.pointers:
            address = addresses.get(slot.buffer, 0)
            blob[slot.offset : slot.offset + 8] = ((address + slot.byte_offset) if address else 0).to_bytes(8, "little")
        return bytes(blob)


@dataclass(frozen=True)
class Schedule:
    """The launches that carry out one candidate, in order, and what they need."""

    launches: tuple[Launch, ...]
    workspace_bytes: int


# ---- Whole numbers of tiles.


def ceil_div(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return ceil_div(value, multiple) * multiple


# ---- Stride and dilation as lattices: a convolution along one axis as dense, unit-stride problems on sub-lattices.


@dataclass(frozen=True)
class Phase:
    """One residue class along one axis.

    Position ``i < count`` is written at ``written_first + i * written_step``. Its tap ``j < taps`` reads the source at
    ``read_first + i * read_step + j * tap_step`` with kernel element ``tap_first + j * tap_stride``.
    """

    written_first: int
    written_step: int
    count: int
    read_first: int
    read_step: int
    tap_step: int
    taps: int
    tap_first: int
    tap_stride: int

    def cut(self, first: int, count: int) -> Phase:
        """The ``count`` positions from number ``first`` on: how large problems are cut into slabs."""
        return replace(
            self,
            written_first=self.written_first + first * self.written_step,
            read_first=self.read_first + first * self.read_step,
            count=min(count, self.count - first),
        )


def forward_phases(outputs: int, kernel: int, stride: int, dilation: int, before: int) -> tuple[Phase, ...]:
    """The single phase of a forward convolution with ``before`` elements of padding in front."""
    return (
        Phase(
            written_first=0,
            written_step=1,
            count=outputs,
            read_first=-before,
            read_step=stride,
            tap_step=dilation,
            taps=kernel,
            tap_first=0,
            tap_stride=1,
        ),
    )


def gradient_phases(inputs: int, kernel: int, stride: int, dilation: int, before: int) -> tuple[Phase, ...]:
    """The phases of the input gradient, one per residue of the stride that has any position, taps or not."""
    common = gcd(stride, dilation)
    tap_stride = stride // common
    tap_step = -(dilation // common)
    meeting = {r * dilation % stride: r for r in range(min(tap_stride, kernel))}
    phases = []
    # As many residues as the stride has, but for those that it steps over the whole image with.
    for residue, first in sorted(((first + before) % stride, first) for first in range(min(stride, inputs))):
        tap = meeting.get(residue)
        phases.append(
            Phase(
                written_first=first,
                written_step=stride,
                count=ceil_div(inputs - first, stride),
                read_first=0 if tap is None else (first + before - tap * dilation) // stride,
                read_step=1,
                tap_step=tap_step,
                taps=0 if tap is None else ceil_div(kernel - tap, tap_stride),
                tap_first=tap or 0,
                tap_stride=tap_stride,
            )
        )
    return tuple(phases)


@dataclass(frozen=True)
class TapClass:
    """Taps of a :class:`DenseAxis` that read the same residue of the source: tap ``t < taps`` of position i reads
    ``read_first + read_step * (i + dilation * t)`` with kernel element ``tap_first + t * tap_stride``."""

    read_first: int
    taps: int
    tap_first: int
    tap_stride: int


@dataclass(frozen=True)
class DenseAxis:
    """One phase as dense correlations, one per class of taps, that are added up.

    Position ``i < count`` is written at ``written_first + i * written_step``. The positions ``i = a + dilation * q`` of
    each ``a < dilation`` are consecutive outputs q of a correlation with consecutive taps: what F(m, r) computes.
    """

    written_first: int
    written_step: int
    count: int
    read_step: int
    dilation: int
    classes: tuple[TapClass, ...]

    @property
    def taps(self) -> int:
        """Of the first class, the longest; the others are filled up with zeros."""
        return self.classes[0].taps


def dense_axis(phase: Phase) -> DenseAxis:
    """A phase with taps forward and both sides of unit stride. One that meets no tap has no tap: it writes zeros."""
    if not phase.taps:
        return DenseAxis(phase.written_first, phase.written_step, phase.count, 1, 1, (TapClass(0, 0, 0, 0),))
    if phase.tap_step < 0:
        last = phase.taps - 1
        phase = replace(
            phase,
            read_first=phase.read_first + last * phase.tap_step,
            tap_step=-phase.tap_step,
            tap_first=phase.tap_first + last * phase.tap_stride,
            tap_stride=-phase.tap_stride,
        )
    common = gcd(phase.read_step, phase.tap_step)
    apart = phase.read_step // common
    classes = tuple(
        TapClass(
            read_first=phase.read_first + first * phase.tap_step,
            taps=ceil_div(phase.taps - first, apart),
            tap_first=phase.tap_first + first * phase.tap_stride,
            tap_stride=apart * phase.tap_stride,
        )
        for first in range(min(apart, phase.taps))
    )
    return DenseAxis(
        phase.written_first, phase.written_step, phase.count, phase.read_step, phase.tap_step // common, classes
    )


# ---- The kernels' parameter structs, field by field as the device headers declare them.

MAX_PHASES = 8
"""Phases per axis that fit into one launch (``kMaxPhases`` in common.cuh)."""
DIVIDEND_LIMIT = 2**31
"""FastDivisor is exact below this; so are flattened pixel numbers."""

pointer = c_uint64


def int32(value: int, what: str) -> int:
    """``value``, or an error that names it: the kernels hold it in 32 bits."""
    if not -(2**31) <= value < 2**31:
        raise PlanError(f"{what} is {value}; polyconv's CUDA kernels take at most {2**31 - 1}")
    return value


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Params(ctypes.Structure):
    """A struct that takes no number which its field does not hold: ``ctypes`` alone would keep the lower bits.

    A field that the device divides by takes the number as well.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is int and isinstance(getattr(self, name), FastDivisor):
            value = FastDivisor.of(value)
        super().__setattr__(name, value)
        if type(value) is int and getattr(self, name) != value:
            raise PlanError(
                f"{name} of {type(self).__name__} is {value}: more than its field in the CUDA kernels holds"
            )

    def place(self, name: str, strides: Strides, what: str) -> None:
        """Fill in the strides of a tensor, whose fields begin with ``name``; in an error it is called ``what``."""
        every = (*strides[:2], *pixel_strides(strides, what))
        for axis, stride in zip(("batch", "channel", "row", "column"), every, strict=True):
            setattr(self, f"{name}_{axis}", stride)


def pixel_strides(strides: Strides, what: str) -> Extents:
    """From row to row and from column to column, which the kernels hold in 32 bits."""
    return int32(strides[2], f"the row stride of {what}"), int32(strides[3], f"the column stride of {what}")


class FastDivisor(Params):
    """Division by an invariant as one high multiplication and a shift, exact for dividends below 2^31."""

    _fields_ = [("divisor", c_uint32), ("multiplier", c_uint32), ("shift", c_uint32)]

    @classmethod
    def of(cls, divisor: int) -> FastDivisor:
        if divisor <= 1:
            return cls(1, 0, 0)
        power = 31 + (divisor - 1).bit_length()
        return cls(divisor, ((1 << power) + divisor - 1) // divisor, power - 32)


class AxisPhase(Params):
    _fields_ = [
        *_fields(c_int32, "written_first written_step read_first read_step taps tap_first tap_stride"),
        ("count", FastDivisor),
    ]

    @classmethod
    def of(cls, phase: Phase) -> AxisPhase:
        return cls(*(getattr(phase, field[0]) for field in cls._fields_))


class GatherParams(Params):
    _fields_ = [
        *_fields(pointer, "source packed table bias written"),
        *_fields(
            c_int64, "source_batch source_channel source_channel_bytes next_tap_bytes written_batch written_channel"
        ),
        ("packed_step_bytes", c_int64),
        *_fields(c_int32, "source_row source_column written_row written_column source_height source_width"),
        *_fields(c_int32, "batch channels outputs outputs_padded"),
        ("channel_tiles", FastDivisor),
        *_fields(c_int32, "packed_rows written_vector phases_w tap_step_h tap_step_w"),
        *_fields(c_int32, "border image_top image_left image_height image_width pad_top pad_bottom pad_left pad_right"),
        *_fields(FastDivisor, "stride_h stride_w"),
        ("first_row", c_int32 * (MAX_PHASES * MAX_PHASES)),
        *_fields(AxisPhase * MAX_PHASES, "phase_h phase_w"),
    ]


class PackParams(Params):
    _fields_ = [
        *_fields(pointer, "w packed table"),
        *_fields(c_int64, "w_group w_output w_channel w_row w_column table_channel"),
        *_fields(c_int32, "table_row table_column"),
        *_fields(c_int32, "channels outputs outputs_padded output_tiles packed_rows phases_w tap_step_h tap_step_w"),
        ("first_row", c_int32 * (MAX_PHASES * MAX_PHASES)),
        *_fields(AxisPhase * MAX_PHASES, "phase_h phase_w"),
    ]


class WgradParams(Params):
    _fields_ = [
        *_fields(pointer, "x dy partial"),
        *_fields(c_int64, "x_batch x_channel dy_batch dy_channel"),
        *_fields(c_int32, "x_row x_column dy_row dy_column height width"),
        *_fields(c_int32, "k channels columns columns_padded groups bias border"),
        *_fields(c_int32, "pixels pixels_per_slice"),
        *_fields(c_int32, "stride_h stride_w dilation_h dilation_w pad_top pad_left"),
        *_fields(FastDivisor, "k_tiles out_height out_width kernel_area kernel_width"),
    ]


class ReduceParams(Params):
    _fields_ = [
        *_fields(pointer, "partial dw db"),
        *_fields(c_int64, "dw_k dw_channel dw_row dw_column elements"),
        *_fields(c_int32, "slices columns"),
        *_fields(FastDivisor, "columns_padded kernel_area kernel_width"),
    ]


MAX_PARTS = 16
"""Classes of taps per axis, times segments along H, that fit into one launch (``kMaxParts`` in half_layout.cuh)."""


class SourcePart(Params):
    _fields_ = [("read_first", c_int32), ("read_end", c_int32)]


class TapPart(Params):
    _fields_ = [("taps", c_int32), ("tap_first", c_int32), ("tap_stride", c_int32)]


class TransformWeightsParams(Params):
    _fields_ = [
        *_fields(pointer, "w u"),
        *_fields(c_int64, "w_group w_output w_channel"),
        *_fields(c_int32, "w_row w_column channels channels_all chunks outputs k_tile k_tiles groups segments"),
        *_fields(FastDivisor, "source_channels classes_w"),
        *_fields(TapPart * MAX_PARTS, "part_h class_w"),
    ]


class HalfTransformParams(Params):
    _fields_ = [
        *_fields(pointer, "source x"),
        *_fields(c_int64, "source_batch source_channel"),
        *_fields(c_int32, "source_row source_column first_row"),
        ("items", c_uint32),
        *_fields(FastDivisor, "vectors pitch rows"),
        ("channels", c_int32),
        *_fields(FastDivisor, "channels_filled source_channels classes_w"),
        ("channels_all", c_int32),
        *_fields(FastDivisor, "tiles dilation_h dilation_w"),
        *_fields(c_int32, "read_step_h read_step_w outputs_w"),
        *_fields(SourcePart * MAX_PARTS, "part_h class_w"),
    ]


class HalfGemmParams(Params):
    _fields_ = [
        *_fields(pointer, "x u y"),
        ("tiles", c_int32),
        *_fields(FastDivisor, "k_tiles column_tiles row_columns"),
        *_fields(c_int32, "columns columns_filled row_stride group_stride channel_stride part_stride next"),
        *_fields(c_int32, "chunks segments outputs zero"),
    ]


class HalfInverseParams(Params):
    _fields_ = [
        *_fields(pointer, "y bias written"),
        *_fields(c_int64, "written_batch written_channel"),
        *_fields(c_int32, "written_row written_column first_row outputs lines stretch_columns"),
        *_fields(FastDivisor, "line_blocks stretches rows"),
        ("groups", c_int32),
        *_fields(FastDivisor, "vectors columns"),
        *_fields(c_int32, "row_columns columns_filled"),
        *_fields(FastDivisor, "tiles dilation_h dilation_w"),
        *_fields(c_int32, "outputs_w parts"),
        ("stretch", FastDivisor),
        *_fields(c_int32, "count_h count_w written_first_h written_step_h written_first_w written_step_w vector"),
    ]


MAX_CLASSES = 8
"""Residue classes of taps per axis of a fast weight gradient (``kMaxClasses`` in toom_wgrad.cuh)."""


class ToomWgradParams(Params):
    _fields_ = [
        *_fields(pointer, "x dy partial bias_partial"),
        *_fields(c_int64, "x_batch x_channel dy_batch dy_channel"),
        *_fields(c_int64, "x_next_row dy_next_row x_next_channel dy_next_channel"),
        *_fields(c_int64 * MAX_CLASSES, "x_first_h x_first_w"),
        *_fields(c_int32 * MAX_CLASSES, "read_first_h read_first_w"),
        *_fields(c_int32, "x_row x_column dy_row dy_column read_step_h read_step_w height width count_h count_w"),
        *_fields(c_int32, "dilation_h dilation_w interleave channels outputs rows tiles slices flush"),
        *_fields(FastDivisor, "channel_tiles k_tiles groups outer_phases tiles_h phases_h interleaved"),
        *_fields(FastDivisor, "classes classes_w"),
    ]


class ToomWgradSumParams(Params):
    _fields_ = [("partial", pointer), ("elements", c_int64), ("slices", c_int32)]


class ToomWgradFinishParams(Params):
    _fields_ = [
        *_fields(pointer, "partial bias_partial dw db"),
        *_fields(c_int64, "dw_k dw_channel"),
        *_fields(c_int32, "dw_row dw_column slices outputs all_outputs pairs"),
        *_fields(FastDivisor, "channels outputs_divisor tile_k tile_c"),
        *_fields(c_int32, "k_tiles channel_tiles"),
        *_fields(FastDivisor, "classes classes_w"),
        *_fields(c_int32 * MAX_CLASSES, "taps_h tap_first_h taps_w tap_first_w"),
        *_fields(c_int32, "tap_stride_h tap_stride_w"),
    ]


def set_phases(p: Params, h: tuple[Phase, ...], w: tuple[Phase, ...]) -> None:
    """Fill in the phases of one launch. Those of an axis all have the same step from tap to tap."""
    for i, phase in enumerate(h):
        p.phase_h[i] = AxisPhase.of(phase)
    for i, phase in enumerate(w):
        p.phase_w[i] = AxisPhase.of(phase)
    p.phases_w, p.tap_step_h, p.tap_step_w = len(w), h[0].tap_step, w[0].tap_step


def layout_slots(struct: type[ctypes.Structure], **buffers: str | tuple[str, int] | None) -> tuple[PointerSlot, ...]:
    """Pointer fields of a struct and the buffer (with a byte offset) that each one points into; None: it stays null."""
    found = []
    for name, buffer in buffers.items():
        if buffer is not None:
            where, offset = buffer if isinstance(buffer, tuple) else (buffer, 0)
            found.append(PointerSlot(getattr(struct, name).offset, where, offset))
    return tuple(found)


# ---- What every family of kernels offers the planner: a module with ``candidates(problem)`` and ``all_kernels()``.


class DirectCandidate:
    """One kernel that sums the products of the definition, which any tolerance allows; it is called what its kernel is.

    A kernel may have others after it: one that adds up partial sums.
    """

    direct = True

    @property
    def kernel(self) -> KernelSpec:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return self.kernel.symbol


# ---- What runs after the sums: nothing but a bias.


def has_epilogue(problem):
    return False


def task_with_epilogue(problem, task, elements, fewer_blocks=0):
    return task


def with_epilogue(problem, launch):
    return launch


# ---- The tile shapes that kernels are instantiated with: a finite list, so that each one can be compiled and
# inspected.


@dataclass(frozen=True)
class GemmTile:
    """One ``polyconv::GemmTile`` of gemm_tile.cuh: M rows (pixels) by N columns (channels) per block."""

    warps_m: int
    warps_n: int
    lanes_m: int
    thread_m: int
    thread_n: int

    @property
    def m(self) -> int:
        return self.warps_m * self.lanes_m * self.thread_m

    @property
    def n(self) -> int:
        return self.warps_n * (32 // self.lanes_m) * self.thread_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}"

    @property
    def cpp(self) -> str:
        return f"polyconv::GemmTile<{self.warps_m}, {self.warps_n}, {self.lanes_m}, {self.thread_m}, {self.thread_n}>"

    @property
    def facts(self) -> dict[str, int]:
        """What launches count with."""
        return {f"{self.cpp}::kM": self.m, f"{self.cpp}::kN": self.n, f"{self.cpp}::kThreads": self.threads}

    def min_blocks(self, weight: int) -> int:
        """Blocks per multiprocessor to ask of the compiler for a loader of the given weight.

        64 accumulators and a lean loader (weight 0) just fit 128 registers: 512 threads on a multiprocessor. Each step
        of weight gives up 128 of them, so that what the loader carries is never spilled.
        """
        weight += self.m > self.threads or self.threads < 128  # two pixels, or two rows of weights, per thread
        threads = (512, 384, 256, 256) if self.thread_m * self.thread_n == 64 else (768, 512, 512, 384)
        return max(1, threads[weight] // self.threads)


# ---- The memory traffic that no kernel can avoid.


@lru_cache(maxsize=1024)
def moved_bytes(problem: Problem) -> int:
    """Every element of x and of y once: read or written, but for the rows of x that a large stride skips."""
    return int(4 * (prod(problem.x_shape) * _rows_read(problem) + prod(problem.y_shape)))


def _rows_read(problem: Problem) -> float:
    """Share of the rows of x that a pass touches: not all, if the stride is larger than the kernel."""
    height, top = problem.in_size[0], problem.padding[0]
    if problem.kind is Pass.DGRAD or problem.stride[0] == 1:
        return 1.0
    taps = [tap * problem.dilation[0] - top for tap in range(problem.kernel[0])]
    rows = {out * problem.stride[0] + tap for out in range(problem.out_size[0]) for tap in taps}
    return sum(0 <= row < height for row in rows) / height


# ---- Plans for fprop and dgrad as one implicit GEMM (kernels/gather_gemm.cuh).

DEPTH = 8
"""Reduction rows per step (``kDepth`` in gemm_tile.cuh)."""
BORDERS = {PaddingMode.ZEROS: 0, PaddingMode.REFLECT: 1, PaddingMode.REPLICATE: 2, PaddingMode.CIRCULAR: 3}
MOST_GROUPS = 65535
"""Groups are the grid's y dimension."""
MOST_PHASES = 128
MANY_PHASES = f"a stride of more than {MOST_PHASES} phases, each of which would be launches of its own"
"""Why candidates that launch for each phase refuse: planning alone would take seconds."""


@dataclass(frozen=True)
class PairKind:
    """Pairs of phases, one of each axis, that differ in nothing but where they begin: so they are the same work."""

    h: DenseAxis
    w: DenseAxis
    times: int


@dataclass(frozen=True)
class Roles:
    """Which tensor plays which part: fprop gathers x and writes y, dgrad gathers y and writes x."""

    source: str
    source_size: Extents
    source_strides: Strides
    channels: int
    """Source channels of a group."""
    w_channel: int
    """Element stride of the weight per source channel."""
    written: str
    written_size: Extents
    written_strides: Strides
    outputs: int
    """Written channels of a group."""
    w_output: int
    """Element stride of the weight per written channel."""
    phases_h: tuple[Phase, ...]
    phases_w: tuple[Phase, ...]
    border: PaddingMode
    bias: str | None
    """The buffer of the bias, if it is added."""

    @property
    def many_phases(self) -> bool:
        return len(self.phases_h) * len(self.phases_w) > MOST_PHASES

    @cached_property
    def dense_h(self) -> tuple[DenseAxis, ...]:
        """The phases as fast algorithms take them."""
        return tuple(map(dense_axis, self.phases_h))

    @cached_property
    def dense_w(self) -> tuple[DenseAxis, ...]:
        return tuple(map(dense_axis, self.phases_w))

    @property
    def pairs(self) -> Iterator[tuple[DenseAxis, DenseAxis]]:
        """Each is a convolution of its own."""
        return product(self.dense_h, self.dense_w)

    @cached_property
    def kinds(self) -> tuple[PairKind, ...]:
        """The same, those that are alike counted: a stride has many phases, and few kinds of them."""
        kinds_h, kinds_w = _kinds(self.dense_h), _kinds(self.dense_w)
        return tuple(PairKind(h, w, m * n) for (h, m), (w, n) in product(kinds_h, kinds_w))


def _kinds(axes: tuple[DenseAxis, ...]) -> list[tuple[DenseAxis, int]]:
    """One axis of each kind, and how many there are."""
    found: dict[tuple[int, ...], list[DenseAxis]] = {}
    for axis in axes:
        found.setdefault((axis.count, axis.taps, axis.dilation, len(axis.classes)), []).append(axis)
    return [(alike[0], len(alike)) for alike in found.values()]


@lru_cache(maxsize=1024)
def roles(problem: Problem) -> Roles:
    """The problem in the kernel's own words. A border of no width counts as zeros, whatever its mode."""
    channels, outputs = problem.channels_per_group
    top, _, left, _ = problem.padding
    border = problem.padding_mode if any(problem.padding) else PaddingMode.ZEROS
    (r, s), (sh, sw), (dh, dw) = problem.kernel, problem.stride, problem.dilation
    k_stride, c_stride, _, _ = problem.w_strides
    x = "x", problem.in_size, problem.x_strides, channels, c_stride
    y = "y", problem.out_size, problem.y_strides, outputs, k_stride
    if problem.kind is Pass.FPROP:
        (out_h, out_w), bias = problem.out_size, "bias" if problem.bias else None
        phases_h, phases_w = forward_phases(out_h, r, sh, dh, top), forward_phases(out_w, s, sw, dw, left)
        return Roles(*x, *y, phases_h, phases_w, border, bias)
    in_h, in_w = problem.in_size
    if border is PaddingMode.ZEROS:
        phases_h, phases_w = gradient_phases(in_h, r, sh, dh, top), gradient_phases(in_w, s, sw, dw, left)
    else:
        # A pixel's images outside fall into other residues of the stride than the pixel: every tap is tried.
        phases_h = (Phase(0, 1, in_h, 0, 1, -dh, r, 0, 1),)
        phases_w = (Phase(0, 1, in_w, 0, 1, -dw, s, 0, 1),)
    return Roles(*y, *x, phases_h, phases_w, border, None)


@dataclass(frozen=True)
class LoaderKind:
    """One way to gather (gather_loaders.cuh)."""

    name: str
    types: tuple[str, ...]
    """Template arguments after the tile, with ``{tile}`` to fill in."""
    weight: int
    """How many registers it carries: 0 few, 1 more, 2 many."""
    tabulated: bool
    epilogue_tiles: tuple[str, ...]
    """Tiles that have a twin with an epilogue: those that the planner chooses for forward passes of known networks."""
    function: str = "gather_gemm"


_MOST = ("128x128", "128x64", "256x32", "64x64")
TAPS = LoaderKind("taps", ("TapMajorLoader<{tile}, false>",), 0, False, (*_MOST, "64x32", "256x16", "256x8"))
TAPS_VECTOR = LoaderKind("taps_vector", ("TapMajorLoader<{tile}, true>",), 1, False, _MOST)
POINTWISE = LoaderKind("pointwise", ("PointwiseLoader<{tile}>",), 1, False, (*_MOST, "256x8"))
ROWS = LoaderKind("rows", ("RowLoader<{tile}, polyconv::Gather::kZeros>",), 1, True, (*_MOST, "256x8"))
ROWS_BORDERED = LoaderKind(
    "rows_bordered", ("RowLoader<{tile}, polyconv::Gather::kBordered>",), 1, True, ("128x64", "64x64", "256x8")
)
FOLDED = LoaderKind("folded", (), 2, True, (), "gather_folded")

PACK = KernelSpec.of(PackParams, "pack_weights", threads=256)


@dataclass(frozen=True)
class _PhaseTables:
    """Phases that go into one launch, and where the weights of each pair begin."""

    h: tuple[Phase, ...]
    w: tuple[Phase, ...]
    first_rows: tuple[int, ...]
    rows: int

    def fill(self, params: GatherParams | PackParams) -> None:
        set_phases(params, self.h, self.w)
        for i, row in enumerate(self.first_rows):
            params.first_row[i] = row
        params.packed_rows = int32(self.rows, "the number of weight rows (taps times channels)")


@lru_cache(maxsize=1024)
def _tables(problem: Problem) -> tuple[_PhaseTables, ...]:
    r = roles(problem)
    found = []
    for phases_h in _chunks(r.phases_h):
        for phases_w in _chunks(r.phases_w):
            first_rows, total = [], 0
            for h in phases_h:
                for w in phases_w:
                    first_rows.append(total)
                    total += round_up(h.taps * w.taps * r.channels, DEPTH)
            found.append(_PhaseTables(phases_h, phases_w, tuple(first_rows), total))
    return tuple(found)


def _chunks(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, ...]]:
    for first in range(0, len(phases), MAX_PHASES):
        yield phases[first : first + MAX_PHASES]


@dataclass(frozen=True)
class _Slab:
    """What one launch writes: so many images, and lines of each phase of them."""

    first_image: int
    images: int
    first_line: int
    lines: int

    def lines_of(self, phase: Phase) -> int:
        return max(0, min(self.lines, phase.count - self.first_line))


def _written_vector(problem: Problem, r: Roles) -> int:
    """How the epilogue may store: 1 four pixels, 2 four channels, 0 one element at a time."""
    if len(r.phases_h) * len(r.phases_w) == 1 and dense_pixels(r.written_strides, r.written_size, problem):
        return 1
    return 2 if dense_channels(r.written_strides, r.outputs, problem) else 0


def dense_pixels(strides: Strides, size: Extents, problem: Problem) -> bool:
    batch, channel, row, column = strides
    dense = column == 1 and row == size[1] and size[0] * size[1] % 4 == 0
    return dense and batch % 4 == 0 and channel % 4 == 0 and problem.vector_aligned


def dense_channels(strides: Strides, channels: int, problem: Problem) -> bool:
    batch, channel, row, column = strides
    quads = channels % 4 == 0 and batch % 4 == 0 and row % 4 == 0 and column % 4 == 0
    return channel == 1 and quads and problem.vector_aligned


@dataclass(frozen=True)
class GatherCandidate(DirectCandidate):
    """fprop or dgrad as an implicit GEMM."""

    tile: GemmTile
    loader: LoaderKind

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, loader = self.tile, self.loader
        return KernelSpec.of(
            GatherParams,
            loader.function,
            tile,
            *(f"polyconv::{name.format(tile=tile.cpp)}" for name in loader.types),
            stem="gather_gemm",
            symbol=f"gather_{loader.name}_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(loader.weight),
            facts=tile.facts,
        )

    def refusal(self, problem: Problem) -> str | None:
        r, loader = roles(problem), self.loader
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if loader is TAPS_VECTOR and DEPTH * self.tile.m // self.tile.threads < 4:
            return "a thread gathers fewer than four channels"
        if has_epilogue(problem) and self.tile.name not in loader.epilogue_tiles:
            return "stores its sums as they are, without an activation or a residual"
        zeros = r.border is PaddingMode.ZEROS
        if loader is FOLDED:
            folds = problem.kind is Pass.DGRAD and not zeros
            return None if folds else "only for the gradient of a border of image values"
        if loader is ROWS_BORDERED:
            return None if problem.kind is Pass.FPROP and not zeros else "only for a border of image values"
        if not zeros:
            return f"cannot read a {r.border} border"
        if loader is ROWS:
            return None
        if loader is POINTWISE:
            if problem.kernel != (1, 1) or problem.stride != (1, 1) or any(problem.padding):
                return "only for 1x1 kernels with stride 1 and no padding"
            return None if dense_pixels(r.source_strides, r.source_size, problem) else "pixels are not dense quads"
        if r.channels % DEPTH:
            return f"{r.channels} source channels per group are not a multiple of {DEPTH}"
        if loader is TAPS_VECTOR and not dense_channels(r.source_strides, r.channels, problem):
            return "channels are not dense quads"
        return None

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """For all phases that fit into one launch: their weights are packed, then the slabs gather."""
        r = roles(problem)
        found: list[Launch] = []
        used = 0
        for tables in _tables(problem):
            table = ("workspace", used) if self.loader.tabulated else None
            packed = ("workspace", round_up(used + (16 * tables.rows if self.loader.tabulated else 0), 256))
            # One step of slack: the kernel's last load goes past the last row, and its values are not used.
            packed_bytes = 4 * (problem.groups * tables.rows + DEPTH) * self._outputs_padded(r)
            used = round_up(packed[1] + packed_bytes, 256)
            if tables.rows:
                found.append(self._pack(problem, r, tables, table, packed))
            found += self._gather(problem, r, tables, table, packed)
        return Schedule(tuple(found), used)

    def _outputs_padded(self, r: Roles) -> int:
        return round_up(r.outputs, self.tile.n)

    def _slabs(self, problem: Problem, r: Roles, tables: _PhaseTables) -> Iterator[_Slab]:
        """Flattened pixels must stay below 2^31: first whole images per launch, then rows of one image."""
        most_rows, most_columns = max(h.count for h in tables.h), max(w.count for w in tables.w)
        limit = (DIVIDEND_LIMIT - 1) // ceil_div(r.outputs, self.tile.n) // self.tile.m * self.tile.m
        images = min(problem.batch, max(1, limit // (most_rows * most_columns)))
        lines = most_rows if images > 1 else min(most_rows, limit // most_columns)
        for first_image in range(0, problem.batch, images):
            for first_line in range(0, most_rows, max(lines, 1)):
                yield _Slab(first_image, min(images, problem.batch - first_image), first_line, lines)

    def _pack_task(self, problem: Problem, r: Roles, tables: _PhaseTables) -> Task:
        outputs_padded = self._outputs_padded(r)
        output_tiles = int32(ceil_div(outputs_padded, 32) * problem.groups, "the number of weight tiles")
        grid = (output_tiles, ceil_div(r.channels, 8), len(tables.first_rows))
        blocks, elements = grid[0] * grid[1] * grid[2], problem.groups * tables.rows * outputs_padded
        taps = sum(h.taps for h in tables.h) * sum(w.taps for w in tables.w)
        return Task(PACK, grid, Work(blocks, blocks, grid[0] * grid[1] * taps, 8 * elements))

    def _pack(
        self, problem: Problem, r: Roles, tables: _PhaseTables, table: tuple[str, int] | None, packed: tuple[str, int]
    ) -> Launch:
        outputs_padded = self._outputs_padded(r)
        p = PackParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
        tables.fill(p)
        p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
        p.w_output, p.w_channel = r.w_output, r.w_channel
        p.w_row, p.w_column = problem.w_strides[2:]
        p.output_tiles = ceil_div(outputs_padded, 32)
        p.table_channel = r.source_strides[1]
        if self.loader is ROWS:  # the other row loaders fold the coordinate first and add rows and columns themselves
            p.table_row, p.table_column = pixel_strides(r.source_strides, r.source)
        slots = layout_slots(PackParams, w="w", packed=packed, table=table)
        return self._pack_task(problem, r, tables).launch(bytes(p), slots)

    def _gather_task(self, problem: Problem, r: Roles, tables: _PhaseTables, slab: _Slab) -> Task:
        tile = self.tile
        channel_tiles = ceil_div(r.outputs, tile.n)
        most_rows, most_columns = max(h.count for h in tables.h), max(w.count for w in tables.w)
        tiles = ceil_div(slab.images * min(slab.lines, most_rows) * most_columns, tile.m) * channel_tiles
        blocks = steps = 0
        for h in tables.h:
            pixels = slab.images * slab.lines_of(h)
            for w in tables.w:
                here = ceil_div(pixels * w.count, tile.m) * channel_tiles * problem.groups
                blocks, steps = blocks + here, steps + here * ceil_div(h.taps * w.taps * r.channels, DEPTH)
        part = slab.images * min(slab.lines, most_rows) / (problem.batch * most_rows)
        packed = 4 * problem.groups * tables.rows * self._outputs_padded(r)
        work = Work(blocks, blocks, steps, int(part * moved_bytes(problem)) + packed)
        task = Task(self.kernel, (tiles, problem.groups, len(tables.first_rows)), work)
        return task_with_epilogue(problem, task, int(part * prod(problem.y_shape)))

    def _gather(
        self, problem: Problem, r: Roles, tables: _PhaseTables, table: tuple[str, int] | None, packed: tuple[str, int]
    ) -> Iterator[Launch]:
        outputs_padded = self._outputs_padded(r)
        p = GatherParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
        tables.fill(p)
        p.place("source", r.source_strides, r.source)
        p.place("written", r.written_strides, r.written)
        p.source_height, p.source_width = r.source_size
        p.source_channel_bytes = 4 * p.source_channel
        p.packed_step_bytes = 4 * DEPTH * outputs_padded
        p.next_tap_bytes = 4 * (p.tap_step_w * r.source_strides[3] - r.channels * p.source_channel)
        p.channel_tiles = ceil_div(r.outputs, self.tile.n)
        p.written_vector = _written_vector(problem, r)
        p.border = BORDERS[r.border]
        crop_top, crop_bottom, crop_left, crop_right = (max(-side, 0) for side in problem.padding)
        p.image_top, p.image_left = crop_top, crop_left
        p.image_height = r.written_size[0] - crop_top - crop_bottom
        p.image_width = r.written_size[1] - crop_left - crop_right
        p.pad_top, p.pad_bottom, p.pad_left, p.pad_right = (max(side, 0) for side in problem.padding)
        p.stride_h, p.stride_w = problem.stride[0], problem.stride[1]
        for slab in self._slabs(problem, r, tables):
            p.batch = slab.images
            for i, h in enumerate(tables.h):
                p.phase_h[i] = AxisPhase.of(h.cut(min(slab.first_line, h.count), slab.lines))
                p.phase_h[i].count.divisor = slab.lines_of(h)
            slots = layout_slots(
                GatherParams,
                source=(r.source, 4 * slab.first_image * r.source_strides[0]),
                packed=packed,
                table=table,
                bias=r.bias,
                written=(r.written, 4 * slab.first_image * r.written_strides[0]),
            )
            yield with_epilogue(problem, self._gather_task(problem, r, tables, slab).launch(bytes(p), slots))


# ---- The sizes of one chain of separable launches: how the four kernels of kernels/half_layout.cuh cut their work.

CHUNK = 8
"""Channels that half_gemm.cuh sums between two barriers."""
INVERSE_THREADS = 128
LEAST_SHARED = 96 * 1024
"""Bytes of shared memory that a multiprocessor has at least."""
STRETCH_VECTORS = 256
"""Vectors of a channel that a block of half_inverse.cuh takes at most."""
SLABS_TRIED = 48
"""Sizes of a slab that are weighed at most."""


def segments_of(axis: ToomAxis, taps: int) -> int:
    """Segments that an algorithm cuts so many taps into: all of m taps but the last, which may have ``longest``."""
    if axis.tiles > 1:
        return len(axis.segments)
    return 1 if taps <= axis.longest else ceil_div(taps - axis.longest, axis.m) + 1


def chain_columns_of(k_tile: int) -> int:
    """Columns of a block of half_gemm.cuh (``kU``)."""
    return 2048 // k_tile


def gemm_shared(w: ToomAxis, k_tile: int) -> int:
    """Bytes of shared memory (``kSharedFloats`` in half_gemm.cuh)."""
    columns = chain_columns_of(k_tile)
    rows = k_tile // 8 * (2 if columns == 128 or w.points < 8 else 4)
    return 4 * w.points * (2 * CHUNK * columns + 2 * CHUNK * k_tile + rows * columns)


def gemm_blocks(w: ToomAxis, k_tile: int) -> int:
    """Blocks per multiprocessor: few points make small blocks, two of which share the four schedulers evenly."""
    return 2 if w.points <= 6 and 2 * gemm_shared(w, k_tile) <= LEAST_SHARED else 1


@dataclass(frozen=True)
class Stretches:
    """A row of outputs, cut for the blocks of half_inverse.cuh."""

    count: int
    """In a row."""
    columns: int
    """Of one."""
    lines: int
    """Written channels that a block takes of it."""
    line_blocks: int
    """Blocks that take all of them."""


class Chain:
    """One chain of launches: one pair of phases of the lattice.

    A plain class, because every candidate has one: it is made in a few microseconds.
    """

    def __init__(self, problem: Problem, h: DenseAxis, w: DenseAxis, along_h: ToomAxis, along_w: ToomAxis, k_tile: int):
        r = roles(problem)
        self.h, self.w, self.along_h, self.along_w, self.k_tile = h, w, along_h, along_w, k_tile
        self.batch, self.groups, self.channels, self.outputs = problem.batch, problem.groups, r.channels, r.outputs
        self.segments_h, self.segments_w = segments_of(along_h, h.taps), segments_of(along_w, w.taps)
        self.passes = along_w.passes if along_w.tiles > 1 else self.segments_w
        # Channels of a group, classes and segments counted.
        self.parts_h = len(h.classes) * self.segments_h
        self.channels_all = self.parts_h * len(w.classes) * r.channels
        self.chunks = ceil_div(self.channels_all, CHUNK)
        # Tiles along H of one phase of one image, and of all.
        self.tiles_h = ceil_div(h.count, h.dilation * along_h.m)
        self.rows = problem.batch * h.dilation * self.tiles_h
        self.units = ceil_div(w.count, w.dilation * along_w.outputs)
        self.row_columns = self.units * w.dilation
        # Columns of X: those of the outputs and the ones that the last unit reads beyond itself. An odd number, unless
        # they are few, so that the points of H do not all lie in one bank of memory.
        last = along_w.points - 1 + (self.passes - 1) * along_w.m
        columns = self.row_columns + last // along_w.outputs * w.dilation
        self.pitch = columns | 1 if columns >= 16 else columns
        # Of one channel of one row of X, and of all of them.
        self.vectors = along_w.tiles * self.pitch
        self.row_stride = along_h.points * problem.groups * self.chunks * CHUNK * self.vectors * along_w.m
        self.k_tiles = ceil_div(r.outputs, k_tile)
        self.columns_each = chain_columns_of(k_tile)
        self.products = along_h.points * problem.groups * self.k_tiles
        slice_floats = self.chunks * CHUNK * self.passes * along_w.points * k_tile
        self.weight_bytes = round_up(4 * self.products * slice_floats, 256)

    def source_bytes(self, rows: int) -> int:
        """X of a slab."""
        return round_up(4 * rows * self.row_stride, 256)

    def column_tiles(self, rows: int) -> int:
        """Tiles of columns of half_gemm.cuh in a slab."""
        return ceil_div(rows * self.row_columns, self.columns_each)

    def columns_filled(self, rows: int) -> int:
        """Columns of Y: whole tiles, and a few more, so that the points of H do not all lie in one bank of memory."""
        return self.column_tiles(rows) * self.columns_each + 8

    def written_bytes(self, rows: int) -> int:
        """Y of a slab."""
        each = self.along_h.points * self.groups * self.outputs * self.along_w.outputs
        return round_up(4 * each * self.columns_filled(rows), 256)

    def gemm_tiles(self, rows: int) -> int:
        """Tiles of half_gemm.cuh in a slab."""
        return self.products * self.column_tiles(rows)

    def items(self, rows: int) -> int:
        """Threads of half_transform.cuh that have something to do in a slab."""
        return rows * self.groups * self.chunks * CHUNK * self.vectors * self.along_w.m

    def bytes_of(self, rows: int) -> int:
        return self.weight_bytes + self.source_bytes(rows) + self.written_bytes(rows)

    def most_rows(self, workspace: int) -> int:
        """Rows of the largest slab that fits; 0 if not even one does."""
        per_row = (self.bytes_of(64) - self.weight_bytes) // 64
        rows = min(self.rows, max(0, workspace - self.weight_bytes) // per_row + 1, DIVIDEND_LIMIT // self.row_stride)
        while rows > 0 and self.bytes_of(rows) > workspace:
            rows -= 1
        return rows

    def slab_rows(self, sms: int, workspace: int) -> int:
        """Rows of a slab: as few rounds of the persistent blocks as possible, then as few slabs."""
        most = self.most_rows(workspace)
        blocks = sms * gemm_blocks(self.along_w, self.k_tile)
        least = ceil_div(self.gemm_tiles(self.rows), blocks)  # rounds, however the rows are cut
        best, fewest = most, 0
        for rows in range(most, most // 2, -max(1, most // SLABS_TRIED)):
            slabs, left = divmod(self.rows, rows)
            launched = slabs + (left > 0)
            if fewest and least + launched >= fewest:
                break  # smaller slabs are no fewer of them
            each = ceil_div(self.gemm_tiles(rows), blocks)
            last = ceil_div(self.gemm_tiles(left), blocks) if left else 0
            rounds = slabs * each + last + launched
            if not fewest or rounds < fewest:
                best, fewest = rows, rounds
        return best

    def stretches(self) -> Stretches:
        """How half_inverse.cuh cuts a row."""
        parts = self.along_w.tiles
        units = ceil_div(self.units, ceil_div(parts * self.row_columns, STRETCH_VECTORS))
        columns = units * self.w.dilation
        lines = min(self.outputs, max(1, INVERSE_THREADS // (parts * columns)))
        return Stretches(ceil_div(self.units, units), columns, lines, ceil_div(self.outputs, lines))


# ---- Plans for fprop and dgrad by fast algorithms in both axes, one after the other (kernels/half_layout.cuh).

THREADS = 256
"""Of the kernels that only move and transform."""
WEIGHT_THREADS = 32 * CHUNK


def axis_refusal(axis: ToomAxis, taps: int) -> str | None:
    if axis.tiles > 1:
        inner = f"{axis.m + 1} to {axis.taps} taps"
        return None if axis.m < taps <= axis.taps else f"{axis} nests {inner}, not {taps}"
    if segments_of(axis, taps) > 1 and axis.m > axis.longest:
        return f"{axis} takes at most {axis.longest} taps, not {taps}"
    return None


@lru_cache(maxsize=1024)
def transform_kernel(h: ToomAxis, vector: int) -> KernelSpec:
    symbol = f"half_transform_{h.struct.lower()}_by{vector}"
    return KernelSpec.of(HalfTransformParams, "half_transform", h, vector, symbol=symbol, threads=THREADS, min_blocks=2)


@lru_cache(maxsize=1024)
def inverse_kernel(h: ToomAxis, vector: int) -> KernelSpec:
    symbol = f"half_inverse_{h.struct.lower()}_by{vector}"
    return KernelSpec.of(
        HalfInverseParams, "half_inverse", h, vector, symbol=symbol, threads=INVERSE_THREADS, min_blocks=5
    )


@lru_cache(maxsize=1024)
def weights_kernel(h: ToomAxis, w: ToomAxis) -> KernelSpec:
    symbol = f"transform_weights_{h.struct.lower()}_{w.struct.lower()}"
    return KernelSpec.of(TransformWeightsParams, "transform_weights", h, w, symbol=symbol, threads=WEIGHT_THREADS)


@lru_cache(maxsize=1024)
def gemm_kernel(w: ToomAxis, k_tile: int) -> KernelSpec:
    threads, gemm = 32 * w.points, f"polyconv::HalfGemm<{w.cpp}, {k_tile}>"
    return KernelSpec.of(
        HalfGemmParams,
        "half_gemm",
        w,
        k_tile,
        symbol=f"half_gemm_{w.struct.lower()}_{k_tile}",
        threads=threads,
        min_blocks=gemm_blocks(w, k_tile),
        facts={
            f"{gemm}::kThreads": threads,
            f"{gemm}::kU": chain_columns_of(k_tile),
            f"4 * {gemm}::kSharedFloats": gemm_shared(w, k_tile),
        },
    )


@dataclass(frozen=True)
class SeparableCandidate:
    """One pair of algorithms and the width in written channels of the matrix product's tile."""

    h: ToomAxis
    w: ToomAxis
    k_tile: int

    direct = False

    @cached_property
    def name(self) -> str:
        return f"separable_{self.h.struct.lower()}_{self.w.struct.lower()}_{self.k_tile}"

    def refusal(self, problem: Problem) -> str | None:
        why = _refusal_of_all(problem)
        if why:
            return why
        for kind in roles(problem).kinds:
            why = axis_refusal(self.h, kind.h.taps) or axis_refusal(self.w, kind.w.taps)
            if why:
                return why
        for chain, _ in self.chains(problem):
            if max(chain.parts_h, len(chain.w.classes)) > MAX_PARTS:
                return f"more than {MAX_PARTS} classes and segments of taps"
            if chain.rows >= DIVIDEND_LIMIT or chain.row_stride >= DIVIDEND_LIMIT:
                return "too many rows"
        return None

    def chains(self, problem: Problem) -> tuple[tuple[Chain, int], ...]:
        """One chain of each kind, and how many there are."""
        return _chains(problem, self)

    def least_workspace(self, problem: Problem) -> int:
        """Bytes that one row at a time takes."""
        return max(chain.bytes_of(1) for chain, _ in self.chains(problem))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The launches. A workspace that is too small for one row of tiles is exceeded by what that takes."""
        r = roles(problem)
        workspace = max(workspace, self.least_workspace(problem))
        found: list[Launch] = []
        used = 0
        for h, w in r.pairs:
            chain = Chain(problem, h, w, self.h, self.w, self.k_tile)
            rows = chain.slab_rows(sms, workspace)
            used = max(used, chain.bytes_of(rows))
            found.append(_weights(problem, r, chain))
            slabs = {n: _slab(problem, r, chain, n, rows, sms) for n in {rows, chain.rows % rows} if n}
            for first in range(0, chain.rows, rows):
                transform, gemm, inverse = slabs[min(rows, chain.rows - first)]
                found += [
                    _starting_at(first, transform, HalfTransformParams),
                    gemm,
                    _starting_at(first, inverse, HalfInverseParams),
                ]
        return Schedule(tuple(found), used)


@lru_cache(maxsize=1024)
def _refusal_of_all(problem: Problem) -> str | None:
    """Why no candidate can compute the problem, or None."""
    if problem.kind is Pass.WGRAD:
        return "only for the forward pass and the input gradient"
    if problem.depthwise:
        return "not for depthwise convolutions"
    r = roles(problem)
    if r.border is not PaddingMode.ZEROS:
        return f"cannot read a {r.border} border"
    if any(abs(stride) >= 2**31 for stride in (*r.source_strides[2:], *r.written_strides[2:], *problem.w_strides[2:])):
        return "rows or columns are too far apart"
    return MANY_PHASES if r.many_phases else None


@lru_cache(maxsize=1024)
def _chains(problem: Problem, candidate: SeparableCandidate) -> tuple[tuple[Chain, int], ...]:
    """Kinds of phases that are cut into as many segments make chains of the same sizes."""
    along_h, along_w, k_tile = candidate.h, candidate.w, candidate.k_tile
    found: dict[tuple[int, ...], tuple[PairKind, int]] = {}
    for kind in roles(problem).kinds:
        h, w = kind.h, kind.w
        sizes = (h.count, h.dilation, len(h.classes), w.count, w.dilation, len(w.classes))
        key = (*sizes, segments_of(along_h, h.taps), segments_of(along_w, w.taps))
        first, times = found.get(key, (kind, 0))
        found[key] = first, times + kind.times
    return tuple((Chain(problem, k.h, k.w, along_h, along_w, k_tile), times) for k, times in found.values())


def _weights_task(problem: Problem, chain: Chain, times: int = 1) -> Task:
    blocks = int32(chain.groups * chain.k_tiles * chain.chunks, "the number of weight tiles")
    read = 4 * chain.groups * chain.channels * chain.outputs * problem.kernel[0] * problem.kernel[1]
    work = Work(blocks, blocks, blocks * chain.segments_w, read + chain.weight_bytes)
    return Task(weights_kernel(chain.along_h, chain.along_w), (blocks, 1, 1), work, times)


def _weights(problem: Problem, r: Roles, chain: Chain) -> Launch:
    p = TransformWeightsParams(channels=chain.channels, channels_all=chain.channels_all, outputs=chain.outputs)
    p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
    p.w_output, p.w_channel = r.w_output, r.w_channel
    p.w_row, p.w_column = problem.w_strides[2:]
    p.groups, p.chunks, p.segments = chain.groups, chain.chunks, chain.segments_w
    p.k_tile, p.k_tiles = chain.k_tile, chain.k_tiles
    p.source_channels, p.classes_w = chain.channels, len(chain.w.classes)
    m = chain.along_h.m
    for segment in range(chain.segments_h):
        for number, taps in enumerate(chain.h.classes):
            last = segment == chain.segments_h - 1
            count = taps.taps - segment * m if last else min(m, taps.taps - segment * m)
            first = taps.tap_first + segment * m * taps.tap_stride
            p.part_h[segment * len(chain.h.classes) + number] = TapPart(max(0, count), first, taps.tap_stride)
    for number, taps in enumerate(chain.w.classes):
        p.class_w[number] = TapPart(taps.taps, taps.tap_first, taps.tap_stride)
    slots = layout_slots(TransformWeightsParams, w="w", u=("workspace", 0))
    return _weights_task(problem, chain).launch(bytes(p), slots)


def _starting_at(first: int, launch: Launch, struct: type[HalfTransformParams | HalfInverseParams]) -> Launch:
    """The launch of the slab that begins with row ``first``; as made, it begins with row 0."""
    if first == 0:
        return launch
    at = struct.first_row.offset
    return replace(launch, params=launch.params[:at] + first.to_bytes(4, "little") + launch.params[at + 4 :])


def _slab_tasks(
    problem: Problem, r: Roles, chain: Chain, rows: int, sms: int, times: int = 1
) -> tuple[Task, Task, Task]:
    """What so many slabs of so many rows launch, in counts: the transform, the matrix product, the transform back."""
    moved_x, moved_y = chain.source_bytes(rows), chain.written_bytes(rows)
    (height, width), planes = r.source_size, chain.batch * chain.groups
    read = 4 * planes * chain.channels * height * width * rows // chain.rows
    transform = ceil_div(chain.items(rows), THREADS)
    gemm = gemm_kernel(chain.along_w, chain.k_tile)
    tiles = chain.gemm_tiles(rows)
    blocks = min(tiles, sms * gemm.min_blocks)
    cut = chain.stretches()
    inverse = int32(rows * chain.groups * cut.line_blocks * cut.count, "the number of blocks")
    rounds = ceil_div(cut.lines * chain.along_w.tiles * cut.columns, INVERSE_THREADS)
    result = 4 * planes * chain.outputs * chain.h.count * chain.w.count * rows // chain.rows
    back = Task(
        inverse_kernel(chain.along_h, chain.along_w.m),
        (inverse, 1, 1),
        Work(inverse, inverse, inverse * rounds, moved_y + result),
        times,
    )
    return (
        Task(
            transform_kernel(chain.along_h, chain.along_w.m),
            (transform, 1, 1),
            Work(transform, transform, transform, read + moved_x),
            times,
        ),
        Task(
            gemm,
            (blocks, 1, 1),
            Work(blocks, tiles, tiles * chain.chunks * chain.passes, moved_x + moved_y + chain.weight_bytes),
            times,
        ),
        task_with_epilogue(problem, back, result // 4),
    )


def _slab(
    problem: Problem, r: Roles, chain: Chain, rows: int, most_rows: int, sms: int
) -> tuple[Launch, Launch, Launch]:
    """The launches of the first slab."""
    source_at = chain.weight_bytes
    written_at = source_at + chain.source_bytes(most_rows)
    transform, gemm, inverse = _slab_tasks(problem, r, chain, rows, sms)
    return (
        _transform(transform, r, chain, rows, source_at),
        _gemm(gemm, chain, rows, source_at, written_at),
        _inverse(inverse, problem, r, chain, rows, written_at),
    )


def _transform(task: Task, r: Roles, chain: Chain, rows: int, source_at: int) -> Launch:
    h, w = chain.h, chain.w
    channels = chain.chunks * CHUNK
    p = HalfTransformParams(items=chain.items(rows), rows=rows, tiles=chain.tiles_h, outputs_w=chain.along_w.outputs)
    p.vectors, p.pitch = chain.vectors, chain.pitch
    p.channels, p.channels_filled, p.channels_all = chain.groups * channels, channels, chain.channels_all
    p.source_channels, p.classes_w = chain.channels, len(w.classes)
    p.dilation_h, p.dilation_w = h.dilation, w.dilation
    p.read_step_h, p.read_step_w = h.read_step, w.read_step
    p.place("source", r.source_strides, r.source)
    for segment in range(chain.segments_h):
        for number in range(len(h.classes)):
            shift = h.read_step * h.dilation * segment * chain.along_h.m
            p.part_h[segment * len(h.classes) + number] = _source_part(h, number, r.source_size[0], shift)
    for number in range(len(w.classes)):
        p.class_w[number] = _source_part(w, number, r.source_size[1], 0)
    return task.launch(bytes(p), layout_slots(HalfTransformParams, source=r.source, x=("workspace", source_at)))


def _source_part(axis: DenseAxis, number: int, extent: int, shift: int) -> SourcePart:
    taps = axis.classes[number]
    needed = taps.read_first + axis.read_step * (axis.count - 1 + axis.dilation * (taps.taps - 1)) + 1
    return SourcePart(taps.read_first + shift, max(0, min(extent, needed)))


def _gemm(task: Task, chain: Chain, rows: int, source_at: int, written_at: int) -> Launch:
    vector = chain.along_w.m
    channel_stride = chain.vectors * vector
    p = HalfGemmParams(
        tiles=chain.gemm_tiles(rows),
        k_tiles=chain.k_tiles,
        column_tiles=chain.column_tiles(rows),
        row_columns=chain.row_columns,
        columns=rows * chain.row_columns,
        columns_filled=chain.columns_filled(rows),
        row_stride=chain.row_stride,
        group_stride=chain.chunks * CHUNK * channel_stride,
        channel_stride=channel_stride,
        part_stride=chain.pitch * vector,
        next=chain.w.dilation * vector,
        chunks=chain.chunks,
        segments=chain.segments_w,
        outputs=chain.outputs,
    )
    slots = layout_slots(HalfGemmParams, x=("workspace", source_at), u=("workspace", 0), y=("workspace", written_at))
    return task.launch(bytes(p), slots, gemm_shared(chain.along_w, chain.k_tile))


def _inverse(task: Task, problem: Problem, r: Roles, chain: Chain, rows: int, written_at: int) -> Launch:
    h, w, cut = chain.h, chain.w, chain.stretches()
    parts = chain.along_w.tiles
    stretch = cut.columns * chain.along_w.outputs
    p = HalfInverseParams(groups=chain.groups, outputs=chain.outputs, rows=rows, tiles=chain.tiles_h)
    p.lines, p.line_blocks = cut.lines, cut.line_blocks
    p.stretches, p.stretch, p.stretch_columns, p.columns = cut.count, stretch, cut.columns, cut.columns
    p.row_columns, p.columns_filled = chain.row_columns, chain.columns_filled(rows)
    p.outputs_w, p.parts, p.vectors = chain.along_w.outputs, parts, parts * cut.columns
    p.dilation_h, p.dilation_w = h.dilation, w.dilation
    p.count_h, p.count_w = h.count, w.count
    p.written_first_h, p.written_step_h = h.written_first, h.written_step
    p.written_first_w, p.written_step_w = w.written_first, w.written_step
    p.place("written", r.written_strides, r.written)
    p.vector = (
        problem.vector_aligned
        and p.written_column == 1
        and w.written_step == 1
        and w.written_first % 4 == 0
        and stretch % 4 == 0
        and all(stride % 4 == 0 for stride in r.written_strides[:3])
    )
    slots = layout_slots(HalfInverseParams, y=("workspace", written_at), written=r.written, bias=r.bias)
    return with_epilogue(problem, task.launch(bytes(p), slots, 4 * cut.lines * chain.along_h.m * stretch))


# ---- What a schedule would take: from counted instructions and bytes, and the device's figures. Never a measurement.


def waves(blocks: int, slots: int) -> float:
    """Waves that the device needs. A last partial one takes less than a whole one: fewer blocks share what there is."""
    whole, rest = divmod(blocks, slots)
    return whole + (0.0 if rest == 0 else max(rest / slots, 0.5 if whole else 1.0))


# ---- Plans for the weight gradient in its own fast form (kernels/toom_wgrad.cuh, toom_wgrad_finish.cuh).

TILE_CHUNK = 8
"""Tiles between two barriers (``kChunk`` in toom_wgrad.cuh)."""
STATE_BYTES = 392
"""``sizeof(ToomWgradState)``: what a block keeps in shared memory behind its buffers."""
INTERLEAVES = (3, 2, 1)
"""Phases along W that can share a chunk, best first (``kMaxInterleave``)."""

FLUSH = 192
"""Tiles that an accumulator sums before it is added to the block's partial sums: more would round more, fewer would
move more memory."""
MOST_WAVES = 8
"""Slices make at most so many full waves of blocks."""

DIRECT = ToomAxis(1, (1,))
THREE = ToomAxis(4, (3,))
FIVE = ToomAxis(4, (5,))
NINE = ToomAxis(4, (4, 5))
THIRTEEN = ToomAxis(4, (4, 4, 5))
ALONG_H = (DIRECT, THREE, FIVE, NINE, THIRTEEN)
"""Algorithms along H; a kernel takes the first one that has enough taps."""
ALONG_W = (THREE, FIVE, NINE, THIRTEEN)


@dataclass(frozen=True)
class WgradTile:
    """One ``polyconv::WgradTile``: ``k`` output by ``c`` source channels per block."""

    k: int
    c: int
    warps_k: int
    warps_c: int
    warps_pass: int
    split: int
    lanes_k: int

    @property
    def name(self) -> str:
        return f"{self.k}x{self.c}"

    @property
    def cpp(self) -> str:
        sizes = (self.k, self.c, self.warps_k, self.warps_c, self.warps_pass, self.split, self.lanes_k)
        return f"polyconv::WgradTile<{', '.join(map(str, sizes))}>"

    @property
    def warps_per_point(self) -> int:
        return self.warps_k * self.warps_c * self.warps_pass * self.split


SQUARE = WgradTile(64, 64, 1, 2, 1, 1, 8)
HALVES = WgradTile(64, 32, 1, 1, 1, 2, 8)
TALL = WgradTile(128, 16, 1, 1, 1, 2, 16)
POINTS = WgradTile(64, 32, 1, 1, 1, 1, 8)
SEGMENTS = WgradTile(64, 32, 1, 1, 2, 1, 8)
SMALL = WgradTile(32, 32, 1, 1, 1, 1, 4)


def tiles(h: ToomAxis, w: ToomAxis, classed: bool) -> tuple[WgradTile, ...]:
    """The tiles that are instantiated for a pair of algorithms, with or without classes of taps (strides)."""
    if classed and (h.taps > 5 or w.taps > 5):
        return ()
    if w == THREE:
        return (HALVES, TALL) if classed else (SQUARE, HALVES, TALL) if h in (THREE, FIVE) else (HALVES,)
    return (POINTS,) if w == FIVE else (SEGMENTS,) if w == NINE else (SMALL,)


def shared_bytes(w: ToomAxis, tile: WgradTile) -> int:
    """Two buffers of transformed operands and of what is staged for them, and the state of the block."""
    warps = w.points * tile.warps_per_point
    beyond = ceil_div(w.span, 4) - 1  # blocks of four positions, per phase, that a tile reads after its own
    quads = (TILE_CHUNK + beyond * INTERLEAVES[0]) | 1
    operands = w.points * TILE_CHUNK * (tile.k + w.passes * tile.c)
    staged = 4 * TILE_CHUNK * round_up(tile.k, warps) + 4 * quads * round_up(tile.c, warps)
    return 8 * (operands + staged) + STATE_BYTES


@lru_cache(maxsize=1024)
def kernel(h: ToomAxis, w: ToomAxis, tile: WgradTile, classed: bool) -> KernelSpec:
    threads, sizes = 32 * w.points * tile.warps_per_point, f"polyconv::ToomWgradSizes<{h.cpp}, {w.cpp}, {tile.cpp}>"
    return KernelSpec.of(
        ToomWgradParams,
        "toom_wgrad",
        *(h, w, tile, classed),
        symbol=f"toom_wgrad_{h.struct}_{w.struct}_{tile.name}" + "_strided" * classed,
        threads=threads,
        facts={
            f"{sizes}::kThreads": threads,
            f"4 * 2 * ({sizes}::kOperands + {sizes}::kStaged)": shared_bytes(w, tile) - STATE_BYTES,
        },
    )


SUM = KernelSpec.of(ToomWgradSumParams, "toom_wgrad_sum", stem="toom_wgrad_finish", threads=256)


@lru_cache(maxsize=1024)
def finish_kernel(h: ToomAxis, w: ToomAxis) -> KernelSpec:
    symbol = f"toom_wgrad_finish_{h.struct}_{w.struct}"
    return KernelSpec.of(ToomWgradFinishParams, "toom_wgrad_finish", h, w, symbol=symbol, threads=128)


@lru_cache(maxsize=4096)
def lattices(problem: Problem) -> tuple[DenseAxis, DenseAxis]:
    """Both axes of the forward convolution whose weights are wanted."""
    r = roles(problem.for_pass(Pass.FPROP))
    return dense_axis(r.phases_h[0]), dense_axis(r.phases_w[0])


def axis_for(taps: int, among: tuple[ToomAxis, ...]) -> ToomAxis | None:
    """The first algorithm with enough taps; what it has beyond is computed and left out."""
    return next((axis for axis in among if axis.taps >= taps), None)


@dataclass(frozen=True)
class _Work:
    """How a problem is cut into rows of tiles, slices and sums."""

    rows: int
    tiles: int
    tiles_h: int
    interleave: int
    outer_phases: int
    k_tiles: int
    c_tiles: int
    products: int
    slices: int
    flush: int

    @property
    def chunks(self) -> int:
        """Of one row."""
        return ceil_div(self.tiles, TILE_CHUNK)

    @property
    def blocks(self) -> int:
        """Per slice and group."""
        return self.k_tiles * self.c_tiles * self.products


@dataclass(frozen=True)
class ToomWgradCandidate:
    """F(m, r) along both axes of the weight gradient, with one tile of channels."""

    h: ToomAxis
    w: ToomAxis
    tile: WgradTile
    direct = False

    @property
    def name(self) -> str:
        return f"toom_wgrad_{self.h.struct}_{self.w.struct}_{self.tile.name}"

    def refusal(self, problem: Problem) -> str | None:
        if problem.kind is not Pass.WGRAD:
            return "only for the weight gradient"
        if problem.depthwise:
            return "depthwise: every output channel has one source channel"
        if problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding):
            return f"cannot read a {problem.padding_mode} border"
        h, w = lattices(problem)
        if max(len(h.classes), len(w.classes)) > MAX_CLASSES:
            return f"a stride of more than {MAX_CLASSES} classes of taps"
        if axis_for(h.taps, ALONG_H) != self.h or axis_for(w.taps, ALONG_W) != self.w:
            return f"another algorithm fits {h.taps} x {w.taps} taps"
        if self.tile not in tiles(self.h, self.w, len(h.classes) * len(w.classes) > 1):
            return "no such tile"
        if self.multiplications >= problem.kernel[0] * problem.kernel[1]:
            return f"{problem.kernel[0]} x {problem.kernel[1]} taps: saves no multiplications"
        return None

    @property
    def multiplications(self) -> float:
        """Per output and pair of channels."""
        h = len(self.h.segments) * self.h.points / self.h.m
        return h * self.w.passes * self.w.points / self.w.m

    def channels(self, problem: Problem) -> int:
        """Of a group, each as often as it has classes of taps."""
        h, w = lattices(problem)
        return problem.channels_per_group[0] * len(h.classes) * len(w.classes)

    def spec(self, problem: Problem) -> KernelSpec:
        h, w = lattices(problem)
        return kernel(self.h, self.w, self.tile, len(h.classes) * len(w.classes) > 1)

    @property
    def partial_elements(self) -> int:
        """Sums of one tile of channels."""
        return len(self.h.segments) * self.h.points * self.w.passes * self.w.points * self.tile.k * self.tile.c

    def work(self, problem: Problem, sms: int, workspace: int) -> _Work:
        """Slices: enough to fill the device in whole waves, and for short sums; few enough for the workspace."""
        h, w = lattices(problem)
        k = problem.channels_per_group[1]
        interleave = next(e for e in INTERLEAVES if w.dilation % e == 0)
        outer = w.dilation // interleave
        tiles_h = round_up(h.count, h.dilation * self.h.m) // (h.dilation * self.h.m)
        tiles = round_up(w.count, w.dilation * 4) // (w.dilation * 4) * interleave
        rows = problem.batch * h.dilation * tiles_h * outer
        k_tiles, c_tiles = ceil_div(k, self.tile.k), ceil_div(self.channels(problem), self.tile.c)
        products = len(self.h.segments) * self.h.points
        per_slice = k_tiles * c_tiles * products * problem.groups
        bytes_per_slice = 4 * self.tile.split * k_tiles * c_tiles * problem.groups * self.partial_elements
        most = max(1, min(rows, workspace // (bytes_per_slice + 4 * problem.out_channels)))
        best = min(
            (max(1, min(most, count * sms // per_slice)) for count in range(1, MOST_WAVES + 1)),
            key=lambda slices: (round(waves(per_slice * slices, sms) * ceil_div(rows, slices), 6), -slices),
        )
        flush = max(1, FLUSH * self.tile.split // TILE_CHUNK)
        return _Work(rows, tiles, tiles_h, interleave, outer, k_tiles, c_tiles, products, best, flush)

    def _elements(self, problem: Problem, work: _Work) -> int:
        """Partial sums of one slice."""
        return problem.groups * work.k_tiles * work.c_tiles * self.partial_elements

    def _tasks(self, problem: Problem, work: _Work) -> Iterator[Task]:
        """The sums of all slices; the sum of these, if there are several; the transform to taps."""
        slices, elements = work.slices * self.tile.split, self._elements(problem, work)
        blocks = int32(work.blocks * problem.groups * work.slices, "the number of blocks")
        walked = blocks // work.slices * work.rows
        steps = walked * work.chunks
        lines = self.tile.k * self.h.m + self.tile.c * self.h.points  # rows that a chunk reads
        scattered = steps * lines * (min(32, work.outer_phases) - 1)
        done = Work(blocks, walked, steps, moved_bytes(problem) + 4 * elements * slices, scattered)
        yield Task(self.spec(problem), (blocks, 1, 1), done)
        if slices > 1:
            blocks = ceil_div(elements, 4 * SUM.threads)
            yield Task(SUM, (blocks, 1, 1), Work(blocks, blocks, blocks * slices, 4 * elements * (slices + 1)))
        finish = finish_kernel(self.h, self.w)
        pairs = int32(problem.out_channels * self.channels(problem), "the number of pairs of channels")
        blocks = ceil_div(pairs, finish.threads)
        taps = problem.kernel[0] * problem.kernel[1]
        moved = 4 * pairs * (taps + self.partial_elements // (self.tile.k * self.tile.c))
        yield Task(finish, (blocks, 1, 1), Work(blocks, blocks, blocks, moved))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The launches: the sums of all slices, their sum, and the transform to taps."""
        work = self.work(problem, sms, workspace)
        h, w = lattices(problem)
        channels, k = self.channels(problem), problem.channels_per_group[1]
        groups, classes = problem.groups, len(h.classes) * len(w.classes)
        int32(work.rows * work.chunks, "the number of tiles")
        p = ToomWgradParams(channels=channels, outputs=k, count_h=h.count, count_w=w.count)
        p.x_batch, p.x_channel, _, _ = problem.x_strides
        p.place("dy", problem.y_strides, "the gradient of y")
        x_row, x_column = pixel_strides(problem.x_strides, "x")
        p.x_row = int32(x_row * h.read_step, "the row stride of x")
        p.x_column = int32(x_column * w.read_step, "the column stride of x")
        p.x_next_row, p.dy_next_row = 4 * p.x_row * h.dilation, 4 * p.dy_row * h.dilation
        warps = self.spec(problem).threads // 32
        p.x_next_channel, p.dy_next_channel = 4 * warps * p.x_channel, 4 * warps * p.dy_channel
        for i, tap_class in enumerate(h.classes):
            p.read_first_h[i] = int32(tap_class.read_first, "the first row that a tap reads")
            p.x_first_h[i] = tap_class.read_first * x_row
        for i, tap_class in enumerate(w.classes):
            p.read_first_w[i] = int32(tap_class.read_first, "the first column that a tap reads")
            p.x_first_w[i] = tap_class.read_first * x_column
        p.read_step_h, p.read_step_w = h.read_step, w.read_step
        p.height, p.width = min(problem.in_size[0], _reach(h)), min(problem.in_size[1], _reach(w))
        p.dilation_h, p.dilation_w, p.interleave = h.dilation, w.dilation, work.interleave
        p.rows, p.tiles, p.slices, p.flush = work.rows, work.tiles, work.slices, work.flush
        p.channel_tiles, p.k_tiles = work.k_tiles * work.c_tiles, work.k_tiles
        p.groups, p.outer_phases = groups, work.outer_phases
        p.tiles_h, p.phases_h = work.tiles_h, h.dilation
        p.interleaved = work.interleave
        p.classes, p.classes_w = classes, len(w.classes)

        bias_at = 4 * self._elements(problem, work) * work.slices * self.tile.split
        bias_partial = ("workspace", bias_at) if problem.bias else None
        slots = layout_slots(ToomWgradParams, x="x", dy="y", partial="workspace", bias_partial=bias_partial)
        first, *between, last = self._tasks(problem, work)
        found = [first.launch(bytes(p), slots, shared_bytes(self.w, self.tile))]
        for task in between:
            s = ToomWgradSumParams(elements=self._elements(problem, work), slices=work.slices * self.tile.split)
            found.append(task.launch(bytes(s), layout_slots(ToomWgradSumParams, partial="workspace")))
        found.append(self._finish(problem, work, last, bias_partial))
        return Schedule(tuple(found), bias_at + 4 * work.slices * problem.out_channels * problem.bias)

    def _finish(self, problem: Problem, work: _Work, task: Task, bias_partial: tuple[str, int] | None) -> Launch:
        h, w = lattices(problem)
        channels, k = self.channels(problem), problem.channels_per_group[1]
        p = ToomWgradFinishParams(slices=work.slices, outputs=k, all_outputs=problem.out_channels)
        p.pairs = problem.out_channels * channels
        p.dw_k, p.dw_channel, _, _ = problem.w_strides
        p.dw_row, p.dw_column = pixel_strides(problem.w_strides, "the weight")
        p.channels, p.outputs_divisor = channels, k
        p.tile_k, p.tile_c = self.tile.k, self.tile.c
        p.k_tiles, p.channel_tiles = work.k_tiles, work.k_tiles * work.c_tiles
        p.classes, p.classes_w = len(h.classes) * len(w.classes), len(w.classes)
        for i, tap_class in enumerate(h.classes):
            p.taps_h[i], p.tap_first_h[i], p.tap_stride_h = tap_class.taps, tap_class.tap_first, tap_class.tap_stride
        for i, tap_class in enumerate(w.classes):
            p.taps_w[i], p.tap_first_w[i], p.tap_stride_w = tap_class.taps, tap_class.tap_first, tap_class.tap_stride
        db = "db" if problem.bias else None
        slots = layout_slots(ToomWgradFinishParams, partial="workspace", dw="dw", bias_partial=bias_partial, db=db)
        return task.launch(bytes(p), slots)


def _reach(axis: DenseAxis) -> int:
    """One past the last source position that any output reads."""
    last = axis.count - 1
    return max(c.read_first + axis.read_step * (last + axis.dilation * (c.taps - 1)) for c in axis.classes) + 1


# ---- Plans for wgrad as an implicit GEMM over pixels (kernels/wgrad_gemm.cuh), and its second stage.

MOST_PIXELS_PER_SLICE = 16384
"""Longest sum in one accumulator: keeps the rounding error of sums over millions of pixels small."""
MOST_SLICES = 65535
"""Slices are the grid's z dimension."""

REDUCE = KernelSpec.of(ReduceParams, "reduce_partials", threads=256)


def bordered(problem: Problem) -> bool:
    return problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding)


def wgrad_columns_of(problem: Problem) -> int:
    """Columns of one group's dw: channels times kernel area."""
    return problem.channels_per_group[0] * problem.kernel[0] * problem.kernel[1]


@dataclass(frozen=True)
class WgradCut:
    """How a problem is cut into tiles of dw and slices of pixels."""

    k_tiles: int
    column_tiles: int
    columns_padded: int
    pixels_per_slice: int
    images: int
    """Of one launch: flattened pixels must stay below 2^31. Each launch has slices of its own."""

    def parts(self, problem: Problem) -> Iterator[tuple[int, int, int]]:
        """Of each launch its first image, its pixels and its slices."""
        out_h, out_w = problem.out_size
        for first_image in range(0, problem.batch, self.images):
            pixels = min(self.images, problem.batch - first_image) * out_h * out_w
            yield first_image, pixels, ceil_div(pixels, self.pixels_per_slice)

    def slices(self, problem: Problem) -> int:
        """Of all launches."""
        return sum(slices for _, _, slices in self.parts(problem))


def reduction_task(problem: Problem, slices: int, columns_padded: int) -> Task:
    """The task that adds the slices' partial sums."""
    elements = int32(problem.out_channels * columns_padded, "the number of weights")
    blocks = ceil_div(elements, REDUCE.threads)
    return Task(REDUCE, (blocks, 1, 1), Work(blocks, blocks, blocks * slices, 4 * (slices + 1) * elements))


def reduction(problem: Problem, slices: int, columns: int, columns_padded: int) -> Launch:
    """Its launch; the partial sums start at the beginning of the workspace."""
    p = ReduceParams(slices=slices, columns=columns, elements=problem.out_channels * columns_padded)
    p.dw_k, p.dw_channel, p.dw_row, p.dw_column = problem.w_strides
    p.columns_padded = columns_padded
    p.kernel_area, p.kernel_width = problem.kernel[0] * problem.kernel[1], problem.kernel[1]
    slots = layout_slots(ReduceParams, partial="workspace", dw="dw", db="db" if problem.bias else None)
    return reduction_task(problem, slices, columns_padded).launch(bytes(p), slots)


@dataclass(frozen=True)
class PixelGemm(DirectCandidate):
    """wgrad as a GEMM over pixels, whatever its kernel does to read them."""

    tile: GemmTile

    @property
    def resident(self) -> int:
        """Blocks per multiprocessor that the slices are to fill."""
        return self.kernel.min_blocks

    def cut(self, problem: Problem, sms: int, workspace: int) -> WgradCut:
        """Enough slices to fill the device evenly and to keep each sum short, few enough for the workspace."""
        out_h, out_w = problem.out_size
        pixels = problem.batch * out_h * out_w
        columns = wgrad_columns_of(problem) + problem.bias
        columns_padded = round_up(columns, 4)
        k_tiles, column_tiles = ceil_div(problem.channels_per_group[1], self.tile.m), ceil_div(columns, self.tile.n)
        filling = ceil_div(2 * sms * self.resident, k_tiles * column_tiles * problem.groups)
        wanted = max(ceil_div(pixels, MOST_PIXELS_PER_SLICE), filling)
        most = min(max(1, workspace // (4 * problem.out_channels * columns_padded)), max(1, pixels // 64), MOST_SLICES)
        pixels_per_slice = round_up(ceil_div(pixels, min(wanted, most)), 8)
        int32(out_h * out_w + pixels_per_slice, "the number of pixels of one image of y")
        images = min(problem.batch, max(1, (DIVIDEND_LIMIT - 1 - pixels_per_slice) // (out_h * out_w)))
        return WgradCut(k_tiles, column_tiles, columns_padded, pixels_per_slice, images)

    def _task(self, problem: Problem, cut: WgradCut, pixels: int, slices: int) -> Task:
        grid = (cut.k_tiles * cut.column_tiles, problem.groups, slices)
        blocks = grid[0] * grid[1] * slices
        part = pixels / (problem.batch * problem.out_size[0] * problem.out_size[1])
        moved = int(part * moved_bytes(problem)) + 4 * slices * problem.out_channels * cut.columns_padded
        return Task(self.kernel, grid, Work(blocks, blocks, ceil_div(pixels, 8) * grid[0] * grid[1], moved))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The partial sums, then their reduction."""
        cut = self.cut(problem, sms, workspace)
        channels, k = problem.channels_per_group
        columns = wgrad_columns_of(problem)
        out_h, out_w = problem.out_size
        p = WgradParams(height=problem.in_size[0], width=problem.in_size[1], k=k, channels=channels)
        p.groups, p.columns, p.bias = problem.groups, int32(columns, "channels times kernel area"), problem.bias
        p.place("x", problem.x_strides, "x")
        p.place("dy", problem.y_strides, "the gradient of y")
        p.border = BORDERS[problem.padding_mode] if bordered(problem) else 0
        p.stride_h, p.stride_w = problem.stride
        p.dilation_h, p.dilation_w = problem.dilation
        p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
        p.k_tiles, p.out_height, p.out_width = cut.k_tiles, out_h, out_w
        p.kernel_area, p.kernel_width = problem.kernel[0] * problem.kernel[1], problem.kernel[1]
        p.columns_padded, p.pixels_per_slice = cut.columns_padded, cut.pixels_per_slice
        found = []
        scratch = 0
        for first_image, pixels, slices in cut.parts(problem):
            p.pixels = pixels
            slots = layout_slots(
                WgradParams,
                x=("x", 4 * first_image * problem.x_strides[0]),
                dy=("y", 4 * first_image * problem.y_strides[0]),
                partial=("workspace", scratch),
            )
            found.append(self._task(problem, cut, pixels, slices).launch(bytes(p), slots))
            scratch += 4 * slices * problem.out_channels * cut.columns_padded
        found.append(reduction(problem, cut.slices(problem), columns, cut.columns_padded))
        return Schedule(tuple(found), scratch)


@dataclass(frozen=True)
class WgradCandidate(PixelGemm):
    """wgrad as an implicit GEMM."""

    vector: bool
    """Four pixels of dy in one load."""
    bordered: bool

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, lean = self.tile, self.tile.threads == 256 and self.vector and not self.bordered
        return KernelSpec.of(
            WgradParams,
            "wgrad_gemm",
            tile,
            self.vector,
            self.bordered,
            symbol=f"wgrad_{tile.name}" + "_vector" * self.vector + "_bordered" * self.bordered,
            threads=tile.threads,
            min_blocks=tile.min_blocks(weight=0 if lean else 1),
            facts=tile.facts,
        )

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if self.bordered is not bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if self.vector and not dense_pixels(problem.y_strides, problem.out_size, problem):
            return "pixels of dy are not dense quads"
        return None


# ---- A fast way inside an exported file: only where its error is known to be within the tolerance.


class Launcher(Protocol):
    """What is left of a way once it has been chosen."""

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot compute this problem, or None."""

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The launches."""


def summed(problem: Problem) -> int:
    """What one element of the result sums over, beside taps: channels, or pixels of all images."""
    c, k = problem.channels_per_group
    if problem.kind is Pass.WGRAD:
        return problem.batch * prod(problem.out_size)
    return k if problem.kind is Pass.DGRAD else c


@dataclass(frozen=True)
class Within:
    """A way for sums no longer than those it was chosen for."""

    way: Launcher
    kernel: Extents
    stride: Extents
    dilation: Extents
    longest: int
    """The largest :func:`summed`."""

    def refusal(self, problem: Problem) -> str | None:
        if (problem.kernel, problem.stride, problem.dilation) != (self.kernel, self.stride, self.dilation):
            return "its error was predicted for another kernel"
        if summed(problem) > self.longest:
            return f"its error was predicted for sums over {self.longest}, not {summed(problem)}"
        return self.way.refusal(problem)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return self.way.schedule(problem, sms, workspace)


# ---- What runs, by pass, in order of preference: the first that does not refuse the tensors at hand is taken.

EXPORTED = "8x32x512x512, 64 channels, kernel 5x9, padding 2x4, dilation 2x3"
# Chosen by polyconv's cost model for a Tesla V100.
WAYS = {
    Pass.FPROP: [
        Within(
            way=SeparableCandidate(
                h=ToomAxis(m=4, segments=(5,), tiles=1), w=ToomAxis(m=4, segments=(4, 5), tiles=2), k_tile=64
            ),
            kernel=(5, 9),
            stride=(1, 1),
            dilation=(2, 3),
            longest=32,
        ),
        GatherCandidate(tile=GemmTile(4, 1, 4, 8, 8), loader=TAPS),
        GatherCandidate(tile=GemmTile(4, 1, 4, 8, 8), loader=ROWS),
    ],
    Pass.DGRAD: [
        Within(
            way=SeparableCandidate(
                h=ToomAxis(m=4, segments=(5,), tiles=1), w=ToomAxis(m=4, segments=(4, 5), tiles=2), k_tile=32
            ),
            kernel=(5, 9),
            stride=(1, 1),
            dilation=(2, 3),
            longest=64,
        ),
        GatherCandidate(tile=GemmTile(4, 1, 8, 8, 8), loader=TAPS),
        GatherCandidate(tile=GemmTile(4, 1, 8, 8, 8), loader=ROWS),
    ],
    Pass.WGRAD: [
        Within(
            way=ToomWgradCandidate(
                h=ToomAxis(m=4, segments=(5,), tiles=1),
                w=ToomAxis(m=4, segments=(4, 5), tiles=1),
                tile=WgradTile(64, 32, 1, 1, 2, 1, 8),
            ),
            kernel=(5, 9),
            stride=(1, 1),
            dilation=(2, 3),
            longest=2015744,
        ),
        WgradCandidate(tile=GemmTile(2, 1, 4, 8, 8), vector=True, bordered=False),
        WgradCandidate(tile=GemmTile(2, 1, 4, 8, 8), vector=False, bordered=False),
    ],
}


# ---- The part that meets torch: builds the extension once per process, launches the kernels, differentiates.

WORKSPACE = 64 * 2**20
"""Bytes of scratch memory that a convolution may take."""

_loaded: list[Any] = []


def extension() -> Any:
    """The compiled kernels. The first caller in a process builds them (torch keeps the result on disk); others wait."""
    with whole:
        if not _loaded:
            from torch.utils.cpp_extension import load_inline

            declaration = (
                "void launch(const std::string&, int64_t, const std::vector<int64_t>&, const std::vector<int64_t>&, "
                "int64_t, const std::string&);"
            )
            built = load_inline(
                name="polyconv_" + hashlib.sha256(CUDA_SOURCE.encode()).hexdigest()[:16],
                cpp_sources=[declaration],
                cuda_sources=[CUDA_SOURCE],
                functions=["launch"],
                extra_cuda_cflags=["-O3"],
                with_cuda=True,
            )
            _loaded.append(built)
        return _loaded[0]


def _launch(symbol: str, device: int, grid: Dim3, block: Dim3, shared_bytes: int, params: bytes) -> None:
    """Enqueue one kernel on torch's current stream of a device."""
    extension().launch(symbol, device, grid, block, shared_bytes, params)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=1024)
def _schedule(problem: Problem, sms: int) -> Schedule:
    refusals = []
    for way in WAYS[problem.kind]:
        refusal = way.refusal(problem)
        if refusal is None:
            return way.schedule(problem, sms, WORKSPACE)
        refusals.append(f"{way}: {refusal}")
    raise RuntimeError(
        f"this file was exported for {EXPORTED} and has no kernel for {problem}; "
        f"export it again with these arguments ({'; '.join(refusals)})"
    )


def _run(problem: Problem, device: torch.device, **tensors: Tensor) -> None:
    """Enqueue the launches that fill the outputs among ``tensors``."""
    schedule = _schedule(problem, _multiprocessors(device))
    # Freed on return, while the kernels may still be running: torch's allocator orders memory by stream.
    tensors["workspace"] = torch.empty(schedule.workspace_bytes, dtype=torch.uint8, device=device)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for launch in schedule.launches:
        params = launch.bind(addresses)
        _launch(launch.kernel.symbol, device.index or 0, launch.grid, launch.block, launch.dynamic_shared, params)


def _problem(kind: Pass, x: Tensor, w: Tensor, y: Tensor, geometry: Geometry, bias: bool) -> Problem:
    n, c, height, width = x.shape
    k, _, r, s = w.shape
    return Problem(
        kind=kind,
        batch=n,
        in_channels=c,
        out_channels=k,
        in_size=(height, width),
        kernel=(r, s),
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
        padding_mode=PaddingMode(geometry.padding_mode),
        bias=bias,
        x_strides=x.stride(),
        w_strides=w.stride(),
        y_strides=y.stride(),
        vector_aligned=not (x.data_ptr() | y.data_ptr()) & 15,
        dtype="float32",
    )


def _empty(like: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format)


def _is_channels_last(tensor: Tensor) -> bool:
    return suggests_channels_last(tensor.shape, tensor.stride())


def _check_device(tensor: Tensor) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError(
            f"this convolution has CUDA kernels only, but got a tensor on the device {str(tensor.device)!r}: "
            "move the model and its input with .cuda()"
        )


def _check(**tensors: Tensor) -> None:
    """Raise unless all tensors are float32, on one CUDA device."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        _check_device(tensor)
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"this convolution computes in float32, but the {name} is {tensor.dtype}: use .float()")
        if tensor.device != first.device:
            raise RuntimeError(f"the tensors should be on one device: got {first.device} and {tensor.device} ({name})")


def _fprop(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    given = {"input": x, "weight": w}
    if bias is not None:
        given["bias"] = bias
    _check(**given)
    check_shapes(x.shape, w.shape, None if bias is None else bias.shape, geometry)
    shape = (x.shape[0], w.shape[0], *geometry.out_size(x.shape[2:], w.shape[2:]))
    y = _empty(x, shape, _is_channels_last(x) or _is_channels_last(w))
    if x.numel() == 0 or y.numel() == 0:  # without input channels: a sum of nothing, and the bias
        return y.zero_() if bias is None else y.copy_(bias.reshape(1, -1, 1, 1).expand(y.shape))
    tensors = {"x": x, "w": w, "y": y}
    if bias is not None:
        tensors["bias"] = bias.contiguous()
    _run(_problem(Pass.FPROP, x, w, y, geometry, bias is not None), x.device, **tensors)
    return y


def _dgrad(grad: Tensor, w: Tensor, x_shape: Sequence[int], channels_last: bool, geometry: Geometry) -> Tensor:
    _check(gradient=grad, weight=w)
    dx = _empty(grad, x_shape, channels_last)
    if grad.numel() == 0 or dx.numel() == 0:
        return dx.zero_()
    _run(_problem(Pass.DGRAD, dx, w, grad, geometry, False), grad.device, x=dx, w=w, y=grad)
    return dx


def _wgrad(
    grad: Tensor, x: Tensor, w_shape: Sequence[int], channels_last: bool, bias: bool, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    _check(gradient=grad, input=x)
    dw, db = _empty(grad, w_shape, channels_last), grad.new_empty(w_shape[0] if bias else 0)
    if grad.numel() == 0 or dw.numel() == 0:
        return dw.zero_(), grad.sum((0, 2, 3)) if bias else db
    tensors = {"x": x, "y": grad, "dw": dw}
    if bias:
        tensors["db"] = db
    _run(_problem(Pass.WGRAD, x, dw, grad, geometry, bias), grad.device, **tensors)
    return dw, db


class _Fprop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return _fprop(x, w, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        want_x, want_w, want_bias, _ = ctx.needs_input_grad
        dx = dw = db = None
        if want_x:
            dx = _Dgrad.apply(grad, w, x.shape, _is_channels_last(x), ctx.geometry)
        if want_w:
            dw, db = _Wgrad.apply(grad, x, w.shape, _is_channels_last(w), want_bias, ctx.geometry)
        elif want_bias:
            db = grad.sum((0, 2, 3))
        return dx, dw, db if want_bias else None, None


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, w: Tensor, x_shape: Sequence[int], channels_last: bool, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(grad, w)
        ctx.geometry = geometry
        return _dgrad(grad, w, x_shape, channels_last, geometry)

    @staticmethod
    def backward(ctx: Any, grad_dx: Tensor) -> Any:
        grad, w = ctx.saved_tensors
        for_grad = for_w = None
        if ctx.needs_input_grad[0]:
            for_grad = _Fprop.apply(grad_dx, w, None, ctx.geometry)
        if ctx.needs_input_grad[1]:
            for_w, _ = _Wgrad.apply(grad, grad_dx, w.shape, _is_channels_last(w), False, ctx.geometry)
        return for_grad, for_w, None, None, None


class _Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        x: Tensor,
        w_shape: Sequence[int],
        channels_last: bool,
        bias: bool,
        geometry: Geometry,
    ) -> Any:
        ctx.save_for_backward(grad, x)
        ctx.bias, ctx.geometry = bias, geometry
        return _wgrad(grad, x, w_shape, channels_last, bias, geometry)

    @staticmethod
    def backward(ctx: Any, grad_dw: Tensor, grad_db: Tensor) -> Any:
        grad, x = ctx.saved_tensors
        for_grad = for_x = None
        if ctx.needs_input_grad[0]:
            for_grad = _Fprop.apply(x, grad_dw, grad_db if ctx.bias else None, ctx.geometry)
        if ctx.needs_input_grad[1]:
            for_x = _Dgrad.apply(grad, grad_dw, x.shape, _is_channels_last(x), ctx.geometry)
        return for_grad, for_x, None, None, None, None


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d``: its parameters, its initialisation, its state dict. The kernels above do the convolution.

    ``padding`` may also be (top, bottom, left, right).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extension()  # built now, so that the first batch does not wait for the compiler

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in (3, 4):
            raise RuntimeError(f"expected an input of 4 dimensions (or 3, one image), got size {list(input.shape)}")
        geometry = Geometry(self.stride, self._sides(), self.dilation, self.groups, self.padding_mode)
        if input.dim() == 4:
            return _Fprop.apply(input, self.weight, self.bias, geometry)
        return _Fprop.apply(input.unsqueeze(0), self.weight, self.bias, geometry).squeeze(0)

    def _sides(self) -> tuple[int, int, int, int]:
        """Padding at the top, the bottom, the left and the right."""
        if isinstance(self.padding, str):  # "same" and "valid": torch has worked out the numbers
            left, right, top, bottom = self._reversed_padding_repeated_twice
            return (top, bottom, left, right)
        sides: tuple[int, ...] = self.padding
        if len(sides) == 2:
            return (sides[0], sides[0], sides[1], sides[1])
        top, bottom, left, right = sides
        return (top, bottom, left, right)


class _Model(torch.nn.Module):
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=(0, 0),
        dilation=(1, 1),
        bias=False,
        *,
        groups=1,
    ):
        super().__init__()
        self.conv2d = Conv2d(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2d(x)


class ModelNew(_Model):
    """Takes the arguments of the module it replaces; without any, it is the one that this file was exported for."""

    def __init__(self, *args, **kwargs):
        super().__init__(*(args if args or kwargs else get_init_inputs()), **kwargs)


def get_inputs():
    return [torch.rand(8, 32, 512, 512)]


def get_init_inputs():
    return [32, 64, (5, 9), 1, (2, 4), (2, 3)]
