// wgrad of a depthwise convolution with a kernel size known at compile time. Bound by memory bandwidth.
//   dw[channel, r, s] = sum over images and pixels (i, j) of  dy[i, j] * x[i * stride + r - top, j * stride + s - left]
//
// A thread walks down one column of a strip of rows with a window of x rows in registers, and sums all taps at once.
// Both tensors are read once, coalesced: neighbouring threads own neighbours in memory. A block owns one channel, or 32
// channels as lanes, and one slice of their strips. At the end it adds its threads' sums in a fixed order and writes a
// partial sum; implicit_gemm/split_k_reduce.cuh adds the slices. dy is also summed: the bias gradient.
// Shared memory: one word per warp and sum, or per thread and sum. Grid: x = slice, y = output channel or 32 of them.
#pragma once

#include "depthwise/strip_tile.cuh"

namespace polyconv {

template <class Element>
struct StripWgradParamsOf {
  const Element* x;
  const Element* dy;
  float* partial;  // [slice][channel][columns_padded]: the taps, then the bias
  i64 x_batch, x_channel, dy_batch, dy_channel;
  int x_row, x_column, dy_row, dy_column;
  int height, width, pad_top, pad_left;
  int channels;  // output channels
  int columns_padded;
  int bias;
  int rows, rows_per_strip;      // rows of dy
  u32 strips, strips_per_slice;  // strips of one channel
  FastDivisor column_strips, row_strips, multiplier;
};

struct StripWgradParams : StripWgradParamsOf<float> {};
struct HalfStripWgradParams : StripWgradParamsOf<Half> {};
struct BFloat16StripWgradParams : StripWgradParamsOf<BFloat16> {};

// kStride: along both axes.
template <int kTapsH, int kTapsW, int kStride, Lanes kLanes, int kThreads, class Element = float, class Params>
__device__ __forceinline__ void depthwise_strip_wgrad(const Params& p) {
  constexpr int kTaps = kTapsH * kTapsW, kWarps = kThreads / 32;
  constexpr int kRound = kTapsH == 1 ? 4 : kTapsH;  // steps after which the window's slots repeat
  constexpr bool kChannels = kLanes == Lanes::kChannels;
  __shared__ float sums[kWarps][kTaps + 1][kChannels ? 32 : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = kChannels ? blockIdx.y * 32 + lane : blockIdx.y;
  const Element* const x_channel = p.x + i64(p.multiplier.quotient(channel)) * p.x_channel;
  const Element* const dy_channel = p.dy + channel * p.dy_channel;

  // ---- Sum over the strips of each thread
  float sum[kTaps + 1];  // the last one: dy
#pragma unroll
  for (int t = 0; t <= kTaps; t++) sum[t] = 0.f;
  const u32 first = blockIdx.x * p.strips_per_slice;
  const u32 last = channel < p.channels ? min(first + p.strips_per_slice, p.strips) : 0;
#pragma unroll 1
  for (u32 strip = first + (kChannels ? warp : threadIdx.x); strip < last; strip += kChannels ? kWarps : kThreads) {
    const u32 above = p.column_strips.quotient(strip), image = p.row_strips.quotient(above);
    const int column = strip - above * p.column_strips.divisor;
    const int first_row = (above - image * p.row_strips.divisor) * p.rows_per_strip;
    const int rows = min(p.rows_per_strip, p.rows - first_row);
    const Element* dy =
        dy_channel + image * p.dy_batch + i64(first_row) * p.dy_row + column * i64(kChannels ? p.dy_column : 1);
    SourceRows<kLanes, kTapsW, Element> source(x_channel + image * p.x_batch, p.x_row, p.x_column, p.height, p.width,
                                               first_row * kStride - p.pad_top, column * kStride - p.pad_left,
                                               (rows - 1) * kStride + kTapsH);

    // Row r of the window of step i is in slot (i * kStride + r) % kTapsH: constant once steps are unrolled.
    float window[kTapsH][kTapsW];
#pragma unroll
    for (int r = 0; r < kTapsH - kStride; r++) source.next(window[r]);
    const auto step = [&](int u) {
#pragma unroll
      for (int r = kTapsH - kStride; r < kTapsH; r++) source.next(window[(u * kStride + r) % kTapsH]);
      const float g = widened(*dy);
      dy += p.dy_row;
#pragma unroll
      for (int r = 0; r < kTapsH; r++)
#pragma unroll
        for (int s = 0; s < kTapsW; s++)
          sum[r * kTapsW + s] = fmaf(g, window[(u * kStride + r) % kTapsH][s], sum[r * kTapsW + s]);
      sum[kTaps] += g;
    };
    int i = 0;
#pragma unroll 1
    for (; i + kRound <= rows; i += kRound) {
#pragma unroll
      for (int u = 0; u < kRound; u++) step(u);
    }
#pragma unroll
    for (int u = 0; u < kRound - 1; u++)
      if (i + u < rows) step(u);
  }

  // ---- Sum over the block: lanes of one channel by a butterfly, then the warps in order
#pragma unroll
  for (int t = 0; t <= kTaps; t++) {
    float v = sum[t];
    if constexpr (!kChannels) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
    }
    if (kChannels || lane == 0) sums[warp][t][kChannels ? lane : 0] = v;
  }
  __syncthreads();
  if (channel >= p.channels) return;
  float* const to = p.partial + (i64(blockIdx.x) * p.channels + channel) * p.columns_padded;
  for (int t = kChannels ? warp : threadIdx.x; t < kTaps + (p.bias != 0); t += kChannels ? kWarps : kThreads) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += sums[w][t][kChannels ? lane : 0];
    to[t] = total;
  }
}

}  // namespace polyconv
