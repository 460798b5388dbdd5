// wgrad of a depthwise convolution of 16-bit tensors with stride 1 and adjacent channels on tensor cores, from sm_80 on.
//
// The products are those of depthwise/band_wgrad.cuh, for 16 channels: m16n8k16 sums 16 columns u of the rows i and
// i + 1 of dy, shifted by s, times the rows i to i + 7 of x. Memory is read once, in chunks of eight channels, and
// transposed in registers: words of shared memory are two neighbouring columns of one channel.
//
// A block owns 16 channels and one slice of the jobs: (image, run of rows of dy, tile of columns). It walks down a job
// in steps of eight rows and keeps the last 16 rows of x, so that no row of a job is read twice; while it multiplies, the
// elements of its next step are on their way. A warp owns 2 channels, whose sums stay in registers. At the end it writes
// partial sums; implicit_gemm/split_k_reduce.cuh adds the slices. The bias gradient is a product with ones.
// Shared memory, per channel: 16 rows of x, as a ring; then two copies of eight rows of dy, the second shifted by one
// column. Grid: x = slice, y = 16 channels.
#pragma once

#include "depthwise/band.cuh"

namespace polyconv {

template <class Element>
struct BandWgradNhwcParamsOf {
  const Element* x;
  const Element* dy;
  float* partial;  // [slice][channel][columns_padded]: the taps, then the bias
  i64 x_batch, x_channel, dy_batch, dy_channel;
  int x_row, x_column, dy_row, dy_column;
  int height, width, rows, columns;  // of x and of dy
  int pad_top, pad_left;
  int channels, columns_padded, bias;
  int steps;  // of a job, of eight rows each
  int jobs, jobs_per_slice;
  FastDivisor tiles, tiles_w;  // of an image, and of a run of rows
};

struct HalfBandWgradNhwcParams : BandWgradNhwcParamsOf<Half> {};
struct BFloat16BandWgradNhwcParams : BandWgradNhwcParamsOf<BFloat16> {};

__device__ __forceinline__ u32 ones_of(Half) {
  return 0x3c003c00;
}
__device__ __forceinline__ u32 ones_of(BFloat16) {
  return 0x3f803f80;
}

// kTilesN: a tile has 8 * kTilesN columns of dy.
template <int kTilesN>
struct BandWgradNhwc {
  static constexpr int kThreads = 256, kStep = 8, kRing = 2 * kStep;
  static constexpr int kColumns = 8 * kTilesN, kSourceColumns = kColumns + 8;
  static constexpr int kPairs = kSourceColumns / 2, kRowsAtOnce = kThreads / (2 * kPairs);
  static constexpr int kEach = kStep / kRowsAtOnce;  // pairs of x, and of dy, per thread and step
  static constexpr int kPitch = kPairs + 4;          // of a row of x, in words: eight rows are in different banks
  static constexpr int kBefore = 4;                  // leading zeros of a row of dy, in words
  static constexpr int kCopy = kBefore + kPairs;     // a row of dy, with zeros on both sides
  static constexpr int kShifted = kCopy + (kCopy % 32 < 7 ? 4 : 0);  // its shifted copy, in other banks
  static constexpr int kPitchDy = kShifted + kCopy;
  // Pads channels so that those that 16 lanes and the 16 others of a warp store are in different banks.
  static constexpr int kChannel = (kRing * kPitch + 7) / 16 * 16 + 8;
  static constexpr int kChannelDy = (kStep * kPitchDy + 7) / 16 * 16 + 8;
  static_assert(kPairs % 16 == 0 && kThreads % (2 * kPairs) == 0 && kStep % kRowsAtOnce == 0, "made for other sizes");

  u32 source[kBandChannels][kChannel];
  u32 gradient[kBandChannels][kChannelDy];
};

// Eight channels of two neighbouring columns.
struct BandPair {
  uint4 low, high;

