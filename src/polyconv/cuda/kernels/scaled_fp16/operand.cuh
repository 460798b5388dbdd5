// float32 operands of the scaled FP16 product: each tensor is scaled by one power of two, which takes its largest finite
// magnitude (winograd_fp16x3/absmax.cuh) to the upper end of FP16, and rounded once, to the 11 bits that TF32 keeps.
//
//   scaled_fp16_convert   an image, or a gradient, to FP16 with adjacent channels, padded to chunks
//   scaled_fp16_pack      weights to packed rows (implicit_gemm/pack_weights.cuh)
//   scaled_fp16_reduce    partial sums of a weight gradient (implicit_gemm/split_k_reduce.cuh), scaled back
//
// Infinities and NaNs stay what they are. Values below 2^-29 of the largest keep fewer bits; below 2^-39 they are zero.
#pragma once

#include "implicit_gemm/mma_tile.cuh"
#include "implicit_gemm/pack_weights.cuh"
#include "implicit_gemm/split_k_reduce.cuh"

namespace polyconv {

enum : int { kConvertThreads = 256, kConvertTiles = 4 };  // tiles of 32 pixels by 8 chunks, or chunks per thread

struct ScaledConvertParams {
  const float* source;
  Half* converted;     // [image][row][column][group][channels padded to chunks]
  const u32* largest;  // parts of the absmax, as bits
  int* exponent;       // of the scale; written by the first block
  i64 source_batch, source_channel;
  int source_row, source_column;
  int magnitudes;                                       // number of parts
  int channels;                                         // of a group
  int pixels;                                           // of all images
  FastDivisor height, width, chunks, chunks_per_group;  // chunks: of all groups
};

struct ScaledPackParams : HalfPackParams {
  const float* weights;
  const u32* largest;
  int* exponent;
  int magnitudes;
  int unpadded;  // channels of a group; the others are zeros
};

struct ScaledReduceParams : SplitKReduceParams {
  const int* exponents[2];  // of dy and of x
};

// A power of two of an exponent from -149 to 127, which may be a denormal number.
__device__ __forceinline__ float exact_power(int exponent) {
  return __uint_as_float(exponent >= -126 ? u32(exponent + 127) << 23 : 1u << (exponent + 149));
}

// Multiplication by 2^exponent, from -298 to 254, without overflow or loss on the way.
struct Scale {
  float first, second;

  __device__ __forceinline__ explicit Scale(int exponent)
      : first(exact_power(exponent >> 1)), second(exact_power(exponent - (exponent >> 1))) {}

  __device__ __forceinline__ float operator()(float value) const { return value * first * second; }
};

// Exponent of the scale that takes the largest magnitude, as bits, to 2^14 or more, below 2^15.
__device__ __forceinline__ int exponent_of(u32 largest) {
  return 141 - int(largest >> 23);
}

// The same for parts of the largest magnitude. Called by all threads of a block of kConvertThreads.
__device__ __forceinline__ int operand_exponent(const u32* largest, int magnitudes) {
  __shared__ u32 of_warps[kConvertThreads / 32];
  u32 found = 0;
  for (int i = threadIdx.x; i < magnitudes; i += kConvertThreads) found = max(found, largest[i]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) found = max(found, __shfl_xor_sync(~0u, found, lanes));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kConvertThreads / 32; warp++) found = max(found, of_warps[warp]);
  return exponent_of(found);
}

// Two values as FP16, the first in the lower half.
__device__ __forceinline__ u32 scaled_pair(const Scale& scale, float low, float high) {
  return rounded<Half>(scale(low)).bits | u32(rounded<Half>(scale(high)).bits) << 16;
}

__device__ __forceinline__ uint4 scaled_chunk(const Scale& scale, const float (&v)[kChunk]) {
  return make_uint4(scaled_pair(scale, v[0], v[1]), scaled_pair(scale, v[2], v[3]), scaled_pair(scale, v[4], v[5]),
                    scaled_pair(scale, v[6], v[7]));
}

// Address of the first channel of a pixel.
__device__ __forceinline__ const float* pixel_of(const ScaledConvertParams& p, u32 pixel) {
  const u32 line = p.width.quotient(pixel), image = p.height.quotient(line);
  return p.source + i64(image) * p.source_batch + i64(line - image * p.height.divisor) * p.source_row +
         i64(pixel - line * p.width.divisor) * p.source_column;
}

