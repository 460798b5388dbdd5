// fprop and dgrad of a depthwise convolution with a kernel that is known at compile time, limited by memory alone.
//   written[n, channel, i, j] = bias + sum over taps (r, s) of  w[r, s] * source[n, ..., i * stride + r, j * stride + s]
// (dgrad with stride 1 is the same with the taps flipped; with a stride see depthwise_scatter.cuh.)
//
// A thread owns one column of a strip of rows and walks down it. Each source row is read once, adds to all outputs that
// are still open, and completes one: the registers hold an accumulator per open output, not a window of the source.
// Neighbouring threads own neighbouring columns, so every access is coalesced whatever the alignment of a row; what the
// taps of a row share comes from L1. Strips of all planes are numbered through: no lane idles on a narrow image.
//
// No shared memory. Grid: x covers the strips, one thread each.
#pragma once

#include "strip.cuh"

namespace polyconv {

// kStride: along both axes.
template <int kTapsH, int kTapsW, int kStride>
__device__ __forceinline__ void depthwise_strip(const StripParams& p) {
  constexpr int kOpen = (kTapsH + kStride - 1) / kStride;  // outputs that one step adds to
  constexpr int kAhead = strip_steps(kStride * kTapsW);    // steps whose loads travel at once
  const u32 number = blockIdx.x * blockDim.x + threadIdx.x;
  if (number >= p.strips) return;
  const Strip strip(p, number);

  float taps[kTapsH][kTapsW];
  load_taps(taps, p, strip.channel);
  const float bias = p.bias ? p.bias[strip.channel] : 0.f;

  // Step k reads `kStride` rows; it opens output k and completes output k - (kOpen - 1).
  const int first_step = 1 - kOpen;
  SourceColumn<kTapsW> source(p, strip, strip.first_row * kStride + p.first_row,
                              strip.column * kStride + p.first_column, (strip.rows - 1) * kStride + kTapsH);
  float* to = p.written + strip.image * p.written_batch + strip.channel * p.written_channel +
              i64(strip.first_row + first_step) * p.written_row + strip.column;
  float open[kOpen];  // [m]: the output that was opened m steps ago
#pragma unroll
  for (int m = 0; m < kOpen; m++) open[m] = 0.f;

#pragma unroll 1
  for (int i = first_step; i < strip.rows; i += kAhead) {
    float x[kAhead][kStride][kTapsW];
#pragma unroll
    for (int u = 0; u < kAhead; u++)
#pragma unroll
      for (int a = 0; a < kStride; a++) source.next(x[u][a]);
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
#pragma unroll
      for (int m = kOpen - 1; m >= 0; m--) {
        float sum = m ? open[m ? m - 1 : 0] : bias;
#pragma unroll
        for (int a = 0; a < kStride && m * kStride + a < kTapsH; a++)
#pragma unroll
          for (int s = 0; s < kTapsW; s++) sum = fmaf(taps[m * kStride + a][s], x[u][a][s], sum);
        open[m] = sum;
      }
      if (u32(i + u) < u32(strip.rows)) *to = open[kOpen - 1];
      to += p.written_row;
    }
  }
}

}  // namespace polyconv
