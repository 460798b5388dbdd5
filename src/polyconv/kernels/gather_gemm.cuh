// fprop and dgrad as one implicit GEMM:
//   written[pixel, n] = bias[n] + sum over rows k of  gathered[pixel, k] * packed[k, n]
//
// A row k of the reduction is a (tap, channel) pair; a pixel is a position of one phase of the lattice (common.cuh).
// fprop gathers x and writes y; dgrad gathers dy and writes dx, one phase per residue of the stride, so that no tap is
// ever multiplied by a structural zero. The weights come packed as packed[group][row][n] by pack_weights.cuh.
//
// Grid: x = pixel tile * channel tiles + channel tile (neighbours share the gathered pixels in L2),
//       y = group, z = phase.
// Shared memory: a = 2 x 8 x M pixels, b = 2 x 8 x N channels; one barrier per 8 rows: while one buffer is multiplied,
// the next 8 rows travel from global memory through registers into the other.
#pragma once

#include "gather_loaders.cuh"

namespace polyconv {

// Accumulates all rows of the block's phase, double-buffered.
template <class Tile, class Loader>
__device__ __forceinline__ void accumulate(Accumulators<Tile>& c, Loader& source, PackedLoader<Tile> packed, int rows,
                                           float (*a)[kDepth * Tile::kM], float (*b)[kDepth * Tile::kN]) {
  if (rows == 0) return;
  source.load(true);
  packed.load(true);
  source.store(a[0]);
  packed.store(b[0]);
  __syncthreads();
  int buffer = 0;
#pragma unroll 1
  for (int left = rows - kDepth; left >= 0; left -= kDepth) {
    const bool more = left > 0;  // the last step loads nothing, without a branch
    source.advance();
    packed.advance();
    source.load(more);
    packed.load(more);
    c.template multiply_add<Tile::kM, Tile::kN>(a[buffer], b[buffer]);
    buffer ^= 1;
    source.store(a[buffer]);
    packed.store(b[buffer]);
    __syncthreads();
  }
}

// The element of channel 0 of the group that a flattened pixel is written to.
template <class Tile>
__device__ __forceinline__ float* written_at(u32 index, const GatherParams& p, const GatherBlock<Tile>& block) {
  const Pixel pixel(index, block.h, block.w);
  return p.written + block.group * p.outputs * p.written_channel + pixel.image * p.written_batch +
         i64(block.h.written_first + pixel.i * block.h.written_step) * p.written_row +
         i64(block.w.written_first + pixel.j * block.w.written_step) * p.written_column;
}

// Adds the bias and writes the tile, four elements at a time along whichever axis is dense.
template <class Tile>
__device__ __forceinline__ void write(Accumulators<Tile>& c, const GatherParams& p) {
  const GatherBlock<Tile> block(p);
  const TilePlace<Tile> place(fresh_thread());
  const u32 first_pixel = block.first_pixel + place.m;
  const int first_output = block.first_output + place.n;
  if (p.bias) {
    const float* bias = p.bias + block.group * p.outputs + first_output;
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; j++) {
      const float add = first_output + c.offset_n(j) < p.outputs ? bias[c.offset_n(j)] : 0.f;
#pragma unroll
      for (int i = 0; i < Tile::kThreadM; i++) c.sum[i][j] += add;
    }
  }
  if (p.written_vector == 1) {
#pragma unroll
    for (int i = 0; i < Tile::kThreadM; i += 4) {
      if (first_pixel + c.offset_m(i) >= block.pixels) continue;
      float* at = written_at(first_pixel + c.offset_m(i), p, block) + first_output * p.written_channel;
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++)
        if (first_output + c.offset_n(j) < p.outputs)
          store4_global(at + c.offset_n(j) * p.written_channel, c.sum[i][j], c.sum[i + 1][j], c.sum[i + 2][j],
                        c.sum[i + 3][j]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Tile::kThreadM; i++) {
    if (first_pixel + c.offset_m(i) >= block.pixels) continue;
    float* at = written_at(first_pixel + c.offset_m(i), p, block) + first_output * p.written_channel;
    if (p.written_vector == 2) {
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j += 4)
        if (first_output + c.offset_n(j) < p.outputs)
          store4_global(at + c.offset_n(j), c.sum[i][j], c.sum[i][j + 1], c.sum[i][j + 2], c.sum[i][j + 3]);
    } else {
#pragma unroll
      for (int j = 0; j < Tile::kThreadN; j++)
        if (first_output + c.offset_n(j) < p.outputs) at[c.offset_n(j) * p.written_channel] = c.sum[i][j];
    }
  }
}

template <class Tile, class Loader>
__device__ __forceinline__ void gather_gemm(const GatherParams& p) {
  __shared__ __align__(16) float a[2][kDepth * Tile::kM];
  __shared__ __align__(16) float b[2][kDepth * Tile::kN];
  const GatherBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;  // phases differ in size; the grid is made for the largest

  Accumulators<Tile> c;
  Loader source(p, block);
  accumulate<Tile>(c, source, PackedLoader<Tile>(p, block), block.rows, a, b);
  write(c, p);
}

// dgrad of a border that is not zero: once over all rows for each image that the padding made of a pixel.
template <class Tile>
__device__ __forceinline__ void gather_folded(const GatherParams& p) {
  __shared__ __align__(16) float a[2][kDepth * Tile::kM];
  __shared__ __align__(16) float b[2][kDepth * Tile::kN];
  const GatherBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;

  const bool replicate = Border(p.border) == Border::kReplicate;
  const int folds_h = replicate ? 1 + p.pad_top + p.pad_bottom : 3;
  const int folds_w = replicate ? 1 + p.pad_left + p.pad_right : 3;
  Accumulators<Tile> c;
  RowLoader<Tile, Gather::kFolded> source(p, block);
#pragma unroll 1
  for (int fold_h = 0; fold_h < folds_h; fold_h++)
#pragma unroll 1
    for (int fold_w = 0; fold_w < folds_w; fold_w++)
      if (source.aim(fold_h, fold_w))  // its barrier also separates the folds' use of shared memory
        accumulate<Tile>(c, source, PackedLoader<Tile>(p, block), block.rows, a, b);
  write(c, p);
}

}  // namespace polyconv
