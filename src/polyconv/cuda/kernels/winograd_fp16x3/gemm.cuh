// GEMM of the pipeline of winograd_fp16x3/layout.cuh: for each point of W a matrix product over channels and taps on
// tensor cores, three FP16 products for one FP32 product, followed by the inverse along W and the bias.
//
// A block has eight warps, a warp one point of one tile: 32 written channels x 64 units. Algorithms with fewer than
// eight points have several tiles per block. Warps share nothing in the main loop, MainloopK4 or MainloopK16 by
// instruction. Trailing blocks compute parts of the absmax of images of later slabs: the tensor cores bound the GEMM,
// its last wave is seldom full, and it leaves most of the memory bandwidth unused.
//
// Grid: x = (tiles of positions / tiles of a block) * k tiles + k tile, then parts; y = group of the convolution.
// Shared memory: double buffers [warp][2][stage]; in the epilogue [warp][rows of a fragment][64 units]. Behind them,
// with nested segments, the same for the sums of the first tile, or all of them, [warp][32 written channels][64 units],
// if the main loop parks them there.
#pragma once

#include "common/epilogue.cuh"
#include "winograd_fp16x3/mainloop_m16n8k16.cuh"
#include "winograd_fp16x3/mainloop_m8n8k4.cuh"

namespace polyconv {

// Inverse transform of two neighbouring units, with `apart` floats between points.
template <class W>
__device__ __forceinline__ void inverse_of_two(const float* at, int apart, float (&out)[2][W::kM]) {
  float points[2][W::kPoints];
#pragma unroll
  for (int point = 0; point < W::kPoints; point++) {
    const float2 two = *reinterpret_cast<const float2*>(at + point * apart);
    points[0][point] = two.x, points[1][point] = two.y;
  }
  W::output(points[0], out[0]);
  W::output(points[1], out[1]);
}

template <class W, class Steps, class Params>
__device__ __forceinline__ void winograd_fp16x3_gemm(const Params& p) {
  using Product = typename Steps::Tile;
  using Mma = typename Steps::Mma;
  constexpr int kPoints = W::kPoints, kTiles = Product::kTiles;
  extern __shared__ __align__(16) float shared[];
  uint4* const stages = reinterpret_cast<uint4*>(shared);
  float* const exchange = shared;  // in the epilogue, over the stages
  if (blockIdx.x >= p.blocks) {
    const u32 number = p.first_part + blockIdx.x - p.blocks, image = number / kMagnitudeParts;
    find_magnitude(p.behind, image * p.groups + blockIdx.y, number % kMagnitudeParts, kMagnitudeParts,
                   reinterpret_cast<u32*>(shared));
    return;
  }
  const int stage = Steps::stage_quads(p);
  // With nested segments, sums of the first tile: all, behind everything else, or a fragment's, behind the last tile's.
  constexpr int kFirst = Steps::kParks ? Product::kParked : Product::kExchange;
  float* const first_tile =
      exchange + (Steps::kParks ? max(4 * 2 * stage, Product::kExchange) : Product::kExchange) * Product::kWarps;

  const u32 tile_block = p.k_tiles.quotient(blockIdx.x), k_tile = blockIdx.x - tile_block * p.k_tiles.divisor;
  typename Product::Sums sum, other;
  {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, point = warp % kPoints;
    // Past the end the last tile is computed once more, and not stored.
    const typename Product::Place place(p, min(tile_block * kTiles + warp / kPoints, u32(p.tiles) - 1));
    const uint4* from_v = p.v + (place.of_v * kTensorPasses<W> * p.chunks * kPoints + point) * p.positions +
                          i64(place.row_group) * p.rows * p.pitch + lane;
    const i64 steps = i64(kTensorPasses<W>) * p.chunks * p.taps;
    const uint4* from_u = p.u + ((i64(blockIdx.y) * p.k_tiles.divisor + k_tile) * kPoints + point) * steps * kTensorK +
                          Mma::row_of_a(lane);
    Steps::sum_up(sum, other, p, stages + warp * 2 * stage, first_tile + warp * Product::kParked, from_v, from_u);
  }

  // One fragment of written channels at a time: points meet in shared memory, are inverted along W in place, and
  // stored.
  const u32 thread = fresh_thread(), warp = thread / 32;
  constexpr int kStores = kTiles * kTensorUnits * W::kOutputs / Product::kThreads;  // of a thread and channel
  // Each lane holds the scales and the bias of one filter of the tile, and rows fetch them by shuffles. With several
  // tiles, stores may belong to different images.
  constexpr int kScales = kTiles == 1 ? 1 : kStores;
  static_assert(kTensorK == 32, "a filter of the tile to a lane");
  const u32 first_filter = blockIdx.y * p.outputs + k_tile * kTensorK;
  const u32 own_filter = min(first_filter + thread % 32, (blockIdx.y + 1) * p.outputs - 1);
  const int of_filter = -scale_exponent(p.largest_filters[own_filter], p.headroom_filters);
  const float own_bias = p.bias ? p.bias[own_filter] : 0.f;
  float own_scales[kScales][2];
  const float* from[kStores];
  float* to[kStores];
  int unit[kStores];
  bool wanted[kStores];
#pragma unroll
  for (int store = 0; store < kStores; store++) {
    constexpr int kEach = kTensorUnits * W::kOutputs;
    const u32 number = thread + store * Product::kThreads, of_block = number / kEach, item = number % kEach;
    const u32 tile = tile_block * kTiles + of_block;
    const typename Product::Place place(p, min(tile, u32(p.tiles) - 1));
    const u32 row = p.stretch.quotient(item), along = item - row * p.stretch.divisor;
    const u32 q = p.phases.quotient(along), phase = along - q * p.phases.divisor;
    const u32 unit_group = p.phase_groups.quotient(place.column_group);
    const int phase_w = (place.column_group - unit_group * p.phase_groups.divisor) * p.phases.divisor + phase;
    const int h = place.phase_h + int(p.dilation_h.divisor) * (p.first_row + int(place.row_group) * p.rows + int(row));
    const int w = phase_w + p.dilation_w * int(unit_group * p.units * W::kOutputs + q);
    wanted[store] =
        tile < u32(p.tiles) && int(row) < p.rows && phase_w < p.dilation_w && h < p.count_h && w < p.count_w;
    from[store] = (Product::kNested ? first_tile : exchange) +
                  (of_block * kPoints + q % W::kOutputs) * (Product::kNested ? kFirst : Product::kExchange);
    unit[store] = wanted[store] ? row * p.columns.divisor + q / W::kOutputs * p.phases.divisor + phase : 0;
    to[store] = p.written + first_filter * p.written_channel + place.image * p.written_batch +
                i64(p.written_first_h + h * p.written_step_h) * p.written_row +
                i64(p.written_first_w + w * p.written_step_w) * p.written_column;
    if (store < kScales) {
      const u32* largest = p.largest_sources + (place.image * p.groups + blockIdx.y) * kMagnitudeParts;
      // In two steps, neither of which leaves the range of a float if the result does not.
      const int both = of_filter - scale_exponent(largest_part(largest), p.headroom_sources), half = both / 2;
      own_scales[store][0] = power_of_two(half), own_scales[store][1] = power_of_two(both - half);
    }
  }
#pragma unroll
  for (int m = 0; m < Product::kFragments; m++) {
    // If the results of a fragment are among parked sums, the next fragment's sums may come before they are stored.
    if (m == 0 || !Steps::kParks) __syncthreads();
#pragma unroll
    for (int n = 0; n < Product::kStrips; n++)
#pragma unroll
      for (int i = 0; i < Mma::kSums; i += 2) {
        const int place = warp * Product::kExchange + Product::at(0, n, i);
        *reinterpret_cast<float2*>(exchange + place) = make_float2(sum[m][n][i], sum[m][n][i + 1]);
        if constexpr (Product::kNested && !Steps::kParks)
          *reinterpret_cast<float2*>(first_tile + place) = make_float2(other[m][n][i], other[m][n][i + 1]);
      }
    __syncthreads();
    const int fragment = Steps::kParks ? m * Mma::kRows * kTensorUnits : 0;  // where its results begin
    constexpr int kPairs = Mma::kRows * kTensorUnits / 2, kInverses = kTiles * kPairs / Product::kThreads;
#pragma unroll
    for (int item = 0; item < kInverses; item++) {
      const u32 number = thread + item * Product::kThreads, of_block = number / kPairs, at = number % kPairs * 2;
      float* last = exchange + of_block * kPoints * Product::kExchange + at;
      float out[2][W::kM];
      inverse_of_two<W>(last, Product::kExchange, out);
      if constexpr (Product::kNested) {
        float* first = first_tile + fragment + at;
        float before[2][W::kM];
        inverse_of_two<W>(first, kFirst, before);
#pragma unroll
        for (int i = 0; i < W::kM; i++) {
          *reinterpret_cast<float2*>(first + i * kFirst) = make_float2(before[0][i], before[1][i]);
          *reinterpret_cast<float2*>(first + (W::kM + i) * kFirst) = make_float2(out[0][i], out[1][i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < W::kM; i++)
          *reinterpret_cast<float2*>(last + i * Product::kExchange) = make_float2(out[0][i], out[1][i]);
      }
    }
    __syncthreads();
#pragma unroll 4
    for (int row = 0; row < Mma::kRows; row++) {
      const int of_tile = m * Mma::kRows + row;
      if (int(k_tile * kTensorK) + of_tile >= p.outputs) break;
      const float bias = __shfl_sync(~0u, own_bias, of_tile);
      float scales[kScales][2];
#pragma unroll
      for (int i = 0; i < 2 * kScales; i++) scales[i / 2][i % 2] = __shfl_sync(~0u, own_scales[i / 2][i % 2], of_tile);
#pragma unroll
      for (int store = 0; store < kStores; store++) {
        const auto& scale = scales[kScales == 1 ? 0 : store];
        const float value = from[store][fragment + row * kTensorUnits + (unit[store] ^ Product::swap(row))];
        if (wanted[store]) *to[store] = finished(p, fmaf(value * scale[0], scale[1], bias), to[store]);
        to[store] += p.written_channel;
      }
    }
  }
}

}  // namespace polyconv
