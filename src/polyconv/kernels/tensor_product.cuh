// The heart of the pipeline of tensor_layout.cuh: for each point of W a matrix product over channels and taps on the
// tensor cores, three products of halves for one of floats; transformed back along W and written, with bias.
//
// A block has eight warps, a warp one point of one tile: 32 written channels x 64 units. Algorithms with fewer than eight
// points have several tiles to a block. Nothing is shared between warps in the main loop: a warp streams its own V
// through its own double buffer in shared memory, where all tap rows and shifts of a chunk read it, and its U from L2
// straight into registers, in the order of the fragments, one step ahead. A step is one tap of one chunk of channels.
//
// Small products come first. Sums of a few steps start at zero, because the tensor core truncates; FP32 additions, which
// round to nearest, add these to the others. Nested segments (tensor_layout.cuh) have two sets of sums: the one that a
// pass does not need is parked in shared memory, where the epilogue wants it anyway.
//
// Grid: x = (tiles of positions / tiles of a block) * k tiles + k tile, y = group of the convolution.
// Shared: double buffers [warp][2][stage], in the epilogue [warp][8 written channels][64 units]; behind them, where
// segments are nested, the parked sums [warp][32 written channels][64 units].
#pragma once

#include "epilogue.cuh"
#include "tensor_layout.cuh"

namespace polyconv {

struct TensorProductParams {
  const uint4* v;
  const uint4* u;
  const u32* largest_sources;  // parts of every image and group
  const u32* largest_filters;
  const float* bias;  // null: none
  float* written;
  i64 written_batch, written_channel;
  int written_row, written_column;
  int headroom_sources, headroom_filters;
  int first_plane, first_row;  // of the slab
  int tiles;                   // of positions, in the slab
  FastDivisor k_tiles, row_groups, column_groups, phase_groups, dilation_h;
  int planes;           // of the slab
  FastDivisor columns;  // of a tile
  FastDivisor phases;   // of a tile
  FastDivisor stretch;  // positions of a row of a tile
  int rows, units;      // of a tile
  int groups, outputs, chunks, taps_h, shifts;
  int pitch, stage;  // quads of a row of V; of what a tile reads of a chunk
  int next_tap_row;  // quads from behind the last shift of a tap row to the first of the next
  int positions;     // quads of a point of a chunk of V
  int steps_per_flush;
  int dilation_w;
  int count_h, count_w;  // positions
  int written_first_h, written_step_h, written_first_w, written_step_w;
};

template <class W>
struct TensorProduct {
  using Mma = Mma884;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kPoints = W::kPoints, kTiles = kWarps / kPoints;  // tiles of a block
  static constexpr bool kNested = W::kTiles == 2;
  static constexpr int kFragments = kTensorK / Mma::kRows, kStrips = kTensorUnits / Mma::kColumns;
  static constexpr int kLoads = 4;  // quads of a chunk that a lane brings
  static_assert(kWarps % kPoints == 0, "whole tiles to a block");
  static_assert(W::kOutputs <= kPoints, "outputs take the places of their points in shared memory");

  // Sums of one warp in shared memory: four banks more than whole rows, for the readers of all points of a unit.
  static constexpr int kExchange = Mma::kRows * kTensorUnits + 4, kParked = kTensorK * kTensorUnits + 4;

  // A tile of positions.
  struct Place {
    u32 image, phase_h, row_group, column_group;
    i64 of_v;  // column groups of V before it

    __device__ __forceinline__ Place(const TensorProductParams& p, u32 tile) {
      const u32 rest = p.row_groups.quotient(tile);
      row_group = tile - rest * p.row_groups.divisor;
      const u32 of_slab = p.column_groups.quotient(rest), plane = p.first_plane + of_slab;
      column_group = rest - of_slab * p.column_groups.divisor;
      image = p.dilation_h.quotient(plane), phase_h = plane - image * p.dilation_h.divisor;
      of_v = i64(blockIdx.y * p.planes + of_slab) * p.column_groups.divisor + column_group;
    }
  };

  using Sums = float[kFragments][kStrips][Mma::kSums];
  using Rows = uint4[kFragments];
  using Columns = uint4[kStrips];

  // Where the pair of sums i, i + 1 of fragment m and strip n lies: odd rows have their groups of 16 units swapped, so
  // that the two rows of a half-warp hit different banks.
  static __device__ __forceinline__ int at(int m, int n, int i) {
    const int lane = threadIdx.x % 32, row = Mma::row_of_sum(lane, i), column = Mma::column_of_sum(lane, i);
    return (m * Mma::kRows + row) * kTensorUnits + n * Mma::kColumns + (column ^ (row & 1) * 16);
  }

