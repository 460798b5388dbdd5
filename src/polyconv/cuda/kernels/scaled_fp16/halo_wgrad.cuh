// wgrad of float32 tensors by one scaled FP16 product, from sm_80 on, with both operands read in place:
//   dw[k, column] = 2^-(e + f) * sum over pixels of  rounded(2^e * dy[pixel, k]) * rounded(2^f * x[shifted pixel, channel])
//
// Columns are (kernel row, kernel column, channel), as in implicit_gemm/wgrad_nhwc.cuh. A block owns 64 k by 32 channels
// under at most nine taps, and walks over rectangles of pixels: it scales and rounds dy, and x with its halo, to shared
// memory, where they serve every tap. The scales can only fall from rectangle to rectangle: the sums are then scaled with
// them, by a power of two, and the rectangle is read again, from the L2. The first one is always read twice.
//
// Pixels of a rectangle that lie outside of the image are zeros in dy alone: with an infinity or NaN in x, more elements
// of dw are NaN than by definition. Channels are even.
//
// Grid: x = column tile * k tiles + k tile, y = group, z = slice. Column tile = tap tile * channel tiles + channel tile.
// Shared memory: x, [pixel of the halo][32 channels + 8], then dy, [k / 32][pixel][32 k + 8], with pixels in whole
// matrices. A pitch of five chunks puts eight neighbouring pixels, which a matrix of ldmatrix reads, in different banks.
#pragma once

#include "implicit_gemm/wgrad.cuh"
#include "scaled_fp16/operand.cuh"

namespace polyconv {

struct ScaledHaloWgradParams : WgradParams {
  FastDivisor channel_tiles;
  FastDivisor tiles_h, tiles_w;  // rectangles of an image
  FastDivisor tile_width, halo_width;
  int tile_height, halo_height;
  int rectangles, rectangles_per_slice;  // of all images
  int taps;
  int x_vector, dy_vector;    // channels are adjacent and aligned quads
  int x_at_once, dy_at_once;  // pixels that a warp reads at once: whole rows, or 32
};

constexpr int kWindowChannels = 32;
constexpr int kWindowPitch = 2 * kWindowChannels + 16;  // bytes

// A rectangle of pixels of one image, of 32 channels.
struct Window {
  const float* source;  // of the first channel, in the image's first pixel
  i64 channel;          // strides
  int row, column;
  int height, width;  // of the image
  int top, left;      // of the rectangle, perhaps outside of the image
  int channels;       // that exist
  bool vector;
  int at_once;

  // A pixel of the rectangle; null from `end` on and outside of the image.
  __device__ __forceinline__ const float* at(u32 pixel, u32 end, const FastDivisor& columns) const {
    const int i = columns.quotient(pixel), y = top + i, x = left + int(pixel - i * columns.divisor);
    const bool inside = pixel < end && u32(y) < u32(height) && u32(x) < u32(width);
    return inside ? source + i64(y) * row + i64(x) * column : nullptr;
  }
};

// Scales and rounds a window to shared memory; zeros outside of the image. A warp reads all channels of its pixels
// before the first is used: neighbouring threads have neighbouring chunks, or neighbouring pixels. Returns the largest
// finite magnitude that this thread has read.
template <int kThreads>
__device__ __forceinline__ float fill_window(const Window& window, u32 pixels, const FastDivisor& columns,
                                             const Scale& scale, unsigned char* to) {
  constexpr int kChunks = kWindowChannels / kChunk;
  const u32 lane = threadIdx.x % 32;
  const float infinity = __uint_as_float(0x7f800000u);
  float found = 0.f;
#pragma unroll 1
  for (u32 first = threadIdx.x / 32 * window.at_once; first < pixels; first += kThreads / 32 * window.at_once) {
    const u32 end = min(first + window.at_once, pixels);
    float values[kChunks][kChunk] = {};
    if (window.vector) {
#pragma unroll
      for (int q = 0; q < kChunks; q++) {
        const int channel = lane % kChunks * kChunk;
        const float* from = window.at(first + q * (32 / kChunks) + lane / kChunks, end, columns);
        const int channels = from ? window.channels - channel : 0;
#pragma unroll
        for (int i = 0; i < kChunk; i += 4) {
          if (i >= channels) continue;
          const float4 four = load4(from + channel + i);
          values[q][i] = four.x, values[q][i + 1] = four.y, values[q][i + 2] = four.z, values[q][i + 3] = four.w;
        }
      }
    } else {
      const float* from = window.at(first + lane, end, columns);
      const int channels = from ? window.channels : 0;
#pragma unroll
      for (int i = 0; i < kWindowChannels; i++, from += window.channel)
        if (i < channels) values[i / kChunk][i % kChunk] = *from;
    }
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kWindowChannels; i++) largest = fmaxf(largest, fabsf(values[i / kChunk][i % kChunk]));
    if (largest == infinity) {
      largest = 0.f;
#pragma unroll
      for (int i = 0; i < kWindowChannels; i++) {
        const float magnitude = fabsf(values[i / kChunk][i % kChunk]);
        if (magnitude < infinity) largest = fmaxf(largest, magnitude);
      }
    }
    found = fmaxf(found, largest);
#pragma unroll
    for (int q = 0; q < kChunks; q++) {
      const u32 pixel = first + (window.vector ? q * (32 / kChunks) + lane / kChunks : lane);
      const u32 chunk = window.vector ? lane % kChunks : q;
      if (pixel < end)
        *reinterpret_cast<uint4*>(to + pixel * kWindowPitch + chunk * 16) = scaled_chunk(scale, values[q]);
    }
  }
  return found;
}

