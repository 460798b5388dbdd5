"""KernelBench level 1, problem 80, on CUDA kernels of its own.

    model = ModelNew().cuda()
    y = model(torch.rand(8, 32, 512, 512, device="cuda"))

conv2d: 8x32x512x512, 64 channels, kernel 5x9, padding 2x4, dilation 2x3
  forward          F(4,5) along H, F(4,5) taps 4+5 nested F(2,2) along W, one after the other; 64 channels per block
  input gradient   F(4,5) along H, F(4,5) taps 4+5 nested F(2,2) along W, one after the other; 32 channels per block
  weight gradient  F(4,5) along H, F(4,5) taps 4+5 along W, in its transposed form; 64x32 channels per block

This file imports only torch, 2.0.1 or newer. At the first import, torch compiles the kernels with nvcc, 11.8 or newer.
They run on GPUs of compute capability 7.0 and higher, for any batch, image size and strides. The direct kernels below
serve GPUs with too little shared memory for the others, and other arguments of the constructor.

Parts, by their first lines:
     45  CUDA source CONV2D: direct kernels, for any geometry
    333  winograd/nonfused_layout     Nonfused Winograd pipeline for dense correlations
    388  winograd/nonfused_filter     Filter transform of the nonfused pipeline
    546  winograd/nonfused_input      Input transform along H of the nonfused pipeline
    608  winograd/nonfused_gemm       GEMM of the nonfused pipeline
    881  winograd/nonfused_output     Last step of the nonfused pipeline
    973  winograd/wgrad               Winograd weight gradient
   1459  winograd/wgrad_output        Second stage of winograd/wgrad
   1540  launches of these kernels
   1769  Python: compilation
   1832  autograd
   1859  module Conv2d
   1888  module ModelNew

Written by polyconv 0.1.0 for a Tesla V100: polyconv export kb80
"""

import _thread
import contextlib
import ctypes
import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.utils import cpp_extension

CONV2D_DIRECT = r"""
#include <cstdio>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

using i64 = long long;
using u32 = unsigned int;

// Addresses, strides in elements, sizes; every field has 8 bytes.
struct Call {
  float *x, *w, *y, *bias;  // tensors or, in the place of those that are written, gradients; bias may be null
  float* workspace;
  i64 x_batch, x_channel, x_row, x_column;  // strides of x, or of its gradient
  i64 y_batch, y_channel, y_row, y_column;  // strides of y, or of its gradient (0 in an expanded tensor)
  i64 batch, height, width, out_height, out_width;
  cudaStream_t stream;
};

constexpr i64 kWorkspace = 64 << 20;  // bytes

// Message for a RuntimeError if the last launch failed, else null. CUDA's error is cleared, so it is reported once.
static const char* failed(const char* kernel) {
  static thread_local char message[256];
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return nullptr;
  snprintf(message, sizeof message, "%s could not be launched: %s", kernel, cudaGetErrorString(error));
  return message;
}

static i64 ceil_div(i64 a, i64 b) {
  return (a + b - 1) / b;
}

// Offsets of elements in the tensors, and the values of the border around an image.
constexpr int kGroupInputs = kInChannels / kGroups, kGroupOutputs = kOutChannels / kGroups;  // channels of one group
constexpr int kKernelArea = kKernelH * kKernelW, kFilter = kGroupInputs * kKernelArea;

DEVICE i64 in_x(const Call& c, i64 image, i64 channel, i64 y, i64 x) {
  return image * c.x_batch + channel * c.x_channel + y * c.x_row + x * c.x_column;
}

DEVICE i64 in_y(const Call& c, i64 image, i64 channel, i64 y, i64 x) {
  return image * c.y_batch + channel * c.y_channel + y * c.y_row + x * c.y_column;
}

// Column, row and image of a pixel.
DEVICE int3 pixel_at(u32 index, u32 height, u32 width) {
  return make_int3(index % width, index / width % height, index / width / height);
}

// x at a position in the image or its border; `at` is the address that the position would have.
DEVICE float read_x(const Call& c, const float* at, int y, int x) {
  return u32(y) < u32(c.height) && u32(x) < u32(c.width) ? *at : 0.f;
}

// A weight gradient is computed in slices of the pixels, which fill the device and keep sums short. Their partial sums
// lie in the workspace as [slice][output channel][filter, bias], and are added in ascending order: the result is
// deterministic.
constexpr i64 kSlice = i64(kOutChannels) * (kFilter + 1);  // elements

__global__ void __launch_bounds__(128) sum_slices(const Call c, const int slices) {
  const i64 element = i64(blockIdx.x) * 128 + threadIdx.x, m = element / (kFilter + 1), n = element % (kFilter + 1);
  if (m >= kOutChannels || (n == kFilter && !c.bias)) return;
  float sum = 0.f;
  for (int slice = 0; slice < slices; slice++) sum += c.workspace[slice * kSlice + element];
  (n == kFilter ? c.bias[m] : c.w[m * kFilter + n]) = sum;
}

static const char* add_slices(const Call& c, int slices) {
  sum_slices<<<ceil_div(kSlice, 128), 128, 0, c.stream>>>(c, slices);
  return failed("sum_slices");
}

// Direct kernels, for any geometry, image size and strides. Each computes one matrix product per group,
//   sums[m][n] = sum over k of a[k][m] * b[k][n]
//                      m                n                                k
//   forward            output channel   output pixel                     (input channel, tap)
//   input gradient     input channel    input pixel                      (output channel, tap)
//   weight gradient    output channel   (input channel, tap), and ones   output pixel of one slice
//
// A thread computes two columns of up to 32 sums. A step covers 8 k: b is read from global memory, a, which all threads
// need, from shared memory. If there are few columns, the k of a step are divided among the threads, too.
//
// One k: its offsets in both operands, and its shift relative to the position of a column.
struct Row {
  bool used;
  i64 a, b;
  int y, x;
};

// One column: address in b and position in the image, both before the shift; address in the result, and step per m.
struct Column {
  const float* b;
  int y, x;
  float* to;
  i64 step;
};

struct Product {
  static constexpr int kLanes = 128;  // threads along the columns

  const Call& c;
  const u32 plane;  // group, and phase or slice within it
  const u32 share;  // which part of a step

  __device__ float finished(u32, float sum) const { return sum; }
};

template <class P>
__global__ void __launch_bounds__(128, 3) direct(const Call c) {
  constexpr int kRows = P::kM < 32 ? (P::kM + 3) / 4 * 4 : 32, kTiles = (P::kM + kRows - 1) / kRows;  // in quads
  constexpr int kStep = 8 * 128 / P::kLanes;
  __shared__ __align__(16) float a[kStep][kRows + 4];
  __shared__ Row rows[kStep];
  const u32 columns = P::columns(c), tiles = (columns - 1) / (2 * P::kLanes) + 1, tile = blockIdx.x / kTiles;
  const u32 first_m = blockIdx.x % kTiles * kRows, n = tile % tiles * 2 * P::kLanes + threadIdx.x % P::kLanes;
  const P product{{c, tile / tiles, threadIdx.x / P::kLanes}};
  const Column column[2] = {product.column(min(n, columns - 1)), product.column(min(n + P::kLanes, columns - 1))};
  float sums[2][kRows] = {};
  for (u32 k = product.first; k < product.end; k += kStep) {
    const Row row = product.row(k + threadIdx.x % kStep);
    __syncthreads();
    if (threadIdx.x < kStep) rows[threadIdx.x] = row;
    for (int i = threadIdx.x / kStep; i < kRows; i += 128 / kStep)
      a[threadIdx.x % kStep][i] = row.used && first_m + i < P::kM ? product.a(row, first_m + i) : 0.f;
    __syncthreads();
    UNROLL for (int i = 0; i < 8; i++) {
      const Row at = rows[product.share * 8 + i];
      const float b[2] = {at.used ? product.b(at, column[0]) : 0.f, at.used ? product.b(at, column[1]) : 0.f};
      UNROLL for (int j = 0; j < 2 * kRows; j++) sums[j % 2][j / 2] += a[product.share * 8 + i][j / 2] * b[j % 2];
    }
  }
  UNROLL for (int j = 0; j < 2 * kRows; j++) {
    const u32 m = first_m + j / 2;
    if (m < P::kM && n + j % 2 * P::kLanes < columns && column[j % 2].to)
      column[j % 2].to[m * column[j % 2].step] = product.finished(m, sums[j % 2][j / 2]);
  }
}

template <class P>
static const char* launch_direct(const Call& c) {
  const i64 columns = P::columns(c), blocks = ceil_div(columns, 2 * P::kLanes) * ceil_div(P::kM, 32) * P::planes(c);
  if (max(max(columns, blocks), c.batch * c.out_height * c.out_width) > 0x7fffff00)
    return "the direct kernels count pixels and tiles with 31 bits: give a smaller batch";
  if (blocks > 0) direct<P><<<blocks, 128, 0, c.stream>>>(c);
  return failed("direct");
}

struct Forward : Product {
  static constexpr int kM = kGroupOutputs;
  const u32 first = 0, end = kFilter;

  static __host__ __device__ i64 columns(const Call& c) { return c.batch * c.out_height * c.out_width; }
  static i64 planes(const Call&) { return kGroups; }
  __device__ Row row(u32 k) const {
    const u32 channel = plane * kGroupInputs + k / kKernelArea;
    const u32 y = k / kKernelW % kKernelH * kDilationH, x = k % kKernelW * kDilationW;
    return {k < end, i64(plane) * kGroupOutputs * kFilter + k, in_x(c, 0, channel, y, x), int(y), int(x)};
  }
  __device__ Column column(u32 n) const {
    const int3 p = pixel_at(n, c.out_height, c.out_width);
    const int y = p.y * kStrideH - kPadTop, x = p.x * kStrideW - kPadLeft;
    return {c.x + in_x(c, p.z, 0, y, x), y, x, c.y + in_y(c, p.z, plane * kGroupOutputs, p.y, p.x), c.y_channel};
  }
  __device__ float a(Row row, u32 m) const { return c.w[row.a + i64(m) * kFilter]; }
  __device__ float b(Row row, Column at) const { return read_x(c, at.b + row.b, at.y + row.y, at.x + row.x); }
  __device__ float finished(u32 m, float sum) const { return c.bias ? sum + c.bias[plane * kGroupOutputs + m] : sum; }
};

static const char* direct_forward(const Call& c) { return launch_direct<Forward>(c); }

struct InputGradient : Product {
  static constexpr int kM = kGroupInputs;
  const u32 first = 0, end = kGroupOutputs * kKernelArea;

  static __host__ __device__ i64 columns(const Call& c) { return c.batch * c.height * c.width; }
  static i64 planes(const Call&) { return kGroups; }
  __device__ Row row(u32 k) const {
    const int3 tap = pixel_at(k, kKernelH, kKernelW);  // z is the output channel
    const int y = -tap.y * kDilationH, x = -tap.x * kDilationW;
    const i64 channel = plane * kGroupOutputs + tap.z;
    return {k < end, channel * kFilter + k % kKernelArea, in_y(c, 0, channel, y, x), y, x};
  }
  __device__ Column column(u32 n) const {
    const int3 p = pixel_at(n, c.height, c.width);
    const int y = p.y + kPadTop, x = p.x + kPadLeft;
    return {c.y + in_y(c, p.z, 0, y, x), y, x, c.x + in_x(c, p.z, plane * kGroupInputs, p.y, p.x), c.x_channel};
  }
  __device__ float a(Row row, u32 m) const { return c.w[row.a + i64(m) * kKernelArea]; }
  __device__ float b(Row row, Column at) const { return read_y(at.b + row.b, at.y + row.y, at.x + row.x); }
  // y at a position of the input; 0 where the taps skip it. `at` is its address if the strides are 1.
  __device__ float read_y(const float* at, int y, int x) const {
    const int v = y / kStrideH, u = x / kStrideW;
    if (y % kStrideH || x % kStrideW || u32(v) >= c.out_height || u32(u) >= c.out_width) return 0.f;
    return at[in_y(c, 0, 0, v - y, u - x)];
  }
};

static const char* direct_input_gradient(const Call& c) { return launch_direct<InputGradient>(c); }

struct WeightGradient : Product {
  static constexpr int kM = kGroupOutputs, kLanes = kFilter < 128 && kSlice < 1 << 20 ? 8 : 128, kShares = 128 / kLanes;
  const u32 count = slices(c), group = plane / count, slice = plane % count;
  const u32 first = pixels(c) * slice / count, end = pixels(c) * (slice + 1) / count;

  static __host__ __device__ i64 pixels(const Call& c) { return c.batch * c.out_height * c.out_width; }
  static __host__ __device__ i64 columns(const Call& c) { return kFilter + (c.bias != nullptr); }
  static __host__ __device__ i64 slices(const Call& c) {
    const i64 wanted = max(pixels(c) / 16384 / kShares, 640 / (i64(kGroups) * (kM / 32 + 1) * (kFilter / 256 + 1)));
    return max(min(min(wanted, pixels(c) / 64), kWorkspace / 4 / kSlice / kShares), 1ll);
  }
  static i64 planes(const Call& c) { return kGroups * slices(c); }
  __device__ Row row(u32 k) const {
    const int3 p = pixel_at(k, c.out_height, c.out_width);
    const int y = p.y * kStrideH - kPadTop, x = p.x * kStrideW - kPadLeft;
    return {k < end, in_y(c, p.z, group * kGroupOutputs, p.y, p.x), in_x(c, p.z, group * kGroupInputs, y, x), y, x};
  }
  __device__ Column column(u32 n) const {
    const int y = n / kKernelW % kKernelH * kDilationH, x = n % kKernelW * kDilationW;
    const float* b = n == kFilter ? nullptr : c.x + in_x(c, 0, n / kKernelArea, y, x);
    float* to = c.workspace + (slice * kShares + share) * kSlice + i64(group) * kM * (kFilter + 1) + n;
    return {b, y, x, to, kFilter + 1};
  }
  __device__ float a(Row row, u32 m) const { return c.y[row.a + m * c.y_channel]; }
  __device__ float b(Row row, Column at) const {
    return at.b ? read_x(c, at.b + row.b, at.y + row.y, at.x + row.x) : 1.f;
  }
};

static const char* direct_weight_gradient(const Call& c) {
  const char* error = launch_direct<WeightGradient>(c);
  return error ? error : add_slices(c, WeightGradient::slices(c) * WeightGradient::kShares);
}
"""

