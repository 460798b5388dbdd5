// Depthwise convolutions along rows: a kernel of one row with a width known at compile time, stride 1. All passes;
// causal signals are such images of height 1. Bound by memory bandwidth.
//   written[n, channel, i, j] = bias + sum over taps s of  w[s] * source[n, ..., i, j + s + first_column]
//   dw[channel, s] = sum over images and pixels of  dy[i, j] * x[i, j + s - left]
//
// A warp owns a piece of one row and walks along it: in every step, lane l has the neighbouring columns 2l and 2l + 1.
// Elements are loaded one by one, so that rows need no alignment; what neighbours share comes from L1. Each thread
// loads the taps once. Pieces are numbered across rows and planes.
#pragma once

#include "common/epilogue.cuh"
#include "depthwise/strip_tile.cuh"

namespace polyconv {

constexpr int kLineColumns = 2;  // per thread and step
constexpr int kLineStep = 32 * kLineColumns;

// Pieces of rows, as both kernels number them.
struct LineCut {
  int columns;  // of a row
  int steps;    // of a piece
  FastDivisor pieces, rows;
};

template <class Element>
struct LineParamsOf {
  const Element* source;
  const Element* w;
  const Element* bias;  // null: none
  Element* written;
  i64 source_batch, source_channel, written_batch, written_channel;
  i64 w_channel, w_first, w_row, w_column;  // tap s of a channel at w_first + s * w_column; w_row is not used
  int source_row, source_column, written_row, written_column;
  int source_width, first_column;
  u32 numbers;  // pieces of all rows of all planes
  LineCut cut;
  FastDivisor channels, multiplier;  // written channels; written channels per source channel
};

struct HalfLineParams : LineParamsOf<Half> {};
struct BFloat16LineParams : LineParamsOf<BFloat16> {};

template <class Element>
struct LineWgradParamsOf {
  const Element* x;
  const Element* dy;
  float* partial;  // [slice][channel][columns_padded]: the taps, then the bias
  i64 x_batch, x_channel, dy_batch, dy_channel;
  int x_row, x_column, dy_row, dy_column;
  int width, pad_left;
  int channels;  // output channels
  int columns_padded;
  int bias;
  u32 numbers, numbers_per_slice;  // pieces of one channel
  LineCut cut;
  FastDivisor multiplier;
};

struct HalfLineWgradParams : LineWgradParamsOf<Half> {};
struct BFloat16LineWgradParams : LineWgradParamsOf<BFloat16> {};

// A thread's place in the piece of a number: its row of a plane, and its first column.
struct LinePlace {
  u32 plane;
  int row, column, end;  // columns from `end` on belong to others, or to none