template <class Tile>
__device__ __forceinline__ void scaled_fp16_halo_wgrad(const ScaledHaloWgradParams& p) {
  using Instruction = typename Tile::Instruction;
  constexpr int kUnitsM = Tile::kUnitsM, kTaps = Tile::kUnitsN, kWarps = Tile::kThreads / 32;
  static_assert(kUnitsM * kMatrix == kWindowChannels && Tile::kWarpsN * kMatrix == kWindowChannels, "a window each");
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float of_warps[2][kWarps];

  const TilePlace<Tile> place(threadIdx.x);
  const int lane = threadIdx.x % 32, of_warp = place.n / kTaps;  // the warp's first channel of the window
  const int column_tile = p.k_tiles.quotient(blockIdx.x), tap_tile = p.channel_tiles.quotient(column_tile);
  const int first_k = (blockIdx.x - column_tile * p.k_tiles.divisor) * Tile::kM, first_tap = tap_tile * kTaps;
  const int first_channel = (column_tile - tap_tile * p.channel_tiles.divisor) * kWindowChannels;
  const bool sums_dy = p.bias && column_tile == 0 && of_warp == 0;

  const u32 pixels = p.tile_height * p.tile_width.divisor, halo = p.halo_height * p.halo_width.divisor;
  const u32 dy_bytes = (pixels + kMatrix - 1) / kMatrix * kMatrix * kWindowPitch;  // of 32 k
  unsigned char* const of_dy = shared + halo * kWindowPitch;
  const u32 x = u32(__cvta_generic_to_shared(shared)) + lane / 16 * 16 + of_warp * 2;
  const u32 dy = u32(__cvta_generic_to_shared(of_dy)) + place.m / kWindowChannels * dy_bytes +
                 (lane / 16 * 8 + lane % 8) * kWindowPitch + lane / 8 % 2 * 16;
  for (u32 at = pixels * kWindowPitch + threadIdx.x * 16; at < dy_bytes; at += Tile::kThreads * 16)
#pragma unroll
    for (int part = 0; part < Tile::kWarpsM; part++)
      *reinterpret_cast<uint4*>(of_dy + part * dy_bytes + at) = make_uint4(0, 0, 0, 0);
  u32 taps[kTaps];  // distance from the first tap's pixel
#pragma unroll
  for (int n = 0; n < kTaps; n++) {
    const int tap = min(first_tap + n, p.taps - 1), r = p.kernel_width.quotient(tap),
              s = tap - r * p.kernel_width.divisor;
    taps[n] = (r * p.dilation_h * p.halo_width.divisor + s * p.dilation_w) * kWindowPitch;
  }

  Accumulators<Tile> c;
  float bias[kUnitsM][8] = {};
  int exponent_x = exponent_of(0) + 1, exponent_dy = exponent_x;  // more than any: the first rectangle lowers both
  const int first = blockIdx.z * p.rectangles_per_slice, end = min(first + p.rectangles_per_slice, p.rectangles);
#pragma unroll 1
  for (int rectangle = first; rectangle < end; rectangle++) {
    bool again;
    do {
      const int line = p.tiles_w.quotient(rectangle), image = p.tiles_h.quotient(line);
      const int top = (line - image * p.tiles_h.divisor) * p.tile_height;
      const int left = (rectangle - line * p.tiles_w.divisor) * p.tile_width.divisor;
      __syncthreads();  // shared memory is free
      float largest[2] = {};
      {
        const float* source = p.x + image * p.x_batch + (i64(blockIdx.y) * p.channels + first_channel) * p.x_channel;
        const Window window{source,
                            p.x_channel,
                            p.x_row,
                            p.x_column,
                            p.height,
                            p.width,
                            top * p.stride_h - p.pad_top,
                            left * p.stride_w - p.pad_left,
                            p.channels - first_channel,
                            p.x_vector != 0,
                            p.x_at_once};
        largest[0] = fill_window<Tile::kThreads>(window, halo, p.halo_width, Scale(exponent_x), shared);
      }
#pragma unroll 1
      for (int part = 0; part < Tile::kWarpsM; part++) {
        const int k = first_k + part * kWindowChannels;
        const float* source = p.dy + image * p.dy_batch + (i64(blockIdx.y) * p.k + k) * p.dy_channel;
        const Window window{source,
                            p.dy_channel,
                            p.dy_row,
                            p.dy_column,
                            int(p.out_height.divisor),
                            int(p.out_width.divisor),
                            top,
                            left,
                            p.k - k,
                            p.dy_vector != 0,
                            p.dy_at_once};
        largest[1] = fmaxf(largest[1], fill_window<Tile::kThreads>(window, pixels, p.tile_width, Scale(exponent_dy),
                                                                   of_dy + part * dy_bytes));
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2)
          largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], lanes));
        if (lane == 0) of_warps[i][threadIdx.x / 32] = largest[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) largest[i] = fmaxf(largest[i], of_warps[i][warp]);
      const int down_x = min(0, exponent_of(__float_as_uint(largest[0])) - exponent_x);
      const int down_dy = min(0, exponent_of(__float_as_uint(largest[1])) - exponent_dy);
      exponent_x += down_x, exponent_dy += down_dy;
      again = down_x + down_dy < 0;
      if (again) {
        const Scale down(max(down_x + down_dy, -298)), of_bias(down_dy);
#pragma unroll
        for (int m = 0; m < kUnitsM; m++) {
#pragma unroll
          for (int i = 0; i < 8; i++) bias[m][i] = of_bias(bias[m][i]);
#pragma unroll
          for (int n = 0; n < kTaps; n++)
#pragma unroll
            for (int i = 0; i < 8; i++) c.sum[m][n][i] = down(c.sum[m][n][i]);
        }
      }
    } while (again);