CONV2D_PLANNED = r"""
// Blocks per multiprocessor that a kernel's registers must allow. From sm_100 on, ptxas keeps more loads in flight and
// would spill at the occupancy that exactly fits the others: request a quarter less there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define MIN_BLOCKS(blocks) ((blocks) - ((blocks) > 1) * ((blocks) + 3) / 4)
#else
#define MIN_BLOCKS(blocks) (blocks)
#endif

// Quotient by a divisor known on the host: one high multiplication and one shift. For dividends below 2^31.
struct FastDivisor {
  u32 divisor, multiplier, shift;

  DEVICE u32 quotient(u32 dividend) const { return divisor == 1 ? dividend : __umulhi(dividend, multiplier) >> shift; }
};

// Special registers, read again at each call. Values that an epilogue derives from them cannot be kept live across the
// main loop, where every register is an accumulator.
DEVICE u32 fresh_thread() {
  u32 v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
DEVICE u32 fresh_block_x() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
}

// Returns the pointer with its origin hidden from the compiler, which could otherwise turn a chain of additions back
// into multiples of the stride, computed on the FP32 pipe.
DEVICE const float* opaque(const float* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

DEVICE const float* add_bytes(const float* pointer, i64 bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(pointer) + bytes);
}
DEVICE float* add_bytes(float* pointer, i64 bytes) {
  return reinterpret_cast<float*>(reinterpret_cast<char*>(pointer) + bytes);
}

DEVICE float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
DEVICE void store4(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }

// Stores four floats to global memory in one instruction. PTX, because the compiler prefers four scalar stores, with
// four times the memory transactions, to moving accumulators into neighbouring registers.
DEVICE void store4_global(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// ---- winograd/nonfused_layout ---------------------------------------------------------------------------------------
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

// Channels that winograd/nonfused_gemm sums between two barriers. X and U are padded to whole chunks.
enum : int { kChannelChunk = 8 };

// Classes per axis, times segments along H, in one launch. An exported file has as many as it needs.
constexpr int kMaxParts = 1;

// First position that the taps of one class (and segment) read, and the end of what any output needs of the image.
// Positions beyond are not read, so that an infinity there cannot reach a tile that extends beyond the outputs.
struct SourcePart {
  int read_first, read_end;
};

DEVICE void load_vector(const float* from, float* to) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Loads data that is read once, bypassing L1.
DEVICE void load_stream(const float* from, float* to) {
  const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Predicated store. With an `if`, the compiler would move all computations of the value into its branch, and the loads
// of several such stores could not overlap.
DEVICE void store_vector_if(bool wanted, float* to, const float* from) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
               "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]), "r"(int(wanted))
               : "memory");
}

// Predicated load of four floats that no thread of the launch writes. Leaves `to` unchanged if not wanted.
DEVICE void load4_if(bool wanted, const float* from, float* to) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];}"
               : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
               : "l"(from), "r"(int(wanted)));
}

// ---- winograd/nonfused_filter ---------------------------------------------------------------------------------------
// Filter transform of the nonfused pipeline (winograd/nonfused_layout), along both axes, in the order of
// winograd/nonfused_gemm: U[point of H][group][k tile][chunk][point of W][8 channels][k of the tile]. Chunks of 8
// channels come segment by segment; if segments are nested, first all of U0 + U1, then U0 and U1 of each chunk in turn.
// Channels and k are zero-padded.
//
// A thread transforms the taps of one (k, channel); lanes are neighbours in k, so every store is coalesced.
// Grid: x = (group * k tiles + k tile) * channels / 8 + chunk. Block: 32 lanes x 8 channels.

// Taps of one class (and segment).
struct TapPart {
  int taps, tap_first, tap_stride;
};

struct NonfusedFilterParams {
  const float* w;
  float* u;
  i64 w_output, w_channel;
  int channels;                  // of the source, per group
  int channels_all;              // times classes and segments
  int chunks;                    // of 8 of these, zero-padded
  int outputs, k_tile;  // written channels of a group, of a tile; tiles
  FastDivisor source_channels;
  TapPart tap_part_h[kMaxParts], tap_class_w;
};
// F(4,5): 4 outputs of 5 taps from 8 products.
struct F45 {
  static constexpr int kM = 4, kLongest = 5, kPoints = 8;
  // 8 from 8 in 22 operations (8 add, 0 mul, 14 fma), depth 4.
  static DEVICE void input(const float* x, float* y) {
    const float t0 = x[4] - x[2], t1 = x[0] - x[6];
    y[0] = fmaf(t0, 5.25f, t1);
    const float t2 = x[2] + x[6], t3 = fmaf(x[4], -5.0f, t2), t4 = fmaf(x[4], 0.75f, t3), t5 = x[1] + x[5];
    const float t6 = fmaf(x[3], -5.0f, t5), t7 = fmaf(x[3], 0.75f, t6);
    y[1] = t4 + t7, y[2] = t4 - t7;
    const float t8 = fmaf(x[5], 3.0f, t6), t9 = fmaf(x[6], 3.0f, t3);
    y[3] = fmaf(t8, 2.0f, t9), y[4] = fmaf(t8, -2.0f, t9);
    const float t10 = fmaf(x[2], 3.0f, t3), t11 = fmaf(x[1], 3.0f, t6);
    y[5] = fmaf(t10, 2.0f, t11), y[6] = fmaf(t10, 2.0f, -t11);
    const float t12 = x[3] - x[5], t13 = x[7] - x[1];
    y[7] = fmaf(t12, 5.25f, t13);
  }
  // 4 from 8 in 16 operations (10 add, 0 mul, 6 fma), depth 4.
  static DEVICE void output(const float* x, float* y) {
    const float t0 = x[1] + x[2], t1 = x[0] + t0, t2 = x[3] + x[4], t3 = x[5] + x[6], t4 = t2 + t3;
    y[0] = t1 + t4;
    const float t5 = x[3] - x[4], t6 = x[5] - x[6], t7 = x[1] - x[2], t8 = fmaf(t6, 0.5f, t7);
    y[1] = fmaf(t5, 2.0f, t8);
    const float t9 = fmaf(t3, 0.25f, t0);
    y[2] = fmaf(t2, 4.0f, t9);
    const float t10 = x[7] + t7, t11 = fmaf(t6, 0.125f, t10);
    y[3] = fmaf(t5, 8.0f, t11);
  }
  // 8 from 5 in 18 operations (3 add, 3 mul, 12 fma), depth 4.
  static DEVICE void weights(const float* x, float* y) {
    const float t0 = x[1] + x[3], t1 = x[0] + x[2], t2 = x[4] + t1, t3 = t2 * -0.22222222f;
    y[1] = fmaf(t0, -0.22222222f, t3), y[2] = fmaf(t0, 0.22222222f, t3);
    const float t4 = fmaf(x[3], 4.0f, x[1]), t5 = x[0] * 0.0027777778f, t6 = fmaf(x[2], 0.011111111f, t5);
    const float t7 = fmaf(x[4], 0.044444446f, t6);
    y[3] = fmaf(t4, 0.0055555557f, t7), y[4] = fmaf(t4, -0.0055555557f, t7);
    const float t8 = fmaf(x[1], 4.0f, x[3]), t9 = x[4] * 0.022222223f, t10 = fmaf(x[2], 0.08888889f, t9);
    const float t11 = fmaf(x[0], 0.35555556f, t10);
    y[5] = fmaf(t8, 0.044444446f, t11), y[6] = fmaf(t8, -0.044444446f, t11), y[0] = x[0], y[7] = x[4];
  }
  // 8 from 4 in 12 operations (4 add, 0 mul, 8 fma), depth 2.
  static DEVICE void spread(const float* x, float* y) {
    const float t0 = x[0] + x[2], t1 = x[1] + x[3];
    y[1] = t0 + t1, y[2] = t0 - t1;
    const float t2 = fmaf(x[3], 4.0f, x[1]), t3 = fmaf(x[2], 4.0f, x[0]);
    y[3] = fmaf(t2, 2.0f, t3), y[4] = fmaf(t2, -2.0f, t3);
    const float t4 = fmaf(x[1], 4.0f, x[3]), t5 = fmaf(x[2], 0.25f, x[0]);
    y[5] = fmaf(t4, 0.125f, t5), y[6] = fmaf(t4, -0.125f, t5), y[0] = x[0], y[7] = x[3];
  }
  // 5 from 8 in 21 operations (6 add, 3 mul, 12 fma), depth 4.
  static DEVICE void collect(const float* x, float* y) {
    const float t0 = x[5] + x[6], t1 = x[1] + x[2], t2 = x[3] + x[4], t3 = fmaf(t2, 0.0027777778f, x[0]);
    const float t4 = fmaf(t1, -0.22222222f, t3);
    y[0] = fmaf(t0, 0.35555556f, t4);
    const float t5 = x[1] - x[2], t6 = x[5] - x[6], t7 = x[3] - x[4], t8 = t7 * 0.0055555557f;
    const float t9 = fmaf(t6, 0.17777778f, t8);
    y[1] = fmaf(t5, -0.22222222f, t9);
    const float t10 = t2 * 0.011111111f, t11 = fmaf(t0, 0.08888889f, t10);
    y[2] = fmaf(t1, -0.22222222f, t11);
    const float t12 = t7 * 0.022222223f, t13 = fmaf(t6, 0.044444446f, t12);
    y[3] = fmaf(t5, -0.22222222f, t13);
    const float t14 = fmaf(t0, 0.022222223f, x[7]), t15 = fmaf(t2, 0.044444446f, t14);
    y[4] = fmaf(t1, -0.22222222f, t15);
  }
};
// F(4,5) taps 4+5 nested F(2,2).
struct F45Nested : F45 {
  static constexpr int kTiles = 2, kPasses = 3, kOutputs = 8;
};
// F(4,5) taps 4+5.
struct F45x2 : F45 {
  static constexpr int kSegments = 2;
  static __device__ constexpr int first_tap(int i) { return i == 0 ? 0 : 4; }
  static __device__ constexpr int taps(int i) { return i == 0 ? 4 : 5; }
};

struct WeightTransform {
  // Taps of one segment along W, transformed along H.
  static DEVICE void along_h(const NonfusedFilterParams& p, const float* w, const TapPart& h,
                                                 const TapPart& class_w, int segment,
                                                 float (&t)[F45::kPoints][F45Nested::kLongest]) {
    const int first = segment * F45Nested::kM;
    const int last = segment + 1 < 2 ? first + F45Nested::kM : class_w.taps;
    UNROLL for (int j = 0; j < F45Nested::kLongest; j++) {
      float column[F45::kLongest], points[F45::kPoints];
      UNROLL for (int i = 0; i < F45::kLongest; i++)
        column[i] = w && i < h.taps && first + j < last
                        ? w[i64(h.tap_first + i * h.tap_stride) * 9 +
                            i64(class_w.tap_first + (first + j) * class_w.tap_stride)]
                        : 0.f;
      F45::weights(column, points);
      UNROLL for (int i = 0; i < F45::kPoints; i++) t[i][j] = points[i];
    }
  }

  static DEVICE void store(float* to, int next_point, const float* points) {
    UNROLL for (int point = 0; point < F45Nested::kPoints; point++) to[point * next_point] = points[point];
  }
};

__global__ void __launch_bounds__(256, 1) winograd_nonfused_filter(const __grid_constant__ NonfusedFilterParams p) {
  const int chunk = blockIdx.x % p.chunks, k_tile = blockIdx.x / p.chunks % 1;
  const int group = blockIdx.x / p.chunks;
  const int in_chunk = threadIdx.x / 32, channel = chunk * kChannelChunk + in_chunk;
  const int by_class = p.source_channels.quotient(channel), part_h = by_class;
  const TapPart& h = p.tap_part_h[min(part_h, kMaxParts - 1)];
  const TapPart& w = p.tap_class_w;
  const int next_w = kChannelChunk * p.k_tile;  // between points of W
  const i64 plane = i64(F45Nested::kPoints) * next_w;   // one chunk
  const i64 slice = i64(p.chunks) * 3 * plane, next_point = i64(slice);
  float* u = p.u + (i64(group) + k_tile) * slice + in_chunk * p.k_tile;

  for (int in_tile = threadIdx.x % 32; in_tile < p.k_tile; in_tile += 32) {
    const int k = k_tile * p.k_tile + in_tile;
    const float* from = nullptr;
    if (channel < p.channels_all && k < p.outputs)
      from = p.w + group * 92160 + k * p.w_output + i64(channel - by_class * p.channels) * p.w_channel;
    float t[F45::kPoints][F45Nested::kLongest], points[F45Nested::kPoints];
    float second[F45::kPoints][F45Nested::kLongest];
    WeightTransform::along_h(p, from, h, w, 0, t);
    WeightTransform::along_h(p, from, h, w, 1, second);
    UNROLL for (int i = 0; i < F45::kPoints; i++) {
      float* to = u + i * next_point + in_tile;
      float other[F45Nested::kPoints], both[F45Nested::kPoints];
      F45Nested::weights(t[i], points);
      F45Nested::weights(second[i], other);
      UNROLL for (int point = 0; point < F45Nested::kPoints; point++) both[point] = points[point] + other[point];
      WeightTransform::store(to + chunk * plane, next_w, both);
      WeightTransform::store(to + (p.chunks + 2 * chunk) * plane, next_w, points);
      WeightTransform::store(to + (p.chunks + 2 * chunk + 1) * plane, next_w, other);
    }
  }
}

// ---- winograd/nonfused_input ----------------------------------------------------------------------------------------
// Input transform along H of the nonfused pipeline, in the layout of winograd/nonfused_layout. Bound by memory
// bandwidth.
//
// A thread computes one position: it reads H::kPoints rows of it and writes H::kPoints elements. Neighbouring threads
// write neighbours. With a dilation, or units wider than a vector, they read short interleaved runs; other warps soon
// use the rest of a sector. Overlapping tiles of rows are consecutive, so that the second read hits L2.
// Grid: x covers all (group, channel, row, vector, element) of the slab.

struct NonfusedInputParams {
  const float* source;
  float* x;
  i64 source_batch, source_channel;
  int source_row, source_column;
  int first_row;                // first row of tiles of the slab
  u32 items;                    // elements of one point of H in the slab
  FastDivisor vectors, pitch;   // vectors of a channel; of a part of it
  FastDivisor rows;             // rows of tiles of the slab
  int channels;                 // channels of a row: groups * padded channels
  FastDivisor channels_filled;  // padded channels of a group
  FastDivisor source_channels;
  int channels_all;  // channels of a group without padding
  FastDivisor tiles;
  SourcePart part_h, class_w;
};

__global__ void __launch_bounds__(256, MIN_BLOCKS(2))
winograd_nonfused_input(const __grid_constant__ NonfusedInputParams p) {
  const u32 item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= p.items) return;
  const u32 of_all = item / F45Nested::kM, line = p.vectors.quotient(of_all),
      vector = of_all - line * p.vectors.divisor;
  const u32 of_row = p.rows.quotient(line), row = line - of_row * p.rows.divisor;
  const u32 group = p.channels_filled.quotient(of_row), channel = of_row - group * p.channels_filled.divisor;

  float in[F45::kPoints], out[F45::kPoints];
  UNROLL for (int i = 0; i < F45::kPoints; i++) in[i] = 0.f;
  if (channel < p.channels_all) {
    const SourcePart h = p.part_h, w = p.class_w;
    const u32 place = p.first_row + row, phases = p.tiles.quotient(place), image = u32(phases) / 2;
    const int tile = place - phases * p.tiles.divisor, phase_h = phases - image * 2;
    const u32 piece = p.pitch.quotient(vector), column = vector - piece * p.pitch.divisor;
    const int unit = u32(column) / 3, phase_w = column - unit * 3;
    const int q = unit * 8 + piece * F45Nested::kM + item % F45Nested::kM;

    const int step_h = 2, at_w = w.read_first + (phase_w + 3 * q);
    int at_h = h.read_first + phase_h + step_h * tile * F45::kM;
    const float* from = p.source + image * p.source_batch +
        (i64(group) * p.source_channels.divisor + channel) * p.source_channel +
        i64(at_h) * p.source_row + i64(at_w) * p.source_column;
    const i64 next_row = i64(step_h) * p.source_row;
    const bool column_there = at_w >= 0 && at_w < w.read_end;
    UNROLL for (int i = 0; i < F45::kPoints; i++, at_h += step_h, from += next_row)
      if (column_there && at_h >= 0 && at_h < h.read_end) in[i] = *from;
  }
  F45::input(in, out);
  const i64 next_point = i64(p.channels) * p.vectors.divisor * F45Nested::kM;
  float* x = p.x + row * F45::kPoints * next_point + (i64(of_row) * p.vectors.divisor + vector) * F45Nested::kM
          + item % F45Nested::kM;
  UNROLL for (int i = 0; i < F45::kPoints; i++, x += next_point) *x = out[i];
}

// ---- winograd/nonfused_gemm -----------------------------------------------------------------------------------------
// GEMM of the nonfused pipeline (winograd/nonfused_layout): for each point of H a matrix product over channels,
//   Y[k, u] = A^T sum over channels c of  U[k, c] * (B^T X[c, u])        (elementwise over the points of W)
// with the transform along W fused into the load of X and its inverse into the epilogue.
//
// One warp per point of W, with kK x kU accumulators, 8 x 8 per thread. Blocks are persistent and loop over tiles
// (point of H, group, columns, k tile), the point of H slowest, so that its slice of U stays in L2. Segments of taps
// are further chunks of channels whose columns are `next` further. Nested segments (F(2,2), algebra/segments.py)
// compute two neighbouring tiles of outputs at once, in two sets of accumulators: P = (U0 + U1) V1 into the first set;
// copy it to the second; then U0 (V0 - V1) to the first, U1 (V2 - V1) to the second.
//
// The reduction runs in chunks of 8 channels. While a chunk is multiplied, the next one, in registers since the last
// chunk, goes to the other buffers (weights to the warp's own, columns through the transform), and the loads of the one
// after it are issued. One barrier per chunk. The first chunk of the next tile follows the last of a tile.
// Shared memory:  v[2][8][kPoints][kU]   u[2][kPoints][8][kK]   exchange[kPoints][rows of a part][kU]

struct NonfusedGemmParams {
  const float* x;
  const float* u;
  float* y;
  int tiles;
  FastDivisor column_tiles;  // tile = (hg * column tiles + column tile) * k tiles + k tile, hg = point, group
  FastDivisor row_columns;
  int columns, columns_filled;  // columns of the slab; padded to whole tiles
  int row_stride;               // elements of X between rows, groups, channels
  int group_stride, channel_stride;
  int part_stride;  // elements of X between parts; to the next unit
  int chunks;
  int outputs;  // written channels of a group
  int zero;     // 0, unknown to the compiler
};

template <int kK_>
struct NonfusedGemm {
  static constexpr int kPoints = 8, kVector = 4, kParts = 2;
  static constexpr bool kNested = F45Nested::kTiles == 2;
  static constexpr int kSets = 2, kThreads = 256;
  static constexpr int kK = kK_, kLanesK = kK / 8, kLanesU = 32 / kLanesK, kU = 8 * kLanesU;
  static constexpr int kChunkV = kChannelChunk * kPoints * kU, kChunkU = kChannelChunk * kK;  // the latter per warp
  static constexpr int kWeightVectors = kChunkU / 128;                                        // float4 per lane
  // A warp transforms 32 columns at a time: kTasks per warp and chunk, some of the last ones idle.
  static constexpr int kStrips = kU / 32, kTaskCount = kChannelChunk * kStrips;
  static constexpr int kTasks = (kTaskCount + kPoints - 1) / kPoints, kOwnStrips = 1, kInputs = 2;
  // Accumulators are exchanged in parts of kPartRows rows per thread.
  static constexpr int kPartRows = kU == 128 || kPoints < 8 ? 2 : 4;
  static constexpr int kExchangeRows = kLanesK * kPartRows;
  static constexpr int kExchange = kPoints * kExchangeRows * kU;
  static constexpr int kSharedFloats = 2 * kChunkV + 2 * kPoints * kChunkU + kExchange;

  struct Accumulators {
    float sum[kSets][8][8];
  };

  // A thread's addresses in the two V buffers and in the two U buffers of its warp.
  struct Buffers {
    float *v, *write_u;
    const float *read_v, *read_u;
    int parity = 0;  // the buffers that are read

    DEVICE explicit Buffers(float* shared) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      float* u = shared + 2 * kChunkV + warp * kChunkU;
      v = shared, read_v = v + warp * kU + lane % kLanesU * 4;
      write_u = u + lane * 4, read_u = u + lane / kLanesU * 4;
    }
  };

  // This lane's weights, two chunks ahead, between global memory and the warp's shared memory.
  struct Weights {
    int tile, chunks_left;
    const float* from;
    float4 u[kWeightVectors];

    DEVICE void begin_tile(const NonfusedGemmParams& p, int chunks) {
      const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const u32 hg = p.column_tiles.quotient(tile);
      from = p.u + i64(hg) * chunks * kPoints * kChunkU + warp * kChunkU + lane * 4;
      chunks_left = chunks;
    }

    DEVICE void advance(const NonfusedGemmParams& p, int chunks) {
      from += kPoints * kChunkU;
      if (--chunks_left) return;
      if (tile + gridDim.x < p.tiles) tile += gridDim.x;
      begin_tile(p, chunks);
    }

    DEVICE void load(int number) { u[number] = load4(from + number * 128); }
    DEVICE void store(float* to, int number) { store4(to + number * 128, u[number]); }
  };

  // This lane's columns of the next chunk, between global memory and the other V buffer (transformed).
  struct Columns {
    int tile, chunks_left, channels_left;
    int kind, loaded_kind;  // 0: a tile itself, 1: V0 - V1, 2: V2 - V1
    u32 at[kOwnStrips];
    float v[kTasks][kInputs + kNested][kVector];

    DEVICE void begin_tile(const NonfusedGemmParams& p, int chunks) {
      const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const u32 hg = p.column_tiles.quotient(tile), column_tile = tile - hg * p.column_tiles.divisor;
      const u32 strip = warp % kStrips;
      // Columns past the end repeat the last one and are not written.
      const u32 n = min(column_tile * kU + strip * 32 + lane, u32(p.columns - 1));
      const u32 row = p.row_columns.quotient(n), column = n - row * p.row_columns.divisor;
      at[0] = row * p.row_stride + hg * p.group_stride + column * kVector;
      chunks_left = chunks, channels_left = p.chunks, kind = 0;
    }

    // Moves to the next chunk. Past the last tile that tile is loaded once more, unused.
    DEVICE void advance(const NonfusedGemmParams& p, int chunks) {
      loaded_kind = kind;
      if (--chunks_left == 0) {
        if (tile + gridDim.x < p.tiles) tile += gridDim.x;
        begin_tile(p, chunks);
        return;
      }
      int by = kChannelChunk * p.channel_stride;
      if (kind == 1) {
        kind = 2, by = 0;
      } else if (kind == 2) {
        kind = 1;
      } else if (--channels_left == 0) {
        kind = 1, by = -(p.chunks - 1) * kChannelChunk * p.channel_stride;
      }
      at[0] += by;
    }

    static DEVICE int task(int number) { return threadIdx.x / 32 + number * kPoints; }

    DEVICE void load(const NonfusedGemmParams& p, int number) {
      if (kTaskCount % kPoints && number == kTasks - 1 && task(number) >= kTaskCount) return;
      const float* from = p.x + (at[number % kOwnStrips] + u32(task(number) / kStrips) * p.channel_stride);
      // Vectors 1 and 2 are the middle tile; its left neighbour has 0 and 1, its right one 2 and 3.
      load_vector(from + p.part_stride, v[number][0]);
      load_vector(from + 12, v[number][1]);
      load4_if(kind != 0, from + (kind == 2 ? p.part_stride + 12 : 0), v[number][2]);
    }

    DEVICE void store(float* to, int number) {
      if (kTaskCount % kPoints && number == kTasks - 1 && task(number) >= kTaskCount) return;
      float in[kInputs * kVector], out[kPoints];
      UNROLL for (int i = 0; i < kVector; i++) {
        const float middle = v[number][0][i], after = v[number][1][i], outer = v[number][2][i];
        in[i] = loaded_kind == 0 ? middle : (loaded_kind == 1 ? outer : after) - middle;
        in[kVector + i] = loaded_kind == 0 ? after : (loaded_kind == 1 ? middle : outer) - after;
      }
      F45Nested::input(in, out);
      to += task(number) / kStrips * kPoints * kU + task(number) % kStrips * 32 + threadIdx.x % 32;
      UNROLL for (int i = 0; i < kPoints; i++) to[i * kU] = out[i];
    }
  };

  // One half of a chunk: four outer products.
  template <int kSet, class Beside>
  static DEVICE void multiply(Accumulators& c, const float* u, const float* v, Beside beside) {
    UNROLL for (int step = 0; step < 4; step++) {
      float row[8], column[8];
      load_vector(u + step * kK, row), load_vector(u + step * kK + kK / 2, row + 4);
      load_vector(v + step * kPoints * kU, column), load_vector(v + step * kPoints * kU + kU / 2, column + 4);
      beside(step);
      UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int j = 0; j < 8; j++) c.sum[kSet][i][j] = fmaf(row[i], column[j], c.sum[kSet][i][j]);
    }
  }

  // Multiplies the chunk in one buffer into accumulator set kSet, and stores the next one to the other buffer. The
  // cursors advance between the two halves: their branches keep the compiler from using loaded values too early. Loads
  // are spread out: a burst would fill the queues of L1 and delay the loads from shared memory.
  template <int kSet>
  static DEVICE void multiply_chunk(Accumulators& c, Columns& columns, Weights& weights,
                                                        const NonfusedGemmParams& p, int chunks, Buffers& buffers) {
    const float* v = buffers.read_v + buffers.parity * kChunkV;
    const float* u = buffers.read_u + buffers.parity * kPoints * kChunkU;
    buffers.parity ^= 1;
    float* next_v = buffers.v + buffers.parity * kChunkV;
    float* next_u = buffers.write_u + buffers.parity * kPoints * kChunkU;
    multiply<kSet>(c, u, v, [&](int step) {
      UNROLL for (int i = 0; i < kWeightVectors; i++)
        if (step == i * 4 / kWeightVectors) weights.store(next_u, i);
    });
    columns.advance(p, chunks);
    weights.advance(p, chunks);
    multiply<kSet>(c, u + 4 * kK, v + 4 * kPoints * kU, [&](int step) {
      UNROLL for (int task = 0; task < kTasks; task++)
        if (step == task * 4 / kTasks) columns.store(next_v, task), columns.load(p, task);
      UNROLL for (int i = 0; i < kWeightVectors; i++)
        if (step == i * 4 / kWeightVectors) weights.load(i);
    });
    __syncthreads();
  }

  // Exchanges the accumulators of one set through shared memory, applies the inverse along W, and stores to Y.
  template <int kSet>
  static DEVICE void write(const Accumulators& c, const NonfusedGemmParams& p, float* exchange, int tile) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, lane_k = lane / kLanesU, lane_u = lane % kLanesU;
    const u32 rest = tile;
    const u32 hg = p.column_tiles.quotient(rest), column_tile = rest - hg * p.column_tiles.divisor;
    UNROLL for (int part = 0; part < 8 / kPartRows; part++) {
      if (kSet > 0 || part > 0) __syncthreads();
      // With 32 columns per row, rows of neighbouring lanes are in the same banks: swap their halves.
      float* to = exchange + (warp * kExchangeRows + lane_k * kPartRows) * kU;
      const u32 swap = kU == 32 ? lane_k % 2 * 16 : 0;
      UNROLL for (int i = 0; i < kPartRows; i++)
        UNROLL for (int half = 0; half < 2; half++) {
          // OR with a zero unknown to the compiler: a direct vector store would tie accumulators to neighbouring
          // registers, and cost bank conflicts of the register file in the main loop.
          const float* sum = c.sum[kSet][part * kPartRows + i] + half * 4;
          store4(to + i * kU + ((lane_u * 4 + half * (kU / 2)) ^ swap), make_float4(
                     __int_as_float(__float_as_int(sum[0]) | p.zero), __int_as_float(__float_as_int(sum[1]) | p.zero),
                     __int_as_float(__float_as_int(sum[2]) | p.zero), __int_as_float(__float_as_int(sum[3]) | p.zero)));
        }
      __syncthreads();
      UNROLL for (int first = 0; first < kExchangeRows * kStrips; first += kPoints) {
        const u32 task = first + warp;
        if (kExchangeRows * kStrips % kPoints && task >= kExchangeRows * kStrips) continue;
        const u32 row = task / kStrips, of_lane_k = row / kPartRows, i = part * kPartRows + row % kPartRows;
        const u32 u = task % kStrips * 32 + lane;
        const float* from = exchange + row * kU + (kU == 32 ? u ^ (of_lane_k % 2 * 16) : u);
        float points[kPoints], out[F45Nested::kM];
        UNROLL for (int point = 0; point < kPoints; point++) points[point] = from[point * kExchangeRows * kU];
        F45Nested::output(points, out);
        // Columns past the end are written, too: Y is padded to whole tiles.
        const u32 k = i / 4 * (kK / 2) + of_lane_k * 4 + i % 4, n = column_tile * kU + u;
        store_vector_if(
            k < p.outputs, p.y + ((i64(hg) * p.outputs + k) * kParts + kSet) * p.columns_filled * kVector + n * kVector,
            out);
      }
    }
  }
};

template <int kK>
__global__ void __launch_bounds__(256, 1) winograd_nonfused_gemm(const __grid_constant__ NonfusedGemmParams p) {
  using Gemm = NonfusedGemm<kK>;
  extern __shared__ __align__(16) float shared[];
  float* const exchange = shared + 2 * Gemm::kChunkV + 2 * Gemm::kPoints * Gemm::kChunkU;
  typename Gemm::Buffers buffers(shared);
  const int chunks = p.chunks * 3;

  typename Gemm::Columns columns;
  typename Gemm::Weights weights;
  columns.tile = weights.tile = blockIdx.x;
  columns.begin_tile(p, chunks);
  weights.begin_tile(p, chunks);
  UNROLL for (int i = 0; i < Gemm::kTasks; i++) columns.load(p, i);
  UNROLL for (int i = 0; i < Gemm::kWeightVectors; i++) weights.load(i), weights.store(buffers.write_u, i);
  columns.advance(p, chunks);
  weights.advance(p, chunks);
  UNROLL for (int i = 0; i < Gemm::kWeightVectors; i++) weights.load(i);
  UNROLL for (int i = 0; i < Gemm::kTasks; i++) columns.store(buffers.v, i), columns.load(p, i);
  __syncthreads();

  typename Gemm::Accumulators c;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    UNROLL for (int i = 0; i < 8; i++)
      UNROLL for (int j = 0; j < 8; j++) c.sum[0][i][j] = 0.f;
#pragma unroll 1
    for (int chunk = p.chunks; chunk > 0; chunk--)
      Gemm::template multiply_chunk<0>(c, columns, weights, p, chunks, buffers);
    UNROLL for (int i = 0; i < 8; i++)
      UNROLL for (int j = 0; j < 8; j++) c.sum[1][i][j] = c.sum[0][i][j];
#pragma unroll 1
    for (int chunk = p.chunks; chunk > 0; chunk--) {
      Gemm::template multiply_chunk<0>(c, columns, weights, p, chunks, buffers);
      Gemm::template multiply_chunk<1>(c, columns, weights, p, chunks, buffers);
    }
    Gemm::template write<0>(c, p, exchange, tile);
    Gemm::template write<1>(c, p, exchange, tile);
  }
}

// ---- winograd/nonfused_output ---------------------------------------------------------------------------------------
// Last step of the nonfused pipeline (winograd/nonfused_layout): inverse along H, plus bias. Bound by memory
// bandwidth.
//
// A block computes whole stretches of positions for some written channels: vectors come in column by column, phase
// beside phase, and are rearranged in shared memory to H::kM dense rows per channel.
// Grid: x = ((group * blocks of channels + block) * rows + row) * stretches + stretch, so that blocks that run at the
// same time access neighbouring memory. Shared memory: lines * kM * stretch floats.

struct NonfusedOutputParams {
  const float* y;
  float* written;
  i64 written_batch, written_channel;
  int written_row;
  int first_row;        // first row of tiles of the slab
  int outputs;          // written channels of a group
  int lines;            // channels per block
  int stretch_columns;  // columns per block
  FastDivisor line_blocks, stretches, rows;
  FastDivisor vectors;  // vectors of a stretch and channel
  FastDivisor columns;  // columns of a stretch
  int row_columns;      // columns of a row
  int columns_filled;   // columns of Y, padded to whole tiles
  FastDivisor tiles;
  FastDivisor stretch;   // positions of a stretch
  int count_h, count_w;  // output positions
  int vector;  // 1: rows are stored four elements at a time
};

__global__ void __launch_bounds__(128, MIN_BLOCKS(5))
winograd_nonfused_output(const __grid_constant__ NonfusedOutputParams p) {
  extern __shared__ __align__(16) float rows[];
  u32 block = blockIdx.x, rest = p.stretches.quotient(block);
  const int stretch = block - rest * p.stretches.divisor;
  block = rest, rest = p.rows.quotient(block);
  const int row = block - rest * p.rows.divisor;
  const int group = p.line_blocks.quotient(rest), first_k = (rest - group * p.line_blocks.divisor) * p.lines;
  const int lines = min(p.lines, p.outputs - first_k);

  const i64 next_point = i64(p.outputs) * 2 * p.columns_filled * F45Nested::kM;
  const int first_column = stretch * p.stretch_columns;
  for (u32 item = threadIdx.x; item < lines * p.vectors.divisor; item += blockDim.x) {
    const u32 line = p.vectors.quotient(item), vector = item - line * p.vectors.divisor;
    const u32 part = p.columns.quotient(vector), column = vector - part * p.columns.divisor;
    if (first_column + int(column) >= p.row_columns) continue;
    const i64 k = group * p.outputs + first_k + line;
    const float* y =
        p.y + ((k * 2 + part) * p.columns_filled + i64(row) * p.row_columns + first_column + column) * F45Nested::kM;
    float points[F45::kPoints][F45Nested::kM];
    UNROLL for (int i = 0; i < F45::kPoints; i++) load_stream(y + i * next_point, points[i]);
    const float bias = 0.f;
    const u32 unit = u32(column) / 3, phase = column - unit * 3;
    float* to = rows + line * F45::kM * p.stretch.divisor + (unit * 8 + part * F45Nested::kM) * 3 + phase;
    UNROLL for (int v = 0; v < F45Nested::kM; v++) {
      float in[F45::kPoints], out[F45::kM];
      UNROLL for (int i = 0; i < F45::kPoints; i++) in[i] = points[i][v];
      F45::output(in, out);
      UNROLL for (int i = 0; i < F45::kM; i++) to[i * p.stretch.divisor + v * 3] = out[i] + bias;
    }
  }
  __syncthreads();

  const u32 place = p.first_row + row, phases = p.tiles.quotient(place), image = u32(phases) / 2;
  const int first_h = phases - image * 2 + (place - phases * p.tiles.divisor) * F45::kM * 2;
  const int first_w = stretch * p.stretch.divisor;
  float* written = p.written + image * p.written_batch + i64(group * p.outputs + first_k) * p.written_channel;
  const u32 per_line = p.stretch.divisor * F45::kM;
  if (p.vector) {
    for (u32 at = threadIdx.x * 4; at < lines * per_line; at += blockDim.x * 4) {
      const u32 of_all = p.stretch.quotient(at), line = of_all / F45::kM, i = of_all % F45::kM;
      const int h = first_h + i * 2, w = first_w + at - of_all * p.stretch.divisor;
      if (h >= p.count_h || w >= p.count_w) continue;
      float* to = written + line * p.written_channel + i64(h) * p.written_row + w;
      if (w + 4 <= p.count_w) {
        store4(to, load4(rows + at));
      } else {
        for (int v = 0; w + v < p.count_w; v++) to[v] = rows[at + v];
      }
    }
    return;
  }
  for (u32 at = threadIdx.x; at < lines * per_line; at += blockDim.x) {
    const u32 of_all = p.stretch.quotient(at), line = of_all / F45::kM, i = of_all % F45::kM;
    const int h = first_h + i * 2, w = first_w + at - of_all * p.stretch.divisor;
    if (h < p.count_h && w < p.count_w) {
      const float sum = rows[at];
      float* to = &written[line * p.written_channel + i64(h) * p.written_row + i64(w)];
      *to = sum;
    }
  }
}

// ---- winograd/wgrad -------------------------------------------------------------------------------------------------
// Winograd weight gradient: along both axes dW = G^T [(A dy) * (B^T x)], summed over all tiles.
//
// For each product of the H algorithm (a point of a segment), each segment and each point of the W algorithm this is a
// matrix product over the tiles, sums[k][c] = sum D[k][tile] V[c][tile]. A block owns one product of H, kTileK output
// channels, kTileC source channels and a slice of the rows of tiles; a warp owns one point of W (or a part of its
// channels, or every other tile). Three stages work on successive chunks of kChunk tiles, so that one barrier per chunk
// suffices and memory latency is hidden:
//   1. rows of dy and x are combined along H, lanes = positions along W (coalesced), into `staged`;
//   2. each tile of `staged` is transformed along W, lanes = channels, into `operands`: the transposition is free;
//   3. outer products: fragments of 16 bytes, 64 to 128 accumulators per thread.
// Tiles of neighbouring phases of a dilated convolution are neighbours here (`interleave`), so that a warp's reads are
// dense in memory. Accumulators are added to the block's part of `partial` every `flush` chunks: rounding errors grow
// with the longest sequence of additions, not with the number of tiles. winograd/wgrad_output adds the slices.
//
// Grid: x = ((slice * groups + group) * channel tiles + channel tile) * products + product. All products of a slice run
// at about the same time and share their reads in L2.
// Shared memory, two of each:  operands = D[point][tile][k], V[segment][point][tile][c];
//                              staged = dy[k][4 * tile], x[c][4 * block], a block being 4 positions of one phase.

constexpr int kChunk = 8;             // tiles multiplied between two barriers
constexpr int kFirstFlush = 1 << 20;  // marks the first flush
constexpr int kMaxWarps = 16;

struct WgradParams {
  const float* x;
  const float* dy;
  float* partial;       // [slice * kSplit][group][channel tile][product][segment][point][kTileK][kTileC]
  i64 x_batch, x_channel, dy_batch, dy_channel;
  i64 x_next_row, dy_next_row;                               // bytes between rows of a tile
  i64 x_next_channel, dy_next_channel;                       // bytes between channels of a warp
  i64 x_first_h, x_first_w;        // elements from x to position 0, by class of taps
  int x_row, x_column, dy_row, dy_column;                    // elements between lattice positions
  int height, width;                                         // of x, as far as any output reads it
  int count_h, count_w;                                      // outputs
  int rows, tiles;        // rows of tiles, and tiles in each
  int slices;
  FastDivisor tiles_h;
};

// kTileK x kTileC channels per block, divided among kWarpsK x kWarpsC warps per point. kWarpsPass warps share the
// segments of W, and kSplit warps take every kSplit-th tile. A warp's lanes form kLanesK x (32 / kLanesK).
struct WgradTile {
  static constexpr int kTileK = 64, kTileC = 32, kWarpsPass = 2, kLanesK = 8, kLanesC = 4, kThreadK = 8, kThreadC = 8;
};

struct WgradSizes {
  static constexpr int kProducts = 8, kPasses = 2;
  // Rows of x that a product needs: 0, 2, 4, ... for the point 0, 1, 3, 5, ... for infinity, 1, 2, 3, ... for others.
  static constexpr int kRowsX = 6, kWarps = 16, kThreads = 512, kSteps = 8, kBeyond = 2, kOperandD = 4096;
  static constexpr int kOperands = 8192;
  // Stage 1 by items: kItemsD channels of dy and kItemsX of x per warp; kHeadBlocks blocks per channel at a row's
  // start.
  static constexpr int kItemsD = 4, kItemsX = 2;
  // Each item of stage 1 has its row of `staged`, even if there are fewer channels than warps.
  static constexpr int kStagedD = 2048, kPitchX = 60, kStaged = 3968, kHeadBlocks = 4, kBatches = 7;
};

// Row `point` of the matrix of a transform, computed from unit vectors (constants, once compiled).
template <int kInputs, bool kSpread>
DEVICE void coefficients(int point, float* row) {
  UNROLL for (int n = 0; n < kInputs; n++) {
    float unit[kInputs], values[F45::kPoints];
    UNROLL for (int i = 0; i < kInputs; i++) unit[i] = i == n ? 1.f : 0.f;
    if (kSpread) F45::spread(unit, values);
    else
      F45::input(unit, values);
    row[n] = 0.f;
    UNROLL for (int i = 0; i < F45::kPoints; i++) row[n] = i == point ? values[i] : row[n];
  }
}

// Work of a block. Decoded from the special register wherever it is needed: the accumulators need the registers.
struct WgradBlock {
  int product, slice;

  DEVICE explicit WgradBlock(const WgradParams& p) {
    const u32 number = fresh_block_x(), pair = number / WgradSizes::kProducts;
    const u32 above = pair, run = above;
    product = number % WgradSizes::kProducts;
    slice = run;
  }

  DEVICE int first_row(const WgradParams& p) const {
    return int(i64(p.rows) * slice / p.slices);
  }
  DEVICE int end_row(const WgradParams& p) const {
    return int(i64(p.rows) * (slice + 1) / p.slices);
  }
};

// A row of tiles, the same for all threads of a block. In shared memory, one for each of two successive rows.
struct WgradRow {
  const float *x, *dy;  // first row of the tiles, of the block's first channels
  int phase;            // first phase along W
  u32 rows;             // bit n: row n of dy, bit 8 + n: row n of x is inside the image and counts
  int x_first;          // first row of x, as a lattice position
  int beyond;           // 1 after the block's last row
};

// State of a block in shared memory, behind its buffers.
struct WgradState {
  float of_dy[4], of_x[8];  // factors of the block's product along H
  WgradRow row[2];
  int x_from, x_step;                         // first row of x that the product needs, and distance to the next
  i64 x_next_row;                             // that distance in bytes
  int end_row;                                // of the block
  i64 dy_warp[kMaxWarps], x_warp[kMaxWarps];  // elements to the first channel of each warp
};

// Stages 1 and 2 of a block: loops over its chunks and leaves transformed operands in shared memory.
struct WgradLoader {
  static constexpr int kRowsD = 4, kRowsX = 6;

  const WgradParams& p;
  WgradState& state;
  float* staged;  // target of stage 1
  u32 more;       // bit i: item i of dy, bit 16 + i: item i of x is not the last that has a channel

  // The chunk of stage 1.
  int row, tile;
  const float *x_at, *dy_at;  // its address, of the current channel
  u32 mask;
  float dy_loaded[WgradSizes::kItemsD][kRowsD], x_loaded[WgradSizes::kItemsX][kRowsX];

  DEVICE WgradLoader(const WgradParams& params, WgradState& shared_state, float* scratch)
      : p(params), state(shared_state), tile(0) {
    const WgradBlock block(p);
    const int warp = threadIdx.x / 32, left_d = min(WgradTile::kTileK, 64) - 1 - warp;
    const int left_x = min(WgradTile::kTileC, 32) - 1 - warp;
    more = 0;
    UNROLL for (int item = 0; item < 16; item++) {
      more |= u32((item + 1) * WgradSizes::kWarps <= left_d) << item;
      more |= u32((item + 1) * WgradSizes::kWarps <= left_x) << (16 + item);
    }
    row = block.first_row(p);
    if (threadIdx.x % 32 == 0) {
      state.dy_warp[warp] = (warp + min(left_d, 0)) * p.dy_channel;
      state.x_warp[warp] = (warp + min(left_x, 0)) * p.x_channel;
    }
    if (threadIdx.x == 0) {
      float of_dy[kRowsD], of_x[F45::kPoints];
      coefficients<kRowsD, true>(block.product % F45::kPoints, of_dy);
      coefficients<F45::kPoints, false>(block.product % F45::kPoints, of_x);
      state.end_row = block.end_row(p);
      state.x_from = of_x[0] == 0.f;
      state.x_step = steps_of_two(of_x) ? 2 : 1;
      state.x_next_row = state.x_step * p.x_next_row;
      UNROLL for (int n = 0; n < F45::kPoints; n++) scratch[n] = of_x[n];
      UNROLL for (int n = 0; n < 4; n++) state.of_dy[n] = n < kRowsD ? of_dy[n] : 0.f;
#pragma unroll 1
      for (int n = 0; n < 8; n++) {
        const int from = state.x_from + n * state.x_step;
        state.of_x[n] = n < kRowsX && from < F45::kPoints ? scratch[from] : 0.f;
      }
      aim_row();
    }
    __syncthreads();
  }

  static DEVICE bool steps_of_two(const float* of_x) { return F45::kPoints > 2 && (of_x[1] == 0.f || of_x[2] == 0.f); }

  // Decodes `row` = ((image * phases + phase) * tiles + tile along H) * outer phases + outer phase along W.
  DEVICE void aim_row() {
    const WgradBlock block(p);
    WgradRow& to = state.row[row & 1];
    const u32 above = row, column = p.tiles_h.quotient(above);
    const int image = u32(column) / 2;
    to.phase = 0;
    const int first = int(column - image * 2) + 2 * F45::kM * int(above - column * p.tiles_h.divisor);
    const int x_first = first + state.x_from * 2;
    to.dy = p.dy + image * p.dy_batch + i64(first) * p.dy_row;
    const float* x = p.x + image * p.x_batch + i64(x_first) * p.x_row;
    to.x = x + p.x_first_h + p.x_first_w;
    to.x_first = x_first;
    to.beyond = row >= state.end_row;
    u32 rows = 0;
    UNROLL for (int n = 0; n < kRowsD; n++) rows |= u32(first + n * 2 < p.count_h && state.of_dy[n] != 0.f) << n;
    rows |= rows_inside(x_first, -2);
    to.rows = to.beyond ? 0 : rows;
  }

  DEVICE u32 rows_inside(int x_first, int read_first) const {
    u32 found = 0;
    UNROLL for (int n = 0; n < kRowsX; n++) {
      const int at = read_first + (x_first + n * state.x_step * 2);
      found |= u32(u32(at) < u32(p.height) && state.of_x[n] != 0.f) << (8 + n);
    }
    return found;
  }

  // Lattice position along W of element j of block number `number`, in the first of the row's phases.
  DEVICE int position(int number, int j) const {
    const int unit = u32(number) / 3;
    return number - unit * 3 + 3 * (4 * unit + j);
  }

  DEVICE bool column_inside(int read_first, int at) const { return u32(read_first + at) < u32(p.width); }

  DEVICE void aim_chunk() {
    const WgradRow& at = state.row[row & 1];
    const u32 thread = fresh_thread();
    const int here = at.phase + position(tile + thread % 32 / 4, thread % 4);
    const int x_here = here + WgradSizes::kBeyond * 4 * 3;
    dy_at = at.dy + state.dy_warp[thread / 32] + i64(here) * p.dy_column;
    mask = here < p.count_w ? at.rows & 0xff : 0;
    x_at = at.x + state.x_warp[thread / 32] + i64(x_here) * p.x_column;
    mask |= column_inside(-4, x_here) ? at.rows & 0xff00 : 0;
  }

  // Moves to the next chunk. All threads see a new row after the next barrier.
  DEVICE void advance() {
    tile += kChunk;
    if (tile >= p.tiles) {
      tile = 0;
      row++;
      if (fresh_thread() == 0) aim_row();
    }
  }

  template <int kRows>
  static DEVICE void load_rows(const float* at, i64 step, u32 inside, float* loaded) {
    UNROLL for (int n = 0; n < kRows; n++) {
      loaded[n] = (inside >> n & 1) ? __ldg(at) : 0.f;
      at = opaque(add_bytes(at, step));
    }
  }

  // One position of channel number c of the tile.
  DEVICE void load_x(int c, int here, float* loaded) const {
    const WgradRow& at = state.row[row & 1];
    const int first = 0;
    c = min(c, 32 - first - 1);
    const float* from = at.x + i64(here) * p.x_column;
    u32 inside;
    from += c * p.x_channel;
    inside = column_inside(-4, here) ? at.rows : 0;
    load_rows<6>(from, state.x_next_row, inside >> 8, loaded);
  }

  // The first blocks of a chunk are the last ones of the chunk before; at the beginning of a row they are loaded.
  DEVICE void head(const float* before) const {
    const u32 thread = fresh_thread();
    const int blocks = WgradSizes::kBeyond * 3;
    const u32 c = thread / 4 / WgradSizes::kHeadBlocks, j = thread % 4;
    const u32 to = WgradSizes::kStagedD + c * WgradSizes::kPitchX + j;
#pragma unroll 1
    for (int number = thread / 4 % WgradSizes::kHeadBlocks; number < blocks; number += WgradSizes::kHeadBlocks) {
      if (c >= WgradTile::kTileC) break;
      float value;
      if (tile > 0) {
        value = before[to + (kChunk + number) * 4];
      } else {
        float loaded[kRowsX], of_x[8];
        load_x(c, state.row[row & 1].phase + position(number, j), loaded);
        fragment(state.of_x, (kRowsX + 3) / 4, of_x);
        value = dot<6>(of_x, loaded);
      }
      staged[to + number * 4] = value;
    }
  }

  // Stage 1 in batches of items, evenly distributed, dy and x alternating if there are fewer items than batches.
  static DEVICE constexpr int first_d(int batch) {
    return WgradSizes::kItemsD * batch / WgradSizes::kBatches;
  }
  static DEVICE constexpr int first_x(int batch) {
    return (WgradSizes::kItemsX * batch + WgradSizes::kBatches - 2) / WgradSizes::kBatches;
  }

  // First half: loads.
  DEVICE void load(int batch) {
    UNROLL for (int item = first_d(batch); item < first_d(batch + 1); item++) {
      load_rows<4>(dy_at, p.dy_next_row, mask, dy_loaded[item]);
      if (more >> item & 1) dy_at = add_bytes(dy_at, p.dy_next_channel);
    }
    UNROLL for (int item = first_x(batch); item < first_x(batch + 1); item++) {
      load_rows<6>(x_at, state.x_next_row, mask >> 8, x_loaded[item]);
      if (more >> (16 + item) & 1) x_at = add_bytes(x_at, p.x_next_channel);
    }
  }

  // Second half: the product of the H transform, into `staged`. The quads of a row of dy are permuted by channel, and
  // rows of x have an odd number of quads, so that stage 2, with channels as lanes, reads both without bank conflicts.
  DEVICE void combine(int batch) const {
    const u32 thread = fresh_thread(), lane = thread % 32, warp = thread / 32;
    float of_dy[4], of_x[8];
    fragment(state.of_dy, 1, of_dy);
    fragment(state.of_x, (kRowsX + 3) / 4, of_x);
    UNROLL for (int item = first_d(batch); item < first_d(batch + 1); item++) {
      const u32 k = warp + item * WgradSizes::kWarps;
      staged[k * 4 * kChunk + (lane ^ (k % 8 * 4))] = dot<4>(of_dy, dy_loaded[item]);
    }
    float* const to = staged + WgradSizes::kStagedD + WgradSizes::kBeyond * 3 * 4 + lane;
    UNROLL for (int item = first_x(batch); item < first_x(batch + 1); item++) {
      const u32 c = warp + item * WgradSizes::kWarps;
      to[c * WgradSizes::kPitchX] = dot<6>(of_x, x_loaded[item]);
    }
  }

  static DEVICE void fragment(const float* at, int quads, float* values) {
    UNROLL for (int i = 0; i < quads; i++) {
      const float4 v = load4(at + 4 * i);
      values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
  }

  template <int kRows>
  static DEVICE float dot(const float* a, const float* b) {
    float sum = a[0] * b[0];
    UNROLL for (int n = 1; n < kRows; n++) sum = fmaf(a[n], b[n], sum);
    return sum;
  }

  // Stage 2, one round: a tile of one channel per thread, dy in the first rounds, then x.
  DEVICE void transform(int round, const float* from, float* operands, float& bias) const {
    const u32 thread = fresh_thread();
    if (round < 1) {
      const u32 task = thread + round * WgradSizes::kThreads;
      const u32 k = task % WgradTile::kTileK, u = task / WgradTile::kTileK;
      float dy_tile[4], d[F45x2::kPoints];
      fragment(from + k * 4 * kChunk + (u ^ k % 8) * 4, 1, dy_tile);
      F45x2::spread(dy_tile, d);
      UNROLL for (int i = 0; i < F45x2::kPoints; i++) operands[(i * kChunk + u) * WgradTile::kTileK + k] = d[i];
      bias += d[1];
      return;
    }
    const u32 task = thread + (round - 1) * WgradSizes::kThreads;
    const u32 c = task % WgradTile::kTileC, u = task / WgradTile::kTileC % kChunk,
        segment = task / (WgradTile::kTileC * kChunk);
    const float* at = from + WgradSizes::kStagedD + c * WgradSizes::kPitchX + (u + segment * 3) * 4;
    float inputs[8], v[F45x2::kPoints];
    fragment(at, 1, inputs);
    fragment(at + 3 * 4, 1, inputs + 4);
    F45x2::input(inputs, v);
    float* to = operands + WgradSizes::kOperandD + (segment * F45x2::kPoints * kChunk + u) * WgradTile::kTileC + c;
    UNROLL for (int i = 0; i < F45x2::kPoints; i++) to[i * kChunk * WgradTile::kTileC] = v[i];
  }
};

// Stage 3: the accumulators of a thread, for one point of W and its segments.
struct WgradSums {
  static constexpr int kPasses = 1;
  float sum[kPasses][WgradTile::kThreadK][WgradTile::kThreadC];

  DEVICE void clear() {
    UNROLL for (int i = 0; i < WgradTile::kThreadK; i++)
        UNROLL for (int j = 0; j < WgradTile::kThreadC; j++) sum[0][i][j] = 0.f;
  }

  static DEVICE void fragment(const float* at, int quads, int apart, float* values) {
    UNROLL for (int i = 0; i < quads; i++) {
      const float4 v = load4(at + i * apart);
      values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
  }

  // d and v point at this thread's channels of one tile.
  DEVICE void multiply_add(const float* d, const float* v) {
    float row[WgradTile::kThreadK], column[WgradTile::kThreadC];
    fragment(d, WgradTile::kThreadK / 4, WgradTile::kLanesK * 4, row);
    fragment(v, WgradTile::kThreadC / 4, WgradTile::kLanesC * 4, column);
    UNROLL for (int i = 0; i < WgradTile::kThreadK; i++)
      UNROLL for (int j = 0; j < WgradTile::kThreadC; j++) sum[0][i][j] = fmaf(row[i], column[j], sum[0][i][j]);
  }

  // Adds the sums to those of `partial`, or starts them.
  DEVICE void flush(float* partial, bool begin) {
    UNROLL for (int i = 0; i < WgradTile::kThreadK; i++) {
        float* at = partial + ((i / 4) * WgradTile::kLanesK * 4 + i % 4) * WgradTile::kTileC;
        UNROLL for (int j = 0; j < WgradTile::kThreadC; j += 4) {
          float* to = at + j * WgradTile::kLanesC;
          const float4 old = begin ? make_float4(0.f, 0.f, 0.f, 0.f) : load4(to);
          store4_global(to, old.x + sum[0][i][j], old.y + sum[0][i][j + 1], old.z + sum[0][i][j + 2],
                        old.w + sum[0][i][j + 3]);
        }
      }
  }
};

// Keeps the compiler from hoisting loads into spills. From sm_90 on the barrier takes registers, too many for 16 warps.
DEVICE void keep_order() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#else
  __syncwarp();
#endif
}

// Step of a chunk in which a round of transforms runs: evenly distributed. On sm_90 eight points along H leave no
// register for a round in the first step.
DEVICE constexpr int step_of(int round, int rounds, int steps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return (round + 1) * steps / (rounds + 1);
#else
  return round * steps / rounds;
#endif
}

// A thread's channels within the block's tile, its point and its share of the tiles.
struct WgradPlace {
  u32 point, k, c, segment;

  DEVICE explicit WgradPlace(u32 thread) {
    const u32 lane = thread % 32, warp = thread / 32, part = warp / F45x2::kPoints;
    point = warp % F45x2::kPoints;
    k = lane % WgradTile::kLanesK * 4;
    c = lane / WgradTile::kLanesK * 4;
    segment = part * (F45x2::kSegments / WgradTile::kWarpsPass);
  }
};

// Address of a thread's partial sums.
DEVICE float* partial_of(const WgradParams& p) {
  const WgradBlock block(p);
  const WgradPlace place(fresh_thread());
  const i64 run = (i64(block.slice)), product = run * WgradSizes::kProducts + block.product;
  return p.partial + product * (WgradSizes::kPasses * F45x2::kPoints * WgradTile::kTileK * WgradTile::kTileC) +
         ((place.segment * F45x2::kPoints + place.point) * WgradTile::kTileK + place.k) * WgradTile::kTileC + place.c;
}

__global__ void __launch_bounds__(512, 1) winograd_wgrad(const __grid_constant__ WgradParams p) {
  extern __shared__ __align__(16) float shared[];

  constexpr int kBuffer = WgradSizes::kOperands + WgradSizes::kStaged;
  WgradLoader loader(p, *reinterpret_cast<WgradState*>(shared + 2 * kBuffer), shared);
  int chunks;
  {
    const WgradBlock block(p);
    chunks = (block.end_row(p) - block.first_row(p)) * ((p.tiles + kChunk - 1) / kChunk);
  }

  // Prologue: the first chunk through stages 1 and 2, the second through stage 1. Chunks are counted backwards, and the
  // parity of a chunk's number selects its buffers.
  const int odd = chunks % 2;
  float bias = 0.f;
#pragma unroll 1
  for (int ahead = 0; ahead < 2; ahead++) {
    loader.staged = shared + (ahead == odd ? 0 : kBuffer) + WgradSizes::kOperands;
    loader.aim_chunk();
    UNROLL for (int batch = 0; batch < WgradSizes::kBatches; batch++) loader.load(batch), loader.combine(batch);
    loader.head(shared + (odd ? kBuffer : 0) + WgradSizes::kOperands);
    loader.advance();
    __syncthreads();
    if (ahead == 0) {
      UNROLL for (int round = 0; round < 2; round++)
        loader.transform(round, loader.staged, loader.staged - WgradSizes::kOperands, bias);
    }
  }
  __syncthreads();

  WgradSums sums;
  sums.clear();
  int until_flush = 24 + kFirstFlush;
#pragma unroll 1
  for (; chunks > 0; chunks--) {
    // The chunk after next goes where this one was staged; the next is transformed into the other operands.
    float* const now = shared + (chunks % 2 ? kBuffer : 0);
    float* const next = shared + (chunks % 2 ? 0 : kBuffer);
    loader.staged = now + WgradSizes::kOperands;
    const WgradPlace place(fresh_thread());
    const float* d = now + (place.point * kChunk) * WgradTile::kTileK + place.k;
    const float* v = now + WgradSizes::kOperandD +
                     ((place.segment * F45x2::kPoints + place.point) * kChunk) * WgradTile::kTileC + place.c;
    constexpr int kRounds = 2;
    loader.head(next + WgradSizes::kOperands);
    loader.aim_chunk();
    UNROLL for (int step = 0; step < WgradSizes::kSteps; step++) {
      // Consumers of loads come before the last products: nothing behind them could hide the latency.
      if (step > 0) keep_order();
      if (step > 0) loader.combine(step - 1);
      if (step < WgradSizes::kBatches) loader.load(step);
      UNROLL for (int round = 0; round < kRounds; round++)
        if (step_of(round, kRounds, WgradSizes::kSteps) == step)
          loader.transform(round, next + WgradSizes::kOperands, next, bias);
      if (step == WgradSizes::kSteps - 1) loader.advance();
      sums.multiply_add(d + step * WgradTile::kTileK, v + step * WgradTile::kTileC);
    }
    if (--until_flush % kFirstFlush == 0 || chunks == 1) {
      sums.flush(partial_of(p), until_flush >= kFirstFlush);
      sums.clear();
      until_flush = 24;
    }
    __syncthreads();
  }
}

// ---- winograd/wgrad_output ------------------------------------------------------------------------------------------
// Second stage of winograd/wgrad: adds the slices' partial sums in a fixed order, then transforms them to taps.
//
// winograd_wgrad_sum: one thread per four elements of `partial[slice]`. Slices are added in groups, then the groups, so
// that no element goes through more than about 2 sqrt(slices) sequential additions.
// winograd_wgrad_output: one thread per pair of channels: G^T along W, then along H. Writes dw with its strides and
// classes of taps (of a strided convolution), and adds the partial sums of the bias gradient.

constexpr int kSlicesPerGroup = 8;

struct WgradSumParams {
  float* partial;  // [slice][elements]; slice 0 becomes the sum
  int slices;
};

struct WgradOutputParams {
  const float* partial;       // [group][channel tile][product][segment][point][tile_k][tile_c]
  float* dw;
  int slices;  // outputs of a group, of all groups; pairs of channels
};

DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

__global__ void __launch_bounds__(256, 1) winograd_wgrad_sum(const __grid_constant__ WgradSumParams p) {
  const i64 element = 4 * (i64(blockIdx.x) * blockDim.x + threadIdx.x);
  if (element >= 262144) return;
  float* const to = p.partial + element;
  const float* from = to;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int first = 0; first < p.slices; first += kSlicesPerGroup) {
    float4 group = make_float4(0.f, 0.f, 0.f, 0.f);
    UNROLL for (int i = 0; i < kSlicesPerGroup; i++) {
      if (first + i < p.slices) group = add4(group, load4(from));
      from += 262144;
    }
    sum = add4(sum, group);
  }
  store4(to, sum);
}

__global__ void __launch_bounds__(128, 1)
winograd_wgrad_output(const __grid_constant__ WgradOutputParams p) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (pair >= 2048) return;

  const int output = u32(pair) / 32, c = pair - output * 32;
  const int group = u32(output) / 64, k = output - group * 64;
  const int k_tile = u32(k) / 64, c_tile = u32(c) / 32;
  const int point_size = 2048, product_size = F45x2::kSegments * F45x2::kPoints * point_size;
  const float* from = p.partial + i64(group + c_tile + k_tile) * (F45::kPoints * product_size) +
      (k - k_tile * 64) * 32 + c - c_tile * 32;

  float* const dw = p.dw + output * 1440 + c * 45;
  const int taps_h = 5, taps_w = 9;

  // Segment by segment along both axes, so that the values of one pair of segments fit into registers.
  #pragma unroll 1
  for (int segment_w = 0; segment_w < F45x2::kSegments; segment_w++) {
    const float* const sums_at = from + segment_w * F45x2::kPoints * point_size;
    float along_w[F45x2::kLongest][F45::kPoints];
    UNROLL for (int product = 0; product < F45::kPoints; product++) {
      float sums[F45x2::kPoints], taps[F45x2::kLongest];
      UNROLL for (int i = 0; i < F45x2::kPoints; i++) sums[i] = sums_at[product * product_size + i * point_size];
      F45x2::collect(sums, taps);
      UNROLL for (int t = 0; t < F45x2::kLongest; t++) along_w[t][product] = taps[t];
    }
    UNROLL for (int j = 0; j < F45x2::kLongest; j++) {
      float taps[F45::kLongest];
      F45::collect(along_w[j], taps);
      const int s = F45x2::first_tap(segment_w) + j;
      UNROLL for (int t = 0; t < F45::kLongest; t++) {
        const int r = t;
        if (t < 5 && j < F45x2::taps(segment_w) && r < taps_h && s < taps_w) dw[i64(r) * 9 + i64(s)] = taps[t];
      }
    }
  }
  from += F45::kPoints * product_size;
}

// Division by an invariant as one high multiplication and a shift.
static FastDivisor by(i64 divisor) {
  if (divisor <= 1) return {1, 0, 0};
  int power = 31;
  while (1ll << (power - 31) < divisor) power++;
  return {u32(divisor), u32(((1ull << power) + divisor - 1) / divisor), u32(power - 32)};
}

// Attribute of the current device.
static int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device), cudaDeviceGetAttribute(&value, which, device);
  return value;
}

// Allow a kernel this much dynamic shared memory; false if a block of the current device cannot have it.
template <class Kernel>
static bool allow_shared(Kernel kernel, int bytes) {
  return bytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) &&
         cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
}

// Exchange x and y: an input gradient becomes the call of a forward convolution that reads y and writes x.
static Call exchanged(const Call& c) {
  return {c.y,          c.w,         c.x,       nullptr,     c.workspace, c.y_batch,  c.y_channel,
          c.y_row,      c.y_column,  c.x_batch, c.x_channel, c.x_row,     c.x_column, c.batch,
          c.out_height, c.out_width, c.height,  c.width,     c.stream};
}

// Taps that read the same residue of the source: tap t of position i reads read_first + step * (i + lattices * t), and
// is element tap_first + t * tap_stride of the kernel.
struct TapClass {
  int read_first, taps, tap_first, tap_stride;
};

// One past the last position of the image that `count` positions of a tap class read.
static int read_end(const TapClass& taps, int step, int lattices, i64 count, i64 extent) {
  return int(max(0ll, min(extent, taps.read_first + step * (count - 1 + lattices * (taps.taps - 1)) + 1)));
}
constexpr int kLatticesH = 2, kLatticesW = 3, kWgradThreads = 512, kWgradShared = 97672, kWgradPairs = 2048,
    kWgradBlocks = 8;
constexpr TapClass kForwardH[] = {{-2, 5, 0, 1}};
constexpr TapClass kForwardW[] = {{-4, 9, 0, 1}};
constexpr TapClass kGradientH[] = {{-6, 5, 4, -1}};
constexpr TapClass kGradientW[] = {{-20, 9, 8, -1}};
constexpr i64 kWgradElements = 262144, kMostPixels = 8062976;

// The forward convolution, or its input gradient as an exchanged call: both are dense correlations on
// kLatticesH x kLatticesW lattices of positions, which read x and write y.
struct Direction {
  int channels, outputs;  // per group: read and written
  const TapClass *classes_h, *classes_w;
  const char* (*direct)(const Call&);  // fallback for calls that the kernels do not support
};

constexpr Direction kForward = {kGroupInputs, kGroupOutputs, kForwardH, kForwardW, direct_forward};

static const char* direct_exchanged(const Call& c) { return direct_input_gradient(exchanged(c)); }
constexpr Direction kGradient = {kGroupOutputs, kGroupInputs, kGradientH, kGradientW, direct_exchanged};

// Launches the four kernels in slabs of rows whose X and Y fit the workspace.
template <int kK>
static const char* separable(const Call& c, const Direction& d) {
  using Gemm = NonfusedGemm<kK>;
  constexpr int kPasses = F45Nested::kPasses;
  const i64 tiles_h = ceil_div(c.out_height, kLatticesH * F45::kM), rows = c.batch * kLatticesH * tiles_h;
  const i64 units = ceil_div(c.out_width, kLatticesW * F45Nested::kOutputs), row_columns = units * kLatticesW;
  const i64 columns = row_columns + (F45Nested::kPoints - 1
      + (kPasses - 1) * F45Nested::kM) / F45Nested::kOutputs * kLatticesW;
  const i64 pitch = columns >= 16 ? columns | 1 : columns;  // odd: the points of H do not all lie in one memory bank
  const i64 vectors = F45Nested::kTiles * pitch, channel_stride = vectors * F45Nested::kM;
  const i64 channels_all = i64(d.channels), chunks = ceil_div(channels_all, kChannelChunk);
  const i64 k_tiles = ceil_div(d.outputs, kK), products = F45::kPoints * kGroups * k_tiles;
  const i64 row_stride = F45::kPoints * kGroups * chunks * kChannelChunk * channel_stride;
  const i64 weights = products * chunks * kChannelChunk * kPasses * F45Nested::kPoints * kK;
  const auto columns_filled = [&](i64 n) { return ceil_div(n * row_columns, Gemm::kU) * Gemm::kU + 8; };
  const auto floats = [&](i64 n) {
    return weights + n * row_stride + F45::kPoints * kGroups * d.outputs * F45Nested::kOutputs * columns_filled(n);
  };

  // Rows of a slab that fit and take the fewest rounds of the persistent blocks, each launch counted as one more round.
  constexpr int kShared = 4 * Gemm::kSharedFloats;
  i64 room = kWorkspace;
  i64 most = min(rows, min(room / 4 / max(row_stride, 1ll), 0x7fffffff / max(row_stride, 1ll)));
  while (most > 0 && 4 * floats(most) > room) most--;
  if (most == 0 || rows >= 0x7fffffff || max(c.x_row, c.x_column) >= 0x7fffffff ||
      !allow_shared(winograd_nonfused_gemm<kK>, kShared))
    return d.direct(c);
  const i64 blocks = attribute(cudaDevAttrMultiProcessorCount);
  const auto rounds = [&](i64 n) { return ceil_div(products * ceil_div(n * row_columns, Gemm::kU), blocks); };
  i64 slab = most, fewest = 0;
  for (i64 n = most; n > most / 2; n -= max(1ll, most / 48)) {
    const i64 whole = rows / n, left = rows % n;
    const i64 all = whole * (rounds(n) + 1) + (left ? rounds(left) + 1 : 0);
    if (fewest == 0 || all < fewest) slab = n, fewest = all;
  }

  const bool is_forward = d.direct == direct_forward;
  NonfusedFilterParams t{};
  t.w = c.w, t.u = c.workspace;
  t.w_output = is_forward ? kFilter : kKernelArea, t.w_channel = is_forward ? kKernelArea : kFilter;
  t.channels = d.channels, t.channels_all = int(channels_all), t.chunks = int(chunks);
  t.outputs = d.outputs, t.k_tile = kK, t.source_channels = by(d.channels);
  NonfusedInputParams f{};
  f.source = c.x, f.x = c.workspace + weights, f.source_batch = c.x_batch, f.source_channel = c.x_channel;
  f.source_row = int(c.x_row), f.source_column = int(c.x_column), f.vectors = by(vectors), f.pitch = by(pitch);
  f.channels = kGroups * chunks * kChannelChunk, f.channels_filled = by(chunks * kChannelChunk);
  f.source_channels = by(d.channels), f.channels_all = int(channels_all), f.tiles = by(tiles_h);
  const TapClass& down = d.classes_h[0];
  const int own = down.taps;
  t.tap_part_h[0] = {max(0, own), down.tap_first, down.tap_stride};
  f.part_h = {down.read_first, read_end(down, 1, kLatticesH, c.out_height, c.height)};
  const TapClass& across = d.classes_w[0];
  t.tap_class_w = {across.taps, across.tap_first, across.tap_stride};
  f.class_w = {across.read_first, read_end(across, 1, kLatticesW, c.out_width, c.width)};

  NonfusedGemmParams g{};
  g.x = f.x, g.u = t.u, g.y = c.workspace + weights + slab * row_stride, g.row_columns = by(row_columns);
  g.row_stride = int(row_stride), g.group_stride = int(chunks * kChannelChunk * channel_stride);
  g.channel_stride = int(channel_stride), g.part_stride = int(pitch * F45Nested::kM);
  g.chunks = int(chunks), g.outputs = d.outputs;
  NonfusedOutputParams i{};
  const i64 stretch_units = ceil_div(units, ceil_div(F45Nested::kTiles * row_columns, 256));
  const i64 stretch_columns = stretch_units * kLatticesW, stretch = stretch_columns * F45Nested::kOutputs;
  const i64 lines = min(i64(d.outputs), max(1ll, 128 / (F45Nested::kTiles * stretch_columns)));
  const i64 line_blocks = ceil_div(d.outputs, lines), stretches = ceil_div(units, stretch_units);
  i.y = g.y, i.written = c.y, i.written_batch = c.y_batch, i.written_channel = c.y_channel;
  i.written_row = int(c.out_width), i.outputs = d.outputs;
  i.lines = int(lines), i.stretch_columns = int(stretch_columns);
  i.line_blocks = by(line_blocks), i.stretches = by(stretches), i.vectors = by(F45Nested::kTiles * stretch_columns);
  i.columns = by(stretch_columns), i.row_columns = int(row_columns), i.tiles = by(tiles_h), i.stretch = by(stretch);
  i.count_h = int(c.out_height), i.count_w = int(c.out_width);
  i.vector = c.out_width % 4 == 0 && stretch % 4 == 0 && reinterpret_cast<i64>(c.y) % 16 == 0;

  winograd_nonfused_filter<<<kGroups * k_tiles * chunks, 256, 0, c.stream>>>(t);
  if (const char* error = failed("winograd_nonfused_filter")) return error;
  for (i64 first = 0; first < rows; first += slab) {
    const i64 n = min(slab, rows - first), tiles = products * ceil_div(n * row_columns, Gemm::kU);
    f.first_row = i.first_row = int(first), f.rows = i.rows = by(n);
    f.items = u32(n * kGroups * chunks * kChannelChunk * channel_stride);
    g.tiles = int(tiles), g.column_tiles = by(tiles / products), g.columns = int(n * row_columns);
    g.columns_filled = i.columns_filled = int(columns_filled(n));
    winograd_nonfused_input<<<ceil_div(f.items, 256), 256, 0, c.stream>>>(f);
    if (const char* error = failed("winograd_nonfused_input")) return error;
    winograd_nonfused_gemm<kK><<<min(tiles, blocks), Gemm::kThreads, kShared, c.stream>>>(g);
    if (const char* error = failed("winograd_nonfused_gemm")) return error;
    winograd_nonfused_output
        <<<n * kGroups * line_blocks * stretches, 128, 4 * lines * F45::kM * stretch, c.stream>>>(i);
    if (const char* error = failed("winograd_nonfused_output")) return error;
  }
  return nullptr;
}

// Launches the three kernels of the weight gradient.
static const char* toom_weight_gradient(const Call& c) {
  const i64 tiles_h = ceil_div(c.out_height, kLatticesH * F45::kM);
  const i64 tiles = ceil_div(c.out_width, kLatticesW * 4) * 3;
  const i64 rows = c.batch * kLatticesH * tiles_h * (kLatticesW / 3);
  const i64 most_stride = max(max(c.x_row, c.x_column), max(c.y_row, c.y_column));
  if (rows * ceil_div(tiles, kChunk) >= 0x7fffffff || most_stride >= 0x7fffffff ||
      c.batch * c.out_height * c.out_width > kMostPixels || !allow_shared(winograd_wgrad, kWgradShared))
    return direct_weight_gradient(c);

  // Slices of the rows: enough to fill whole waves and to keep sums short, few enough for the workspace.
  const int sms = attribute(cudaDevAttrMultiProcessorCount);
  const i64 most = max(1ll, min(rows, kWorkspace / 4 / (kWgradElements + kOutChannels)));
  i64 slices = 1;
  double least = 0;
  for (int count = 1; count <= 8; count++) {
    const i64 n = max(1ll, min(most, i64(count) * sms / kWgradBlocks));
    const i64 whole = kWgradBlocks * n / sms, rest = kWgradBlocks * n % sms;
    const double last = rest == 0 ? 0. : max(double(rest) / sms, whole ? .5 : 1.);
    const double cost = (whole + last) * ceil_div(rows, n);
    if (least == 0 || cost < least - 1e-6 || (cost < least + 1e-6 && n > slices)) slices = n, least = cost;
  }

  WgradParams p{};
  p.x = c.x, p.dy = c.y, p.partial = c.workspace;
  p.x_batch = c.x_batch, p.x_channel = c.x_channel, p.dy_batch = c.y_batch, p.dy_channel = c.y_channel;
  p.x_row = int(c.x_row), p.x_column = int(c.x_column), p.dy_row = int(c.y_row), p.dy_column = int(c.y_column);
  p.x_next_row = 4 * kLatticesH * c.x_row, p.dy_next_row = 4 * kLatticesH * c.y_row;
  p.x_next_channel = kWgradThreads / 8 * c.x_channel, p.dy_next_channel = kWgradThreads / 8 * c.y_channel;
  p.x_first_h = kForwardH[0].read_first * c.x_row;
  p.height = max(p.height, read_end(kForwardH[0], 1, kLatticesH, c.out_height, c.height));
  p.x_first_w = kForwardW[0].read_first * c.x_column;
  p.width = max(p.width, read_end(kForwardW[0], 1, kLatticesW, c.out_width, c.width));
  p.count_h = int(c.out_height), p.count_w = int(c.out_width);
  p.rows = int(rows), p.tiles = int(tiles), p.slices = int(slices), p.tiles_h = by(tiles_h);
  winograd_wgrad<<<kWgradBlocks * slices, kWgradThreads, kWgradShared, c.stream>>>(p);
  if (const char* error = failed("winograd_wgrad")) return error;

  if (slices > 1) {
    WgradSumParams s{};
    s.partial = c.workspace, s.slices = int(slices);
    winograd_wgrad_sum<<<ceil_div(kWgradElements, 1024), 256, 0, c.stream>>>(s);
    if (const char* error = failed("winograd_wgrad_sum")) return error;
  }
  WgradOutputParams f{};
  f.partial = c.workspace, f.dw = c.w, f.slices = int(slices);
  winograd_wgrad_output<<<ceil_div(kWgradPairs, 128), 128, 0, c.stream>>>(f);
  return failed("winograd_wgrad_output");
}
"""

