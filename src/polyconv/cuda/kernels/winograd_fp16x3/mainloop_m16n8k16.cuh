// Main loop of winograd_fp16x3_gemm with m16n8k16, from sm_80 on. A step is one tap of four chunks of channels: quad t
// of a lane is that of chunk t.
//
// A warp copies its V asynchronously into its own double buffer in shared memory, without registers; all tap rows and
// shifts of the chunks read it there. U comes from L2 straight into registers, one step ahead.
//
// Small products come first. Every step sums its three products from zero, because the tensor core truncates, and FP32
// additions, which round to nearest, accumulate these sums: four for three instructions, on an otherwise idle pipe. At
// most two strips are in flight, so both tiles of nested segments (winograd_fp16x3/layout.cuh) stay in registers.
#pragma once

#include "winograd_fp16x3/tile.cuh"

namespace polyconv {

// Asynchronous copy of 16 bytes to shared memory.
__device__ __forceinline__ void copy_quad(uint4* to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
// Waits for this thread's copies.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Loads 16 constant bytes now: the compiler would delay the load until its use.
__device__ __forceinline__ uint4 load_ahead(const uint4* from) {
  uint4 quad;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
               : "l"(from));
  return quad;
}

template <class W>
struct MainloopK16 {
  using Tile = Fp16x3Tile<W, Mma16816>;
  using Mma = Mma16816;
  using Sums = typename Tile::Sums;
  static constexpr int kChunks = Tile::kChunks, kFragments = Tile::kFragments, kStrips = Tile::kStrips;
  static constexpr bool kNested = Tile::kNested, kParks = false;
  static constexpr int kAtOnce = 2;  // strips
  static constexpr int kStepsPerFlush = 1;

  // A fragment's rows: two per lane.
  struct Rows {
    uint4 upper, lower;
  };

  // Pitch between chunks of a stage: the four quads of two neighbouring columns are then in different banks.
  static __device__ __forceinline__ int chunk_pitch(const Fp16x3GemmParams& p) { return (p.stage + 1 | 3) - 1; }
  static __device__ __forceinline__ int stage_quads(const Fp16x3GemmParams& p) { return kChunks * chunk_pitch(p); }

  static __device__ __forceinline__ uint2 hi(uint4 quad) { return make_uint2(quad.x, quad.y); }
  static __device__ __forceinline__ uint2 lo(uint4 quad) { return make_uint2(quad.z, quad.w); }

  static __device__ __forceinline__ void load_u(Rows (&rows)[kFragments], const uint4* from) {
#pragma unroll
    for (int m = 0; m < kFragments; m++) {
      rows[m].upper = load_ahead(from + Mma::kRows * m);
      rows[m].lower = load_ahead(from + Mma::kRows * m + 8);
    }
  }

  // One tap of the four chunks of a stage. `first` packs a lane's offsets of two strips into one register.
  static __device__ __forceinline__ void step(Sums& sum, const Rows (&a)[kFragments], const uint4* stage,
                                              const u32 (&first)[kStrips / 2], int units) {
    uint4 b[kAtOnce], next_b[kAtOnce];
    auto load_b = [&](uint4(&to)[kAtOnce], int strip) {
      to[0] = stage[first[strip / 2] & 0xffff], to[1] = stage[first[strip / 2] >> 16];
    };
    load_b(b, 0);
#pragma unroll
    for (int strip = 0; strip < kStrips; strip += kAtOnce) {
      // Skips strips that the tile does not have. The branch also keeps loads and additions of a pair of strips
      // together: the compiler would put all loads first and all additions last, and exceed the registers.
      if (strip * Mma::kColumns >= units) break;
      float recent[kFragments][kAtOnce][Mma::kSums] = {};
      if (strip + kAtOnce < kStrips) load_b(next_b, strip + kAtOnce);
#pragma unroll
      for (int product = 0; product < 3; product++)
#pragma unroll
        for (int n = 0; n < kAtOnce; n++)
#pragma unroll
          for (int m = 0; m < kFragments; m++)
            Mma::multiply_add(recent[m][n], product == 0 ? lo(a[m].upper) : hi(a[m].upper),
                              product == 0 ? lo(a[m].lower) : hi(a[m].lower), product == 1 ? lo(b[n]) : hi(b[n]));
#pragma unroll
      for (int n = 0; n < kAtOnce; n++)
#pragma unroll
        for (int m = 0; m < kFragments; m++)
#pragma unroll
          for (int i = 0; i < Mma::kSums; i++) sum[m][strip + n][i] += recent[m][n][i];
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) b[n] = next_b[n];
    }
  }

  // The main loop: all passes, chunks and taps of a warp's point. `other`: with nested segments, the first tile's sums.
  static __device__ __forceinline__ void sum_up(Sums& sum, Sums& other, const Fp16x3GemmParams& p, uint4* stages,
                                                float*, const uint4* from_v, const uint4* from_u) {
    const int lane = threadIdx.x % 32, pitch = chunk_pitch(p);
    const int units = p.rows * p.columns.divisor;
    u32 first[kStrips / 2];
#pragma unroll
    for (int n = 0; n < kStrips; n += 2)
      first[n / 2] = Mma::quad(lane) * pitch * 0x10001 + Tile::first_of(p, n) + (Tile::first_of(p, n + 1) << 16);
    const i64 next_chunk = i64(W::kPoints) * p.positions;
    auto load_v = [&](uint4* to) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk++)
#pragma unroll
        for (int i = 0; i < Tile::kLoads; i++)
          if (lane + 32 * i < p.stage)
            copy_quad(to + chunk * pitch + lane + 32 * i, from_v + chunk * next_chunk + 32 * i);
    };

    Tile::clear(sum);
    Rows a[kFragments], next_a[kFragments];
    from_u += Mma::quad(lane) * p.taps * kTensorK;
    load_u(a, from_u);
    load_v(stages);
    int stages_left = kTensorPasses<W> * p.chunks / kChunks, stage = 0;
#pragma unroll 1
    for (int turn = 0; turn < kTensorPasses<W>; turn++) {
#pragma unroll 1
      for (int chunk = 0; chunk < p.chunks; chunk += kChunks) {
        wait_for_copies();
        __syncwarp();
        const uint4* at = stages + stage;
        stage = kChunks * pitch - stage;
        if (--stages_left > 0) {
          from_v += kChunks * next_chunk;
          load_v(stages + stage);
        }
        int shift = 0;
#pragma unroll 1
        for (int tap = 1; tap <= p.taps; tap++) {
          // The last step loads itself once more.
          if (tap < p.taps) {
            from_u += kTensorK;
          } else if (stages_left > 0) {
            from_u += ((kChunks - 1) * p.taps + 1) * kTensorK;
          }
          load_u(next_a, from_u);
          step(sum, a, at, first, units);
          at += p.phases.divisor;
          if (++shift == p.shifts) shift = 0, at += p.next_tap_row;
#pragma unroll
          for (int m = 0; m < kFragments; m++) a[m] = next_a[m];
        }
      }
      if constexpr (kNested) {
        // The middle belongs to both tiles, so there are two copies. After the left pass the first tile is complete: it
        // is swapped with the middle, and the right pass adds to that.
        if (turn < 2) {
#pragma unroll
          for (int m = 0; m < kFragments; m++)
#pragma unroll
            for (int n = 0; n < kStrips; n++)
#pragma unroll
              for (int i = 0; i < Mma::kSums; i++) {
                const float own = sum[m][n][i];
                sum[m][n][i] = turn == 0 ? own : other[m][n][i];
                other[m][n][i] = own;
              }
        }
      }
    }
  }
};

}  // namespace polyconv
