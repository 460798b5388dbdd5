// fprop and dgrad (taps flipped) of a depthwise convolution of 16-bit tensors with stride 1 on tensor cores, from sm_80
// on, for kernels so large that float multiplications would take longer than the memory.
//
// Eight neighbouring outputs of a row are a product of the 16 elements that they read with a band matrix of the kernel
// row's taps; 16 rows of outputs are the rows of m16n8k16, and kernel rows are added up:
//   written[i, j + n] = sum over r, k of  source[i + r, j + k] * band[r][k][n],   band[r][k][n] = w[r][k - n], else 0
// Products are exact, sums are float, and a result is rounded once. Seven in 16 products are not zero: an infinity
// makes NaN of the outputs beside its own, so that planners offer these kernels only with a tolerance.
//
// A block owns tiles of positions of one channel (depthwise_band) or of 16 channels (depthwise_band_nhwc), image after
// image. Shared memory: the band matrices as words of two neighbours; then per channel a source tile [row][column], and
// the sums, in floats, from where they are stored in memory order.
// Grid: x = image chunk * tiles + tile, y = written channel, or 16 of them.
#pragma once

#include "common/async_copy.cuh"
#include "common/epilogue.cuh"
#include "common/warp_mma.cuh"

namespace polyconv {

template <class Element>
struct BandParamsOf {
  const Element* source;
  const Element* w;
  const Element* bias;  // null: none
  Element* written;
  i64 source_batch, source_channel, written_batch, written_channel;
  i64 w_channel, w_first, w_row, w_column;  // tap (r, s) of a channel at w_first + r * w_row + s * w_column
  int source_row, source_column, written_row, written_column;
  int source_height, source_width;
  int rows, columns, channels;  // of `written`
  int first_row, first_column;  // source coordinates that position (0, 0) reads first
  int batch, images_per_block;
  int shift;  // 1: tiles begin one column before the first one that is read, to align pairs of columns
  int pairs_read, pairs_written;  // whether pairs of columns are aligned to four bytes (depthwise_band)
  FastDivisor tiles, tiles_w;
  FastDivisor multiplier;  // written channels per source channel
};

struct HalfBandParams : BandParamsOf<Half> {};
struct BFloat16BandParams : BandParamsOf<BFloat16> {};

constexpr int kBandChannels = 16;                                 // of a block of depthwise_band_nhwc
constexpr int kBandRows = 16, kBandColumns = 8, kBandWidth = 16;  // one product

#if POLYCONV_HAS_K16
__device__ __forceinline__ void multiply_band(float (&c)[4], const u32 (&a)[2], const u32 (&b)[2], const u32 (&w)[2],
                                              Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]), "r"(w[0]), "r"(w[1]));
}
__device__ __forceinline__ void multiply_band(float (&c)[4], const u32 (&a)[2], const u32 (&b)[2], const u32 (&w)[2],
                                              BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]), "r"(w[0]), "r"(w[1]));
}
#endif

// The band matrices of one channel: word i of a kernel row holds its taps i - 7 and i - 6, less the shift.
template <int kTapsH, int kTapsW>
struct Bands {
  static constexpr int kWords = kBandColumns + kBandWidth - 2;

  u32 word[kTapsH][kWords];

  // By all threads, for neighbouring channels.
  template <int kThreads, int kCount, class Element>
  static __device__ __forceinline__ void load(Bands (&bands)[kCount], const BandParamsOf<Element>& p,
                                              int first_channel) {
    for (int e = threadIdx.x; e < kCount * kTapsH * kWords; e += kThreads) {
      const int line = e / kWords, i = e - line * kWords, of = line / kTapsH, r = line - of * kTapsH;
      const int channel = first_channel + of, s = i - (kBandColumns - 1) - p.shift;
      const Element* from = p.w + channel * p.w_channel + p.w_first + r * p.w_row + s * p.w_column;
      const bool exists = channel < p.channels;
      const Element low = exists && u32(s) < u32(kTapsW) ? from[0] : Element{};
      const Element high = exists && u32(s + 1) < u32(kTapsW) ? from[p.w_column] : Element{};
      bands[of].word[r][i] = low.bits | u32(high.bits) << 16;
    }
  }

  // This lane's part of the matrix of kernel row r.
  __device__ __forceinline__ void fragment(u32 (&w)[2], int r) const {
    const int i = threadIdx.x % 4 * 2 - int(threadIdx.x % 32 / 4) + kBandColumns - 1;
    w[0] = word[r][i];
    w[1] = word[r][i + 8];
  }
};