#pragma unroll 1
    for (u32 k = 0; k < pixels; k += kMatrix) {
      const u32 pixel = min(k + lane % kMatrix, pixels - 1);
      const int i = p.tile_width.quotient(pixel), j = pixel - i * p.tile_width.divisor;
      const u32 from = x + (i * p.stride_h * p.halo_width.divisor + j * p.stride_w) * kWindowPitch;
      typename Instruction::Fragment rows[kUnitsM];
#pragma unroll
      for (int m = 0; m < kUnitsM; m++) load_matrices_at<true>(rows[m].pair, dy + k * kWindowPitch + m * 2 * kMatrix);
#pragma unroll
      for (int n = 0; n < kTaps; n++) {
        typename Instruction::Fragment columns;
        load_matrices_at<true>(columns.pair, from + taps[n]);
#pragma unroll
        for (int m = 0; m < kUnitsM; m++) Instruction::multiply_add(c.sum[m][n], rows[m], columns);
      }
      if (sums_dy) {
        constexpr u32 kOnesOfHalf = 0x3c003c00u;
        const typename Instruction::Fragment ones{{kOnesOfHalf, kOnesOfHalf, kOnesOfHalf, kOnesOfHalf}};
#pragma unroll
        for (int m = 0; m < kUnitsM; m++) Instruction::multiply_add(bias[m], rows[m], ones);
      }
    }
  }

  float* to = p.partial + (i64(blockIdx.z) * p.groups + blockIdx.y) * p.k * p.columns_padded;
  const Scale back(-(exponent_x + exponent_dy)), back_of_bias(-exponent_dy);
#pragma unroll
  for (int m = 0; m < kUnitsM; m++)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int k = first_k + place.m + m * kMatrix + Instruction::row(lane, i), column = Instruction::column(lane, i);
      const int channel = first_channel + of_warp + column;
      if (k >= p.k) continue;
      float* row = to + i64(k) * p.columns_padded;
#pragma unroll
      for (int n = 0; n < kTaps; n++)
        if (first_tap + n < p.taps && channel < p.channels)
          *reinterpret_cast<float2*>(row + (first_tap + n) * p.channels + channel) =
              make_float2(back(c.sum[m][n][i]), back(c.sum[m][n][i + 1]));
      if (sums_dy && column == 0) row[p.columns] = back_of_bias(bias[m][i]);
    }
}

}  // namespace polyconv
