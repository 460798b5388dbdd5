// Filter transform of the nonfused pipeline (winograd/nonfused_layout.cuh), along both axes, in the order of
// winograd/nonfused_gemm.cuh: U[point of H][group][k tile][chunk][point of W][8 channels][k of the tile]. Chunks of 8
// channels come segment by segment; if segments are nested, first all of U0 + U1, then U0 and U1 of each chunk in turn.
// Channels and k are zero-padded.
//
// A thread transforms the taps of one (k, channel); lanes are neighbours in k, so every store is coalesced.
// Grid: x = (group * k tiles + k tile) * channels / 8 + chunk. Block: 32 lanes x 8 channels.
#pragma once

#include "winograd/nonfused_layout.cuh"

namespace polyconv {

// Taps of one class (and segment).
struct TapPart {
  int taps, tap_first, tap_stride;
};

struct NonfusedFilterParams {
  const float* w;
  float* u;
  i64 w_group, w_output, w_channel;
  int w_row, w_column;
  int channels;                  // of the source, per group
  int channels_all;              // times classes and segments
  int chunks;                    // of 8 of these, zero-padded
  int outputs, k_tile, k_tiles;  // written channels of a group, of a tile; tiles
  int groups, segments;          // segments along W
  FastDivisor source_channels, classes_w;
  TapPart tap_part_h[kMaxParts], tap_class_w[kMaxParts];
};

template <class H, class W>
struct WeightTransform {
  // Taps of one segment along W, transformed along H.
  static __device__ __forceinline__ void along_h(const NonfusedFilterParams& p, const float* w, const TapPart& h,
                                                 const TapPart& class_w, int segment,
                                                 float (&t)[H::kPoints][W::kLongest]) {
    const int first = segment * W::kM;
    const int last = segment + 1 < p.segments ? first + W::kM : class_w.taps;
#pragma unroll
    for (int j = 0; j < W::kLongest; j++) {
      float column[H::kLongest], points[H::kPoints];
#pragma unroll
      for (int i = 0; i < H::kLongest; i++)
        column[i] = w && i < h.taps && first + j < last
                        ? w[i64(h.tap_first + i * h.tap_stride) * p.w_row +
                            i64(class_w.tap_first + (first + j) * class_w.tap_stride) * p.w_column]
                        : 0.f;
      H::weights(column, points);
#pragma unroll
      for (int i = 0; i < H::kPoints; i++) t[i][j] = points[i];
    }
  }

  static __device__ __forceinline__ void store(float* to, int next_point, const float* points) {
#pragma unroll
    for (int point = 0; point < W::kPoints; point++) to[point * next_point] = points[point];
  }
};

template <class H, class W>
__device__ __forceinline__ void winograd_nonfused_filter(const NonfusedFilterParams& p) {
  using Transform = WeightTransform<H, W>;
  const int chunk = blockIdx.x % p.chunks, k_tile = blockIdx.x / p.chunks % p.k_tiles;
  const int group = blockIdx.x / p.chunks / p.k_tiles;
  const int in_chunk = threadIdx.x / 32, channel = chunk * kChannelChunk + in_chunk;
  const int by_class = p.source_channels.quotient(channel), part_h = p.classes_w.quotient(by_class);
  const TapPart& h = p.tap_part_h[min(part_h, kMaxParts - 1)];
  const TapPart& w = p.tap_class_w[by_class - part_h * p.classes_w.divisor];
  const int next_w = kChannelChunk * p.k_tile;  // between points of W
  const i64 plane = i64(W::kPoints) * next_w;   // one chunk
  const i64 slice = i64(p.chunks) * (W::kTiles == 2 ? 3 : p.segments) * plane;
  const i64 next_point = i64(p.groups) * p.k_tiles * slice;
  float* u = p.u + (i64(group) * p.k_tiles + k_tile) * slice + in_chunk * p.k_tile;

  for (int in_tile = threadIdx.x % 32; in_tile < p.k_tile; in_tile += 32) {
    const int k = k_tile * p.k_tile + in_tile;
    const float* from = nullptr;
    if (channel < p.channels_all && k < p.outputs)
      from = p.w + group * p.w_group + k * p.w_output + i64(channel - by_class * p.channels) * p.w_channel;
    float t[H::kPoints][W::kLongest], points[W::kPoints];
    if constexpr (W::kTiles == 2) {
      float second[H::kPoints][W::kLongest];
      Transform::along_h(p, from, h, w, 0, t);
      Transform::along_h(p, from, h, w, 1, second);
#pragma unroll
      for (int i = 0; i < H::kPoints; i++) {
        float* to = u + i * next_point + in_tile;
        float other[W::kPoints], both[W::kPoints];
        W::weights(t[i], points);
        W::weights(second[i], other);
#pragma unroll
        for (int point = 0; point < W::kPoints; point++) both[point] = points[point] + other[point];
        Transform::store(to + chunk * plane, next_w, both);
        Transform::store(to + (p.chunks + 2 * chunk) * plane, next_w, points);
        Transform::store(to + (p.chunks + 2 * chunk + 1) * plane, next_w, other);
      }
    } else {
      for (int segment = 0; segment < p.segments; segment++) {
        Transform::along_h(p, from, h, w, segment, t);
#pragma unroll
        for (int i = 0; i < H::kPoints; i++) {
          W::weights(t[i], points);
          Transform::store(u + i * next_point + in_tile + (segment * p.chunks + chunk) * plane, next_w, points);
        }
      }
    }
  }
}

}  // namespace polyconv
