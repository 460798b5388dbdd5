// fprop and dgrad of 16-bit tensors in channels_last or channels_last_3d, from sm_80 on:
//   written[pixel, n] = rounded(bias[n] + sum over rows k of  gathered[pixel, k] * packed[k, n])
//
// The implicit GEMM of implicit_gemm/fprop_dgrad_mma.cuh with the same grid, phases and packed weights, for tensors whose
// channels are adjacent and multiples of eight: a chunk of eight channels is copied, stored and lies in shared memory as
// 16 bytes. Operands go from global to shared memory by asynchronous copies, kStages - 1 steps of 32 rows ahead.
//
// Shared memory: a ring of kStages stages, each a[M][32] pixels by channels, then b[32][N] rows of packed weights. The
// chunks of a row are permuted by an XOR with the row, so that the eight chunks that a matrix of ldmatrix reads lie in
// different banks. Afterwards each warp uses its own part for 16 pixels of sums at a time, [16][N / kWarpsN + 8] floats.
#pragma once

#include "implicit_gemm/fprop_dgrad_mma.cuh"

namespace polyconv {

// Volumes in channels_last_3d: the images are the slices that are written, one after another, and the kernel has the rows
// of all its slices, packed as one below the other. source_batch and written_batch are strides of slices. Only the copies
// of the source know the depth.
template <class Element>
struct VolumeParamsOf : ImplicitGemmParamsOf<Element> {
  i64 source_volume;
  FastDivisor slices;  // of a written volume
  int source_depth;
  int read_first_d, read_step_d, tap_step_d;
  int rows_of_slice;  // rows of taps
};
struct HalfVolumeParams : VolumeParamsOf<Half> {};
struct BFloat16VolumeParams : VolumeParamsOf<BFloat16> {};

// Copies of a[M][32]: a thread has one chunk of every row of kThreads / 4, under one tap after another. kVolume: an image
// is a slice of a volume, and the rows of taps are those of several slices.
template <class Tile, bool kVolume, class Params>
struct SourceCopies {
  static constexpr int kChunks = Tile::kDepth / kChunk, kRowsAtOnce = Tile::kThreads / kChunks;
  static constexpr int kPixels = Tile::kM / kRowsAtOnce;
  using Element = typename Tile::Element;

  const Params& p;
  const ImplicitGemmBlock<Tile>& block;
  const Element* at[kPixels];  // may point outside: then it is not read
  int y[kPixels], x[kPixels];  // source coordinates under the current tap
  int z[kVolume ? kPixels : 1];
  int channel, columns_left, rows_left, rows_of_slice_left;

  __device__ __forceinline__ SourceCopies(const Params& p, const ImplicitGemmBlock<Tile>& block)
      : p(p),
        block(block),
        channel(threadIdx.x % kChunks * kChunk),
        columns_left(block.w.taps),
        rows_left(block.h.taps) {
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      const u32 index = block.first_pixel + threadIdx.x / kChunks + q * kRowsAtOnce;
      const Pixel pixel(index, block.h, block.w);
      y[q] = block.h.read_first + pixel.i * block.h.read_step;
      x[q] = block.w.read_first + pixel.j * block.w.read_step;
      at[q] = p.source + image(pixel.image, q) + block.group * p.channels + channel + i64(y[q]) * p.source_row +
              i64(x[q]) * p.source_column;
      if (index >= block.pixels) y[q] = -(1 << 30);  // past the end: outside under every tap
    }
    if constexpr (kVolume) rows_of_slice_left = p.rows_of_slice;
    settle();
  }

  static __device__ __forceinline__ u32 place() {
    return swizzled<kChunks>(threadIdx.x / kChunks, threadIdx.x % kChunks);
  }

  // Offset of the image, or of the slice that the first tap reads, which may be outside of the volume.
  __device__ __forceinline__ i64 image(int number, int q) {
    if constexpr (kVolume) {
      const u32 volume = p.slices.quotient(number);
      z[q] = p.read_first_d + int(number - volume * p.slices.divisor) * p.read_step_d;
      return volume * p.source_volume + z[q] * p.source_batch;
    } else {
      return number * p.source_batch;
    }
  }

