// The source, transformed along H, in the layout of half_layout.cuh. Bound by memory bandwidth.
//
// A thread makes kVector neighbours of one column: it reads H::kPoints rows of them and writes H::kPoints vectors.
// Neighbouring threads write neighbouring vectors; what they read lies interleaved if the convolution is dilated, but
// in the same lines, which L1 serves. Tiles of rows overlap: the second reading comes from L2.
// Grid: x covers all (row, group, channel, vector) of the slab.
#pragma once

#include "half_layout.cuh"

namespace polyconv {

struct HalfTransformParams {
  const float* source;
  float* x;
  i64 source_batch, source_channel;
  int source_row, source_column;
  int first_row;                // of the slab
  u32 items;                    // vectors of one point of H in the slab
  FastDivisor vectors, pitch;   // of a channel; of a part of it
  FastDivisor channels;         // of a row: groups * filled-up channels
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
  const u32 line = p.vectors.quotient(item), vector = item - line * p.vectors.divisor;
  const u32 row = p.channels.quotient(line), of_row = line - row * p.channels.divisor;
  const u32 group = p.channels_filled.quotient(of_row), channel = of_row - group * p.channels_filled.divisor;
  float* x = p.x + i64(row) * H::kPoints * p.channels.divisor * p.vectors.divisor * kVector +
             i64(of_row * p.vectors.divisor + vector) * kVector;
  const i64 next_point = i64(p.channels.divisor) * p.vectors.divisor * kVector;

  float in[H::kPoints][kVector];
  if (channel < p.channels_all) {
    const u32 by_class = p.source_channels.quotient(channel), part = p.classes_w.quotient(by_class);
    const SourcePart h = p.part_h[part], w = p.class_w[by_class - part * p.classes_w.divisor];
    const u32 place = p.first_row + row, phases = p.tiles.quotient(place), image = p.dilation_h.quotient(phases);
    const int tile = place - phases * p.tiles.divisor, phase_h = phases - image * p.dilation_h.divisor;
    const u32 piece = p.pitch.quotient(vector), column = vector - piece * p.pitch.divisor;
    const int unit = p.dilation_w.quotient(column), phase_w = column - unit * p.dilation_w.divisor;

    const int step_h = p.read_step_h * p.dilation_h.divisor, step_w = p.read_step_w * p.dilation_w.divisor;
    const int first_h = h.read_first + p.read_step_h * phase_h + step_h * tile * H::kM;
    const int first_w = w.read_first + p.read_step_w * phase_w + step_w * (unit * p.outputs_w + int(piece) * kVector);
    const float* from =
        p.source + image * p.source_batch +
        i64(group * p.source_channels.divisor + channel - by_class * p.source_channels.divisor) * p.source_channel +
        i64(first_h) * p.source_row + i64(first_w) * p.source_column;
#pragma unroll
    for (int i = 0; i < H::kPoints; i++) {
      const int at_h = first_h + i * step_h;
      const bool row_there = at_h >= 0 && at_h < h.read_end;
#pragma unroll
      for (int v = 0; v < kVector; v++) {
        const int at_w = first_w + v * step_w;
        in[i][v] = row_there && at_w >= 0 && at_w < w.read_end ? from[i64(v) * step_w * p.source_column] : 0.f;
      }
      from += i64(step_h) * p.source_row;
    }
  } else {
#pragma unroll
    for (int i = 0; i < H::kPoints; i++)
#pragma unroll
      for (int v = 0; v < kVector; v++) in[i][v] = 0.f;
  }
#pragma unroll
  for (int v = 0; v < kVector; v++) {
    float column[H::kPoints], points[H::kPoints];
#pragma unroll
    for (int i = 0; i < H::kPoints; i++) column[i] = in[i][v];
    H::input(column, points);
#pragma unroll
    for (int i = 0; i < H::kPoints; i++) in[i][v] = points[i];
  }
#pragma unroll
  for (int i = 0; i < H::kPoints; i++) store_vector<kVector>(x + i * next_point, in[i]);
}

}  // namespace polyconv
