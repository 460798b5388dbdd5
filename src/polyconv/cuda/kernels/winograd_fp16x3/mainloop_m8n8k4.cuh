// Main loop of winograd_fp16x3_gemm with m8n8k4, for sm_70. A step is one tap of one chunk of channels.
//
// A warp streams its V through its own double buffer in shared memory, where all tap rows and shifts of a chunk read
// it, and its U from L2 straight into registers, in the order of the fragments, one step ahead.
//
// Small products come first. Sums of a few steps start at zero, because the tensor core truncates; FP32 additions,
// which round to nearest, accumulate them, interleaved with products. That takes a second set of sums, so with nested
// segments (winograd_fp16x3/layout.cuh) the set that a pass does not need is parked in shared memory, for the epilogue.
#pragma once

#include "winograd_fp16x3/tile.cuh"

namespace polyconv {

template <class W>
struct MainloopK4 {
  using Tile = Fp16x3Tile<W, Mma884>;
  using Mma = Mma884;
  using Sums = typename Tile::Sums;
  static constexpr int kPoints = W::kPoints, kLoads = Tile::kLoads;
  static constexpr int kFragments = Tile::kFragments, kStrips = Tile::kStrips;
  static constexpr bool kNested = Tile::kNested, kParks = kNested;

  static constexpr int kStepsPerFlush = 4;
  static_assert(kStepsPerFlush % 2 == 0, "steps are taken in pairs");

  using Rows = uint4[kFragments];
  using Columns = uint4[kStrips];

  // Quads of one stage: what a tile reads of a step's channels.
  static __device__ __forceinline__ int stage_quads(const Fp16x3GemmParams& p) { return p.stage; }

  // Products of half of the fragments of a step. `afresh`: their sums start at zero.
  static __device__ __forceinline__ void multiply(Sums& recent, const Rows& a, const Columns& b, int half,
                                                  bool afresh) {
    // Several instructions between two uses of a sum.
#pragma unroll
    for (int product = 0; product < 3; product++)
#pragma unroll
      for (int i = 0; i < kFragments / 2 * kStrips; i++) {
        const int m = half * (kFragments / 2) + i / kStrips, n = i % kStrips;
        const uint2 of_a = product == 0 ? make_uint2(a[m].z, a[m].w) : make_uint2(a[m].x, a[m].y);
        const uint2 of_b = product == 1 ? make_uint2(b[n].z, b[n].w) : make_uint2(b[n].x, b[n].y);
        if (afresh && product == 0) {
          Mma::multiply(recent[m][n], of_a, of_b);
        } else {
          Mma::multiply_add(recent[m][n], of_a, of_b);
        }
      }
  }

  // The main loop: all passes, chunks and taps of a warp's point.
  static __device__ __forceinline__ void sum_up(Sums& sum, Sums&, const Fp16x3GemmParams& p, uint4* stages,
                                                float* parked, const uint4* from_v, const uint4* from_u) {
    const int lane = threadIdx.x % 32;
    Sums recent;
    uint4 next_v[kLoads];
    Rows a, next_a;
    Columns b, next_b;
    // Byte offsets of this lane in a stage of shared memory: an address is a register, and takes one addition.
    extern __shared__ __align__(16) float shared[];
    int at[kStrips];
#pragma unroll
    for (int n = 0; n < kStrips; n++)
      at[n] = int(sizeof(uint4)) * (int(stages - reinterpret_cast<uint4*>(shared)) + Tile::first_of(p, n));
    auto read_b = [&](int n) { return *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(shared) + at[n]); };
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
    auto flush = [&](int half) {
#pragma unroll
      for (int m = half * kFragments / 2; m < (half + 1) * kFragments / 2; m++)
#pragma unroll
        for (int n = 0; n < kStrips; n++)
#pragma unroll
          for (int i = 0; i < Mma::kSums; i++) sum[m][n][i] += recent[m][n][i];
    };

    const int next_chunk = kPoints * p.positions;
    int chunks = kTensorPasses<W> * p.chunks, other_stage = p.stage, tap = 0, shift = 0;
    // The last chunk loads itself once more.
    auto begin_chunk = [&] {
      if (--chunks > 0) from_v += next_chunk;
      load_v();
    };
    // One step on a and b, while next_a and next_b are loaded. `number`: from 1 to the last step that a tensor core
    // sums by itself, or 0, which adds to the sums as they are. Half of the sums are flushed behind the products of the
    // other half: the second half of the last step in the first step after it.
    auto step = [&](const Rows& a, const Columns& b, Rows& next_a, Columns& next_b, int number) {
      const uint4* next_u = from_u + kTensorK * max(number, 1);  // U is followed by one spare step
#pragma unroll
      for (int m = 0; m < kFragments; m++) next_a[m] = __ldg(next_u + Mma::kRows * m);
      int further = p.phases.divisor;
      if (kNested || ++shift == p.shifts) shift = 0, further += p.next_tap_row;
      if (++tap == p.taps) {
        store_v(stages + max(other_stage, 0));
        further = other_stage - p.last_tap;
        other_stage = -other_stage;
        tap = 0;
        begin_chunk();
      }
#pragma unroll
      for (int n = 0; n < kStrips; n++) at[n] += int(sizeof(uint4)) * further, next_b[n] = read_b(n);
      multiply(recent, a, b, 0, number == 1);
      if (number == 1) flush(1);
      if (number == kStepsPerFlush) flush(0);
      multiply(recent, a, b, 1, number == 1);
    };

    Tile::clear(sum);
    Tile::clear(recent);
    load_v();
    store_v(stages);
#pragma unroll
    for (int m = 0; m < kFragments; m++) a[m] = __ldg(from_u + Mma::kRows * m);
#pragma unroll
    for (int n = 0; n < kStrips; n++) b[n] = read_b(n);
    begin_chunk();
#pragma unroll 1
    for (int turn = 0; turn < kTensorPasses<W>; turn++) {
      int left = p.chunks * p.taps;
#pragma unroll 1
      for (; left >= kStepsPerFlush; left -= kStepsPerFlush) {
        // In pairs, so that the operands of the next step need not be moved.
#pragma unroll
        for (int number = 1; number < kStepsPerFlush; number += 2) {
          step(a, b, next_a, next_b, number);
          step(next_a, next_b, a, b, number + 1);
        }
        from_u += kTensorK * kStepsPerFlush;
      }
      flush(1);
      Tile::clear(recent);
      if (left > 0) {
#pragma unroll 1
        for (; left > 0; left--) {
          step(a, b, next_a, next_b, 0);
          from_u += kTensorK;
#pragma unroll
          for (int m = 0; m < kFragments; m++) a[m] = next_a[m];
#pragma unroll
          for (int n = 0; n < kStrips; n++) b[n] = next_b[n];
        }
        flush(0);
        flush(1);
        Tile::clear(recent);
      }
      if constexpr (kNested) {
        // The middle belongs to both tiles: it is parked and kept. After the left pass the first tile is complete: it
        // is swapped with the middle, and the right pass adds to that.
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
  }
};

}  // namespace polyconv