  __device__ __forceinline__ LinePlace(const LineCut& cut, u32 number) {
    const u32 line = cut.pieces.quotient(number), first = (number - line * cut.pieces.divisor) * cut.steps * kLineStep;
    plane = cut.rows.quotient(line), row = line - plane * cut.rows.divisor;
    column = first + threadIdx.x % 32 * kLineColumns;
    end = min(cut.columns, int(first) + cut.steps * kLineStep);
  }
};

// Neighbouring elements of a row; zeros outside.
template <int kCount, class Element>
__device__ __forceinline__ void load_columns(float (&x)[kCount], const Element* from, int column, u32 width) {
#pragma unroll
  for (int s = 0; s < kCount; s++) x[s] = u32(column + s) < width ? widened(from[s]) : 0.f;
}

template <int kTaps, class Element, class Params>
__device__ __forceinline__ void depthwise_line(const Params& p) {
  constexpr int kReads = kLineColumns + kTaps - 1;
  const u32 number = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (number >= p.numbers) return;
  const LinePlace place(p.cut, number);
  const u32 image = p.channels.quotient(place.plane), channel = place.plane - image * p.channels.divisor;
  float taps[kTaps];
#pragma unroll
  for (int s = 0; s < kTaps; s++) taps[s] = widened(p.w[channel * p.w_channel + p.w_first + s * p.w_column]);
  const float bias = p.bias ? widened(p.bias[channel]) : 0.f;
  int read = place.column + p.first_column;
  const Element* from = p.source + image * p.source_batch + i64(p.multiplier.quotient(channel)) * p.source_channel +
                        i64(place.row) * p.source_row + read;
  Element* to =
      p.written + image * p.written_batch + channel * p.written_channel + i64(place.row) * p.written_row + place.column;

#pragma unroll 2
  for (int column = place.column; column < place.end;
       column += kLineStep, read += kLineStep, from += kLineStep, to += kLineStep) {
    float x[kReads], sum[kLineColumns];
    load_columns(x, from, read, p.source_width);
#pragma unroll
    for (int c = 0; c < kLineColumns; c++) {
      sum[c] = bias;
#pragma unroll
      for (int s = 0; s < kTaps; s++) sum[c] = fmaf(taps[s], x[c + s], sum[c]);
    }
    if (p.residual) {
      const Element* residual = add_bytes(to, p.residual_bytes());
#pragma unroll
      for (int c = 0; c < kLineColumns; c++)
        if (column + c < place.end) sum[c] += widened(residual[c]);
    }
    activate(sum, p);
#pragma unroll
    for (int c = 0; c < kLineColumns; c++)
      if (column + c < place.end) to[c] = rounded<Element>(sum[c]);
  }
}

// A block owns one channel and one slice of its pieces. At the end it adds its threads' sums in a fixed order and writes
// a partial sum; implicit_gemm/split_k_reduce.cuh adds the slices. dy is also summed: the bias gradient.
// Shared memory: one word per warp and sum. Grid: x = slice, y = output channel.
template <int kTaps, int kThreads, class Element, class Params>
__device__ __forceinline__ void depthwise_line_wgrad(const Params& p) {
  constexpr int kReads = kLineColumns + kTaps - 1, kWarps = kThreads / 32;
  __shared__ float sums[kWarps][kTaps + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = blockIdx.y;
  const Element* const x_channel = p.x + i64(p.multiplier.quotient(channel)) * p.x_channel;
  const Element* const dy_channel = p.dy + channel * p.dy_channel;
  float sum[kTaps + 1];  // the last one: dy
#pragma unroll
  for (int t = 0; t <= kTaps; t++) sum[t] = 0.f;
  const u32 first = blockIdx.x * p.numbers_per_slice, last = min(first + p.numbers_per_slice, p.numbers);
#pragma unroll 1
  for (u32 number = first + warp; number < last; number += kWarps) {
    const LinePlace place(p.cut, number);
    int read = place.column - p.pad_left;
    const Element* x_from = x_channel + place.plane * p.x_batch + i64(place.row) * p.x_row + read;
    const Element* dy_from = dy_channel + place.plane * p.dy_batch + i64(place.row) * p.dy_row + place.column;
#pragma unroll 2
    for (int column = place.column; column < place.end;
         column += kLineStep, read += kLineStep, x_from += kLineStep, dy_from += kLineStep) {
      float x[kReads], dy[kLineColumns];
      load_columns(x, x_from, read, p.width);
      load_columns(dy, dy_from, column, place.end);
#pragma unroll
      for (int c = 0; c < kLineColumns; c++) {
#pragma unroll
        for (int s = 0; s < kTaps; s++) sum[s] = fmaf(dy[c], x[c + s], sum[s]);
        sum[kTaps] += dy[c];
      }
    }
  }

#pragma unroll
  for (int t = 0; t <= kTaps; t++) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum[t] += __shfl_xor_sync(0xffffffffu, sum[t], distance);
    if (lane == 0) sums[warp][t] = sum[t];
  }
  __syncthreads();
  const int t = threadIdx.x;
  if (t >= kTaps + (p.bias != 0)) return;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += sums[w][t];
  p.partial[(i64(blockIdx.x) * p.channels + channel) * p.columns_padded + t] = total;
}

}  // namespace polyconv
