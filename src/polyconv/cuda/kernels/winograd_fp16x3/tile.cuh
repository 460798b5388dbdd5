// Parameters of winograd_fp16x3_gemm, its tiles of written channels and positions, and the layout of their sums, for
// any matrix instruction. Main loops: winograd_fp16x3/mainloop_m8n8k4.cuh, winograd_fp16x3/mainloop_m16n8k16.cuh.
#pragma once

#include "winograd_fp16x3/absmax.cuh"
#include "winograd_fp16x3/layout.cuh"

namespace polyconv {

struct Fp16x3GemmParams {
  const uint4* v;
  const uint4* u;
  const u32* largest_sources;  // absmax parts of every image and group
  const u32* largest_filters;  // absmax of every filter
  const float* bias;           // null: none
  float* written;
  i64 written_batch, written_channel;
  int written_row, written_column;
  int headroom_sources, headroom_filters;  // bits by which transformed values may exceed the absmax
  int first_plane, first_row;              // first plane and row of the slab
  int tiles;                               // tiles of positions in the slab
  FastDivisor k_tiles, row_groups, column_groups, phase_groups, dilation_h;
  int planes;           // planes of the slab
  FastDivisor columns;  // columns of a tile
  FastDivisor phases;   // phases along W of a tile
  FastDivisor stretch;  // positions of a row of a tile
  int rows, units;      // rows, and units along W, of a tile
  int groups, outputs, chunks, shifts;
  int taps;          // of a chunk: tap rows * shifts
  int pitch, stage;  // quads of a row of V; quads that a tile reads of a chunk
  int next_tap_row;  // quads from behind the last shift of a tap row to the first of the next
  int positions;     // quads of a point of a chunk of V
  int last_tap;      // quads from the first tap to the last
  int dilation_w;
  int count_h, count_w;  // output positions
  int written_first_h, written_step_h, written_first_w, written_step_w;
  u32 blocks;  // along x; trailing blocks compute absmax parts, from first_part on, counted over all images
  u32 first_part;
  Fp16x3AbsmaxParams behind;
};

template <class W, class Mma_>
struct Fp16x3Tile {
  using Mma = Mma_;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kPoints = W::kPoints, kTiles = kWarps / kPoints;  // tiles of a block
  static constexpr bool kNested = W::kTiles == 2;
  static constexpr int kFragments = kTensorK / Mma::kRows, kStrips = kTensorUnits / Mma::kColumns;
  static constexpr int kChunks = Mma::kDepth / kTensorChannels;  // of a step
  static constexpr int kLoads = 4;                               // quads of a chunk that a lane loads
  static_assert(kWarps % kPoints == 0, "whole tiles to a block");
  static_assert(W::kOutputs <= kPoints, "outputs take the places of their points in shared memory");

  // Sums of one warp in shared memory. Four extra banks, for the readers of all points of a unit.
  static constexpr int kExchange = Mma::kRows * kTensorUnits + 4, kParked = kTensorK * kTensorUnits + 4;

  // A tile of positions.
  struct Place {
    u32 image, phase_h, row_group, column_group;
    i64 of_v;  // column groups of V before it

    __device__ __forceinline__ Place(const Fp16x3GemmParams& p, u32 tile) {
      const u32 rest = p.row_groups.quotient(tile);
      row_group = tile - rest * p.row_groups.divisor;
      const u32 of_slab = p.column_groups.quotient(rest), plane = p.first_plane + of_slab;
      column_group = rest - of_slab * p.column_groups.divisor;
      image = p.dilation_h.quotient(plane), phase_h = plane - image * p.dilation_h.divisor;
      of_v = i64(blockIdx.y * p.planes + of_slab) * p.column_groups.divisor + column_group;
    }
  };

  using Sums = float[kFragments][kStrips][Mma::kSums];

  // XOR mask for the units of a row, so that rows whose sums are stored at once are in different banks.
  static __device__ __forceinline__ int swap(int row) { return (row & (Mma::kRowsAtOnce - 1)) * Mma::kColumnsAtOnce; }

  // Offset of the pair of sums i, i + 1 of fragment m and strip n.
  static __device__ __forceinline__ int at(int m, int n, int i) {
    const int lane = threadIdx.x % 32, row = Mma::row_of_sum(lane, i), column = Mma::column_of_sum(lane, i);
    return (m * Mma::kRows + row) * kTensorUnits + ((n * Mma::kColumns + column) ^ swap(row));
  }

  // Offset in a stage that a lane reads for strip n, before the taps. Missing units read what the last one reads.
  static __device__ __forceinline__ int first_of(const Fp16x3GemmParams& p, int n) {
    const u32 unit = min(n * Mma::kColumns + Mma::column_of_b(threadIdx.x % 32), p.rows * p.columns.divisor - 1);
    const u32 row = p.columns.quotient(unit);
    return row * p.pitch + unit - row * p.columns.divisor;
  }

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < kFragments; m++)
#pragma unroll
      for (int n = 0; n < kStrips; n++)
#pragma unroll
        for (int i = 0; i < Mma::kSums; i++) sums[m][n][i] = 0.f;
  }
};

}  // namespace polyconv
