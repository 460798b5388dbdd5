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
import threading
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int32, c_int64, c_uint32, c_uint64
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple, NoReturn, Tuple

import torch
from torch import Tensor

# ---- CUDA kernels.

CUDA_SOURCE = r"""
// ---- common.cuh -----------------------------------------------------------------------------------------------------
// What every kernel shares: index types, division by an invariant, the lattice of one axis, borders.
//
// Device headers include neither torch nor the standard library, so that NVRTC, nvcc and the emulator's toolchain all
// read the same text. Plain-old-data only: each Params struct is filled byte by byte on the host (plan/layout.py), and
// every instantiation asserts its size.

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

// What lies outside the image. Values as in plan/layout.py.
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

// Adds the bias and writes the tile, four elements at a time along whichever axis is dense.
template <class Tile>
__device__ __forceinline__ void write(Accumulators<Tile>& c, const GatherParams& p) {
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
  if (p.written_vector == 1) {
    const i64 to_next_group = (Tile::kLanesN * 4 - 3) * p.written_channel;
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i += 4) {
      if (first_pixel + c.offset_m(i) >= block.pixels) continue;
      float* at = written_at(first_pixel + c.offset_m(i), p, block) + first_output * p.written_channel;
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++) {
        if (first_output + c.offset_n(j) < p.outputs)
          store4_global(at, c.sum[i][j], c.sum[i + 1][j], c.sum[i + 2][j], c.sum[i + 3][j]);
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
          store4_global(at + c.offset_n(j), c.sum[i][j], c.sum[i][j + 1], c.sum[i][j + 2], c.sum[i][j + 3]);
    } else {
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++)
        if (first_output + c.offset_n(j) < p.outputs) at[c.offset_n(j) * p.written_channel] = c.sum[i][j];
    }
  }
}

template <class Tile, class Loader>
__device__ __forceinline__ void gather_gemm(const GatherParams& p) {
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

template <class Tile, bool kVector, bool kBordered>
__device__ __forceinline__ void wgrad_gemm(const WgradParams& p) {
  using Loader = WgradLoader<Tile, kVector, kBordered>;
  __shared__ __align__(16) float a[2][kDepth * Loader::kPitchM];
  __shared__ __align__(16) float b[2][kDepth * Loader::kPitchN];
  __shared__ __align__(16) int4 table[Tile::kN];

  {
    const int first_column = p.k_tiles.quotient(blockIdx.x) * Tile::kN;
    for (int n = threadIdx.x; n < Tile::kN; n += Tile::kThreads)
      table[n] = wgrad_column(first_column + n, p, kBordered);
  }
  __syncthreads();

  const int first = blockIdx.z * p.pixels_per_slice, end = min(first + p.pixels_per_slice, p.pixels);
  const int first_k = (blockIdx.x - p.k_tiles.quotient(blockIdx.x) * p.k_tiles.divisor) * Tile::kM;
  Accumulators<Tile> c;
  Loader loader(p, table, first_k, first, end);
  loader.load();
  loader.store(a[0], b[0]);
  __syncthreads();
  int buffer = 0;
#pragma unroll 1
  for (int left = end - first; left > 0; left -= kDepth) {
    loader.load();  // past the end: zeros
    const TilePlace<Tile> place(threadIdx.x);
    c.template multiply_add<Loader::kPitchM, Loader::kPitchN>(a[buffer] + place.m, b[buffer] + place.n);
    buffer ^= 1;
    loader.store(a[buffer], b[buffer]);
    __syncthreads();
  }

  // The partial sums, four columns at a time; the padding columns are written too and never read.
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
static_assert(sizeof(polyconv::PackParams) == 1008, "host and device disagree about polyconv::PackParams");
static_assert(sizeof(polyconv::GatherParams) == 1128, "host and device disagree about polyconv::GatherParams");
static_assert(sizeof(polyconv::WgradParams) == 200, "host and device disagree about polyconv::WgradParams");
static_assert(sizeof(polyconv::ReduceParams) == 112, "host and device disagree about polyconv::ReduceParams");

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

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(3))
gather_taps_256x32(const __grid_constant__ polyconv::GatherParams params) {
  polyconv::gather_gemm<polyconv::GemmTile<4, 1, 8, 8, 8>, polyconv::TapMajorLoader<polyconv::GemmTile<4, 1, 8, 8, 8>, false>>(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(2))
gather_rows_256x32(const __grid_constant__ polyconv::GatherParams params) {
  polyconv::gather_gemm<polyconv::GemmTile<4, 1, 8, 8, 8>, polyconv::RowLoader<polyconv::GemmTile<4, 1, 8, 8, 8>, polyconv::Gather::kZeros>>(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(3))
wgrad_64x128_vector(const __grid_constant__ polyconv::WgradParams params) {
  polyconv::wgrad_gemm<polyconv::GemmTile<2, 2, 4, 8, 8>, true, false>(params);
}

extern "C" __global__ void __launch_bounds__(256, POLYCONV_MIN_BLOCKS(1))
reduce_partials(const __grid_constant__ polyconv::ReduceParams params) {
  polyconv::reduce_partials(params);
}

extern "C" __global__ void __launch_bounds__(128, POLYCONV_MIN_BLOCKS(3))
wgrad_64x128(const __grid_constant__ polyconv::WgradParams params) {
  polyconv::wgrad_gemm<polyconv::GemmTile<2, 2, 4, 8, 8>, false, false>(params);
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
    {"pack_weights", {reinterpret_cast<const void*>(&pack_weights), sizeof(polyconv::PackParams)}},
    {"gather_taps_128x64", {reinterpret_cast<const void*>(&gather_taps_128x64), sizeof(polyconv::GatherParams)}},
    {"gather_rows_128x64", {reinterpret_cast<const void*>(&gather_rows_128x64), sizeof(polyconv::GatherParams)}},
    {"gather_taps_256x32", {reinterpret_cast<const void*>(&gather_taps_256x32), sizeof(polyconv::GatherParams)}},
    {"gather_rows_256x32", {reinterpret_cast<const void*>(&gather_rows_256x32), sizeof(polyconv::GatherParams)}},
    {"wgrad_64x128_vector", {reinterpret_cast<const void*>(&wgrad_64x128_vector), sizeof(polyconv::WgradParams)}},
    {"reduce_partials", {reinterpret_cast<const void*>(&reduce_partials), sizeof(polyconv::ReduceParams)}},
    {"wgrad_64x128", {reinterpret_cast<const void*>(&wgrad_64x128), sizeof(polyconv::WgradParams)}},
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


# ---- What is asked: one pass of one 2-D convolution, described by numbers alone.

DEFAULT_TOLERANCE = 1e-4
"""The error budget of a caller who says nothing."""

Pair = Tuple[int, int]
Sides = Tuple[int, int, int, int]
"""Top, bottom, left, right."""
Strides = Tuple[int, int, int, int]
"""Element strides in the order batch, channel, row, column, whatever the order in memory."""


class Pass(str, Enum):
    """Which of the three passes of a convolution is asked for."""

    FPROP = "fprop"
    """Output from input and weight (and bias)."""
    DGRAD = "dgrad"
    """Gradient of the input from the gradient of the output; also what a transposed convolution computes."""
    WGRAD = "wgrad"
    """Gradient of the weight (and of the bias) from the input and the gradient of the output."""

    def __str__(self) -> str:
        return self.value


class PaddingMode(str, Enum):
    """What stands outside the image. Named as in ``torch.nn.Conv2d``."""

    ZEROS = "zeros"
    REFLECT = "reflect"
    REPLICATE = "replicate"
    CIRCULAR = "circular"

    def __str__(self) -> str:
        return self.value


def output_extent(extent: int, before: int, after: int, kernel: int, stride: int, dilation: int) -> int:
    """Number of outputs along one axis: the kernel's positions that fit into the padded extent."""
    return (extent + before + after - dilation * (kernel - 1) - 1) // stride + 1


