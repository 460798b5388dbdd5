// wgrad of 16-bit tensors in channels_last or channels_last_3d, from sm_80 on, as a split-K implicit GEMM over pixels:
//   dw[k, column] = sum over pixels of  dy[pixel, k] * x[pixel shifted by the column's tap, the column's channel]
//
// The GEMM of implicit_gemm/wgrad.cuh with the same grid, slices and partial sums, but its columns are (kernel row,
// kernel column, channel): eight neighbours are channels under one tap, and are copied as 16 bytes. With a bias, one
// more column has x = 1 everywhere. Channels on both sides are multiples of eight.
//
// Shared memory: a ring of kStages stages, each a[32 pixels][M] of dy, then b[32 pixels][N] of x, both swizzled
// (implicit_gemm/mma_tile.cuh).
#pragma once

#include "implicit_gemm/wgrad_mma.cuh"

namespace polyconv {

// Volumes in channels_last_3d: the images are the slices of dy, one after another, and columns are (kernel slice, row,
// column, channel). x_batch and dy_batch are strides of slices. Only the copies of x know the depth.
template <class Element>
struct VolumeWgradParamsOf : WgradParamsOf<Element> {
  i64 next_volume;     // from behind the last slice of x under some tap to the first of the next volume
  FastDivisor slices;  // of a volume of dy
  FastDivisor rows_of_slice;
  int depth;  // of x
  int stride_d, dilation_d, pad_front;
};
struct HalfVolumeWgradParams : VolumeWgradParamsOf<Half> {};
struct BFloat16VolumeWgradParams : VolumeWgradParamsOf<BFloat16> {};

// Walks over the flattened pixels of y, keeping the address of an element that belongs to the pixel. kVolume: an image
// is a slice of a volume.
template <class Element, bool kVolume = false>
struct PixelWalk {
  const Element* at;
  int pixel, i, j;
  int height, width;                      // of y
  i64 next_pixel, next_line, next_image;  // added to `at` by a step, and at the end of a line and of an image
  int d, slices;                          // of a volume
  i64 next_volume;

  __device__ __forceinline__ PixelWalk(const Element* origin, u32 first, const FastDivisor& height,
                                       const FastDivisor& width, i64 batch, i64 row, i64 column)
      : pixel(first),
        height(height.divisor),
        width(width.divisor),
        next_pixel(column),
        next_line(row - width.divisor * column),
        next_image(batch - height.divisor * row) {
    const u32 line = width.quotient(first), image = height.quotient(line);
    i = line - image * height.divisor, j = first - line * width.divisor;
    at = origin + image * batch + i * row + j * column;
    if constexpr (kVolume) d = image;
  }

  // Follows the constructor for the slices of volumes.
  __device__ __forceinline__ void begin_volumes(const FastDivisor& slices_of, i64 next) {
    const u32 volume = slices_of.quotient(d);
    slices = slices_of.divisor, next_volume = next;
    d -= volume * slices, at += volume * next;
  }

  __device__ __forceinline__ void advance(int pixels) {
    pixel += pixels, j += pixels, at += pixels * next_pixel;
    while (j >= width) {
      j -= width, at += next_line;
      if (++i == height) {
        i = 0, at += next_image;
        if constexpr (kVolume) {
          if (++d == slices) d = 0, at += next_volume;
        }
      }
    }
  }
};

// Copies of a stage: a thread has one chunk of dy, and one chunk of columns under one tap, of every pixel of
// kRowsAtOnce.
template <class Tile, bool kVolume, class Params>
struct PixelCopies {
  static constexpr int kChunksA = Tile::kM / kChunk, kChunksB = Tile::kN / kChunk;
  static constexpr int kRowsAtOnceA = Tile::kThreads / kChunksA, kRowsAtOnceB = Tile::kThreads / kChunksB;
  using Element = typename Tile::Element;

  const Params& p;
  const int end;
  const bool has_k;
  bool has_column, is_bias;
  int tap_z, tap_y, tap_x;
  PixelWalk<Element> dy;
  PixelWalk<Element, kVolume> x;

  __device__ __forceinline__ PixelCopies(const Params& p, int first_k, int first_column, int first, int end)
      : p(p),
        end(end),
        has_k(first_k + threadIdx.x % kChunksA * kChunk < p.k),
        dy(p.dy + i64(blockIdx.y) * p.k + first_k + threadIdx.x % kChunksA * kChunk, first + threadIdx.x / kChunksA,
           p.out_height, p.out_width, p.dy_batch, p.dy_row, p.dy_column),
        x(p.x, first + threadIdx.x / kChunksB, p.out_height, p.out_width, image_step(p), i64(p.stride_h) * p.x_row,
          i64(p.stride_w) * p.x_column) {
    const int column = first_column + threadIdx.x % kChunksB * kChunk;
    const int tap = column / p.channels, r = p.kernel_width.quotient(tap), s = tap - r * p.kernel_width.divisor;
    has_column = column < p.columns, is_bias = column == p.columns && p.bias;
    int row = r;
    if constexpr (kVolume) {
      const int slice = p.rows_of_slice.quotient(r);
      row -= slice * p.rows_of_slice.divisor, tap_z = slice * p.dilation_d - p.pad_front;
      x.begin_volumes(p.slices, p.next_volume);
      x.at += tap_z * p.x_batch;
    }
    tap_y = row * p.dilation_h - p.pad_top, tap_x = s * p.dilation_w - p.pad_left;
    x.at += i64(blockIdx.y) * p.channels + column - tap * p.channels + i64(tap_y) * p.x_row + i64(tap_x) * p.x_column;
  }

