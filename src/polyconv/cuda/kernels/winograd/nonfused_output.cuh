// Last step of the nonfused pipeline (winograd/nonfused_layout.cuh): inverse along H, plus bias. Bound by memory
// bandwidth.
//
// A block computes whole stretches of positions for some written channels: vectors come in column by column, phase
// beside phase, and are rearranged in shared memory to H::kM dense rows per channel.
// Grid: x = ((group * blocks of channels + block) * rows + row) * stretches + stretch, so that blocks that run at the
// same time access neighbouring memory. Shared memory: lines * kM * stretch floats.
#pragma once

#include "common/epilogue.cuh"
#include "winograd/nonfused_layout.cuh"

namespace polyconv {

struct NonfusedOutputParams {
  const float* y;
  const float* bias;  // null: none
  float* written;
  i64 written_batch, written_channel;
  int written_row, written_column;
  int first_row;        // first row of tiles of the slab
  int outputs;          // written channels of a group
  int lines;            // channels per block
  int stretch_columns;  // columns per block
  FastDivisor line_blocks, stretches, rows;
  int groups;
  FastDivisor vectors;  // vectors of a stretch and channel
  FastDivisor columns;  // columns of a stretch
  int row_columns;      // columns of a row
  int columns_filled;   // columns of Y, padded to whole tiles
  FastDivisor tiles, dilation_h, dilation_w;
  int outputs_w;         // outputs of a unit along W
  int parts;             // vectors of a unit
  FastDivisor stretch;   // positions of a stretch
  int count_h, count_w;  // output positions
  int written_first_h, written_step_h, written_first_w, written_step_w;
  int vector;  // 1: rows are stored four elements at a time
};

template <class H, int kVector, class Params>
__device__ __forceinline__ void winograd_nonfused_output(const Params& p) {
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