@dataclass(frozen=True)
class Problem:
    """One pass of a 2-D convolution. Build it with :meth:`make`, which fills in dense strides."""

    kind: Pass
    batch: int
    in_channels: int
    out_channels: int
    in_size: Pair
    kernel: Pair
    stride: Pair
    padding: Sides
    dilation: Pair
    groups: int
    padding_mode: PaddingMode
    bias: bool
    """FPROP: a bias is added. WGRAD: the bias gradient is wanted too. DGRAD: ignored."""
    x_strides: Strides
    w_strides: Strides
    y_strides: Strides
    vector_aligned: bool
    """The first elements of x and y lie on 16-byte boundaries."""
    dtype: str
    tolerance: float = DEFAULT_TOLERANCE
    """The error, relative to the output's scale, that a fast algorithm may be expected to make; 0: none may run."""

    @property
    def out_size(self) -> Pair:
        """Rows and columns of the output; zero or less where the kernel does not fit."""
        top, bottom, left, right = self.padding
        return (
            output_extent(self.in_size[0], top, bottom, self.kernel[0], self.stride[0], self.dilation[0]),
            output_extent(self.in_size[1], left, right, self.kernel[1], self.stride[1], self.dilation[1]),
        )

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.in_channels, *self.in_size)

    @property
    def channels_per_group(self) -> Pair:
        """Input and output channels of one group."""
        return (self.in_channels // self.groups, self.out_channels // self.groups)

    def __str__(self) -> str:
        n, c, h, w = self.x_shape
        parts = [
            f"{self.kind} {n}x{c}x{h}x{w}",
            f"{self.out_channels} channels",
            f"kernel {self.kernel[0]}x{self.kernel[1]}",
        ]
        if self.stride != (1, 1):
            parts.append(f"stride {self.stride[0]}x{self.stride[1]}")
        if any(self.padding):
            top, bottom, left, right = self.padding
            symmetric = top == bottom and left == right
            sides = f"{top}x{left}" if symmetric else f"{top},{bottom},{left},{right}"
            mode = "" if self.padding_mode is PaddingMode.ZEROS else f" {self.padding_mode}"
            parts.append(f"padding {sides}{mode}")
        if self.dilation != (1, 1):
            parts.append(f"dilation {self.dilation[0]}x{self.dilation[1]}")
        if self.groups != 1:
            parts.append(f"{self.groups} groups")
        if self.bias:
            parts.append("bias")
        return ", ".join(parts)


# ---- What the caller wrote, in one form: ``stride=2`` and ``stride=(2, 2)`` become the same Geometry.


class Geometry(NamedTuple):
    """How the kernel moves over the image, and how exact the result is to be.

    Immutable; a named tuple because one is built on every call.
    """

    stride: Pair = (1, 1)
    padding: Sides = (0, 0, 0, 0)
    """Top, bottom, left, right. A negative side crops the image."""
    dilation: Pair = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"
    tolerance: float | None = None
    """The error budget; None is the one of :func:`polyconv.set_tolerance`."""

    def out_size(self, in_size: Sequence[int], kernel: Sequence[int]) -> Pair:
        """Rows and columns of the output; zero or less where the kernel does not fit."""
        top, bottom, left, right = self.padding
        return (
            output_extent(in_size[0], top, bottom, kernel[0], self.stride[0], self.dilation[0]),
            output_extent(in_size[1], left, right, kernel[1], self.stride[1], self.dilation[1]),
        )


def check_shapes(x: Sequence[int], w: Sequence[int], bias: Sequence[int] | None, geometry: Geometry) -> None:
    """Raise as torch does unless a 4-D input, a 4-D weight and a bias of these shapes fit together."""
    if len(x) != 4 or len(w) != 4:
        raise RuntimeError(
            f"conv2d needs an input of (batch, channels, height, width) and a weight of (out_channels, "
            f"in_channels/groups, height, width); got an input of size {list(x)} and a weight of size {list(w)}"
        )
    groups = geometry.groups
    if w[0] < groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0 (out_channels), "
            f"but got weight of size {list(w)}"
        )
    if w[0] % groups != 0:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0 (out_channels), "
            f"but got weight of size {list(w)}"
        )
    if x[1] != w[1] * groups:
        raise RuntimeError(
            f"Given groups={groups} and a weight of size {list(w)}, expected an input with {w[1] * groups} channels, "
            f"but got {x[1]} channels in an input of size {list(x)}"
        )
    if bias is not None and (len(bias) != 1 or bias[0] != w[0]):
        raise RuntimeError(
            f"Given a weight of size {list(w)}, expected bias to be 1-dimensional with {w[0]} elements, "
            f"but got bias of size {list(bias)}"
        )
    check_extents(x[2:], w[2:], geometry)