  // The main loop: all passes, chunks and taps of a warp's point.
  static __device__ __forceinline__ void sum_up(Sums& sum, const TensorProductParams& p, uint4* stages, float* parked,
                                                const uint4* from_v, const uint4* from_u) {
    const int lane = threadIdx.x % 32;
    Sums recent;
    uint4 next_v[kLoads];
    Rows a, next_a;
    Columns b, next_b;
    int first[kStrips];  // what this lane reads of a stage, before the taps
#pragma unroll
    for (int n = 0; n < kStrips; n++) {
      // Units that the tile does not have read what the last one reads.
      const u32 unit = min(n * Mma::kColumns + Mma::column_of_b(lane), p.rows * p.columns.divisor - 1);
      const u32 row = p.columns.quotient(unit);
      first[n] = row * p.pitch + unit - row * p.columns.divisor;
    }
    auto load_v = [&] {
#pragma unroll
      for (int i = 0; i < kLoads; i++)
        if (lane + 32 * i < p.stage) next_v[i] = __ldg(from_v + 32 * i);
    };
    auto store_v = [&](uint4* to) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kLoads; i++)
        if (lane + 32 * i < p.stage) to[lane + 32 * i] = next_v[i];
      __syncwarp();
    };
    auto clear = [](Sums& sums) {
#pragma unroll
      for (int m = 0; m < kFragments; m++)
#pragma unroll
        for (int n = 0; n < kStrips; n++)
#pragma unroll
          for (int i = 0; i < Mma::kSums; i++) sums[m][n][i] = 0.f;
    };
    auto flush = [&] {
#pragma unroll
      for (int m = 0; m < kFragments; m++)
#pragma unroll
        for (int n = 0; n < kStrips; n++)
#pragma unroll
          for (int i = 0; i < Mma::kSums; i++) sum[m][n][i] += recent[m][n][i];
      clear(recent);
    };

    clear(sum);
    clear(recent);
    load_v();
    store_v(stages);
#pragma unroll
    for (int m = 0; m < kFragments; m++) a[m] = __ldg(from_u + Mma::kRows * m);
#pragma unroll
    for (int n = 0; n < kStrips; n++) b[n] = stages[first[n]];

    const int next_chunk = kPoints * p.positions, steps = p.chunks * p.taps_h * p.shifts;
    int chunks = kTensorPasses<W> * p.chunks, unflushed = p.steps_per_flush;
    int stage = 0, tap = 0, shift = 0, tap_at = 0;
    // The last chunk brings itself once more.
    auto begin_chunk = [&] {
      if (--chunks > 0) from_v += next_chunk;
      load_v();
    };
    // One step on what a and b hold, while the next one's operands come to next_a and next_b.
    auto step = [&](const Rows& a, const Columns& b, Rows& next_a, Columns& next_b) {
      from_u += kTensorK;  // behind U there is a step to spare
#pragma unroll
      for (int m = 0; m < kFragments; m++) next_a[m] = __ldg(from_u + Mma::kRows * m);
      tap_at += p.phases.divisor;
      if (++shift == p.shifts) shift = 0, tap_at += p.next_tap_row, tap++;
      if (tap < p.taps_h) {
#pragma unroll
        for (int n = 0; n < kStrips; n++) next_b[n] = stages[first[n] + tap_at];
      }
      // Two groups of fragments; a sum comes round again after several instructions.
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int product = 0; product < 3; product++)
#pragma unroll
          for (int i = 0; i < kFragments / 2 * kStrips; i++) {
            const int m = half * (kFragments / 2) + i / kStrips, n = i % kStrips;
            Mma::multiply_add(recent[m][n], product == 0 ? make_uint2(a[m].z, a[m].w) : make_uint2(a[m].x, a[m].y),
                              product == 1 ? make_uint2(b[n].z, b[n].w) : make_uint2(b[n].x, b[n].y));
          }
      if (--unflushed == 0) {
        flush();
        unflushed = p.steps_per_flush;
      }
      if (tap == p.taps_h) {
        stage = p.stage - stage;
        store_v(stages + stage);
        tap = 0, tap_at = stage;
#pragma unroll
        for (int n = 0; n < kStrips; n++) next_b[n] = stages[first[n] + tap_at];
        begin_chunk();
      }
    };
    begin_chunk();
