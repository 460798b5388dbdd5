// wgrad of 16-bit tensors: implicit_gemm/wgrad.cuh with the products of implicit_gemm/mma_tile.cuh.
// Elements are copied to shared memory unchanged, products are exact, sums and partial sums are float. Grid, slices,
// columns and loaders are those of implicit_gemm/wgrad.cuh. implicit_gemm_split_k_reduce_rounded adds the slices as
// implicit_gemm_split_k_reduce does, and rounds once.
#pragma once

#include "implicit_gemm/mma_tile.cuh"
#include "implicit_gemm/split_k_reduce.cuh"
#include "implicit_gemm/wgrad.cuh"

namespace polyconv {

struct HalfWgradParams : WgradParamsOf<Half> {};
struct BFloat16WgradParams : WgradParamsOf<BFloat16> {};

template <class Tile, bool kVector, bool kBordered, class Params>
__device__ __forceinline__ void implicit_gemm_wgrad_mma(const Params& p) {
  using Instruction = typename Tile::Instruction;
  Accumulators<Tile> c;
  {
    const int4* table = tabulate_columns<Tile, kBordered>(p);
    const int first = blockIdx.z * p.pixels_per_slice, end = min(first + p.pixels_per_slice, p.pixels);
    const int first_k = (blockIdx.x - p.k_tiles.quotient(blockIdx.x) * p.k_tiles.divisor) * Tile::kM;
    WgradLoader<Tile, kVector, kBordered> loader(p, table, first_k, first, end);
    accumulate_slice<Tile>(c, loader, end - first);
  }

  const TilePlace<Tile> place(fresh_thread());
  const u32 x = fresh_block_x(), column_tile = p.k_tiles.quotient(x), lane = fresh_thread() % 32;
  const int first_k = (x - column_tile * p.k_tiles.divisor) * Tile::kM + place.m;
  const int first_column = column_tile * Tile::kN + place.n;
  float* to = p.partial + (i64(blockIdx.z) * p.groups + fresh_block_y()) * p.k * p.columns_padded;
#pragma unroll
  for (int m = 0; m < Tile::kUnitsM; m++)
#pragma unroll
    for (int n = 0; n < Tile::kUnitsN; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int k = first_k + m * kMatrix + Instruction::row(lane, i);
        const int column = first_column + n * kMatrix + Instruction::column(lane, i);
        if (k < p.k && column < p.columns_padded) to[i64(k) * p.columns_padded + column] = c.sum[m][n][i];
      }
}

// dw and db have 16-bit elements; only their addresses are taken from the parameters.
template <class Element>
__device__ __forceinline__ void implicit_gemm_split_k_reduce_rounded(const SplitKReduceParams& p) {
  float sum;
  i64 place;
  bool is_bias;
  if (reduced(p, sum, place, is_bias)) reinterpret_cast<Element*>(is_bias ? p.db : p.dw)[place] = rounded<Element>(sum);
}

}  // namespace polyconv
