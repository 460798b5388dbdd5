// The heart of the pipeline of tensor_layout.cuh: for each point of W a matrix product over channels and taps on the
// tensor cores, three products of halves for one of floats; transformed back along W and written, with bias.
//
// A block has eight warps, a warp one point of one tile: 32 written channels x 64 units. Algorithms with fewer than eight
// points have several tiles to a block. Nothing is shared between warps in the main loop, which is the one of the matrix
// instruction: TensorStepsK4 or TensorStepsK16.
//
// Grid: x = (tiles of positions / tiles of a block) * k tiles + k tile, y = group of the convolution.
// Shared: double buffers [warp][2][stage], in the epilogue [warp][rows of a fragment][64 units]; behind them, where
// segments are nested, as much for the sums of the first tile, or all of them [warp][32 written channels][64 units],
// where they are parked in the main loop.
#pragma once

#include "epilogue.cuh"
#include "tensor_steps_k16.cuh"
#include "tensor_steps_k4.cuh"

namespace polyconv {

template <class W, class Steps, class Params>
__device__ __forceinline__ void tensor_product(const Params& p) {
  using Product = typename Steps::Tile;
  using Mma = typename Steps::Mma;
  constexpr int kPoints = W::kPoints, kTiles = Product::kTiles;
  extern __shared__ __align__(16) float shared[];
  uint4* const stages = reinterpret_cast<uint4*>(shared);
  float* const exchange = shared;  // in the epilogue, over the stages
  const int stage = Steps::stage_quads(p);
  // Of nested segments, where the sums of the first tile lie: all of them behind everything else, or those of a fragment
  // behind the last tile's.
  constexpr int kFirst = Steps::kParks ? Product::kParked : Product::kExchange;
  float* const first_tile =
      exchange + (Steps::kParks ? max(4 * 2 * stage, Product::kExchange) : Product::kExchange) * Product::kWarps;

  const u32 tile_block = p.k_tiles.quotient(blockIdx.x), k_tile = blockIdx.x - tile_block * p.k_tiles.divisor;
  typename Product::Sums sum, other;
  {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, point = warp % kPoints;
    // Past the last tile it is computed once more, and not stored.
    const typename Product::Place place(p, min(tile_block * kTiles + warp / kPoints, u32(p.tiles) - 1));
    const uint4* from_v = p.v + (place.of_v * kTensorPasses<W> * p.chunks * kPoints + point) * p.positions +
                          i64(place.row_group) * p.rows * p.pitch + lane;
    const i64 steps = i64(kTensorPasses<W>) * p.chunks * p.taps_h * p.shifts;
    const uint4* from_u = p.u + ((i64(blockIdx.y) * p.k_tiles.divisor + k_tile) * kPoints + point) * steps * kTensorK +
                          Mma::row_of_a(lane);
    Steps::sum_up(sum, other, p, stages + warp * 2 * stage, first_tile + warp * Product::kParked, from_v, from_u);
  }

  // The written channels of a fragment at a time: the points meet in shared memory, go back along W, in place, and out in
  // rows.
  const u32 thread = fresh_thread(), warp = thread / 32;
  constexpr int kStores = kTiles * kTensorUnits * W::kOutputs / Product::kThreads;  // of a thread and channel
  int region[kStores], unit[kStores], exponent[kStores];
  i64 to[kStores];
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
    region[store] = (of_block * kPoints + q % W::kOutputs) * (Product::kNested ? kFirst : Product::kExchange);
    unit[store] = row * p.columns.divisor + q / W::kOutputs * p.phases.divisor + phase;
    to[store] = place.image * p.written_batch + i64(p.written_first_h + h * p.written_step_h) * p.written_row +
                i64(p.written_first_w + w * p.written_step_w) * p.written_column;
    const u32* largest = p.largest_sources + (place.image * p.groups + blockIdx.y) * kMagnitudeParts;
    exponent[store] = -scale_exponent(largest_part(largest), p.headroom_sources);
  }
#pragma unroll
  for (int m = 0; m < Product::kFragments; m++) {
    __syncthreads();
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
    float* const first_sums = first_tile + (Steps::kParks ? m * Mma::kRows * kTensorUnits : 0);
    constexpr int kInverses = kTiles * Mma::kRows * kTensorUnits / Product::kThreads;  // of a thread
#pragma unroll
    for (int item = 0; item < kInverses; item++) {
      const u32 number = thread + item * Product::kThreads, of_block = number / (Mma::kRows * kTensorUnits);
      const u32 at = number % (Mma::kRows * kTensorUnits);
      float* last = exchange + of_block * kPoints * Product::kExchange + at;
      float points[kPoints], out[W::kM];
#pragma unroll
      for (int point = 0; point < kPoints; point++) points[point] = last[point * Product::kExchange];
      W::output(points, out);
      if constexpr (Product::kNested) {
        float* first = first_sums + at;
        float before[W::kM];
#pragma unroll
        for (int point = 0; point < kPoints; point++) points[point] = first[point * kFirst];
        W::output(points, before);
#pragma unroll
        for (int i = 0; i < W::kM; i++) first[i * kFirst] = before[i], first[(W::kM + i) * kFirst] = out[i];
      } else {
#pragma unroll
        for (int i = 0; i < W::kM; i++) last[i * Product::kExchange] = out[i];
      }
    }
    __syncthreads();
    const float* results = Product::kNested ? first_sums : exchange;
#pragma unroll 1
    for (int row = 0; row < Mma::kRows; row++) {
      const int k = k_tile * kTensorK + m * Mma::kRows + row;
      if (k >= p.outputs) break;
      const u32 filter = blockIdx.y * p.outputs + k;
      const int of_filter = -scale_exponent(p.largest_filters[filter], p.headroom_filters);
      const float bias = p.bias ? p.bias[filter] : 0.f;
#pragma unroll
      for (int store = 0; store < kStores; store++)
        if (wanted[store]) {
          const float value = results[region[store] + row * kTensorUnits + (unit[store] ^ Product::swap(row))];
          // In two steps, neither of which leaves the range of a float if the result does not.
          const int both = exponent[store] + of_filter, half = both / 2;
          float* y = p.written + filter * p.written_channel + to[store];
          *y = finished(p, fmaf(value * power_of_two(half), power_of_two(both - half), bias), y);
        }
    }
  }
}

}  // namespace polyconv