#pragma unroll 1
    for (int pass = 0; pass < kTensorPasses<W>; pass++) {
      // In pairs, so that what came for the next step need not move.
#pragma unroll 1
      for (int left = steps; left > 1; left -= 2) {
        step(a, b, next_a, next_b);
        step(next_a, next_b, a, b);
      }
      if (steps % 2) {
        step(a, b, next_a, next_b);
#pragma unroll
        for (int m = 0; m < kFragments; m++) a[m] = next_a[m];
#pragma unroll
        for (int n = 0; n < kStrips; n++) b[n] = next_b[n];
      }
      if constexpr (kNested) {
        // The middle belongs to both tiles: it is parked and kept. After the left pass the first tile is complete: it
        // changes places with the middle, and the right pass adds to that.
        flush();
        unflushed = p.steps_per_flush;
        if (pass < 2) {
#pragma unroll
          for (int m = 0; m < kFragments; m++)
#pragma unroll
            for (int n = 0; n < kStrips; n++)
#pragma unroll
              for (int i = 0; i < Mma::kSums; i += 2) {
                float2* place = reinterpret_cast<float2*>(parked + at(m, n, i));
                const float2 own = make_float2(sum[m][n][i], sum[m][n][i + 1]);
                const float2 other = pass == 0 ? own : *place;
                *place = own;
                sum[m][n][i] = other.x, sum[m][n][i + 1] = other.y;
              }
        }
      }
    }
    if constexpr (!kNested) flush();
  }
};

template <class W, class Params>
__device__ __forceinline__ void tensor_product(const Params& p) {
  using Product = TensorProduct<W>;
  using Mma = typename Product::Mma;
  constexpr int kPoints = W::kPoints, kTiles = Product::kTiles;
  extern __shared__ __align__(16) uint4 shared[];
  float* const exchange = reinterpret_cast<float*>(shared);  // in the epilogue, over the stages
  const int stage_floats = max(4 * 2 * p.stage, Product::kExchange) * Product::kWarps;
  float* const parked = exchange + stage_floats;

  const u32 tile_block = p.k_tiles.quotient(blockIdx.x), k_tile = blockIdx.x - tile_block * p.k_tiles.divisor;
  typename Product::Sums sum;
  {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, point = warp % kPoints;
    // Past the last tile it is computed once more, and not stored.
    const typename Product::Place place(p, min(tile_block * kTiles + warp / kPoints, u32(p.tiles) - 1));
    const uint4* from_v = p.v + (place.of_v * kTensorPasses<W> * p.chunks * kPoints + point) * p.positions +
                          i64(place.row_group) * p.rows * p.pitch + lane;
    const i64 steps = i64(kTensorPasses<W>) * p.chunks * p.taps_h * p.shifts;
    const uint4* from_u = p.u + ((i64(blockIdx.y) * p.k_tiles.divisor + k_tile) * kPoints + point) * steps * kTensorK +
                          Mma::row_of_a(lane);
    Product::sum_up(sum, p, shared + warp * 2 * p.stage, parked + warp * Product::kParked, from_v, from_u);
  }

  // Eight written channels at a time: the points meet in shared memory, go back along W, in place, and out in rows.
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
    region[store] = (of_block * kPoints + q % W::kOutputs) * (Product::kNested ? Product::kParked : Product::kExchange);
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
      for (int i = 0; i < Mma::kSums; i += 2)
        *reinterpret_cast<float2*>(exchange + warp * Product::kExchange + Product::at(0, n, i)) =
            make_float2(sum[m][n][i], sum[m][n][i + 1]);
    __syncthreads();
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
        float* first = parked + m * Mma::kRows * kTensorUnits + at;
        float before[W::kM];
#pragma unroll
        for (int point = 0; point < kPoints; point++) points[point] = first[point * Product::kParked];
        W::output(points, before);
#pragma unroll
        for (int i = 0; i < W::kM; i++)
          first[i * Product::kParked] = before[i], first[(W::kM + i) * Product::kParked] = out[i];
      } else {
#pragma unroll
        for (int i = 0; i < W::kM; i++) last[i * Product::kExchange] = out[i];
      }
    }
    __syncthreads();
    const float* results = Product::kNested ? parked + m * Mma::kRows * kTensorUnits : exchange;
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
          const float value = results[region[store] + row * kTensorUnits + (unit[store] ^ (row & 1) * 16)];
          // In two steps, neither of which leaves the range of a float if the result does not.
          const int both = exponent[store] + of_filter, half = both / 2;
          float* y = p.written + filter * p.written_channel + to[store];
          *y = finished(p, fmaf(value * power_of_two(half), power_of_two(both - half), bias), y);
        }
    }
  }
}

}  // namespace polyconv