  template <class Element>
  __device__ __forceinline__ void load(const Element* from, int column, bool has_low, bool has_high) {
    low = high = make_uint4(0, 0, 0, 0);
    if (has_low) low = *reinterpret_cast<const uint4*>(from);
    if (has_high) high = *reinterpret_cast<const uint4*>(from + column);
  }

  // Calls store(channel, word) for each channel. Lanes that swap do so in another order: banks differ in a warp.
  template <class Store>
  __device__ __forceinline__ void transposed(bool swaps, Store store) const {
    const u32 first[4] = {swaps ? low.y : low.x, swaps ? low.x : low.y, swaps ? low.w : low.z, swaps ? low.z : low.w};
    const u32 second[4] = {swaps ? high.y : high.x, swaps ? high.x : high.y, swaps ? high.w : high.z,
                           swaps ? high.z : high.w};
#pragma unroll
    for (int c = 0; c < 8; c++)
      store(c + (swaps ? (c & 2 ? -2 : 2) : 0), __byte_perm(first[c / 2], second[c / 2], c % 2 ? 0x7632 : 0x5410));
  }
};

template <int kTapsH, int kTapsW, int kTilesN, class Element, class Params>
__device__ __forceinline__ void depthwise_band_wgrad_nhwc(const Params& p) {
  using Memory = BandWgradNhwc<kTilesN>;
  constexpr int kThreads = Memory::kThreads, kWarps = kThreads / 32, kOwn = kBandChannels / kWarps;
  constexpr int kStep = Memory::kStep, kEach = Memory::kEach, kRowsAtOnce = Memory::kRowsAtOnce;
  static_assert(kTapsH <= 7 && kTapsW <= 7, "made for other sizes");
  extern __shared__ __align__(16) unsigned char memory[];
  auto& source = reinterpret_cast<Memory*>(memory)->source;
  auto& gradient = reinterpret_cast<Memory*>(memory)->gradient;

  // Loads and stores: a thread has eight channels of pairs of columns.
  const int of = threadIdx.x % 2 * 8, channel = blockIdx.y * kBandChannels + of;
  const int pair = threadIdx.x / 2 % Memory::kPairs, row = threadIdx.x / (2 * Memory::kPairs);
  const bool has_channels = channel < p.channels, swaps = of != 0;
  for (int e = threadIdx.x; e < kBandChannels * Memory::kChannelDy; e += kThreads) gradient[0][e] = 0;

  // Products: a warp has kOwn channels, and a lane its parts of the operands.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, shift = lane / 4;
  const u32* const band =
      &gradient[warp * kOwn][Memory::kBefore + lane % 4 + (shift % 2 ? Memory::kShifted - shift / 2 : -(shift / 2))];
  const u32 at = u32(__cvta_generic_to_shared(source[warp * kOwn])) + lane / 8 * 16;
  float sum[kOwn][2][4] = {}, sum_dy[kOwn][4] = {};

  // The next step to be loaded: of job `job`; step -1 has rows of x alone.
  int job = blockIdx.x * p.jobs_per_slice, step = -1;
  const int last_job = min(job + p.jobs_per_slice, p.jobs);
  BandPair x[kEach], dy[kEach];
  auto load = [&]() {
    const int image = p.tiles.quotient(job), number = job - image * p.tiles.divisor;
    const int run = p.tiles_w.quotient(number), first_j = (number - run * p.tiles_w.divisor) * Memory::kColumns;
    const int i = (run * p.steps + step) * kStep + row, j = first_j + 2 * pair;
    const int top = i + kStep - p.pad_top, left = j - p.pad_left;
    const u32 height_low = has_channels && u32(left) < u32(p.width) ? p.height : 0;
    const u32 height_high = has_channels && u32(left + 1) < u32(p.width) ? p.height : 0;
    const bool inside = has_channels && 2 * pair < Memory::kColumns && step >= 0;
    const u32 rows_low = inside && j < p.columns ? p.rows : 0, rows_high = inside && j + 1 < p.columns ? p.rows : 0;
    const Element* from_x = p.x + image * p.x_batch + channel + i64(top) * p.x_row + i64(left) * p.x_column;
    const Element* from_dy = p.dy + image * p.dy_batch + channel + i64(i) * p.dy_row + i64(j) * p.dy_column;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int by = e * kRowsAtOnce;
      x[e].load(from_x + i64(by) * p.x_row, p.x_column, u32(top + by) < height_low, u32(top + by) < height_high);
      dy[e].load(from_dy + i64(by) * p.dy_row, p.dy_column, u32(i + by) < rows_low, u32(i + by) < rows_high);
    }
  };
  if (job < last_job) load();
#pragma unroll 1
  for (int ring = 0; job < last_job; ring ^= kStep) {  // rows of the ring that are written
    __syncthreads();                                   // the last step has been multiplied
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int line = row + e * kRowsAtOnce;
      u32* const to_x = &source[of][(ring + line) * Memory::kPitch + pair];
      u32* const to_dy = &gradient[of][line * Memory::kPitchDy + Memory::kBefore + pair];
      x[e].transposed(swaps, [&](int c, u32 word) { to_x[c * Memory::kChannel] = word; });
      if (2 * pair < Memory::kColumns && step >= 0)
        dy[e].transposed(swaps, [&](int c, u32 word) {
          u32* const to = to_dy + c * Memory::kChannelDy;
          to[0] = word;
          auto* const shifted = reinterpret_cast<unsigned short*>(to + Memory::kShifted);
          shifted[1] = word & 0xffff, shifted[2] = word >> 16;
        });
    }
    __syncthreads();
    const bool multiplies = step >= 0;
    if (++step == p.steps) step = -1, job++;
    if (job < last_job) load();
    if (!multiplies) continue;

#pragma unroll
    for (int i = 0; i < kStep; i += 2) {
      const int place = (ring + kStep + i + lane % 8) % Memory::kRing;
#pragma unroll
      for (int c = 0; c < kOwn; c++)
#pragma unroll
        for (int q = 0; q < Memory::kSourceColumns / 32; q++) {
          u32 rows[4];
          load_matrices_at<false>(rows, at + 4 * (place * Memory::kPitch + c * Memory::kChannel + q * 16));
#pragma unroll
          for (int u = 0; u < 2; u++) {
            const u32* from = band + c * Memory::kChannelDy + i * Memory::kPitchDy + (2 * q + u) * 8;
            const u32 low[2] = {from[0], from[Memory::kPitchDy]}, high[2] = {from[4], from[Memory::kPitchDy + 4]};
            const u32 columns[2] = {rows[2 * u], rows[2 * u + 1]};
            const u32 ones[2] = {ones_of(Element{}), ones_of(Element{})};
#if POLYCONV_HAS_K16
            multiply_band(sum[c][u], low, high, columns, Element{});
            if (p.bias) multiply_band(sum_dy[c], low, high, ones, Element{});
#endif
          }
        }
    }
  }

  // ---- Partial sums: tap (r, s) is the sum of row i's product, at (s, r), and of row i + 1's, at (8 + s, r + 1)
#pragma unroll
  for (int c = 0; c < kOwn; c++) {
    float total[4];
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] = sum[c][0][i] + sum[c][1][i];
    const float next = __shfl_down_sync(0xffffffffu, total[2], 1);
    const int own = blockIdx.y * kBandChannels + warp * kOwn + c, r = lane % 4 * 2;
    if (own >= p.channels) continue;
    float* const to = p.partial + (i64(blockIdx.x) * p.channels + own) * p.columns_padded;
    if (shift < kTapsW && r < kTapsH) to[r * kTapsW + shift] = total[0] + total[3];
    if (shift < kTapsW && r + 1 < kTapsH) to[(r + 1) * kTapsW + shift] = total[1] + next;
    if (lane == 0 && p.bias) to[kTapsH * kTapsW] = sum_dy[c][0] + sum_dy[c][2];
  }
}

}  // namespace polyconv
