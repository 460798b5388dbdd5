// Input transform along H of the nonfused pipeline, in the layout of winograd/nonfused_layout.cuh. Bound by memory
// bandwidth.
//
// A thread computes one position: it reads H::kPoints rows of it and writes H::kPoints elements. Neighbouring threads
// write neighbours. With a dilation, or units wider than a vector, they read short interleaved runs; other warps soon
// use the rest of a sector. Overlapping tiles of rows are consecutive, so that the second read hits L2.
// Grid: x covers all (group, channel, row, vector, element) of the slab.
#pragma once

#include "winograd/nonfused_layout.cuh"

namespace polyconv {

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
  FastDivisor source_channels, classes_w;
  int channels_all;  // channels of a group without padding
  FastDivisor tiles, dilation_h, dilation_w;
  int read_step_h, read_step_w;
  int outputs_w;  // outputs of a unit along W
  SourcePart part_h[kMaxParts], class_w[kMaxParts];
};

template <class H, int kVector>
__device__ __forceinline__ void winograd_nonfused_input(const NonfusedInputParams& p) {
  const u32 item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= p.items) return;
  const u32 of_all = item / kVector, line = p.vectors.quotient(of_all), vector = of_all - line * p.vectors.divisor;
  const u32 of_row = p.rows.quotient(line), row = line - of_row * p.rows.divisor;
  const u32 group = p.channels_filled.quotient(of_row), channel = of_row - group * p.channels_filled.divisor;

  float in[H::kPoints], out[H::kPoints];
#pragma unroll
  for (int i = 0; i < H::kPoints; i++) in[i] = 0.f;
  if (channel < p.channels_all) {
    const u32 by_class = kMaxParts == 1 ? 0 : p.source_channels.quotient(channel),
              part = p.classes_w.quotient(by_class);
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