CONV2D = (
    CONV2D_DIRECT,
    CONV2D_PLANNED,
    (32, 64, 1, 5, 9, 1, 1, 2, 3, 2, 2, 4, 4, False),
    {
        "forward": "separable<64>(*call, kForward)",
        "input_gradient": "separable<32>(exchanged(*call), kGradient)",
        "weight_gradient": "toom_weight_gradient(*call)",
    },
)


# C++ text before a CUDA source, with the constants of its geometry, and after it, with its entry points.
GEOMETRY = """\
constexpr int kInChannels = {0}, kOutChannels = {1}, kGroups = {2}, kKernelH = {3}, kKernelW = {4};
constexpr int kStrideH = {5}, kStrideW = {6}, kDilationH = {7}, kDilationW = {8}, kPadTop = {9}, kPadLeft = {11};
"""
ENTRY = 'extern "C" const char* {}(const Call* call) {{ return {}; }}\n'
_KERNELS, _LOCK = {}, _thread.allocate_lock()


def _explain(kind, error, trace):
    if "unsupported GNU version" in str(error):
        raise RuntimeError("nvcc refuses this g++: name an older one, as in CC=gcc-11 CXX=g++-11") from error


def _compiled(text):
    """Path of the library, compiled if it is missing: torch's load_inline would compile it in every process."""
    arch = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if not arch and not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to compile for: say which one is meant, as in TORCH_CUDA_ARCH_LIST=7.0")
    devices = {torch.cuda.get_device_capability(i) for i in range(0 if arch else torch.cuda.device_count())}
    wanted = repr((text, torch.__version__, torch.version.cuda, arch, sorted(devices)))
    name = "polyconv_" + hashlib.sha256(wanted.encode()).hexdigest()[:16]
    folder = cpp_extension._get_build_directory(name, False)
    lock, complete, headers = (os.path.join(folder, part) for part in ("lock", "complete", "headers"))
    if os.path.exists(lock) and not os.path.exists(complete):
        print(f"waiting for the process that compiles; if it was killed, delete its lock {lock}", file=sys.stderr)
    while os.path.exists(lock) and not os.path.exists(complete):
        if time.time() - os.path.getmtime(lock) > 300:
            raise RuntimeError(f"the lock {lock} was left by a process that was killed while compiling: delete it")
        time.sleep(0.1)
    if not os.path.exists(complete):
        print(f"compiling CUDA kernels into {folder}, once; this takes some seconds", file=sys.stderr)
        # load_inline includes torch's headers, which take a minute to compile: empty ones take their place.
        os.makedirs(os.path.join(headers, "torch"), exist_ok=True)
        for header in ("extension.h", "types.h"):
            open(os.path.join(headers, "torch", header), "w").close()
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # compile again after a failure
        with contextlib.ExitStack() as failing:
            failing.push(_explain)
            options = {"extra_include_paths": [headers], "build_directory": folder, "is_python_module": False}
            cpp_extension.load_inline(name, "", text, **options)
        open(complete, "w").close()
    return os.path.join(folder, name + ".so")


