// wgrad of a depthwise convolution of 16-bit tensors with stride 1 and adjacent columns on tensor cores, from sm_80 on:
//   dw[r, s] = sum over images, rows i and columns u of  dy[i, u - s] * x[i + r, u]
//
// A product m16n8k16 sums 16 columns u of two rows of dy, i and i + 1: its 16 rows are (i or i + 1, s), a band matrix of
// dy, and its eight columns are the rows i to i + 7 of x. So a warp has only four accumulators per lane, for all pixels.
//
// A block owns one channel and one slice of the (image, tile) pairs; a tile has 32 rows and 56 columns of dy. At the end
// it adds its warps' sums in a fixed order and writes a partial sum; implicit_gemm/split_k_reduce.cuh adds the slices.
// The sum of dy is the bias gradient. Shared memory: the source tile, and two copies of each row of dy as words of two
// columns, the second copy shifted by one column. Grid: x = slice, y = output channel.
#pragma once

#include "depthwise/band.cuh"

namespace polyconv {

template <class Element>
struct BandWgradParamsOf {
  const Element* x;
  const Element* dy;
  float* partial;  // [slice][channel][columns_padded]: the taps, then the bias
  i64 x_batch, x_channel, dy_batch, dy_channel;
  int x_row, x_column, dy_row, dy_column;
  int height, width, rows, columns;  // of x and of dy
  int pad_top, pad_left;
  int channels;  // output channels
  int columns_padded;
  int bias;
  int shift;              // 1: tiles of x begin one column before the first one that is read, to align pairs of columns
  int pairs_x, pairs_dy;  // whether pairs of columns are aligned to four bytes
  int jobs, jobs_per_slice;  // (image, tile) pairs
  FastDivisor tiles, tiles_w, multiplier;
};

struct HalfBandWgradParams : BandWgradParamsOf<Half> {};
struct BFloat16BandWgradParams : BandWgradParamsOf<BFloat16> {};

template <int kTapsH, int kTapsW, class Element, class Params>
__device__ __forceinline__ void depthwise_band_wgrad(const Params& p) {
  constexpr int kThreads = 128, kWarps = kThreads / 32, kRows = 32, kColumns = 56, kSourceRows = kRows + 6;
  constexpr int kPitch = 72;                 // of a source row, in halves
  constexpr int kShifted = 48, kBefore = 4;  // start of the shifted copy of a row of dy, and leading zeros, in words
  constexpr int kTaps = kTapsH * kTapsW, kSums = 2;  // independent accumulators
  static_assert(kTapsH <= 7 && kTapsW <= 7, "made for other sizes");
  __shared__ __align__(16) u32 source[kSourceRows][kPitch / 2];
  __shared__ u32 gradient[kRows][2 * kShifted];
  __shared__ float sums[kWarps][2 * 8][8 + 1], sums_dy[kWarps];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = blockIdx.y, pair = lane * 2;
  const Element* const x_channel = p.x + i64(p.multiplier.quotient(channel)) * p.x_channel;
  const Element* const dy_channel = p.dy + channel * p.dy_channel;
  for (int e = threadIdx.x; e < kRows * 2 * kBefore; e += kThreads)
    gradient[e / (2 * kBefore)][e % (2 * kBefore) / kBefore * kShifted + e % kBefore] = 0;

  // This lane's part of the operands, in the first row and columns of a warp.
  const int shift = lane / 4, first_row = warp * (kRows / kWarps);
  const u32* const band = &gradient[first_row][lane % 4 + (shift % 2 ? kShifted + (9 - shift) / 2 : 4 - shift / 2)];
  const u32 at = u32(__cvta_generic_to_shared(source)) + 2 * ((first_row + lane % 8) * kPitch + lane / 8 * 8);
  float sum[kSums][4] = {}, sum_dy = 0.f;
  const int first_job = blockIdx.x * p.jobs_per_slice, last_job = min(first_job + p.jobs_per_slice, p.jobs);
#pragma unroll 1
  for (int job = first_job; job < last_job; job++) {
    const int image = p.tiles.quotient(job), number = job - image * p.tiles.divisor;
    const int tile_y = p.tiles_w.quotient(number), tile_x = number - tile_y * p.tiles_w.divisor;
    const int first_i = tile_y * kRows, first_j = tile_x * kColumns;
    __syncthreads();  // the last tile has been read
    {
      const int y = first_i - p.pad_top + warp, x = first_j - p.pad_left - p.shift + pair;
      const u32 height_low = u32(x) < u32(p.width) ? p.height : 0,
                height_high = u32(x + 1) < u32(p.width) ? p.height : 0;
      const Element* from = x_channel + image * p.x_batch + i64(y) * p.x_row + x;
#pragma unroll 5
      for (int e = 0; e < kSourceRows; e += kWarps, from += i64(kWarps) * p.x_row) {
        u32 both = 0;
        if (p.pairs_x) {
          if (u32(y + e) < height_low) both = *reinterpret_cast<const u32*>(from);
        } else {
          const Element low = u32(y + e) < height_low ? from[0] : Element{};
          const Element high = u32(y + e) < height_high ? from[1] : Element{};
          both = low.bits | u32(high.bits) << 16;
        }
        if (warp + e < kSourceRows) source[warp + e][lane] = both;
      }
    }
    {
      const int column = first_j + pair;
      const int rows_low = pair < kColumns && column < p.columns ? p.rows : 0;
      const int rows_high = pair < kColumns && column + 1 < p.columns ? p.rows : 0;
      const Element* from = dy_channel + image * p.dy_batch + i64(first_i + warp) * p.dy_row + column;
#pragma unroll 4
      for (int e = 0; e < kRows; e += kWarps, from += i64(kWarps) * p.dy_row) {
        const int row = first_i + warp + e;
        Element low{}, high{};
        if (p.pairs_dy) {
          const u32 both = row < rows_low ? *reinterpret_cast<const u32*>(from) : 0;
          low.bits = both & 0xffff, high.bits = both >> 16;
        } else {
          if (row < rows_low) low = from[0];
          if (row < rows_high) high = from[1];
        }
        const u32 before = __shfl_up_sync(0xffffffffu, u32(high.bits), 1);
        gradient[warp + e][kBefore + lane] = low.bits | u32(high.bits) << 16;
        gradient[warp + e][kShifted + kBefore + lane] = (lane ? before : 0) | u32(low.bits) << 16;
        sum_dy += widened(low) + widened(high);
      }
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kRows / kWarps; i += 2) {
#pragma unroll
      for (int q = 0; q < 2; q++) {  // 32 columns
        u32 x[4];
        load_matrices_at<false>(x, at + 2 * (i * kPitch + q * 32));
#pragma unroll
        for (int u = 0; u < 2; u++) {
          const u32* from = band + i * (2 * kShifted) + (2 * q + u) * 8;
          const u32 low[2] = {from[0], from[2 * kShifted]}, high[2] = {from[4], from[2 * kShifted + 4]};
          const u32 rows[2] = {x[2 * u], x[2 * u + 1]};
#if POLYCONV_HAS_K16
          multiply_band(sum[u], low, high, rows, Element{});
#endif
        }
      }
    }
  }

  // ---- Sum over the block, in a fixed order
#pragma unroll
  for (int i = 0; i < 4; i++) sums[warp][lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = sum[0][i] + sum[1][i];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum_dy += __shfl_xor_sync(0xffffffffu, sum_dy, distance);
  if (lane == 0) sums_dy[warp] = sum_dy;
  __syncthreads();
  const int t = threadIdx.x;
  if (t >= kTaps + (p.bias != 0)) return;
  const int r = t / kTapsW, s = t % kTapsW + p.shift;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += t < kTaps ? sums[w][s][r] + sums[w][8 + s][r + 1] : sums_dy[w];
  p.partial[(i64(blockIdx.x) * p.channels + channel) * p.columns_padded + t] = total;
}

}  // namespace polyconv
