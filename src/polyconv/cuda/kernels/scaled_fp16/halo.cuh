// fprop and dgrad of float32 tensors by one scaled FP16 product, from sm_80 on, with the source read in place:
//   written[pixel, n] = bias[n] + 2^-(exponents) * sum over rows k of  rounded(2^e * source[pixel, k]) * packed[k, n]
//
// A block owns a rectangle of pixels of one image. For 32 channels at a time it reads all source pixels under its taps,
// the halo: once for their largest magnitude, and again (from the L2) to scale and round them to shared memory, where
// they serve every tap. Neither a pass for the largest magnitude of the whole tensor nor a converted copy is needed. The
// scale of a block can only fall from channels to channels: its sums are then scaled with it, by a power of two.
//
// Images of a volume are the slices of its result. The taps of the kernel's slices that read inside follow one another:
// 32 channels of one slice of the source are multiplied under all taps of a slice of the kernel, then those of the next.
//
// Grid: x = tile of pixels * channel tiles + channel tile, y = group. One phase.
// Shared memory: the halo, [pixel][32 channels + 8], then a ring of kStages stages b[32][N] of packed weights. A pitch of
// five chunks puts eight neighbouring pixels, which a matrix of ldmatrix reads, in different banks. Afterwards the sums.
#pragma once

#include "scaled_fp16/fprop_dgrad.cuh"

namespace polyconv {

struct ScaledHaloParams : ScaledImplicitGemmParams {
  FastDivisor tiles_h, tiles_w;  // of an image
  FastDivisor tile_width;
  int tile_height;
  int halo_height, halo_width;
  int unpadded;       // source channels of a group; `channels` is a multiple of 32
  int source_vector;  // channels are adjacent and aligned quads
};

// source_batch and written_batch are strides of slices.
struct ScaledHaloVolumeParams : ScaledHaloParams {
  i64 source_volume, next_volume;  // from a volume to the next; behind the last slice of the result
  FastDivisor slices;              // of a volume of the result
  int source_depth, taps_d;
  int read_first_d, read_step_d, tap_step_d;
};

constexpr int kHaloPitch = 2 * kPipelinedDepth + 16;  // bytes

// The ring holds weights alone.
template <class Plain>
struct HaloTile : Plain {
  static constexpr int kBytesA = 0, kStageBytes = Plain::kBytesB, kRingBytes = Plain::kStages * kStageBytes;
};

template <class Tile>
struct HaloBlock : ImplicitGemmBlock<Tile> {
  static constexpr bool kVolume = false;
  static constexpr int first_d = 0, taps_d = 1;  // slices of the kernel that read inside
  int image, top, left;                          // first pixel of the tile

  __device__ __forceinline__ explicit HaloBlock(const ScaledHaloParams& p) : ImplicitGemmBlock<Tile>(p) {
    const u32 tile = this->first_pixel / Tile::kM, line = p.tiles_w.quotient(tile);
    image = p.tiles_h.quotient(line);
    top = (line - image * p.tiles_h.divisor) * p.tile_height;
    left = (tile - line * p.tiles_w.divisor) * p.tile_width.divisor;
    this->first_pixel = 0;
    this->pixels = p.tile_height * p.tile_width.divisor;
  }
};

template <class Tile>
struct HaloVolumeBlock : HaloBlock<Tile> {
  static constexpr bool kVolume = true;
  int volume, first_z, first_d, taps_d;

  __device__ __forceinline__ explicit HaloVolumeBlock(const ScaledHaloVolumeParams& p) : HaloBlock<Tile>(p) {
    volume = p.slices.quotient(this->image);
    first_z = p.read_first_d + (this->image - volume * p.slices.divisor) * p.read_step_d;
    int end = p.taps_d;
    while (end > 0 && outside(p, end - 1)) end--;
    for (first_d = 0; first_d < end && outside(p, first_d);) first_d++;
    taps_d = end - first_d;
  }

  __device__ __forceinline__ bool outside(const ScaledHaloVolumeParams& p, int tap) const {
    return u32(first_z + tap * p.tap_step_d) >= u32(p.source_depth);
  }

