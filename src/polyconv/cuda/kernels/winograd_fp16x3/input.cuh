// Input transform along W: scaled and split, in the layout of winograd_fp16x3/layout.cuh. Bound by memory bandwidth.
//
// A thread computes one column of one row for a chunk of channels, all passes and points. Neighbouring threads write
// neighbouring quads and read short runs; neighbours soon use the rest of a sector.
// Grid: x = part * column groups + column group, where a part is as many (row, column) of a column group as a block has
// threads; y = group * planes + plane; z = chunk. So blocks that run together read whole rows of the image, of which
// neighbouring column groups share the ends.
#pragma once

#include "winograd_fp16x3/layout.cuh"

namespace polyconv {

// First position that the taps of one class read, and the end of what any output needs of the image. Positions beyond
// are not read, so that an infinity there cannot reach a tile that extends beyond the outputs.
struct Fp16x3Source {
  int read_first, read_end;
};

struct Fp16x3InputParams {
  const float* source;
  uint4* v;
  const u32* largest;  // absmax parts of every image and group
  i64 source_batch, source_channel;
  int source_row, source_column;
  int headroom;                // bits by which a transformed value may exceed the absmax
  int first_plane, first_row;  // first plane and row of the slab
  u32 positions;               // rows * columns of a column group
  int groups, channels_all, chunks;
  FastDivisor pitch, phases, column_groups, phase_groups, planes, dilation_h;
  FastDivisor source_channels, classes_w;
  int units, dilation_w;  // of a column group
  int read_step_h, read_step_w;
  Fp16x3Source class_h[kTensorClasses], class_w[kTensorClasses];
};

template <class W>
__device__ __forceinline__ void winograd_fp16x3_input(const Fp16x3InputParams& p) {
  constexpr int kPasses = kTensorPasses<W>;
  const u32 part = p.column_groups.quotient(blockIdx.x);
  const u32 column_group = blockIdx.x - part * p.column_groups.divisor;
  const u32 group = p.planes.quotient(blockIdx.y), plane = p.first_plane + blockIdx.y - group * p.planes.divisor;
  const u32 image = p.dilation_h.quotient(plane), phase_h = plane - image * p.dilation_h.divisor;
  const u32 position = part * blockDim.x + threadIdx.x;

  const u32 row = p.pitch.quotient(position), column = position - row * p.pitch.divisor;
  const u32 unit = p.phases.quotient(column), unit_group = p.phase_groups.quotient(column_group);
  const int phase_w =
      (column_group - unit_group * p.phase_groups.divisor) * p.phases.divisor + column - unit * p.phases.divisor;
  const int first_w = phase_w + p.dilation_w * int(unit_group * p.units + unit) * W::kOutputs;
  const int step_w = p.read_step_w * p.dilation_w;
  const int q_h = p.first_row + row;

  // All channels first, then one pass after another: a pass needs few more registers. The scale is loaded last, so that
  // the loads of the source do not wait for it.
  float in[kTensorChannels][W::kSpan];
#pragma unroll
  for (int i = 0; i < kTensorChannels; i++) {
    const int channel = blockIdx.z * kTensorChannels + i;
#pragma unroll
    for (int j = 0; j < W::kSpan; j++) in[i][j] = 0.f;
    if (channel < p.channels_all && position < p.positions) {
      const u32 by_class = p.source_channels.quotient(channel), of_h = p.classes_w.quotient(by_class);
      const Fp16x3Source h = p.class_h[of_h], w = p.class_w[by_class - of_h * p.classes_w.divisor];
      const int at_h = h.read_first + p.read_step_h * int(phase_h + p.dilation_h.divisor * q_h);
      int at_w = w.read_first + p.read_step_w * first_w;
      if (at_h >= 0 && at_h < h.read_end) {
        const float* from = p.source + image * p.source_batch +
                            (i64(group) * p.source_channels.divisor + channel - by_class * p.source_channels.divisor) *
                                p.source_channel +
                            i64(at_h) * p.source_row + i64(at_w) * p.source_column;
        const i64 next = i64(step_w) * p.source_column;
#pragma unroll
        for (int j = 0; j < W::kSpan; j++, at_w += step_w, from += next)
          if (at_w >= 0 && at_w < w.read_end) in[i][j] = *from;
      }
    }
  }
  const float scale = scale_of(largest_part(p.largest + (image * p.groups + group) * kMagnitudeParts), p.headroom);
  if (position >= p.positions) return;
#pragma unroll
  for (int i = 0; i < kTensorChannels; i++)
#pragma unroll
    for (int j = 0; j < W::kSpan; j++) in[i][j] *= scale;

  const i64 of_v = i64(blockIdx.y) * p.column_groups.divisor + column_group;
  uint4* v = p.v + ((of_v * kPasses * p.chunks + blockIdx.z) * W::kPoints) * p.positions + position;
#pragma unroll
  for (int turn = 0; turn < kPasses; turn++) {
    float points[W::kPoints][kTensorChannels];
#pragma unroll
    for (int i = 0; i < kTensorChannels; i++) {
      float tile[W::kPoints], out[W::kPoints];
#pragma unroll
      for (int j = 0; j < W::kPoints; j++) {
        if constexpr (kPasses == 1) {
          tile[j] = in[i][j];
        } else {
          const float middle = in[i][j + W::kM];
          tile[j] = turn == 0 ? middle : in[i][j + (turn - 1) * 2 * W::kM] - middle;
        }
      }
      W::input(tile, out);
#pragma unroll
      for (int j = 0; j < W::kPoints; j++) points[j][i] = out[j];
    }
#pragma unroll
    for (int point = 0; point < W::kPoints; point++) v[i64(point) * p.positions] = split(points[point]);
    v += i64(p.chunks) * W::kPoints * p.positions;
  }
}

}  // namespace polyconv