  // From an image of x to that of the next image of y.
  static __device__ __forceinline__ i64 image_step(const Params& p) {
    if constexpr (kVolume) return p.stride_d * p.x_batch;
    return p.x_batch;
  }

  __device__ __forceinline__ void start(u32 stage) {
#pragma unroll
    for (int row = 0; row < Tile::kDepth; row += kRowsAtOnceA) {
      const u32 to = stage + swizzled<kChunksA>(row + threadIdx.x / kChunksA, threadIdx.x % kChunksA);
      copy16_or_zeros(to, dy.at, has_k && dy.pixel < end);
      dy.advance(kRowsAtOnceA);
    }
#pragma unroll
    for (int row = 0; row < Tile::kDepth; row += kRowsAtOnceB) {
      const u32 to = stage + Tile::kBytesA + swizzled<kChunksB>(row + threadIdx.x / kChunksB, threadIdx.x % kChunksB);
      const int at_y = x.i * p.stride_h + tap_y, at_x = x.j * p.stride_w + tap_x;
      bool inside = u32(at_y) < u32(p.height) && u32(at_x) < u32(p.width);
      if constexpr (kVolume) inside = inside && u32(x.d * p.stride_d + tap_z) < u32(p.depth);
      if (is_bias)
        store_shared_chunk(to, x.pixel < end ? one<Element>() : Element{});
      else
        copy16_or_zeros(to, x.at, has_column && inside && x.pixel < end);
      x.advance(kRowsAtOnceB);
    }
  }
};

// Adds the products of one stage. a and b: this lane's addresses in the stage, for the first unit. Both operands have
// the reduction index slowest: ldmatrix transposes them.
template <class Tile>
__device__ __forceinline__ void multiply_pixels(Accumulators<typename Tile::Base>& c, u32 a, u32 b) {
  using Instruction = typename Tile::Instruction;
#pragma unroll
  for (int k = 0; k < Tile::kDepth; k += kMatrix) {
    typename Instruction::Fragment rows[Tile::kUnitsM], columns[Tile::kUnitsN];
#pragma unroll
    for (int m = 0; m < Tile::kUnitsM; m++) load_matrices_at<true>(rows[m].pair, (a ^ m * 32) + k * 2 * Tile::kM);
#pragma unroll
    for (int n = 0; n < Tile::kUnitsN; n++) load_matrices_at<true>(columns[n].pair, (b ^ n * 32) + k * 2 * Tile::kN);
#pragma unroll
    for (int m = 0; m < Tile::kUnitsM; m++)
#pragma unroll
      for (int n = 0; n < Tile::kUnitsN; n++) Instruction::multiply_add(c.sum[m][n], rows[m], columns[n]);
  }
}

template <class Tile, bool kVolume = false, class Params>
__device__ __forceinline__ void implicit_gemm_wgrad_nhwc(const Params& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Instruction = typename Tile::Instruction;
  const TilePlace<typename Tile::Base> place(threadIdx.x);
  const int column_tile = p.k_tiles.quotient(blockIdx.x);
  const int first_k = (blockIdx.x - column_tile * p.k_tiles.divisor) * Tile::kM, first_column = column_tile * Tile::kN;
  const int lane = threadIdx.x % 32;
  Accumulators<typename Tile::Base> c;
  {
    const int first = blockIdx.z * p.pixels_per_slice, end = min(first + p.pixels_per_slice, p.pixels);
    const u32 a = swizzled<Tile::kM / kChunk>(lane / 16 * 8 + lane % 8, place.m / kChunk + lane / 8 % 2);
    const u32 b = Tile::kBytesA + swizzled<Tile::kN / kChunk>(lane % kMatrix, place.n / kChunk + lane / kMatrix);
    PixelCopies<Tile, kVolume, Params> copies(p, first_k, first_column, first, end);
    pipeline<Tile>(
        u32(__cvta_generic_to_shared(shared)), (end - first + Tile::kDepth - 1) / Tile::kDepth,
        [&](u32 stage) { copies.start(stage); }, [&](u32 stage) { multiply_pixels<Tile>(c, stage + a, stage + b); });
  }

  // Two columns at a time: a quad of lanes fills a sector. Padding columns are written too, and never read.
  float* to = p.partial + (i64(blockIdx.z) * p.groups + blockIdx.y) * p.k * p.columns_padded;
#pragma unroll
  for (int m = 0; m < Tile::kUnitsM; m++)
#pragma unroll
    for (int n = 0; n < Tile::kUnitsN; n++)
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int k = first_k + place.m + m * kMatrix + Instruction::row(lane, i);
        const int column = first_column + place.n + n * kMatrix + Instruction::column(lane, i);
        if (k < p.k && column < p.columns_padded)
          *reinterpret_cast<float2*>(to + i64(k) * p.columns_padded + column) =
              make_float2(c.sum[m][n][i], c.sum[m][n][i + 1]);
      }
}

}  // namespace polyconv
