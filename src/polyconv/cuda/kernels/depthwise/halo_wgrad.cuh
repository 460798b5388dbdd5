// wgrad of a depthwise convolution, for any kernel size, stride, dilation and border:
//   dw[channel, tap] = sum over images and pixels of  dy[pixel] * x[pixel shifted by tap]
//
// A block owns one output channel, a chunk of its taps and one slice of the (image, tile) pairs. Each thread keeps one
// sum per tap over its pixels. At the end the block adds them in a fixed order and writes a partial sum;
// implicit_gemm/split_k_reduce.cuh adds the slices. The first chunk also sums dy: the bias gradient.
// Shared memory: two buffers, each an x tile with its halo and a dy tile. While one is used, the next is loaded into
// registers. Grid: x = slice, y = output channel, z = chunk of taps.
#pragma once

#include "depthwise/halo_tile.cuh"

namespace polyconv {

template <class Element>
struct HaloWgradParamsOf {
  const Element* x;
  const Element* dy;
  float* partial;  // [slice][channel][columns_padded]
  i64 x_batch, x_channel, dy_batch, dy_channel;
  int x_row, x_column, dy_row, dy_column;
  int height, width, out_height, out_width;
  int channels;              // output channels
  int taps, columns_padded;  // kernel area; row length of `partial`: the taps, then the bias
  int bias;
  int border;
  int jobs, jobs_per_slice;  // (image, tile) pairs
  int stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  HaloShape halo;
  FastDivisor multiplier, kernel_width, tiles, tiles_w;
};

struct HaloWgradParams : HaloWgradParamsOf<float> {};
struct HalfHaloWgradParams : HaloWgradParamsOf<Half> {};
struct BFloat16HaloWgradParams : HaloWgradParamsOf<BFloat16> {};

template <int kTileH, int kTileW, int kThreads, int kTaps, class Element = float, class Params>
__device__ __forceinline__ void depthwise_halo_wgrad(const Params& p) {
  constexpr int kEach = kTileH * kTileW / kThreads, kRowStep = kThreads / kTileW, kWarps = kThreads / 32;
  static_assert(kThreads % kTileW == 0 && kTileH % kRowStep == 0, "the block must divide the tile");
  extern __shared__ __align__(16) float shared[];
  __shared__ float sums[kWarps][kTaps + 1];
  const int halo = p.halo.elements(), both = halo + kTileH * kTileW;

  const int channel = blockIdx.y, first_tap = blockIdx.z * kTaps;
  const int i = threadIdx.x / kTileW, j = threadIdx.x % kTileW;
  const Element* const x_channel = p.x + p.multiplier.quotient(channel) * p.x_channel;
  const Element* const dy_channel = p.dy + channel * p.dy_channel;

  // Offset of tap t in the x tile, relative to the pixel. Taps past the last read the first one and are not written.
  int shift[kTaps];
#pragma unroll
  for (int t = 0; t < kTaps; t++) {
    const int tap = first_tap + t < p.taps ? first_tap + t : 0, r = p.kernel_width.quotient(tap);
    shift[t] = r * p.dilation_h * p.halo.pitch + (tap - r * p.kernel_width.divisor) * p.dilation_w;
  }

  // ---- One (image, tile) pair into registers, then into a buffer
  const Plane plane{p.x_row, p.x_column, p.height, p.width, Border(p.border)};
  HaloTile<kThreads> tile;
  float carried_dy[kEach];
  const auto load = [&](int job) {
    const int image = p.tiles.quotient(job), place = job - image * p.tiles.divisor;
    const int tile_y = p.tiles_w.quotient(place), tile_x = place - tile_y * p.tiles_w.divisor;
    const int origin_y = tile_y * kTileH * p.stride_h - p.pad_top, origin_x = tile_x * kTileW * p.stride_w - p.pad_left;
    tile.load(x_channel + image * p.x_batch, plane, p.halo, origin_y, origin_x);
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int a = tile_y * kTileH + i + e * kRowStep, b = tile_x * kTileW + j;
      carried_dy[e] = a < p.out_height && b < p.out_width
                          ? widened(dy_channel[image * p.dy_batch + i64(a) * p.dy_row + i64(b) * p.dy_column])
                          : 0.f;
    }
  };
  const auto store = [&](float* to) {
    tile.store(to, p.halo);
#pragma unroll
    for (int e = 0; e < kEach; e++) to[halo + (i + e * kRowStep) * kTileW + j] = carried_dy[e];
  };

  // ---- Sum over the pixels of each thread
  float sum[kTaps], sum_dy = 0.f;
#pragma unroll
  for (int t = 0; t < kTaps; t++) sum[t] = 0.f;
  const int first_job = blockIdx.x * p.jobs_per_slice, last_job = min(first_job + p.jobs_per_slice, p.jobs);
  load(first_job);
  store(shared);
  __syncthreads();
  int buffer = 0;
#pragma unroll 1
  for (int job = first_job; job < last_job; job++) {
    const bool more = job + 1 < last_job;
    if (more) load(job + 1);
    const float* ready = shared + buffer * both;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const float g = ready[halo + (i + e * kRowStep) * kTileW + j];
      const float* at = ready + (i + e * kRowStep) * p.stride_h * p.halo.pitch + j * p.stride_w;
      sum_dy += g;
#pragma unroll
      for (int t = 0; t < kTaps; t++) sum[t] = fmaf(at[shift[t]], g, sum[t]);
    }
    buffer ^= 1;
    if (more) store(shared + buffer * both);
    __syncthreads();
  }

  // ---- Sum over the block: a butterfly within each warp, then the warps in order
#pragma unroll
  for (int t = 0; t <= kTaps; t++) {
    float v = t < kTaps ? sum[t < kTaps ? t : 0] : sum_dy;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][t] = v;
  }
  __syncthreads();
  const int t = threadIdx.x;
  if (t > kTaps) return;
  const bool is_bias = t == kTaps;
  if (is_bias ? !(p.bias && blockIdx.z == 0) : first_tap + t >= p.taps) return;
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) total += sums[warp][t];
  p.partial[(i64(blockIdx.x) * p.channels + channel) * p.columns_padded + (is_bias ? p.taps : first_tap + t)] = total;
}

}  // namespace polyconv