  // Starts the copies of a step to the stage whose a is at `to` + place(). Channels outside of the image are zeros.
  __device__ __forceinline__ void start(u32 to) const {
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      bool inside = u32(y[q]) < u32(p.source_height) && u32(x[q]) < u32(p.source_width) && rows_left > 0;
      if constexpr (kVolume) inside = inside && u32(z[q]) < u32(p.source_depth);
      copy16_or_zeros(to + q * 16 * kChunks * kRowsAtOnce, at[q], inside);
    }
  }

  __device__ __forceinline__ void advance() {
    channel += Tile::kDepth;
    move(Tile::kDepth);
    settle();
  }

  // Goes on to the tap that the channel belongs to: with few channels a step has several taps.
  __device__ __forceinline__ void settle() {
    while (channel >= p.channels) {
      channel -= p.channels;
      i64 step = i64(p.tap_step_w) * p.source_column - p.channels;
      int right = p.tap_step_w, down = 0;
      if (--columns_left == 0) {
        columns_left = block.w.taps;
        rows_left--;
        right -= block.w.taps * p.tap_step_w, down = p.tap_step_h;
        if constexpr (kVolume) {
          if (--rows_of_slice_left == 0) {
            rows_of_slice_left = p.rows_of_slice;
            down -= p.rows_of_slice * p.tap_step_h;
            step += p.tap_step_d * p.source_batch;
#pragma unroll
            for (int q = 0; q < kPixels; q++) z[q] += p.tap_step_d;
          }
        }
        step += i64(down) * p.source_row - i64(block.w.taps) * p.tap_step_w * p.source_column;
      }
      move(step);
#pragma unroll
      for (int q = 0; q < kPixels; q++) x[q] += right, y[q] += down;
      if (rows_left <= 0) return;  // behind the last tap
    }
  }

  __device__ __forceinline__ void move(i64 elements) {
#pragma unroll
    for (int q = 0; q < kPixels; q++) at[q] += elements;
  }
};

// Copies of b[32][N]: a thread has one chunk of every row of kRowsAtOnce.
template <class Tile>
struct PackedCopies {
  static constexpr int kChunks = Tile::kN / kChunk, kRowsAtOnce = Tile::kThreads / kChunks;
  static constexpr int kRows = Tile::kDepth / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0, "all rows of a thread have one permutation");

  const typename Tile::Element* at;
  i64 between;  // from a row of this thread to the next

  __device__ __forceinline__ PackedCopies(const ImplicitGemmParamsFor<Tile>& p, const ImplicitGemmBlock<Tile>& block)
      : between(i64(kRowsAtOnce) * p.outputs_padded) {
    const i64 row = i64(block.group) * p.packed_rows + block.first_row + threadIdx.x / kChunks;
    at = p.packed + row * p.outputs_padded + block.first_output + threadIdx.x % kChunks * kChunk;
  }

  static __device__ __forceinline__ u32 place() {
    return swizzled<kChunks>(threadIdx.x / kChunks, threadIdx.x % kChunks);
  }

  __device__ __forceinline__ void start(u32 to) {
#pragma unroll
    for (int r = 0; r < kRows; r++, at += between) copy16(to + r * 16 * kChunks * kRowsAtOnce, at);
  }
};

// Adds the products of one stage. a and b: this lane's addresses in the stage, for the first unit.
template <class Tile>
__device__ __forceinline__ void multiply_stage(Accumulators<typename Tile::Base>& c, u32 a, u32 b) {
  using Instruction = typename Tile::Instruction;
#pragma unroll
  for (int k = 0; k < Tile::kDepth / kMatrix; k++) {
    typename Instruction::Fragment rows[Tile::kUnitsM], columns[Tile::kUnitsN];
#pragma unroll
    for (int m = 0; m < Tile::kUnitsM; m++)
      load_matrices_at<false>(rows[m].pair, (a ^ k * 32) + m * kMatrix * 2 * Tile::kDepth);
#pragma unroll
    for (int n = 0; n < Tile::kUnitsN; n++)
      load_matrices_at<true>(columns[n].pair, (b ^ n * 32) + k * kMatrix * 2 * Tile::kN);
#pragma unroll
    for (int m = 0; m < Tile::kUnitsM; m++)
#pragma unroll
      for (int n = 0; n < Tile::kUnitsN; n++) Instruction::multiply_add(c.sum[m][n], rows[m], columns[n]);
  }
}

