// Filter transform along W for winograd_fp16x3/layout.cuh: scaled, split and zero-padded, in the order of the GEMM's
// reads.
//
// A thread computes one tap row of one k for a chunk of channels; lanes are neighbours in k, so every store is
// coalesced.
// Grid: x = (group * k tiles + k tile) * chunks + chunk. Block: 32 k x 8 tap rows, looping over all tap rows.
#pragma once

#include "winograd_fp16x3/layout.cuh"

namespace polyconv {

// Taps of one class.
struct Fp16x3Taps {
  int taps, tap_first, tap_stride;
};

struct Fp16x3FilterParams {
  const float* w;
  uint4* u;
  const u32* largest;  // absmax of every filter
  i64 w_group, w_output, w_channel;
  int w_row, w_column;
  int headroom;  // bits by which a transformed weight may exceed the absmax
  int channels_all, outputs, taps_h, shifts;
  FastDivisor chunks, k_tiles, source_channels, classes_w;
  Fp16x3Taps class_h[kTensorClasses], class_w[kTensorClasses];
};

template <class W>
__device__ __forceinline__ void winograd_fp16x3_filter(const Fp16x3FilterParams& p) {
  constexpr int kPasses = kTensorPasses<W>, kSegments = W::kTiles;
  const u32 tile = p.chunks.quotient(blockIdx.x), chunk = blockIdx.x - tile * p.chunks.divisor;
  const u32 group = p.k_tiles.quotient(tile);
  const int k = (tile - group * p.k_tiles.divisor) * kTensorK + threadIdx.x % 32;
  const float scale = k < p.outputs ? scale_of(p.largest[group * p.outputs + k], p.headroom) : 0.f;
  const int taps = p.taps_h * p.shifts;
  const i64 next_pass = i64(p.chunks.divisor) * taps * kTensorK, next_point = kPasses * next_pass;
  uint4* u = p.u + tile * W::kPoints * next_point + i64(chunk) * taps * kTensorK + threadIdx.x % 32;

  for (int row = threadIdx.x / 32; row < p.taps_h; row += blockDim.x / 32) {
    for (int shift = 0; shift < p.shifts; shift++) {
      float points[kPasses][W::kPoints][kTensorChannels];
#pragma unroll
      for (int i = 0; i < kTensorChannels; i++) {
        const int channel = chunk * kTensorChannels + i;
        const u32 by_class = p.source_channels.quotient(channel), of_h = p.classes_w.quotient(by_class);
        const bool exists = channel < p.channels_all && k < p.outputs;
        const Fp16x3Taps h = p.class_h[exists ? of_h : 0];
        const Fp16x3Taps w = p.class_w[by_class - of_h * p.classes_w.divisor];
        const float* from = p.w + group * p.w_group + k * p.w_output +
                            i64(channel - by_class * p.source_channels.divisor) * p.w_channel +
                            i64(h.tap_first + row * h.tap_stride) * p.w_row;
        float segment[kSegments][W::kPoints];
#pragma unroll
        for (int s = 0; s < kSegments; s++) {
          const int number = shift + s, first = number * W::kM;
          const int last = number + 1 < p.shifts + kSegments - 1 ? first + W::kM : w.taps;
          float in[W::kLongest];
#pragma unroll
          for (int j = 0; j < W::kLongest; j++)
            in[j] = exists && row < h.taps && first + j < min(last, w.taps)
                        ? from[i64(w.tap_first + (first + j) * w.tap_stride) * p.w_column] * scale
                        : 0.f;
          W::weights(in, segment[s]);
        }
#pragma unroll
        for (int point = 0; point < W::kPoints; point++) {
          if constexpr (kPasses == 1) {
            points[0][point][i] = segment[0][point];
          } else {
            points[0][point][i] = segment[0][point] + segment[1][point];
            points[1][point][i] = segment[0][point];
            points[2][point][i] = segment[1][point];
          }
        }
      }
#pragma unroll
      for (int turn = 0; turn < kPasses; turn++)
#pragma unroll
        for (int point = 0; point < W::kPoints; point++)
          u[point * next_point + turn * next_pass + (row * p.shifts + shift) * kTensorK] = split(points[turn][point]);
    }
  }
}

}  // namespace polyconv
