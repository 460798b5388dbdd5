// fprop and dgrad of float32 tensors by one scaled FP16 product, from sm_80 on:
//   written[pixel, n] = bias[n] + 2^-(exponents) * sum over rows k of  converted[pixel, k] * packed[k, n]
//
// The pipeline of implicit_gemm/fprop_dgrad_nhwc.cuh on operands that scaled_fp16/operand.cuh has scaled and
// rounded. Sums, bias, residual and result are float32, in any layout.
#pragma once

#include "implicit_gemm/fprop_dgrad_nhwc.cuh"
#include "scaled_fp16/operand.cuh"

namespace polyconv {

struct ScaledImplicitGemmParams : HalfImplicitGemmParams {
  const int* source_exponent;
  const int* packed_exponent;
};

// Finishes neighbouring sums, which are stored from `to` on.
template <int kCount, class Params>
__device__ __forceinline__ void finish_scaled(float (&sums)[kCount], const Scale& back, const Params& p,
                                              const float (&bias)[kCount], const float* to) {
#pragma unroll
  for (int i = 0; i < kCount; i++) sums[i] = back(sums[i]) + bias[i];
  finish(sums, p, to);
}

// Whether a pixel of a block is one of the tensor.
template <class Tile>
__device__ __forceinline__ bool exists(u32 pixel, const ScaledImplicitGemmParams&,
                                       const ImplicitGemmBlock<Tile>& block) {
  return pixel < block.pixels;
}

// Stores the tile: four channels at a time, four pixels, or one element. A warp has 16 pixels of its sums in shared
// memory at a time, [channel][16 + 4], or [16][channels + 8] where channels are adjacent. `exponent` is that of the sums.
template <class Tile, class Block = ImplicitGemmBlock<Tile>, class Params>
__device__ __forceinline__ void write_scaled(const Accumulators<typename Tile::Base>& c, const Params& p,
                                             unsigned char* shared, int exponent) {
  using Instruction = typename Tile::Instruction;
  constexpr int kWarpN = Tile::kUnitsN * kMatrix, kPitch = kWarpN + 8, kPixelPitch = kMatrix + 4;
  constexpr int kFloats = kWarpN * kPixelPitch > kMatrix * kPitch ? kWarpN * kPixelPitch : kMatrix * kPitch;
  static_assert(Tile::kThreads / 32 * kFloats * 4 <= Tile::kRingBytes, "the sums need more than the ring");
  const Block block(p);
  const u32 thread = fresh_thread(), lane = thread % 32;
  const TilePlace<typename Tile::Base> place(thread);
  float* sums = reinterpret_cast<float*>(shared) + thread / 32 * kFloats;
  const float* all_bias = reinterpret_cast<const float*>(p.bias);
  const Scale back(-exponent);
  const bool in_channels = p.written_vector == 2;
  // `written` counts elements of two bytes; its strides are those of float32 elements.
  const auto written = [&](u32 pixel) {
    return reinterpret_cast<float*>(p.written) + (written_at(pixel, p, block) - p.written);
  };
  const auto bias_of = [&](int output) { return all_bias ? all_bias[block.group * p.outputs + output] : 0.f; };
#pragma unroll
  for (int m = 0; m < Tile::kUnitsM; m++) {
    const u32 first_pixel = block.first_pixel + place.m + m * kMatrix;
    const int first_output = block.first_output + place.n;
    __syncwarp();  // the unit before has been read
#pragma unroll
    for (int n = 0; n < Tile::kUnitsN; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int row = Instruction::row(lane, i), column = n * kMatrix + Instruction::column(lane, i);
        sums[in_channels ? row * kPitch + column : column * kPixelPitch + row] = c.sum[m][n][i];
      }
    __syncwarp();
    if (in_channels) {
      constexpr int kQuads = kWarpN / 4;
      const int column = lane % kQuads * 4, output = first_output + column;
      if (output >= p.outputs) continue;
      const float bias[4] = {bias_of(output), bias_of(output + 1), bias_of(output + 2), bias_of(output + 3)};
#pragma unroll 1
      for (int row = lane / kQuads; row < kMatrix; row += 32 / kQuads) {
        if (!exists(first_pixel + row, p, block)) continue;
        float* to = written(first_pixel + row) + output;
        const float4 four = load4(sums + row * kPitch + column);
        float values[4] = {four.x, four.y, four.z, four.w};
        finish_scaled(values, back, p, bias, to);
        store4_global(to, values[0], values[1], values[2], values[3]);
      }
    } else if (p.written_vector == 1) {
      const u32 pixel = first_pixel + lane % 4 * 4;
      if (!exists(pixel, p, block)) continue;
      float* at = written(pixel);
#pragma unroll 1
      for (int column = lane / 4; column < kWarpN && first_output + column < p.outputs; column += 8) {
        const float one = bias_of(first_output + column), bias[4] = {one, one, one, one};
        float* to = at + i64(first_output + column) * p.written_channel;
        const float4 four = load4(sums + column * kPixelPitch + lane % 4 * 4);
        float values[4] = {four.x, four.y, four.z, four.w};
        finish_scaled(values, back, p, bias, to);
        store4_global(to, values[0], values[1], values[2], values[3]);
      }
    } else {
      const u32 pixel = first_pixel + lane % 16;
      if (!exists(pixel, p, block)) continue;
      float* at = written(pixel);
#pragma unroll 1
      for (int column = lane / 16; column < kWarpN && first_output + column < p.outputs; column += 2) {
        const float bias[1] = {bias_of(first_output + column)};
        float* to = at + i64(first_output + column) * p.written_channel;
        float values[1] = {sums[column * kPixelPitch + lane % 16]};
        finish_scaled(values, back, p, bias, to);
        *to = values[0];
      }
    }
  }
}

template <class Tile, class Params>
__device__ __forceinline__ void scaled_fp16_fprop_dgrad(const Params& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const ImplicitGemmBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;  // phases differ in size; the grid is made for the largest

  Accumulators<typename Tile::Base> c;
  accumulate_pipelined<Tile>(c, p, block, u32(__cvta_generic_to_shared(shared)));
  write_scaled<Tile>(c, p, shared, *p.source_exponent + *p.packed_exponent);
}

}  // namespace polyconv