def check_extents(in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> None:
    """Raise unless the kernel fits into the padded image and the padding mode can fill the sides."""
    padding, dilation = geometry.padding, geometry.dilation
    if kernel[0] <= 0 or kernel[1] <= 0:
        raise RuntimeError(f"Kernel size should be greater than zero, but got {kernel[0]} x {kernel[1]}")
    for axis, name in enumerate(("height", "width")):
        size, before, after = in_size[axis], padding[2 * axis], padding[2 * axis + 1]
        if before < 0 or after < 0:
            _check_crop(name, size, before, after, geometry.padding_mode)
        if size + before + after < dilation[axis] * (kernel[axis] - 1) + 1:
            _kernel_does_not_fit(in_size, kernel, geometry)
        if size <= 0:
            raise RuntimeError(
                f"Only the batch and the channels may be empty: got an input of {in_size[0]} x {in_size[1]} pixels"
            )
        if geometry.padding_mode == "reflect" and (before >= size or after >= size):
            raise RuntimeError(
                f"padding_mode='reflect' needs a padding smaller than the image: "
                f"got {before} and {after} along a {name} of {size}"
            )
        if geometry.padding_mode == "circular" and (before > size or after > size):
            raise RuntimeError(
                f"padding_mode='circular' needs a padding no larger than the image (it may wrap around once): "
                f"got {before} and {after} along a {name} of {size}"
            )


def _check_crop(name: str, size: int, before: int, after: int, padding_mode: str) -> None:
    if max(-before, 0) + max(-after, 0) > size:
        raise RuntimeError(f"negative padding crops more than there is: {before} and {after} along a {name} of {size}")
    if padding_mode != "zeros":
        raise RuntimeError(
            f"the operator takes negative padding with padding_mode='zeros' only; got {before} and {after} along the "
            f"{name} with {padding_mode!r}. polyconv.conv2d takes it with every mode"
        )


def _kernel_does_not_fit(in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> NoReturn:
    top, bottom, left, right = geometry.padding
    padded = (in_size[0] + top + bottom, in_size[1] + left + right)
    reach = tuple(geometry.dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1))
    raise RuntimeError(
        f"Kernel size can't be greater than actual input size: the padded image is {padded[0]} x {padded[1]}, "
        f"the kernel of {kernel[0]} x {kernel[1]} with dilation {geometry.dilation} spans {reach[0]} x {reach[1]}"
    )


def suggests_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch would take a 4-D tensor of these strides for channels_last (also where it is not dense).

    This is ``c10::is_channels_last_strides_2d``, ambiguous cases included, so that our outputs get the memory format
    that torch's convolution would give them.
    """
    if strides[1] == 0:
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        extent, stride = shape[axis], strides[axis]
        if stride < least or extent == 0:
            return False
        if axis == 0 and least == strides[1]:
            return False
        least = stride * extent if extent > 1 else stride
    return True


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

    @property
    def taps(self) -> int:
        return sum(self.segments)

    @property
    def outputs(self) -> int:
        """Outputs that are computed together."""
        return self.m * self.tiles


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


@dataclass(frozen=True)
class PointerSlot:
    """Where in the parameter bytes a buffer's address goes."""

    offset: int
    buffer: str
    """``x``, ``w``, ``y``, ``bias``, ``dw``, ``db`` or ``workspace``."""
    byte_offset: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan."""

    kernel: KernelSpec
    grid: Dim3
    block: Dim3
    dynamic_shared: int
    params: bytes = field(repr=False)
    pointers: tuple[PointerSlot, ...] = field(repr=False)

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
    sums: tuple[int, ...]
    """How one element of the result is summed: so many products in sequence, so many of these sums in sequence, ..."""


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
    phases = []
    for residue in range(stride):
        first = (residue - before) % stride
        if first >= inputs:
            continue
        meeting = [r for r in range(min(tap_stride, kernel)) if r * dilation % stride == residue]
        phases.append(
            Phase(
                written_first=first,
                written_step=stride,
                count=-(-(inputs - first) // stride),
                read_first=(first + before - meeting[0] * dilation) // stride if meeting else 0,
                read_step=1,
                tap_step=tap_step,
                taps=-(-(kernel - meeting[0]) // tap_stride) if meeting else 0,
                tap_first=meeting[0] if meeting else 0,
                tap_stride=tap_stride,
            )
        )
    return tuple(phases)


# ---- The kernels' parameter structs, field by field as the device headers declare them.

MAX_PHASES = 8
"""Phases per axis that fit into one launch (``kMaxPhases`` in common.cuh)."""
DIVIDEND_LIMIT = 2**31
"""FastDivisor is exact below this; so are flattened pixel numbers."""

pointer = c_uint64


class FastDivisor(ctypes.Structure):
    """Division by an invariant as one high multiplication and a shift, exact for dividends below 2^31."""

    _fields_ = [("divisor", c_uint32), ("multiplier", c_uint32), ("shift", c_uint32)]

    @classmethod
    def of(cls, divisor: int) -> FastDivisor:
        if divisor <= 1:
            return cls(1, 0, 0)
        power = 31 + (divisor - 1).bit_length()
        return cls(divisor, ((1 << power) + divisor - 1) // divisor, power - 32)


class AxisPhase(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("written_first", "written_step", "read_first", "read_step")),
        *((name, c_int32) for name in ("taps", "tap_first", "tap_stride")),
        ("count", FastDivisor),
    ]

    @classmethod
    def of(cls, phase: Phase) -> AxisPhase:
        return cls(
            phase.written_first,
            phase.written_step,
            phase.read_first,
            phase.read_step,
            phase.taps,
            phase.tap_first,
            phase.tap_stride,
            FastDivisor.of(phase.count),
        )


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class GatherParams(ctypes.Structure):
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
        ("phase_h", AxisPhase * MAX_PHASES),
        ("phase_w", AxisPhase * MAX_PHASES),
    ]


class PackParams(ctypes.Structure):
    _fields_ = [
        *_fields(pointer, "w packed table"),
        *_fields(c_int64, "w_group w_output w_channel w_row w_column table_channel"),
        *_fields(c_int32, "table_row table_column"),
        *_fields(c_int32, "channels outputs outputs_padded output_tiles packed_rows phases_w tap_step_h tap_step_w"),
        ("first_row", c_int32 * (MAX_PHASES * MAX_PHASES)),
        ("phase_h", AxisPhase * MAX_PHASES),
        ("phase_w", AxisPhase * MAX_PHASES),
    ]


class WgradParams(ctypes.Structure):
    _fields_ = [
        *_fields(pointer, "x dy partial"),
        *_fields(c_int64, "x_batch x_channel dy_batch dy_channel"),
        *_fields(c_int32, "x_row x_column dy_row dy_column height width"),
        *_fields(c_int32, "k channels columns columns_padded groups bias border"),
        *_fields(c_int32, "pixels pixels_per_slice"),
        *_fields(c_int32, "stride_h stride_w dilation_h dilation_w pad_top pad_left"),
        *_fields(FastDivisor, "k_tiles out_height out_width kernel_area kernel_width"),
    ]


class ReduceParams(ctypes.Structure):
    _fields_ = [
        *_fields(pointer, "partial dw db"),
        *_fields(c_int64, "dw_k dw_channel dw_row dw_column elements"),
        *_fields(c_int32, "slices columns"),
        *_fields(FastDivisor, "columns_padded kernel_area kernel_width"),
    ]


def slots(struct: type[ctypes.Structure], **buffers: str | tuple[str, int]) -> tuple[PointerSlot, ...]:
    """Pointer fields of a struct and the buffer (with a byte offset) that each one points into."""
    found = []
    for name, buffer in buffers.items():
        where, offset = buffer if isinstance(buffer, tuple) else (buffer, 0)
        found.append(PointerSlot(getattr(struct, name).offset, where, offset))
    return tuple(found)


# ---- What goes wrong while planning, in words for the person who asked.


class PlanError(RuntimeError):
    """No kernel of polyconv can solve this problem; the message says why."""


def int32(value: int, what: str) -> int:
    """``value``, or an error that names it: the kernels hold it in 32 bits."""
    if not -(2**31) <= value < 2**31:
        raise PlanError(f"{what} is {value}; polyconv's CUDA kernels take at most {2**31 - 1}")
    return value


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

    def min_blocks(self, weight: int) -> int:
        """Blocks per multiprocessor to ask of the compiler for a loader of the given weight.

        64 accumulators and a lean loader (weight 0) just fit 128 registers: 512 threads on a multiprocessor. Each step
        of weight gives up 128 of them, so that what the loader carries is never spilled.
        """
        weight += self.m > self.threads or self.threads < 128  # two pixels, or two rows of weights, per thread
        threads = (512, 384, 256, 256) if self.thread_m * self.thread_n == 64 else (768, 512, 512, 384)
        return max(1, threads[weight] // self.threads)


# ---- Plans for fprop and dgrad as one implicit GEMM (kernels/gather_gemm.cuh).

DEPTH = 8
"""Reduction rows per step (``kDepth`` in gemm_tile.cuh)."""
BORDERS = {PaddingMode.ZEROS: 0, PaddingMode.REFLECT: 1, PaddingMode.REPLICATE: 2, PaddingMode.CIRCULAR: 3}
MOST_GROUPS = 65535
"""Groups are the grid's y dimension."""


@dataclass(frozen=True)
class Roles:
    """Which tensor plays which part: fprop gathers x and writes y, dgrad gathers y and writes x."""

    source: str
    written: str
    source_size: Pair
    written_size: Pair
    source_strides: Strides
    written_strides: Strides
    channels: int
    """Source channels of a group."""
    outputs: int
    """Written channels of a group."""
    w_output: int
    """Element stride of the weight per written channel."""
    w_channel: int
    """Element stride of the weight per source channel."""
    phases_h: tuple[Phase, ...]
    phases_w: tuple[Phase, ...]
    border: PaddingMode


def roles(problem: Problem) -> Roles:
    """The problem in the kernel's own words. A border of no width counts as zeros, whatever its mode."""
    channels, outputs = problem.channels_per_group
    top, _, left, _ = problem.padding
    border = problem.padding_mode if any(problem.padding) else PaddingMode.ZEROS
    (r, s), (sh, sw), (dh, dw) = problem.kernel, problem.stride, problem.dilation
    k_stride, c_stride, _, _ = problem.w_strides
    if problem.kind is Pass.FPROP:
        out_h, out_w = problem.out_size
        return Roles(
            "x",
            "y",
            problem.in_size,
            problem.out_size,
            problem.x_strides,
            problem.y_strides,
            channels,
            outputs,
            k_stride,
            c_stride,
            forward_phases(out_h, r, sh, dh, top),
            forward_phases(out_w, s, sw, dw, left),
            border,
        )
    in_h, in_w = problem.in_size
    if border is PaddingMode.ZEROS:
        phases_h, phases_w = gradient_phases(in_h, r, sh, dh, top), gradient_phases(in_w, s, sw, dw, left)
    else:
        # A pixel's images outside fall into other residues of the stride than the pixel: every tap is tried.
        phases_h = (Phase(0, 1, in_h, 0, 1, -dh, r, 0, 1),)
        phases_w = (Phase(0, 1, in_w, 0, 1, -dw, s, 0, 1),)
    return Roles(
        "y",
        "x",
        problem.out_size,
        problem.in_size,
        problem.y_strides,
        problem.x_strides,
        outputs,
        channels,
        c_stride,
        k_stride,
        phases_h,
        phases_w,
        border,
    )


@dataclass(frozen=True)
class LoaderKind:
    """One way to gather (a loader of gather_gemm.cuh) and what it costs per element."""

    name: str
    call: str
    """C++ call with ``{tile}`` to fill in."""
    weight: int
    """How many registers it carries: 0 few, 1 more, 2 many."""
    tabulated: bool
    gather_instructions: float


TAPS = LoaderKind(
    "taps", "polyconv::gather_gemm<{tile}, polyconv::TapMajorLoader<{tile}, false>>(params);", 0, False, 2.5
)
TAPS_VECTOR = LoaderKind(
    "taps_vector", "polyconv::gather_gemm<{tile}, polyconv::TapMajorLoader<{tile}, true>>(params);", 1, False, 1.0
)
POINTWISE = LoaderKind(
    "pointwise", "polyconv::gather_gemm<{tile}, polyconv::PointwiseLoader<{tile}>>(params);", 1, False, 0.5
)
ROWS = LoaderKind(
    "rows",
    "polyconv::gather_gemm<{tile}, polyconv::RowLoader<{tile}, polyconv::Gather::kZeros>>(params);",
    1,
    True,
    9.0,
)
ROWS_BORDERED = LoaderKind(
    "rows_bordered",
    "polyconv::gather_gemm<{tile}, polyconv::RowLoader<{tile}, polyconv::Gather::kBordered>>(params);",
    1,
    True,
    24.0,
)
FOLDED = LoaderKind("folded", "polyconv::gather_folded<{tile}>(params);", 2, True, 30.0)


def gather_kernel(tile: GemmTile, loader: LoaderKind) -> KernelSpec:
    return KernelSpec(
        stem="gather_gemm",
        symbol=f"gather_{loader.name}_{tile.name}",
        body=loader.call.format(tile=tile.cpp),
        params="polyconv::GatherParams",
        params_bytes=ctypes.sizeof(GatherParams),
        threads=tile.threads,
        min_blocks=tile.min_blocks(loader.weight),
    )


PACK = KernelSpec(
    stem="pack_weights",
    symbol="pack_weights",
    body="polyconv::pack_weights(params);",
    params="polyconv::PackParams",
    params_bytes=ctypes.sizeof(PackParams),
    threads=256,
)


def refusal(loader: LoaderKind, problem: Problem, r: Roles) -> str | None:
    """Why a loader cannot gather this problem, or None."""
    zeros = r.border is PaddingMode.ZEROS
    if loader is FOLDED:
        return None if problem.kind is Pass.DGRAD and not zeros else "only for the gradient of a border of image values"
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


def gather_launches(problem: Problem, tile: GemmTile, loader: LoaderKind) -> Schedule:
    """The launches of one candidate."""
    r = roles(problem)
    outputs_padded = round_up(r.outputs, tile.n)
    found: list[Launch] = []
    workspace = 0
    for phases_h in _chunks(r.phases_h):
        for phases_w in _chunks(r.phases_w):
            first_rows, total = [], 0
            for h in phases_h:
                for w in phases_w:
                    first_rows.append(total)
                    total += round_up(h.taps * w.taps * r.channels, DEPTH)
            table_at = workspace
            packed_at = round_up(table_at + (16 * total if loader.tabulated else 0), 256)
            # One step of slack: the kernel's last load goes past the last row, and its values are not used.
            workspace = round_up(packed_at + 4 * (problem.groups * total + DEPTH) * outputs_padded, 256)
            tables = _PhaseTables(phases_h, phases_w, tuple(first_rows), total)
            if total:
                found.append(_pack(problem, r, tables, loader, outputs_padded, table_at, packed_at))
            found += _gather(problem, r, tables, tile, loader, outputs_padded, table_at, packed_at)
    longest = max(h.taps * w.taps for h in r.phases_h for w in r.phases_w) * r.channels
    if loader is FOLDED:
        top, bottom, left, right = (max(side, 0) for side in problem.padding)
        longest *= (1 + max(2, top + bottom)) * (1 + max(2, left + right))
    return Schedule(tuple(found), workspace, (longest + problem.bias,))


@dataclass(frozen=True)
class _PhaseTables:
    h: tuple[Phase, ...]
    w: tuple[Phase, ...]
    first_rows: tuple[int, ...]
    rows: int

    def fill(self, params: GatherParams | PackParams) -> None:
        for i, phase in enumerate(self.h):
            params.phase_h[i] = AxisPhase.of(phase)
        for i, phase in enumerate(self.w):
            params.phase_w[i] = AxisPhase.of(phase)
        for i, row in enumerate(self.first_rows):
            params.first_row[i] = row
        params.phases_w = len(self.w)
        params.packed_rows = int32(self.rows, "the number of weight rows (taps times channels)")
        params.tap_step_h, params.tap_step_w = self.h[0].tap_step, self.w[0].tap_step


def _pack(
    problem: Problem,
    r: Roles,
    tables: _PhaseTables,
    loader: LoaderKind,
    outputs_padded: int,
    table_at: int,
    packed_at: int,
) -> Launch:
    p = PackParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
    tables.fill(p)
    p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
    p.w_output, p.w_channel = r.w_output, r.w_channel
    p.w_row, p.w_column = problem.w_strides[2:]
    p.output_tiles = -(-outputs_padded // 32)
    p.table_channel = r.source_strides[1]
    if loader is ROWS:  # the other row loaders fold the coordinate first and add rows and columns themselves
        p.table_row, p.table_column = pixel_strides(r.source_strides, r.source)
    phases = len(tables.first_rows)
    where = {"packed": ("workspace", packed_at)}
    if loader.tabulated:
        where["table"] = ("workspace", table_at)
    grid = (int32(p.output_tiles * problem.groups, "the number of weight tiles"), -(-r.channels // 8), phases)
    return Launch(PACK, grid, (PACK.threads, 1, 1), 0, bytes(p), slots(PackParams, w="w", **where))


def _gather(
    problem: Problem,
    r: Roles,
    tables: _PhaseTables,
    tile: GemmTile,
    loader: LoaderKind,
    outputs_padded: int,
    table_at: int,
    packed_at: int,
) -> Iterator[Launch]:
    spec = gather_kernel(tile, loader)
    p = GatherParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
    tables.fill(p)
    p.source_batch, p.source_channel = r.source_strides[:2]
    p.source_channel_bytes = 4 * p.source_channel
    p.packed_step_bytes = 4 * DEPTH * outputs_padded
    p.next_tap_bytes = 4 * (p.tap_step_w * r.source_strides[3] - r.channels * p.source_channel)
    p.written_batch, p.written_channel = r.written_strides[:2]
    p.source_row, p.source_column = pixel_strides(r.source_strides, r.source)
    p.written_row, p.written_column = pixel_strides(r.written_strides, r.written)
    p.source_height, p.source_width = r.source_size
    channel_tiles = -(-r.outputs // tile.n)
    p.channel_tiles = FastDivisor.of(channel_tiles)
    p.written_vector = _written_vector(problem, r)
    p.border = BORDERS[r.border]
    crop_top, crop_bottom, crop_left, crop_right = (max(-side, 0) for side in problem.padding)
    p.image_top, p.image_left = crop_top, crop_left
    p.image_height = r.written_size[0] - crop_top - crop_bottom
    p.image_width = r.written_size[1] - crop_left - crop_right
    p.pad_top, p.pad_bottom, p.pad_left, p.pad_right = (max(side, 0) for side in problem.padding)
    p.stride_h, p.stride_w = FastDivisor.of(problem.stride[0]), FastDivisor.of(problem.stride[1])
    where: dict[str, str | tuple[str, int]] = {"source": r.source, "packed": ("workspace", packed_at)}
    if loader.tabulated:
        where["table"] = ("workspace", table_at)
    if problem.kind is Pass.FPROP and problem.bias:
        where["bias"] = "bias"

    # Flattened pixels must stay below 2^31: first whole images per launch, then rows of one image.
    most_rows, most_columns = max(h.count for h in tables.h), max(w.count for w in tables.w)
    limit = (DIVIDEND_LIMIT - 1) // channel_tiles // tile.m * tile.m
    images = min(problem.batch, max(1, limit // (most_rows * most_columns)))
    lines = most_rows if images > 1 else min(most_rows, limit // most_columns)
    for first_image in range(0, problem.batch, images):
        for first_line in range(0, most_rows, max(lines, 1)):
            p.batch = min(images, problem.batch - first_image)
            for i, h in enumerate(tables.h):
                p.phase_h[i] = AxisPhase.of(h.cut(min(first_line, h.count), lines))
                p.phase_h[i].count.divisor = max(0, min(lines, h.count - first_line))
            tiles = -(-p.batch * min(lines, most_rows) * most_columns // tile.m) * channel_tiles
            written = (r.written, 4 * first_image * r.written_strides[0])
            source = (r.source, 4 * first_image * r.source_strides[0])
            yield Launch(
                spec,
                (tiles, problem.groups, len(tables.first_rows)),
                (tile.threads, 1, 1),
                0,
                bytes(p),
                slots(GatherParams, **{**where, "source": source, "written": written}),
            )


def _written_vector(problem: Problem, r: Roles) -> int:
    """How the epilogue may store: 1 four pixels, 2 four channels, 0 one element at a time."""
    if len(r.phases_h) * len(r.phases_w) == 1 and dense_pixels(r.written_strides, r.written_size, problem):
        return 1
    return 2 if dense_channels(r.written_strides, r.outputs, problem) else 0


def dense_pixels(strides: Strides, size: Pair, problem: Problem) -> bool:
    batch, channel, row, column = strides
    dense = column == 1 and row == size[1] and size[0] * size[1] % 4 == 0
    return dense and batch % 4 == 0 and channel % 4 == 0 and problem.vector_aligned


def dense_channels(strides: Strides, channels: int, problem: Problem) -> bool:
    batch, channel, row, column = strides
    quads = channels % 4 == 0 and batch % 4 == 0 and row % 4 == 0 and column % 4 == 0
    return channel == 1 and quads and problem.vector_aligned


def pixel_strides(strides: Strides, what: str) -> Pair:
    return int32(strides[2], f"the row stride of {what}"), int32(strides[3], f"the column stride of {what}")


def _chunks(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, ...]]:
    for first in range(0, len(phases), MAX_PHASES):
        yield phases[first : first + MAX_PHASES]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---- Plans for wgrad as an implicit GEMM over pixels (kernels/wgrad_gemm.cuh), and its second stage.

MOST_PIXELS_PER_SLICE = 16384
"""Longest sum in one accumulator: keeps the rounding error of sums over millions of pixels small."""
MOST_SLICES = 65535
"""Slices are the grid's z dimension."""


def wgrad_kernel(tile: GemmTile, vector: bool, bordered: bool) -> KernelSpec:
    flags = f"{'true' if vector else 'false'}, {'true' if bordered else 'false'}"
    return KernelSpec(
        stem="wgrad_gemm",
        symbol=f"wgrad_{tile.name}" + "_vector" * vector + "_bordered" * bordered,
        body=f"polyconv::wgrad_gemm<{tile.cpp}, {flags}>(params);",
        params="polyconv::WgradParams",
        params_bytes=ctypes.sizeof(WgradParams),
        threads=tile.threads,
        min_blocks=tile.min_blocks(weight=0 if tile.threads == 256 and vector and not bordered else 1),
    )


REDUCE = KernelSpec(
    stem="reduce_partials",
    symbol="reduce_partials",
    body="polyconv::reduce_partials(params);",
    params="polyconv::ReduceParams",
    params_bytes=ctypes.sizeof(ReduceParams),
    threads=256,
)


def bordered(problem: Problem) -> bool:
    return problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding)


def columns_of(problem: Problem) -> int:
    """Columns of one group's dw: channels times kernel area."""
    return problem.channels_per_group[0] * problem.kernel[0] * problem.kernel[1]


def slicing(problem: Problem, tile: GemmTile, resident: int, sms: int, workspace: int) -> tuple[int, int]:
    """Pixels per slice and number of slices.

    Enough slices to fill the device evenly and to keep each sum short, few enough for the workspace.
    """
    out_h, out_w = problem.out_size
    pixels = problem.batch * out_h * out_w
    columns = columns_of(problem) + problem.bias
    k = problem.channels_per_group[1]
    per_slice = 4 * problem.out_channels * round_up(columns, 4)
    tiles = -(-k // tile.m) * -(-columns // tile.n) * problem.groups
    wanted = max(-(-pixels // MOST_PIXELS_PER_SLICE), -(-2 * sms * resident // tiles))
    most = min(max(1, workspace // per_slice), max(1, pixels // 64), MOST_SLICES)
    pixels_per_slice = round_up(-(-pixels // min(wanted, most)), 8)
    return pixels_per_slice, -(-pixels // pixels_per_slice)


def wgrad_launches(problem: Problem, tile: GemmTile, vector: bool, sms: int, workspace: int) -> Schedule:
    """The launches of one candidate: the partial sums, then their reduction."""
    spec = wgrad_kernel(tile, vector, bordered(problem))
    pixels_per_slice, _ = slicing(problem, tile, spec.min_blocks, sms, workspace)
    channels, k = problem.channels_per_group
    columns = columns_of(problem)
    columns_padded = round_up(columns + problem.bias, 4)
    out_h, out_w = problem.out_size
    p = WgradParams(height=problem.in_size[0], width=problem.in_size[1], k=k, channels=channels, groups=problem.groups)
    p.columns, p.columns_padded, p.bias = int32(columns, "channels times kernel area"), columns_padded, problem.bias
    p.x_batch, p.x_channel = problem.x_strides[:2]
    p.dy_batch, p.dy_channel = problem.y_strides[:2]
    p.x_row, p.x_column = pixel_strides(problem.x_strides, "x")
    p.dy_row, p.dy_column = pixel_strides(problem.y_strides, "the gradient of y")
    p.border = BORDERS[problem.padding_mode] if bordered(problem) else 0
    p.stride_h, p.stride_w = problem.stride
    p.dilation_h, p.dilation_w = problem.dilation
    p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
    k_tiles, column_tiles = -(-k // tile.m), -(-(columns + problem.bias) // tile.n)
    p.k_tiles, p.out_height, p.out_width = FastDivisor.of(k_tiles), FastDivisor.of(out_h), FastDivisor.of(out_w)
    p.kernel_area = FastDivisor.of(problem.kernel[0] * problem.kernel[1])
    p.kernel_width = FastDivisor.of(problem.kernel[1])
    p.pixels_per_slice = pixels_per_slice

    # Flattened pixels must stay below 2^31: whole images per launch, each launch with slices of its own.
    found = []
    images = min(problem.batch, max(1, (DIVIDEND_LIMIT - 1 - pixels_per_slice) // (out_h * out_w)))
    int32(out_h * out_w + pixels_per_slice, "the number of pixels of one image of y")
    slices = 0
    for first_image in range(0, problem.batch, images):
        p.pixels = min(images, problem.batch - first_image) * out_h * out_w
        here = -(-p.pixels // pixels_per_slice)
        where = {
            "x": ("x", 4 * first_image * problem.x_strides[0]),
            "dy": ("y", 4 * first_image * problem.y_strides[0]),
            "partial": ("workspace", 4 * slices * problem.out_channels * columns_padded),
        }
        grid = (k_tiles * column_tiles, problem.groups, here)
        found.append(Launch(spec, grid, (tile.threads, 1, 1), 0, bytes(p), slots(WgradParams, **where)))
        slices += here
    found.append(reduction(problem, slices, columns, columns_padded))
    scratch = 4 * slices * problem.out_channels * columns_padded
    return Schedule(tuple(found), scratch, (pixels_per_slice, slices))


def reduction(problem: Problem, slices: int, columns: int, columns_padded: int) -> Launch:
    """The launch that adds the slices' partial sums, which start at the beginning of the workspace."""
    p = ReduceParams(slices=slices, columns=columns, elements=problem.out_channels * columns_padded)
    int32(p.elements, "the number of weights")
    p.dw_k, p.dw_channel, p.dw_row, p.dw_column = problem.w_strides
    p.columns_padded = FastDivisor.of(columns_padded)
    p.kernel_area = FastDivisor.of(problem.kernel[0] * problem.kernel[1])
    p.kernel_width = FastDivisor.of(problem.kernel[1])
    where = {"partial": "workspace", "dw": "dw"}
    if problem.bias:
        where["db"] = "db"
    grid = (-(-p.elements // REDUCE.threads), 1, 1)
    return Launch(REDUCE, grid, (REDUCE.threads, 1, 1), 0, bytes(p), slots(ReduceParams, **where))


# ---- The ways that sum the products of the definition: implicit GEMMs, and channel by channel for depthwise problems.


@dataclass(frozen=True)
class GatherWay:
    """fprop or dgrad as an implicit GEMM."""

    tile: GemmTile
    loader: LoaderKind
    direct = True

    @property
    def name(self) -> str:
        return gather_kernel(self.tile, self.loader).symbol

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if self.loader is TAPS_VECTOR and DEPTH * self.tile.m // self.tile.threads < 4:
            return "a thread gathers fewer than four channels"
        return refusal(self.loader, problem, roles(problem))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return gather_launches(problem, self.tile, self.loader)


@dataclass(frozen=True)
class WgradWay:
    """wgrad as an implicit GEMM."""

    tile: GemmTile
    vector: bool
    """Four pixels of dy in one load."""
    bordered: bool
    direct = True

    @property
    def name(self) -> str:
        return self._kernel().symbol

    def _kernel(self) -> KernelSpec:
        return wgrad_kernel(self.tile, self.vector, self.bordered)

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if self.bordered is not bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if self.vector and not dense_pixels(problem.y_strides, problem.out_size, problem):
            return "pixels of dy are not dense quads"
        return None

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return wgrad_launches(problem, self.tile, self.vector, sms, workspace)


# ---- What runs, by pass, in order of preference: the first that does not refuse the tensors at hand is taken.

EXPORTED = "8x32x512x512, 64 channels, kernel 5x9, padding 2x4, dilation 2x3"
# Chosen by polyconv's cost model for a Tesla V100.
WAYS = {
    Pass.FPROP: [
        GatherWay(GemmTile(4, 1, 4, 8, 8), TAPS),
        GatherWay(GemmTile(4, 1, 4, 8, 8), ROWS),
    ],
    Pass.DGRAD: [
        GatherWay(GemmTile(4, 1, 8, 8, 8), TAPS),
        GatherWay(GemmTile(4, 1, 8, 8, 8), ROWS),
    ],
    Pass.WGRAD: [
        WgradWay(GemmTile(2, 2, 4, 8, 8), vector=True, bordered=False),
        WgradWay(GemmTile(2, 2, 4, 8, 8), vector=False, bordered=False),
    ],
}


# ---- The part that meets torch: builds the extension once per process, launches the kernels, differentiates.

WORKSPACE = 64 * 2**20
"""Bytes of scratch memory that a convolution may take."""

_lock = threading.Lock()
_loaded: list[Any] = []


def extension() -> Any:
    """The compiled kernels. The first caller in a process builds them (torch keeps the result on disk); others wait."""
    with _lock:
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