def _kernels(source, geometry):
    """Compiled functions for a geometry: the planned ones if the file was exported for it, else the direct ones."""
    direct, planned, planned_for, calls = source
    with _LOCK:
        if (planned_for, geometry) not in _KERNELS:
            text = GEOMETRY.format(*geometry) + direct + (planned if geometry == planned_for else "")
            for name, call in calls.items():
                text += ENTRY.format(name, call if geometry == planned_for else f"direct_{name}(*call)")
            library = _KERNELS[planned_for, geometry] = ctypes.CDLL(_compiled(text))
            for name in calls:
                getattr(library, name).restype = ctypes.c_char_p
        return _KERNELS[planned_for, geometry]


def _call(function, x, w, y, bias):
    """Call a compiled function. It writes y, or the gradients in place of x, or of w and the bias."""
    for tensor in (x, w, y) if bias is None else (x, w, y, bias):
        if not tensor.is_cuda or tensor.device != x.device or tensor.dtype != torch.float32:
            raise RuntimeError(
                f"this convolution takes float32 tensors on one CUDA device, not {tensor.dtype} on {tensor.device} "
                f"beside {x.dtype} on {x.device}: move the model and its input with .cuda(), and use .float()"
            )
    with torch.cuda.device(x.device):
        workspace = torch.empty(max(64 << 20, 4 * (w.numel() + w.shape[0])), dtype=torch.uint8, device=x.device)
        tensors = (x, w, y, bias, workspace)
        sizes = (x.shape[0], *x.shape[2:], *y.shape[2:], torch.cuda.current_stream().cuda_stream)
        numbers = (*(0 if t is None else t.data_ptr() for t in tensors), *x.stride(), *y.stride(), *sizes)
        error = function((ctypes.c_longlong * len(numbers))(*numbers))  # ctypes releases the GIL
    if error:
        raise RuntimeError(error.decode())


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, kernels, size):
        ctx.save_for_backward(x, w)
        ctx.kernels = kernels
        y = x.new_empty(x.shape[0], w.shape[0], *size)
        if y.numel():
            _call(kernels.forward, x, w.contiguous(), y, bias)
        return y

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("this file has first derivatives, not those of derivatives: leave out create_graph=True")
        x, w = ctx.saved_tensors
        want_x, want_w, want_bias, *_ = ctx.needs_input_grad
        new = torch.Tensor.new_empty if grad.numel() else torch.Tensor.new_zeros
        dx = new(x, x.shape) if want_x else None
        dw = new(w, w.shape) if want_w else None
        db = None if not want_bias else new(w, w.shape[:1]) if want_w else grad.sum((0, 2, 3))
        if want_x and grad.numel():
            _call(ctx.kernels.input_gradient, dx, w.contiguous(), grad, None)
        if want_w and grad.numel():
            _call(ctx.kernels.weight_gradient, x, dw, grad, db)
        return dx, dw, db, None, None


