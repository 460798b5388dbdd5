// fprop and dgrad of a depthwise convolution with a kernel size known at compile time. Bound by memory bandwidth.
//   written[n, channel, i, j] = bias + sum over taps (r, s) of w[r, s] * source[n, ..., i * stride + r, j * stride + s]
// dgrad with stride 1 has its taps flipped; for other strides see depthwise/strip_scatter.cuh.
//
// A thread owns the columns of a strip of rows and walks down it. Each source row is read once, adds to all outputs
// that are still open, and completes one per column: registers hold one accumulator per open output, not a window of
// the source. Neighbouring threads own neighbours in memory, so every access is coalesced whatever the alignment of a
// row; elements that several taps share come from L1. Strips are numbered across planes: no lane idles on a narrow
// image.
// No shared memory. Grid: x covers the strips, one thread each.
#pragma once

#include "common/epilogue.cuh"
#include "depthwise/strip_tile.cuh"

namespace polyconv {

// Neighbouring positions per thread. Lanes along columns share a row's elements through L1; otherwise a thread does.
// 16-bit elements are loaded one by one, so that rows need no alignment: two positions share loads and instructions.
template <Lanes kLanes, class Element = float>
constexpr int kStripColumns = kLanes == Lanes::kChannels ? 4
                              : sizeof(Element) == 2     ? 2
                                                         : 1;

// kStride: along both axes.
template <int kTapsH, int kTapsW, int kStride, Lanes kLanes, class Element = float, class Params>
__device__ __forceinline__ void depthwise_strip(const Params& p) {
  constexpr int kColumns = kStripColumns<kLanes, Element>;
  constexpr int kWidth = (kColumns - 1) * kStride + kTapsW;
  constexpr int kOpen = (kTapsH + kStride - 1) / kStride;  // outputs that one step adds to
  constexpr int kAhead = strip_steps(kStride * kWidth);    // steps whose loads are in flight together
  const u32 number = blockIdx.x * blockDim.x + threadIdx.x;
  if (number >= p.strips) return;
  const Strip<kLanes, kColumns> strip(p, number);

  float taps[kTapsH][kTapsW];
  load_taps(taps, p, strip.channel);
  const float bias = p.bias ? widened(p.bias[strip.channel]) : 0.f;

  // Step k reads kStride rows. It opens output k and completes output k - (kOpen - 1).
  const int first_step = 1 - kOpen;
  SourceRows<kLanes, kWidth, Element> source(p, strip, strip.first_row * kStride + p.first_row,
                                             strip.column * kStride + p.first_column,
                                             (strip.rows - 1) * kStride + kTapsH);
  const i64 next_column = kLanes == Lanes::kColumns ? 1 : p.written_column;
  Element* to = p.written + strip.image * p.written_batch + strip.channel * p.written_channel +
                i64(strip.first_row + first_step) * p.written_row + strip.column * next_column;
  float open[kOpen][kColumns];  // [m]: outputs opened m steps ago
#pragma unroll
  for (int m = 0; m < kOpen; m++)
#pragma unroll
    for (int c = 0; c < kColumns; c++) open[m][c] = 0.f;

#pragma unroll 1
  for (int i = first_step; i < strip.rows; i += kAhead) {
    float x[kAhead][kStride][kWidth];
#pragma unroll
    for (int u = 0; u < kAhead; u++)
#pragma unroll
      for (int a = 0; a < kStride; a++) source.next(x[u][a]);
    float residual[kAhead][kColumns];
    if constexpr (EpilogueOf<Params>::kResidual) {
      const Element* from = add_bytes(to, p.residual_bytes());
#pragma unroll
      for (int u = 0; u < kAhead; u++, from += p.written_row)
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          const bool exists = u32(i + u) < u32(strip.rows) && (kColumns == 1 || strip.column + c < p.columns);
          residual[u][c] = p.residual && exists ? widened(from[c * next_column]) : 0.f;
        }
    }
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
#pragma unroll
      for (int m = kOpen - 1; m >= 0; m--)
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          float sum = m ? open[m ? m - 1 : 0][c] : bias;
#pragma unroll
          for (int a = 0; a < kStride && (kTapsH % kStride == 0 || m * kStride + a < kTapsH); a++)
#pragma unroll
            for (int s = 0; s < kTapsW; s++) sum = fmaf(taps[m * kStride + a][s], x[u][a][c * kStride + s], sum);
          open[m][c] = sum;
        }
      if constexpr (EpilogueOf<Params>::kResidual) {
#pragma unroll
        for (int c = 0; c < kColumns; c++) open[kOpen - 1][c] += residual[u][c];
      }
      if constexpr (EpilogueOf<Params>::kExists) activate(open[kOpen - 1], p);
      if (u32(i + u) < u32(strip.rows))
#pragma unroll
        for (int c = 0; c < kColumns; c++)
          if (kColumns == 1 || strip.column + c < p.columns) to[c * next_column] = rounded<Element>(open[kOpen - 1][c]);
      to += p.written_row;
    }
  }
}

}  // namespace polyconv
