// fprop and dgrad of a depthwise convolution, for any kernel size, stride, dilation and border.
//   written[n, channel, position] = bias + sum over the channel's sources and taps of  source[n, ...] * w[...]
// fprop: a written channel has one source (channel / multiplier). dgrad: it has `sources` of them (the multiplier's
// outputs). Positions and taps are those of one phase of the lattice (common/common.cuh), as in implicit_gemm.
//
// A block owns one tile of positions of one channel and loops over its images (and sources). Shared memory: two source
// tiles with their halo, then the taps of all sources. While one tile is convolved, the next is loaded into registers.
// Grid: x = image chunk * tiles + tile, y = written channel, z = phase.
#pragma once

#include "common/epilogue.cuh"
#include "depthwise/halo_tile.cuh"

namespace polyconv {

template <class Element>
struct HaloParamsOf {
  const Element* source;
  const Element* w;
  const Element* bias;  // null: none
  Element* written;
  i64 source_batch, source_channel, written_batch, written_channel;
  i64 w_written, w_source;  // weight strides per written channel and per source of it
  i64 w_row, w_column;
  int source_row, source_column, written_row, written_column;
  int source_height, source_width;
  int batch, images_per_block;
  int sources;  // source channels per written channel
  int border;
  HaloShape halo;  // source tile of the largest phase
  int phases_w;
  int tap_step_h, tap_step_w;
  FastDivisor multiplier;  // written channels per source channel; 1 unless fprop
  FastDivisor tiles, tiles_w;
  AxisPhase phase_h[kMaxPhases], phase_w[kMaxPhases];
};

struct HaloParams : HaloParamsOf<float> {};
struct HalfHaloParams : HaloParamsOf<Half> {};
struct BFloat16HaloParams : HaloParamsOf<BFloat16> {};

template <int kTileH, int kTileW, int kThreads, class Element = float, class Params>
__device__ __forceinline__ void depthwise_halo(const Params& p) {
  constexpr int kEach = kTileH * kTileW / kThreads;  // positions per thread, a few rows apart
  constexpr int kRowStep = kThreads / kTileW;
  static_assert(kThreads % kTileW == 0 && kTileH % kRowStep == 0, "the block must divide the tile");
  extern __shared__ __align__(16) float shared[];
  const int halo = p.halo.elements();
  float* const taps = shared + 2 * halo;

  // ---- Block position
  const AxisPhase& h = p.phase_h[blockIdx.z / p.phases_w];
  const AxisPhase& w = p.phase_w[blockIdx.z % p.phases_w];
  const int chunk = p.tiles.quotient(blockIdx.x), place = blockIdx.x - chunk * p.tiles.divisor;
  const int tile_y = p.tiles_w.quotient(place), tile_x = place - tile_y * p.tiles_w.divisor;
  const int first_i = tile_y * kTileH, first_j = tile_x * kTileW;
  if (first_i >= h.count.divisor || first_j >= w.count.divisor) return;  // a phase smaller than the largest
  const int channel = blockIdx.y;
  const int first_image = chunk * p.images_per_block, last_image = min(first_image + p.images_per_block, p.batch);
  const int first_source = p.multiplier.quotient(channel) * p.sources;

  // ---- Load the taps
  const int area = h.taps * w.taps;
  for (int t = threadIdx.x; t < p.sources * area; t += kThreads) {
    const int of = t / area, tap = t - of * area, r = tap / w.taps, s = tap - r * w.taps;
    taps[t] = widened(p.w[channel * p.w_written + of * p.w_source + (h.tap_first + r * h.tap_stride) * p.w_row +
                          (w.tap_first + s * w.tap_stride) * p.w_column]);
  }

  // ---- Source tiles: the origin is the smallest coordinate that any tap of any position of the tile reads
  const int origin_y = h.read_first + first_i * h.read_step + min(0, (h.taps - 1) * p.tap_step_h);
  const int origin_x = w.read_first + first_j * w.read_step + min(0, (w.taps - 1) * p.tap_step_w);
  const Plane plane{p.source_row, p.source_column, p.source_height, p.source_width, Border(p.border)};
  HaloTile<kThreads> tile;
  const auto load = [&](int image, int of) {
    tile.load(p.source + image * p.source_batch + (first_source + of) * p.source_channel, plane, p.halo, origin_y,
              origin_x);
  };

  // ---- Convolve tile after tile
  const int i = threadIdx.x / kTileW, j = threadIdx.x % kTileW;
  const int first = (i * h.read_step - min(0, (h.taps - 1) * p.tap_step_h)) * p.halo.pitch + j * w.read_step -
                    min(0, (w.taps - 1) * p.tap_step_w);
  const int next_position = kRowStep * h.read_step * p.halo.pitch;
  const float add = p.bias ? widened(p.bias[channel]) : 0.f;
  float sum[kEach];
  int buffer = 0;
  if (area) {
    load(first_image, 0);
    tile.store(shared, p.halo);
  }
  __syncthreads();
#pragma unroll 1
  for (int image = first_image; image < last_image; image++) {
#pragma unroll
    for (int e = 0; e < kEach; e++) sum[e] = add;
#pragma unroll 1
    for (int of = 0; of < p.sources && area; of++) {
      const bool wraps = of + 1 == p.sources, more = !wraps || image + 1 < last_image;
      if (more) load(wraps ? image + 1 : image, wraps ? 0 : of + 1);
      const float* tap = taps + of * area;
      const float* line = shared + buffer * halo + first;
      for (int r = 0; r < h.taps; r++, line += p.tap_step_h * p.halo.pitch) {
        const float* at = line;
        for (int s = 0; s < w.taps; s++, at += p.tap_step_w) {
          const float weight = *tap++;
#pragma unroll
          for (int e = 0; e < kEach; e++) sum[e] = fmaf(at[e * next_position], weight, sum[e]);
        }
      }
      buffer ^= 1;
      if (more) tile.store(shared + buffer * halo, p.halo);
      __syncthreads();
    }
    Element* written = p.written + image * p.written_batch + channel * p.written_channel;
    if constexpr (EpilogueOf<Params>::kExists) {
      // All residuals before the first store, so that the loads overlap.
      const Element* residual =
          reinterpret_cast<const Element*>(p.residual) + image * p.written_batch + channel * p.written_channel;
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const int a = first_i + i + e * kRowStep, b = first_j + j;
        if (p.residual && a < int(h.count.divisor) && b < int(w.count.divisor))
          sum[e] += widened(residual[i64(h.written_first + a * h.written_step) * p.written_row +
                                     i64(w.written_first + b * w.written_step) * p.written_column]);
      }
      activate(sum, p);
    }
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int a = first_i + i + e * kRowStep, b = first_j + j;
      if (a < int(h.count.divisor) && b < int(w.count.divisor))
        written[i64(h.written_first + a * h.written_step) * p.written_row +
                i64(w.written_first + b * w.written_step) * p.written_column] = rounded<Element>(sum[e]);
    }
  }
}

}  // namespace polyconv