// Sums of kCount neighbouring products; `at`: this lane's address in the source tile for the first one.
template <int kTapsH, int kPitch, int kCount, class Bands, class Element>
__device__ __forceinline__ void multiply_bands(float (&sum)[kCount][4], u32 at, int count, const Bands& bands,
                                               Element) {
#pragma unroll
  for (int n = 0; n < kCount; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum[n][i] = 0.f;
#pragma unroll
  for (int r = 0; r < kTapsH; r++) {
    u32 half[kCount / 2 + 1][2][2], w[2];  // 16 rows of eight columns
    bands.fragment(w, r);
#pragma unroll
    for (int q = 0; q <= kCount / 2; q++) {
      if (2 * q > count) break;
      u32 four[4];
      load_matrices_at<false>(four, at + 2 * (r * kPitch + q * 16));
      half[q][0][0] = four[0], half[q][0][1] = four[1], half[q][1][0] = four[2], half[q][1][1] = four[3];
    }
#if POLYCONV_HAS_K16
#pragma unroll
    for (int n = 0; n < kCount; n++)
      if (n < count) multiply_band(sum[n], half[n / 2][n % 2], half[(n + 1) / 2][(n + 1) % 2], w, Element{});
#endif
  }
}

// Tensors with adjacent columns, of any alignment. kTilesN: products side by side; 4 * kTilesN + 4 divides 32.
template <int kTapsH, int kTapsW, int kTilesN, class Element, class Params>
__device__ __forceinline__ void depthwise_band(const Params& p) {
  constexpr int kThreads = 128, kRows = 2 * kBandRows, kColumns = kBandColumns * kTilesN;
  constexpr int kSourceRows = kRows + kTapsH - 1, kPairs = (kColumns + 8) / 2, kPitch = kColumns + 16;
  constexpr int kSumsPitch = (kColumns + 31) / 32 * 32 + 8;
  constexpr int kRowsAtOnce = kThreads / kPairs, kEach = (kTilesN + 1) / 2;
  static_assert(kThreads % kPairs == 0 && kTapsW + kBandColumns <= kBandWidth, "made for other sizes");
  __shared__ Bands<kTapsH, kTapsW> bands[1];
  __shared__ __align__(16) u32 tile[kSourceRows][kPitch / 2];
  __shared__ __align__(16) float sums[kRows][kSumsPitch];

  const int chunk = p.tiles.quotient(blockIdx.x), number = blockIdx.x - chunk * p.tiles.divisor;
  const int tile_y = p.tiles_w.quotient(number), tile_x = number - tile_y * p.tiles_w.divisor;
  const int first_i = tile_y * kRows, first_j = tile_x * kColumns, channel = blockIdx.y;
  const int first_image = chunk * p.images_per_block, last_image = min(first_image + p.images_per_block, p.batch);
  Bands<kTapsH, kTapsW>::template load<kThreads>(bands, p, channel);
  const float bias = p.bias ? widened(p.bias[channel]) : 0.f;

  const int pair = threadIdx.x % kPairs * 2, row = threadIdx.x / kPairs;
  const int y = first_i + p.first_row + row, x = first_j + p.first_column - p.shift + pair;
  const u32 height_low = u32(x) < u32(p.source_width) ? p.source_height : 0;
  const u32 height_high = u32(x + 1) < u32(p.source_width) ? p.source_height : 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_m = warp % 2 * kBandRows, first_n = warp / 2 * kEach, count = min(kEach, kTilesN - first_n);
  const u32 at = u32(__cvta_generic_to_shared(tile)) +
                 2 * ((first_m + lane % 16) * kPitch + first_n * kBandColumns + lane / 16 * 8);
  const int column = first_j + pair;
  const int rows_low = pair < kColumns && column < p.columns ? min(kRows, p.rows - first_i) : 0;
  const int rows_high = column + 1 < p.columns ? rows_low : 0;
#pragma unroll 1
  for (int image = first_image; image < last_image; image++) {
    const Element* from = p.source + image * p.source_batch + i64(p.multiplier.quotient(channel)) * p.source_channel +
                          i64(y) * p.source_row + x;
    const i64 next = i64(kRowsAtOnce) * p.source_row;
    if (p.pairs_read) {  // both columns exist, or none
#pragma unroll 5
      for (int e = 0; e < kSourceRows; e += kRowsAtOnce, from += next) {
        const u32 both = u32(y + e) < height_low ? *reinterpret_cast<const u32*>(from) : 0;
        if (kSourceRows % kRowsAtOnce == 0 || row + e < kSourceRows) tile[row + e][pair / 2] = both;
      }
    } else {
#pragma unroll 5
      for (int e = 0; e < kSourceRows; e += kRowsAtOnce, from += next) {
        const Element low = u32(y + e) < height_low ? from[0] : Element{};
        const Element high = u32(y + e) < height_high ? from[1] : Element{};
        if (kSourceRows % kRowsAtOnce == 0 || row + e < kSourceRows)
          tile[row + e][pair / 2] = low.bits | u32(high.bits) << 16;
      }
    }
    __syncthreads();  // also: the last image's sums have been stored

    float sum[kEach][4];
    multiply_bands<kTapsH, kPitch>(sum, at, count, bands[0], Element{});
#pragma unroll
    for (int n = 0; n < kEach; n++)
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        if (n < count)
          *reinterpret_cast<float2*>(&sums[first_m + lane / 4 + i * 4][(first_n + n) * kBandColumns + lane % 4 * 2]) =
              make_float2(sum[n][i], sum[n][i + 1]);
    __syncthreads();

    // Several rows at a time, so that the activation is chosen once.
    constexpr int kAtOnce = 4;
    Element* to =
        p.written + image * p.written_batch + channel * p.written_channel + i64(first_i + row) * p.written_row + column;
#pragma unroll 1
    for (int first = row; first < rows_low; first += kAtOnce * kRowsAtOnce) {
      float value[2 * kAtOnce];
      const Element* residual = add_bytes(to, p.residual_bytes());
#pragma unroll
      for (int e = 0; e < kAtOnce; e++) {
        const int line = first + e * kRowsAtOnce;
        const float2 both = *reinterpret_cast<const float2*>(&sums[line < kRows ? line : row][pair]);
        value[2 * e] = both.x + bias, value[2 * e + 1] = both.y + bias;
        if (p.residual) {
          if (line < rows_low) value[2 * e] += widened(residual[0]);
          if (line < rows_high) value[2 * e + 1] += widened(residual[1]);
          residual += i64(kRowsAtOnce) * p.written_row;
        }
      }
      activate(value, p);
#pragma unroll
      for (int e = 0; e < kAtOnce; e++, to += i64(kRowsAtOnce) * p.written_row) {
        const int line = first + e * kRowsAtOnce;
        const Element low = rounded<Element>(value[2 * e]), high = rounded<Element>(value[2 * e + 1]);
        if (p.pairs_written) {
          if (line < rows_low) *reinterpret_cast<u32*>(to) = low.bits | u32(high.bits) << 16;
        } else {
          if (line < rows_low) to[0] = low;
          if (line < rows_high) to[1] = high;
        }
      }
    }
  }
}

// Tensors with adjacent channels, multiples of eight, aligned to 16 bytes; as many written as source channels.
template <int kTapsH, int kTapsW, int kTilesN>
struct BandNhwc {
  static constexpr int kColumns = kBandColumns * kTilesN, kPixels = kBandRows * kColumns;
  static constexpr int kSourceRows = kBandRows + kTapsH - 1, kPitch = kColumns + 16;
  static constexpr int kSumsPitch = kPixels + 2;  // so that 16 pixels of two channels, eight apart, have all banks

  union Shared {
    u32 tiles[kBandChannels][kSourceRows][kPitch / 2];
    float sums[kBandChannels][kSumsPitch];
  };
  Shared shared;
  Bands<kTapsH, kTapsW> bands[kBandChannels];
};

template <int kTapsH, int kTapsW, int kTilesN, int kThreads, class Element, class Params>
__device__ __forceinline__ void depthwise_band_nhwc(const Params& p) {
  using Memory = BandNhwc<kTapsH, kTapsW, kTilesN>;
  constexpr int kColumns = Memory::kColumns, kSourceRows = Memory::kSourceRows, kPitch = Memory::kPitch;
  constexpr int kPairs = (kColumns + 8) / 2, kRowsAtOnce = kThreads / (2 * kPairs);
  constexpr int kEach = kBandChannels / (kThreads / 32);
  static_assert(kThreads % (2 * kPairs) == 0 && kTapsW + kBandColumns - 1 <= kBandWidth, "made for other sizes");
  extern __shared__ __align__(16) unsigned char memory[];
  auto& bands = reinterpret_cast<Memory*>(memory)->bands;
  auto& shared = reinterpret_cast<Memory*>(memory)->shared;

  const int chunk = p.tiles.quotient(blockIdx.x), number = blockIdx.x - chunk * p.tiles.divisor;
  const int tile_y = p.tiles_w.quotient(number), tile_x = number - tile_y * p.tiles_w.divisor;
  const int first_i = tile_y * kBandRows, first_j = tile_x * kColumns, first_channel = blockIdx.y * kBandChannels;
  const int first_image = chunk * p.images_per_block, last_image = min(first_image + p.images_per_block, p.batch);
  Bands<kTapsH, kTapsW>::template load<kThreads>(bands, p, first_channel);

  // Loads and stores: a thread has eight channels.
  const int of = threadIdx.x % 2 * 8, channel = first_channel + of;
  const bool has_channels = channel < p.channels;
  const int pair = threadIdx.x / 2 % kPairs * 2, row = threadIdx.x / (2 * kPairs);
  const int y = first_i + p.first_row + row, x = first_j + p.first_column + pair;
  const u32 height_low = has_channels && u32(x) < u32(p.source_width) ? p.source_height : 0;
  const u32 height_high = has_channels && u32(x + 1) < u32(p.source_width) ? p.source_height : 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 at = u32(__cvta_generic_to_shared(shared.tiles[warp * kEach])) + 2 * (lane % 16 * kPitch + lane / 16 * 8);
  // Every other thread stores its channels in another order, so that a warp's words are in different banks.
  const bool swaps = of != 0;
#pragma unroll 1
  for (int image = first_image; image < last_image; image++) {
    const Element* from =
        p.source + image * p.source_batch + channel + i64(y) * p.source_row + i64(x) * p.source_column;
#pragma unroll 2
    for (int e = 0; e < kSourceRows; e += kRowsAtOnce, from += i64(kRowsAtOnce) * p.source_row) {
      uint4 low = make_uint4(0, 0, 0, 0), high = low;
      if (u32(y + e) < height_low) low = *reinterpret_cast<const uint4*>(from);
      if (u32(y + e) < height_high) high = *reinterpret_cast<const uint4*>(from + p.source_column);
      const u32 first[4] = {swaps ? low.y : low.x, swaps ? low.x : low.y, swaps ? low.w : low.z, swaps ? low.z : low.w};
      const u32 second[4] = {swaps ? high.y : high.x, swaps ? high.x : high.y, swaps ? high.w : high.z,
                             swaps ? high.z : high.w};
      if (row + e < kSourceRows)
#pragma unroll
        for (int c = 0; c < 8; c++) {
          const int place = of + c + (swaps ? (c & 2 ? -2 : 2) : 0);
          shared.tiles[place][row + e][pair / 2] = __byte_perm(first[c / 2], second[c / 2], c % 2 ? 0x7632 : 0x5410);
        }
    }
    __syncthreads();

    float sum[kEach][kTilesN][4];
#pragma unroll
    for (int c = 0; c < kEach; c++)
      multiply_bands<kTapsH, kPitch>(sum[c], at + c * kSourceRows * kPitch * 2, kTilesN, bands[warp * kEach + c],
                                     Element{});
    __syncthreads();  // the source tiles have been read
#pragma unroll
    for (int c = 0; c < kEach; c++)
#pragma unroll
      for (int n = 0; n < kTilesN; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const int pixel = (lane / 4 + i * 4) * kColumns + n * kBandColumns + lane % 4 * 2;
          *reinterpret_cast<float2*>(&shared.sums[warp * kEach + c][pixel]) =
              make_float2(sum[c][n][i], sum[c][n][i + 1]);
        }
    __syncthreads();

    float bias[8];
#pragma unroll
    for (int c = 0; c < 8; c++) bias[c] = p.bias && has_channels ? widened(p.bias[channel + c]) : 0.f;
#pragma unroll 1
    for (int pixel = threadIdx.x / 2; pixel < Memory::kPixels; pixel += kThreads / 2) {
      const int i = first_i + pixel / kColumns, j = first_j + pixel % kColumns;
      if (!has_channels || i >= p.rows || j >= p.columns) continue;
      Element* to = p.written + image * p.written_batch + channel + i64(i) * p.written_row + i64(j) * p.written_column;
      float value[8];
#pragma unroll
      for (int c = 0; c < 8; c++) value[c] = shared.sums[of + c][pixel] + bias[c];
      if (p.residual) {
        const Chunk<Element> residual = load_chunk<Element>(add_bytes(to, p.residual_bytes()));
#pragma unroll
        for (int c = 0; c < 8; c++) value[c] += widened(residual.value[c]);
      }
      activate(value, p);
      Chunk<Element> found;
#pragma unroll
      for (int c = 0; c < 8; c++) found.value[c] = rounded<Element>(value[c]);
      store_chunk(to, found);
    }
    __syncthreads();  // the sums have been stored
  }
}

}  // namespace polyconv