class Conv2d(nn.Conv2d):
    """nn.Conv2d: its parameters, initialisation and state dict; padding may also be (top, bottom, left, right)."""

    def __init__(self, source, *args, **kwargs):
        super().__init__(*args, **kwargs)
        left, right, top, bottom, *all_sides = self._reversed_padding_repeated_twice
        self.sides = self.padding if all_sides else (top, bottom, left, right)
        sizes = (self.in_channels, self.out_channels, self.groups)
        sizes += (*self.kernel_size, *self.stride, *self.dilation)
        sizes += (*self.sides, self.bias is not None)
        self.source, self.geometry = source, sizes
        _kernels(self.source, self.geometry)  # compiled now, so that the first batch does not wait

    def forward(self, x):
        if x.dim() == 3:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise RuntimeError(f"an input of shape {list(x.shape)} does not have {self.in_channels} channels")
        before, after = self.sides[::2], self.sides[1::2]
        size = []
        for axis, pixels in enumerate(x.shape[2:]):
            reach = self.dilation[axis] * (self.kernel_size[axis] - 1)
            size.append((pixels + before[axis] + after[axis] - reach - 1) // self.stride[axis] + 1)
        if min(size) < 1:
            raise RuntimeError(f"the kernel {self.kernel_size} does not fit into an input of shape {list(x.shape)}")
        kernels = _kernels(self.source, self.geometry)
        return _Convolution.apply(x, self.weight, self.bias, kernels, size)


class ModelNew(nn.Module):
    """Takes the arguments of the module that it replaces; without any, those that this file was exported for."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self._make(*(args if args or kwargs else get_init_inputs()), **kwargs)

    def _make(
        self, in_channels, out_channels, kernel_size, stride=1, padding=(0, 0), dilation=(1, 1), bias=False, *, groups=1
    ):
        self.conv2d = Conv2d(CONV2D, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)

    def forward(self, x):
        return self.conv2d(x)


def get_inputs():
    return [torch.rand(8, 32, 512, 512)]


def get_init_inputs():
    return [32, 64, (5, 9), 1, (2, 4), (2, 3)]


if torch.cuda.is_available() or os.environ.get("TORCH_CUDA_ARCH_LIST"):
    _kernels(CONV2D, CONV2D[2])
