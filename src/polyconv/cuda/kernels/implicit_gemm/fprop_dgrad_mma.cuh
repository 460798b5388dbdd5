// fprop and dgrad of 16-bit tensors: the implicit GEMM of implicit_gemm/fprop_dgrad.cuh with the products of
// implicit_gemm/mma_tile.cuh:
//   written[pixel, n] = rounded(bias[n] + sum over rows k of  gathered[pixel, k] * packed[k, n])
//
// Elements are copied to shared memory unchanged, products are exact, sums are float, and a result is rounded once,
// after bias and epilogue. Grid, phases and loaders are those of implicit_gemm/fprop_dgrad.cuh.
//
// Shared memory: a = 2 x 16 x (M + padding) pixels, b = 2 x 16 x (N + padding) channels; afterwards the sums of 16
// channels of each warp at a time, [channel][M + 4] floats, from where they are stored in memory order.
#pragma once

#include "implicit_gemm/fprop_dgrad.cuh"
#include "implicit_gemm/mma_tile.cuh"

namespace polyconv {

struct HalfImplicitGemmParams : ImplicitGemmParamsOf<Half> {};
struct BFloat16ImplicitGemmParams : ImplicitGemmParamsOf<BFloat16> {};

template <class Tile>
union GatherShared {
  static constexpr int kChannels = Tile::kWarpsN * kMatrix;  // in shared memory at a time
  static constexpr int kPitch = Tile::kM + 4;

  struct {
    typename Tile::Element a[2 * Tile::kDepth * Tile::kPitchM], b[2 * Tile::kDepth * Tile::kPitchN];
  } operands;
  float sums[kChannels * kPitch];
};

// Copies unit number `unit` along n of every warp to shared memory.
template <class Tile>
__device__ __forceinline__ void stage(const Accumulators<Tile>& c, int unit, GatherShared<Tile>& shared) {
  using Instruction = typename Tile::Instruction;
  const u32 thread = fresh_thread(), lane = thread % 32;
  const TilePlace<Tile> place(thread);
  float* to = shared.sums + place.n / Tile::kUnitsN * GatherShared<Tile>::kPitch + place.m;
#pragma unroll
  for (int m = 0; m < Tile::kUnitsM; m++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      to[Instruction::column(lane, i) * GatherShared<Tile>::kPitch + m * kMatrix + Instruction::row(lane, i)] =
          c.sum[m][unit][i];
}

// Applies the epilogue to the sums that are stored from `to` on. The residual has the type of `to`.
template <int kCount, class Params, class Element>
__device__ __forceinline__ void finish(float (&sums)[kCount], const Params& p, const Element* to) {
  if (p.residual) {
    const Element* residual = add_bytes(to, p.residual_bytes());
    if constexpr (kCount == 4) {
      const float4 add = widened4<Element>(load4(residual));
      sums[0] += add.x, sums[1] += add.y, sums[2] += add.z, sums[3] += add.w;
    } else {
      sums[0] += widened(*residual);
    }
  }
  activate(sums, p);
}

// Stores the staged sums: four pixels at a time, or four channels, or one element.
template <class Tile, class Params>
__device__ __forceinline__ void write_staged(const Params& p, const ImplicitGemmBlock<Tile>& block, int unit,
                                             const GatherShared<Tile>& shared) {
  using Element = typename Tile::Element;
  constexpr int kChannels = GatherShared<Tile>::kChannels, kPitch = GatherShared<Tile>::kPitch;
  const int pixels_each = p.written_vector == 1 ? 4 : 1, channels_each = p.written_vector == 2 ? 4 : 1;
  const int quads_or_ones = kChannels * Tile::kM / (pixels_each * channels_each);
#pragma unroll 1
  for (int item = fresh_thread(); item < quads_or_ones; item += Tile::kThreads) {
    // Neighbouring threads have neighbouring pixels, or neighbouring channels.
    const int pixel = p.written_vector == 2 ? item / (kChannels / 4) : item % (Tile::kM / pixels_each) * pixels_each;
    const int channel = p.written_vector == 2 ? item % (kChannels / 4) * 4 : item / (Tile::kM / pixels_each);
    const int output = block.first_output + (channel / kMatrix * Tile::kUnitsN + unit) * kMatrix + channel % kMatrix;
    if (block.first_pixel + pixel >= block.pixels || output >= p.outputs) continue;
    const float* from = shared.sums + channel * kPitch + pixel;
    const Element* bias = p.bias + block.group * p.outputs + output;
    Element* to = written_at(block.first_pixel + pixel, p, block) + output * p.written_channel;
    if (p.written_vector == 0) {
      float sum[1] = {p.bias ? *from + widened(*bias) : *from};
      finish(sum, p, to);
      *to = rounded<Element>(sum[0]);
      continue;
    }
    const int next = p.written_vector == 1 ? 1 : kPitch, next_bias = p.written_vector == 2;
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = p.bias ? from[i * next] + widened(bias[i * next_bias]) : from[i * next];
    finish(sums, p, to);
    store4_global(to, sums[0], sums[1], sums[2], sums[3]);
  }
}

template <class Tile, class Params>
__device__ __forceinline__ void write(const Accumulators<Tile>& c, const Params& p, GatherShared<Tile>& shared) {
  const ImplicitGemmBlock<Tile> block(p);
#pragma unroll
  for (int unit = 0; unit < Tile::kUnitsN; unit++) {
    __syncthreads();  // earlier contents have been read
    stage(c, unit, shared);
    __syncthreads();
    write_staged(p, block, unit, shared);
  }
}

template <class Tile, class Loader, class Params>
__device__ __forceinline__ void implicit_gemm_mma(const Params& p) {
  __shared__ __align__(16) GatherShared<Tile> shared;
  const ImplicitGemmBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;  // phases differ in size; the grid is made for the largest

  Accumulators<Tile> c;
  Loader source(p, block);
  accumulate<Tile>(c, source, PackedLoader<Tile>(p, block), block.rows, shared.operands.a, shared.operands.b);
  write(c, p, shared);
}

template <class Tile, class Params>
__device__ __forceinline__ void implicit_gemm_mma_folded(const Params& p) {
  __shared__ __align__(16) GatherShared<Tile> shared;
  const ImplicitGemmBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;

  Accumulators<Tile> c;
  accumulate_folds<Tile>(c, p, block, shared.operands.a, shared.operands.b);
  write(c, p, shared);
}

}  // namespace polyconv
