// dgrad of a strided depthwise convolution with a kernel size known at compile time. Bound by memory bandwidth.
//
// Row h of the gradient gets tap r of output row k if h + before = k * stride + r. So the kStride rows from k * stride
// - before on get from output row k - m exactly the taps m * stride .. m * stride + kStride - 1, for any k. The same
// holds along columns: the gradient consists of equal cells of kStride x kStride, and no tap is multiplied by a
// structural zero.
//
// A thread owns one column of cells of a strip and walks down it, as in depthwise/strip.cuh: each source row is read
// once, adds to all open cells, and completes one. One thread writes all phases, so the source is read from memory
// once. Grid: x covers the strips, one thread each.
#pragma once

#include "depthwise/strip_tile.cuh"

namespace polyconv {

template <int kTapsH, int kTapsW, int kStride, Lanes kLanes, class Element = float, class Params>
__device__ __forceinline__ void depthwise_strip_scatter(const Params& p) {
  constexpr int kOpen = (kTapsH + kStride - 1) / kStride, kReach = (kTapsW + kStride - 1) / kStride;
  constexpr int kAhead = strip_steps(kReach);
  const u32 number = blockIdx.x * blockDim.x + threadIdx.x;
  if (number >= p.strips) return;
  const Strip<kLanes, 1> strip(p, number);

  float taps[kTapsH][kTapsW];
  load_taps(taps, p, strip.channel);

  // Cell (0, 0) of the plane ends at the source's (first_row, first_column); earlier rows and columns contribute too.
  const int first_step = 1 - kOpen;
  SourceRows<kLanes, kReach, Element> source(p, strip, strip.first_row + first_step + p.first_row,
                                             strip.column + 1 - kReach + p.first_column, strip.rows + kOpen - 1);
  int row = (strip.first_row + first_step) * kStride + p.cell_row;
  const int column = strip.column * kStride + p.cell_column;
  const i64 next_column = kLanes == Lanes::kColumns ? 1 : p.written_column;
  Element* to = p.written + strip.image * p.written_batch + strip.channel * p.written_channel +
                i64(row) * p.written_row + column * next_column;
  float open[kOpen][kStride][kStride];  // [m]: the cell that m more rows complete
#pragma unroll
  for (int m = 0; m < kOpen; m++)
#pragma unroll
    for (int a = 0; a < kStride; a++)
#pragma unroll
      for (int b = 0; b < kStride; b++) open[m][a][b] = 0.f;

#pragma unroll 1
  for (int i = first_step; i < strip.rows; i += kAhead) {
    float dy[kAhead][kReach];
#pragma unroll
    for (int u = 0; u < kAhead; u++) source.next(dy[u]);
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
#pragma unroll
      for (int m = 0; m < kOpen; m++)
#pragma unroll
        for (int a = 0; a < kStride; a++)
#pragma unroll
          for (int b = 0; b < kStride; b++) {
            float sum = m + 1 < kOpen ? open[m + 1 < kOpen ? m + 1 : 0][a][b] : 0.f;
#pragma unroll
            for (int n = 0; n < kReach; n++)
              if (m * kStride + a < kTapsH && n * kStride + b < kTapsW)
                sum = fmaf(taps[m * kStride + a][n * kStride + b], dy[u][kReach - 1 - n], sum);
            open[m][a][b] = sum;
          }
      const bool complete = u32(i + u) < u32(strip.rows);
#pragma unroll
      for (int a = 0; a < kStride; a++) {
        const u32 inside = complete && u32(row) < u32(p.written_height) ? p.written_width : 0;
#pragma unroll
        for (int b = 0; b < kStride; b++)
          if (u32(column + b) < inside) to[b * next_column] = rounded<Element>(open[0][a][b]);
        to += p.written_row;
        row++;
      }
    }
  }
}

}  // namespace polyconv