// kVector: channels are adjacent and aligned quads; a thread converts some chunks, neighbours next to each other. Grid:
// x = kConvertThreads * kConvertTiles chunks. Otherwise any strides: a warp reads 32 neighbouring pixels of eight
// channels. Grid: x = kConvertTiles * 32 pixels, y = eight chunks.
template <bool kVector>
__device__ __forceinline__ void scaled_fp16_convert(const ScaledConvertParams& p) {
  const int exponent = operand_exponent(p.largest, p.magnitudes);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.exponent = exponent;
  const Scale scale(exponent);
  uint4* to = reinterpret_cast<uint4*>(p.converted);
  if constexpr (kVector) {
#pragma unroll
    for (int tile = 0; tile < kConvertTiles; tile++) {
      const u32 item = (blockIdx.x * kConvertTiles + tile) * kConvertThreads + threadIdx.x;
      const u32 pixel = p.chunks.quotient(item), chunk = item - pixel * p.chunks.divisor;
      if (pixel >= p.pixels) return;
      const u32 group = p.chunks_per_group.quotient(chunk);
      const int channel = (chunk - group * p.chunks_per_group.divisor) * kChunk;
      const float* from = pixel_of(p, pixel) + i64(group) * p.channels + channel;
      const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
      const float4 low = load4(from), high = channel + 4 < p.channels ? load4(from + 4) : zeros;
      const float values[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      to[i64(pixel) * p.chunks.divisor + chunk] = scaled_chunk(scale, values);
    }
  } else {
    __shared__ uint4 staged[32][9];  // pixels by chunks; one more, so that a column lies in all banks
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_chunk = blockIdx.y * 8;
    const u32 chunk = first_chunk + warp, group = p.chunks_per_group.quotient(chunk);
    const int channel = (chunk - group * p.chunks_per_group.divisor) * kChunk;
    const i64 of_chunk = (i64(group) * p.channels + channel) * p.source_channel;
#pragma unroll 1
    for (int tile = 0; tile < kConvertTiles; tile++) {
      const u32 first = (blockIdx.x * kConvertTiles + tile) * 32;
      if (first >= p.pixels) return;
      if (first + lane < p.pixels && chunk < p.chunks.divisor) {
        const float* from = pixel_of(p, first + lane) + of_chunk;
        float values[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; i++) values[i] = channel + i < p.channels ? from[i * p.source_channel] : 0.f;
        staged[lane][warp] = scaled_chunk(scale, values);
      }
      __syncthreads();
      const u32 pixel = first + threadIdx.x / 8, stored = first_chunk + threadIdx.x % 8;
      if (pixel < p.pixels && stored < p.chunks.divisor)
        to[i64(pixel) * p.chunks.divisor + stored] = staged[threadIdx.x / 8][threadIdx.x % 8];
      __syncthreads();
    }
  }
}

// As implicit_gemm_pack_weights, of scaled weights and without a table. `channels` of the parameters are padded to chunks.
template <int kTileDepth>
__device__ __forceinline__ void scaled_fp16_pack(const ScaledPackParams& p) {
  const int exponent = operand_exponent(p.largest, p.magnitudes);
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0 && threadIdx.x == 0) *p.exponent = exponent;
  const Scale scale(exponent);
  const AxisPhase& h = p.phase_h[blockIdx.z / p.phases_w];
  const AxisPhase& w = p.phase_w[blockIdx.z % p.phases_w];
  const int group = blockIdx.x / p.output_tiles, n = blockIdx.x % p.output_tiles * 32 + threadIdx.x % 32;
  const int channel = blockIdx.y * 8 + threadIdx.x / 32, taps = h.taps * w.taps;
  if (n >= p.outputs_padded) return;
  Half* to = p.packed + (i64(group) * p.packed_rows + p.first_row[blockIdx.z]) * p.outputs_padded + n;
  if (channel < p.channels) {
    const bool exists = n < p.outputs && channel < p.unpadded;
    const float* from = p.weights + group * p.w_group + n * p.w_output + channel * p.w_channel;
    for (int tap = 0; tap < taps; tap++) {
      const int i = tap / w.taps, j = tap - i * w.taps;
      const i64 at = (h.tap_first + i * h.tap_stride) * p.w_row + (w.tap_first + j * w.tap_stride) * p.w_column;
      to[i64(tap * p.channels + channel) * p.outputs_padded] = rounded<Half>(exists ? scale(from[at]) : 0.f);
    }
  }
  const int rows = taps * p.channels, end = (rows + kTileDepth - 1) / kTileDepth * kTileDepth;
  for (int row = rows + threadIdx.x / 32; blockIdx.y == 0 && row < end; row += 8)
    to[i64(row) * p.outputs_padded] = Half{};
}

// As implicit_gemm_split_k_reduce. The bias gradient is a sum of dy alone.
__device__ __forceinline__ void scaled_fp16_reduce(const ScaledReduceParams& p) {
  float sum;
  i64 place;
  bool is_bias;
  if (!reduced(p, sum, place, is_bias)) return;
  const Scale back(-(*p.exponents[0] + (is_bias ? 0 : *p.exponents[1])));
  (is_bias ? p.db : p.dw)[place] = back(sum);
}

}  // namespace polyconv
