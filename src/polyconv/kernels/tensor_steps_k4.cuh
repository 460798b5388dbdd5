// The main loop of tensor_product by m8n8k4, the tensor cores' instruction of sm_70. A step is one tap of one chunk of
// channels.
//
// A warp streams its own V through its own double buffer in shared memory, where all tap rows and shifts of a chunk read
// it, and its U from L2 straight into registers, in the order of the fragments, one step ahead.
//
// Small products come first. Sums of a few steps start at zero, because the tensor core truncates; FP32 additions, which
// round to nearest, add these to the others. That takes a second set of sums, so of nested segments (tensor_layout.cuh)
// the set that a pass does not need is parked in shared memory, where the epilogue wants it anyway.
#pragma once

#include "tensor_tile.cuh"

namespace polyconv {

template <class W>
struct TensorStepsK4 {
  using Tile = TensorTile<W, Mma884>;
  using Mma = Mma884;
  using Sums = typename Tile::Sums;
  static constexpr int kPoints = W::kPoints, kLoads = Tile::kLoads;
  static constexpr int kFragments = Tile::kFragments, kStrips = Tile::kStrips;
  static constexpr bool kNested = Tile::kNested, kParks = kNested;

  using Rows = uint4[kFragments];
  using Columns = uint4[kStrips];

  // Quads of one stage: what a tile reads of a step's channels.
  static __device__ __forceinline__ int stage_quads(const TensorProductParams& p) { return p.stage; }

  // The main loop: all passes, chunks and taps of a warp's point.
  static __device__ __forceinline__ void sum_up(Sums& sum, Sums&, const TensorProductParams& p, uint4* stages,
                                                float* parked, const uint4* from_v, const uint4* from_u) {
    const int lane = threadIdx.x % 32;
    Sums recent;
    uint4 next_v[kLoads];
    Rows a, next_a;
    Columns b, next_b;
    int first[kStrips];  // what this lane reads of a stage, before the taps
#pragma unroll
    for (int n = 0; n < kStrips; n++) first[n] = Tile::first_of(p, n);
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
    auto flush = [&] {
#pragma unroll
      for (int m = 0; m < kFragments; m++)
#pragma unroll
        for (int n = 0; n < kStrips; n++)
#pragma unroll
          for (int i = 0; i < Mma::kSums; i++) sum[m][n][i] += recent[m][n][i];
      Tile::clear(recent);
    };

    Tile::clear(sum);
    Tile::clear(recent);
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
    for (int turn = 0; turn < kTensorPasses<W>; turn++) {
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
        if (turn < 2) {
#pragma unroll
          for (int m = 0; m < kFragments; m++)
#pragma unroll
            for (int n = 0; n < kStrips; n++)
#pragma unroll
              for (int i = 0; i < Mma::kSums; i += 2) {
                float2* place = reinterpret_cast<float2*>(parked + Tile::at(m, n, i));
                const float2 own = make_float2(sum[m][n][i], sum[m][n][i + 1]);
                const float2 other = turn == 0 ? own : *place;
                *place = own;
                sum[m][n][i] = other.x, sum[m][n][i + 1] = other.y;
              }
        }
      }
    }
    if constexpr (!kNested) flush();
  }
};

}  // namespace polyconv