// Accumulates all rows of the block's phase.
template <class Tile, bool kVolume = false, class Params>
__device__ __forceinline__ void accumulate_pipelined(Accumulators<typename Tile::Base>& c, const Params& p,
                                                     const ImplicitGemmBlock<Tile>& block, u32 ring) {
  const int lane = threadIdx.x % 32, row = lane % kMatrix, half = lane / kMatrix;
  const TilePlace<typename Tile::Base> place(threadIdx.x);
  const u32 a = swizzled<Tile::kDepth / kChunk>(place.m + row, half);
  const u32 b = Tile::kBytesA + swizzled<Tile::kN / kChunk>(row, place.n / kChunk + half);
  SourceCopies<Tile, kVolume, Params> source(p, block);
  PackedCopies<Tile> packed(p, block);
  const auto start = [&](u32 stage) {
    source.start(stage + source.place());
    packed.start(stage + Tile::kBytesA + PackedCopies<Tile>::place());
    source.advance();
  };
  pipeline<Tile>(ring, block.rows / Tile::kDepth, start,
                 [&](u32 stage) { multiply_stage<Tile>(c, stage + a, stage + b); });
}

// Eight neighbouring elements of one row of sums: bias and epilogue are applied, and 16 bytes stored.
template <class Tile, class Params>
__device__ __forceinline__ void write_chunk(const Params& p, const float* from, const float (&bias)[kChunk],
                                            typename Tile::Element* to) {
  using Element = typename Tile::Element;
  const float4 low = load4(from), high = load4(from + 4);
  float sums[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kChunk; i++) sums[i] += bias[i];
  if (p.residual) {
    const Chunk<Element> residual = load_chunk(add_bytes(to, p.residual_bytes()));
#pragma unroll
    for (int i = 0; i < kChunk; i++) sums[i] += widened(residual.value[i]);
  }
  activate(sums, p);
  Chunk<Element> result;
#pragma unroll
  for (int i = 0; i < kChunk; i++) result.value[i] = rounded<Element>(sums[i]);
  store_chunk(to, result);
}

// Stores the tile. Lanes that are neighbours have neighbouring chunks, and a lane the same channels in every row.
template <class Tile, class Params>
__device__ __forceinline__ void write_pipelined(const Accumulators<typename Tile::Base>& c, const Params& p,
                                                unsigned char* shared) {
  using Element = typename Tile::Element;
  using Instruction = typename Tile::Instruction;
  constexpr int kWarpN = Tile::kUnitsN * kMatrix, kChunks = kWarpN / kChunk, kRows = 32 / kChunks;
  constexpr int kPitch = kWarpN + kChunk;  // rows that are stored at once begin in different banks
  static_assert(Tile::kThreads / 32 * kMatrix * kPitch * 4 <= Tile::kRingBytes, "the sums need more than the ring");
  const ImplicitGemmBlock<Tile> block(p);
  const u32 thread = fresh_thread(), lane = thread % 32;
  const TilePlace<typename Tile::Base> place(thread);
  float* sums = reinterpret_cast<float*>(shared) + thread / 32 * kMatrix * kPitch;
  const int column = lane % kChunks * kChunk, output = block.first_output + place.n + column;
  float bias[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; i++)
    bias[i] = p.bias && output < p.outputs ? widened(p.bias[block.group * p.outputs + output + i]) : 0.f;
#pragma unroll
  for (int m = 0; m < Tile::kUnitsM; m++) {
    __syncwarp();  // the unit before has been read
#pragma unroll
    for (int n = 0; n < Tile::kUnitsN; n++)
#pragma unroll
      for (int i = 0; i < 8; i += 2)
        *reinterpret_cast<float2*>(sums + Instruction::row(lane, i) * kPitch + n * kMatrix +
                                   Instruction::column(lane, i)) = make_float2(c.sum[m][n][i], c.sum[m][n][i + 1]);
    __syncwarp();
#pragma unroll 1
    for (int row = lane / kChunks; row < kMatrix; row += kRows) {
      const u32 pixel = block.first_pixel + place.m + m * kMatrix + row;
      if (pixel < block.pixels && output < p.outputs)
        write_chunk<Tile>(p, sums + row * kPitch + column, bias, written_at(pixel, p, block) + output);
    }
  }
}

template <class Tile, bool kVolume = false, class Params>
__device__ __forceinline__ void implicit_gemm_nhwc(const Params& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const ImplicitGemmBlock<Tile> block(p);
  if (block.first_pixel >= block.pixels) return;  // phases differ in size; the grid is made for the largest

  Accumulators<typename Tile::Base> c;
  accumulate_pipelined<Tile, kVolume>(c, p, block, u32(__cvta_generic_to_shared(shared)));
  write_pipelined<Tile>(c, p, shared);
}

}  // namespace polyconv