  // Offset of a slice of the source from that with the image's number.
  __device__ __forceinline__ i64 slice(const ScaledHaloVolumeParams& p, int number) const {
    return volume * p.source_volume + (first_z + (first_d + number) * p.tap_step_d - this->image) * p.source_batch;
  }
};

// Declarations for the type of a block.
template <class Tile>
__device__ HaloBlock<Tile> block_of(const ScaledHaloParams&);
template <class Tile>
__device__ HaloVolumeBlock<Tile> block_of(const ScaledHaloVolumeParams&);

template <class Tile>
__device__ __forceinline__ bool exists(u32 pixel, const ScaledHaloParams& p, const HaloBlock<Tile>& block) {
  const int i = p.tile_width.quotient(pixel), j = pixel - i * p.tile_width.divisor;
  return pixel < block.pixels && u32(block.top + i) < block.h.count.divisor &&
         u32(block.left + j) < block.w.count.divisor;
}

template <class Tile>
__device__ __forceinline__ typename Tile::Element* written_at(u32 pixel, const ScaledHaloParams& p,
                                                              const HaloBlock<Tile>& block) {
  const int i = p.tile_width.quotient(pixel), j = pixel - i * p.tile_width.divisor;
  return p.written + block.group * p.outputs * p.written_channel + block.image * p.written_batch +
         i64(block.h.written_first + (block.top + i) * block.h.written_step) * p.written_row +
         i64(block.w.written_first + (block.left + j) * block.w.written_step) * p.written_column;
}

template <class Tile>
__device__ __forceinline__ typename Tile::Element* written_at(u32 pixel, const ScaledHaloVolumeParams& p,
                                                              const HaloVolumeBlock<Tile>& block) {
  return written_at<Tile>(pixel, static_cast<const ScaledHaloParams&>(p), block) + block.volume * p.next_volume;
}

// Passes every chunk of the halo, with its place in shared memory, to `visit`; zeros outside of the image. A warp reads
// 32 pixels of a row, all 32 channels of each before the first is used: neighbouring threads have neighbouring channels,
// or neighbouring pixels.
template <class Tile, class Params, class Block, class Visit>
__device__ __forceinline__ void visit_halo(const Params& p, const Block& block, int slice, int first_channel,
                                           const Visit& visit) {
  constexpr int kChunks = Tile::kDepth / kChunk;
  const int lane = threadIdx.x % 32;
  const int first_y = block.h.read_first + block.top * block.h.read_step + min(0, (block.h.taps - 1) * p.tap_step_h);
  const int first_x = block.w.read_first + block.left * block.w.read_step + min(0, (block.w.taps - 1) * p.tap_step_w);
  const int channels = p.unpadded - first_channel;  // that exist
  const float* source = reinterpret_cast<const float*>(p.source) + block.image * p.source_batch +
                        (i64(block.group) * p.unpadded + first_channel) * p.source_channel;
  if constexpr (Block::kVolume) source += block.slice(p, slice);
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < p.halo_height; row += Tile::kThreads / 32) {
    const int y = first_y + row;
    const float* line = source + i64(y) * p.source_row;
#pragma unroll 1
    for (int first = 0; first < p.halo_width; first += 32) {
      float values[kChunks][kChunk] = {};
      if (p.source_vector) {
#pragma unroll
        for (int q = 0; q < kChunks; q++) {
          const int channel = lane % kChunks * kChunk, x = first_x + first + q * (32 / kChunks) + lane / kChunks;
          if (u32(y) >= u32(p.source_height) || u32(x) >= u32(p.source_width)) continue;
          const float* from = line + i64(x) * p.source_column + channel;
#pragma unroll
          for (int i = 0; i < kChunk; i += 4) {
            if (channel + i >= channels) continue;
            const float4 four = load4(from + i);
            values[q][i] = four.x, values[q][i + 1] = four.y, values[q][i + 2] = four.z, values[q][i + 3] = four.w;
          }
        }
      } else {
        const int x = first_x + first + lane;
        const bool inside =
            u32(y) < u32(p.source_height) && u32(x) < u32(p.source_width) && first + lane < p.halo_width;
        const float* from = line + i64(x) * p.source_column;
#pragma unroll
        for (int i = 0; i < Tile::kDepth; i++, from += p.source_channel)
          if (inside && i < channels) values[i / kChunk][i % kChunk] = *from;
      }
#pragma unroll
      for (int q = 0; q < kChunks; q++) {
        const int column = first + (p.source_vector ? q * (32 / kChunks) + lane / kChunks : lane);
        const int chunk = p.source_vector ? lane % kChunks : q;
        if (column < p.halo_width) visit((row * p.halo_width + column) * kHaloPitch + chunk * 16, values[q]);
      }
    }
  }
}

// Scales and rounds 32 channels of the halo to shared memory. Called by all threads, when the halo is free.
template <class Tile, class Params, class Block>
__device__ __forceinline__ void fill_halo(Accumulators<typename Tile::Base>& c, const Params& p, const Block& block,
                                          int slice, int first_channel, unsigned char* halo, int& exponent) {
  __shared__ u32 of_warps[Tile::kThreads / 32];
  u32 found = 0;
  visit_halo<Tile>(p, block, slice, first_channel, [&](u32, const float (&values)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      const u32 bits = __float_as_uint(values[i]) & 0x7fffffffu;
      if (bits < 0x7f800000u) found = max(found, bits);
    }
  });
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) found = max(found, __shfl_xor_sync(~0u, found, lanes));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < Tile::kThreads / 32; warp++) found = max(found, of_warps[warp]);
  const int before = exponent;
  exponent = min(before, exponent_of(found));
  if (exponent < before) {
    const Scale down(exponent - before);
#pragma unroll
    for (int m = 0; m < Tile::kUnitsM; m++)
#pragma unroll
      for (int n = 0; n < Tile::kUnitsN; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) c.sum[m][n][i] = down(c.sum[m][n][i]);
  }
  const Scale scale(exponent);
  visit_halo<Tile>(p, block, slice, first_channel, [&](u32 at, const float (&values)[kChunk]) {
    *reinterpret_cast<uint4*>(halo + at) = scaled_chunk(scale, values);
  });
  __syncthreads();
}

template <class Plain, class Params>
__device__ __forceinline__ void scaled_fp16_halo(const Params& p) {
  using Tile = HaloTile<Plain>;
  using Instruction = typename Tile::Instruction;
  extern __shared__ __align__(128) unsigned char shared[];
  Accumulators<typename Tile::Base> c;
  int exponent = exponent_of(0);
  {
    const decltype(block_of<Tile>(p)) block(p);
    const u32 halo = u32(__cvta_generic_to_shared(shared));
    const u32 ring = halo + (p.halo_height * p.halo_width * kHaloPitch + 127) / 128 * 128;
    const TilePlace<typename Tile::Base> place(threadIdx.x);
    const int lane = threadIdx.x % 32;
    const u32 b = swizzled<Tile::kN / kChunk>(lane % kMatrix, place.n / kChunk + lane / kMatrix);
    const int down = p.tap_step_h * p.halo_width * kHaloPitch, right = p.tap_step_w * kHaloPitch;
    u32 a[Tile::kUnitsM];  // of this lane's pixels, under the first tap
#pragma unroll
    for (int m = 0; m < Tile::kUnitsM; m++) {
      const u32 pixel = min(place.m + m * kMatrix + lane % kMatrix, block.pixels - 1);
      const int i = p.tile_width.quotient(pixel), j = pixel - i * p.tile_width.divisor;
      a[m] = halo + lane / kMatrix * 16 + max(0, -(block.h.taps - 1) * down) + max(0, -(block.w.taps - 1) * right) +
             (i * block.h.read_step * p.halo_width + j * block.w.read_step) * kHaloPitch;
    }
    const int taps = block.h.taps * block.w.taps, blocks = p.channels / Tile::kDepth;
    const int all_taps = taps * block.taps_d;
    PackedCopies<Tile> packed(p, block);
    packed.at += i64(block.first_d * taps) * p.channels * p.outputs_padded;
    const i64 next_tap = i64(p.channels - Tile::kDepth) * p.outputs_padded;
    const i64 next_channels = i64(Tile::kDepth - all_taps * p.channels) * p.outputs_padded;
    int copied = all_taps, column = 0, multiplied = 0, channel = 0, slice = 0;
    u32 tap = 0;
    pipeline<Tile>(
        ring, all_taps * blocks,
        [&](u32 stage) {
          packed.start(stage + PackedCopies<Tile>::place());
          packed.at += next_tap;
          if (--copied == 0) copied = all_taps, packed.at += next_channels;
        },
        [&](u32 stage) {
          if (multiplied == 0) {
            fill_halo<Tile>(c, p, block, slice, channel, shared, exponent);
            multiplied = taps, column = block.w.taps, tap = 0;
            if (++slice == block.taps_d) channel += Tile::kDepth, slice = 0;
          }
#pragma unroll
          for (int k = 0; k < Tile::kDepth / kMatrix; k++) {
            typename Instruction::Fragment rows[Tile::kUnitsM], columns[Tile::kUnitsN];
#pragma unroll
            for (int m = 0; m < Tile::kUnitsM; m++) load_matrices_at<false>(rows[m].pair, a[m] + tap + k * 32);
#pragma unroll
            for (int n = 0; n < Tile::kUnitsN; n++)
              load_matrices_at<true>(columns[n].pair, ((stage + b) ^ n * 32) + k * kMatrix * 2 * Tile::kN);
#pragma unroll
            for (int m = 0; m < Tile::kUnitsM; m++)
#pragma unroll
              for (int n = 0; n < Tile::kUnitsN; n++) Instruction::multiply_add(c.sum[m][n], rows[m], columns[n]);
          }
          multiplied--;
          tap += right;
          if (--column == 0) column = block.w.taps, tap += down - column * right;
        });
  }
  write_scaled<Plain, decltype(block_of<Plain>(p))>(c, p, shared, exponent + *p.packed_exponent);
}

}  // namespace polyconv
