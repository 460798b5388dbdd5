// wgrad as a split-K implicit GEMM over pixels:
//   dw[k, column] = sum over pixels of  dy[pixel, k] * x[pixel shifted by the column's tap, the column's channel]
//
// A column is (channel, kernel row, kernel column) of one group. With a bias, one more column has x = 1 everywhere and
// sums the bias gradient. Pixels are the flattened (image, row, column) of y. Each block sums one slice of them and
// writes a partial sum; implicit_gemm/split_k_reduce.cuh adds the slices in a fixed order.
//
// Grid: x = column tile * k tiles + k tile, y = group, z = slice.
// Shared memory: a = 2 x 8 pixels x (M + 4), b = 2 x 8 x (N + 4), column table N x 16 bytes. Eight neighbouring lanes
// read eight neighbouring pixels; a pitch of 4 mod 32 makes their transposed stores conflict-free.
#pragma once

#include "common/elements.cuh"
#include "implicit_gemm/tile.cuh"

namespace polyconv {

template <class Element>
struct WgradParamsOf {
  const Element* x;
  const Element* dy;
  float* partial;  // [slice][group][k][columns_padded]
  i64 x_batch, x_channel, dy_batch, dy_channel;
  int x_row, x_column, dy_row, dy_column;
  int height, width;   // extent of x
  int k, channels;     // per group
  int columns;         // channels * kernel area, without the bias column
  int columns_padded;  // row length of `partial`
  int groups;
  int bias;  // 1: column number `columns` is the bias
  int border;
  int pixels, pixels_per_slice;
  int stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  FastDivisor k_tiles, out_height, out_width, kernel_area, kernel_width;
};
struct WgradParams : WgradParamsOf<float> {};

constexpr int kOnes = kPaddingRow + 1;  // marks the bias column in the column table

// Shift of a column against the pixel {dy, dx, element offset as i64}, computed once per block.
template <class Element>
__device__ __forceinline__ int4 wgrad_column(int column, const WgradParamsOf<Element>& p, bool bordered) {
  if (column > p.columns || (column == p.columns && !p.bias)) return make_int4(kPaddingRow, 0, 0, 0);
  if (column == p.columns) return make_int4(kOnes, 0, 0, 0);
  const int channel = p.kernel_area.quotient(column), tap = column - channel * p.kernel_area.divisor;
  const int r = p.kernel_width.quotient(tap), s = tap - r * p.kernel_width.divisor;
  const int dy = r * p.dilation_h, dx = s * p.dilation_w;
  i64 offset = (i64(blockIdx.y) * p.channels + channel) * p.x_channel;
  if (!bordered) offset += i64(dy) * p.x_row + i64(dx) * p.x_column;
  return make_int4(dy, dx, int(offset), int(offset >> 32));
}

// kVector: one load takes four neighbouring pixels of dy. kBordered: outside the image, the folded coordinate is read.
template <class Tile, bool kVector, bool kBordered>
struct WgradLoader {
  using Element = typename Tile::Element;
  using Params = WgradParamsOf<Element>;
  static constexpr int kDepth = Tile::kDepth;
  static constexpr int kPadding = Tile::kPitchM == Tile::kM ? 4 : 0;  // tiles with their own padding need no more
  static constexpr int kPitchM = Tile::kPitchM + kPadding, kPitchN = Tile::kPitchN + kPadding;
  static constexpr int kStep = Tile::kThreads / kDepth;  // rows or columns that the block loads at once
  static constexpr int kRows = Tile::kM / kStep, kColumns = Tile::kN / kStep;
  static_assert(Tile::kM % kStep == 0 && Tile::kN % kStep == 0, "the block must divide the tile");
  static constexpr int kQuadStep = Tile::kThreads / (kDepth / 4);
  static constexpr int kQuads = kVector ? (Tile::kM + kQuadStep - 1) / kQuadStep : 0;

  const Params& p;
  const int4* table;  // of the block's columns, in shared memory
  int first_k, pixel, end;
  Element a[kVector ? 4 * kQuads : kRows];
  Element b[kColumns];

  __device__ __forceinline__ WgradLoader(const Params& p, const int4* table, int first_k, int first, int end)
      : p(p), table(table), first_k(first_k), pixel(first), end(end) {}

  __device__ __forceinline__ void load() {
    const int index = pixel + threadIdx.x % kDepth;
    const int line = p.out_width.quotient(index), image = p.out_height.quotient(line);
    const int i = line - image * p.out_height.divisor, j = index - line * p.out_width.divisor;
    const i64 group_k = i64(blockIdx.y) * p.k + first_k;

    if constexpr (kVector) {
      const int quad = pixel + threadIdx.x % (kDepth / 4) * 4;
      const int quad_line = p.out_width.quotient(quad), quad_image = p.out_height.quotient(quad_line);
      const Element* at = p.dy + quad_image * p.dy_batch + group_k * p.dy_channel +
                          (quad - i64(quad_image) * p.out_height.divisor * p.out_width.divisor);
#pragma unroll
      for (int e = 0; e < kQuads; e++) {
        const int k = threadIdx.x / (kDepth / 4) + e * kQuadStep;
        const Quad<Element> v = quad < end && first_k + k < p.k ? load4(at + k * p.dy_channel) : Quad<Element>{};
        a[4 * e] = v.x, a[4 * e + 1] = v.y, a[4 * e + 2] = v.z, a[4 * e + 3] = v.w;
      }
    } else {
      const Element* at = p.dy + image * p.dy_batch + group_k * p.dy_channel + i64(i) * p.dy_row + i64(j) * p.dy_column;
#pragma unroll
      for (int e = 0; e < kRows; e++) {
        const int k = threadIdx.x / kDepth + e * kStep;
        a[e] = index < end && first_k + k < p.k ? at[k * p.dy_channel] : Element{};
      }
    }

    const int y = i * p.stride_h - p.pad_top, x = j * p.stride_w - p.pad_left;
    const Element* origin = p.x + image * p.x_batch;
    if constexpr (!kBordered) origin += i64(y) * p.x_row + i64(x) * p.x_column;
#pragma unroll
    for (int e = 0; e < kColumns; e++) {
      const int4 column = table[threadIdx.x / kDepth + e * kStep];
      int v = y + column.x, u = x + column.y;
      const Element* at = origin + (i64(u32(column.z)) | i64(column.w) << 32);
      if constexpr (kBordered) {
        v = fold_into(v, p.height, Border(p.border));
        u = fold_into(u, p.width, Border(p.border));
        at += i64(v) * p.x_row + i64(u) * p.x_column;
      }
      const bool inside = index < end && column.x > kOnes && u32(v) < u32(p.height) && u32(u) < u32(p.width);
      b[e] = inside ? *at : column.x == kOnes ? one<Element>() : Element{};
    }
    pixel += kDepth;
  }

  __device__ __forceinline__ void store(Element* tile_a, Element* tile_b) const {
    if constexpr (kVector) {
#pragma unroll
      for (int e = 0; e < kQuads; e++) {
        const int k = threadIdx.x / (kDepth / 4) + e * kQuadStep;
        if (Tile::kM % kQuadStep == 0 || k < Tile::kM)
#pragma unroll
          for (int f = 0; f < 4; f++) tile_a[(threadIdx.x % (kDepth / 4) * 4 + f) * kPitchM + k] = a[4 * e + f];
      }
    } else {
#pragma unroll
      for (int e = 0; e < kRows; e++) tile_a[threadIdx.x % kDepth * kPitchM + threadIdx.x / kDepth + e * kStep] = a[e];
    }
#pragma unroll
    for (int e = 0; e < kColumns; e++) tile_b[threadIdx.x % kDepth * kPitchN + threadIdx.x / kDepth + e * kStep] = b[e];
  }
};

// Sums the block's slice, with any loader of the operands.
template <class Tile, class Loader>
__device__ __forceinline__ void accumulate_slice(Accumulators<Tile>& c, Loader& loader, int pixels) {
  __shared__ __align__(16) typename Tile::Element a[2][Tile::kDepth * Loader::kPitchM];
  __shared__ __align__(16) typename Tile::Element b[2][Tile::kDepth * Loader::kPitchN];
  loader.load();
  loader.store(a[0], b[0]);
  __syncthreads();
  int buffer = 0;
#pragma unroll 1
  for (int left = pixels; left > 0; left -= Tile::kDepth) {
    loader.load();  // past the end: zeros
    const TilePlace<Tile> place(threadIdx.x);
    c.template multiply_add<Loader::kPitchM, Loader::kPitchN>(a[buffer] + place.m, b[buffer] + place.n);
    buffer ^= 1;
    loader.store(a[buffer], b[buffer]);
    __syncthreads();
  }
}

// accumulate_slice, and the store of its partial sums.
template <class Tile, class Loader>
__device__ __forceinline__ void wgrad_slice(const WgradParams& p, Loader& loader, int pixels) {
  Accumulators<Tile> c;
  accumulate_slice<Tile>(c, loader, pixels);

  // Four columns at a time. Padding columns are written too, and never read.
  const TilePlace<Tile> place(fresh_thread());
  const u32 x = fresh_block_x(), column_tile = p.k_tiles.quotient(x);
  const int k = (x - column_tile * p.k_tiles.divisor) * Tile::kM + place.m, column = column_tile * Tile::kN + place.n;
  float* to = p.partial + ((i64(blockIdx.z) * p.groups + fresh_block_y()) * p.k + k) * p.columns_padded + column;
#pragma unroll
  for (int i = 0; i < Tile::kThreadM; i++)
#pragma unroll
    for (int j = 0; j < Tile::kThreadN; j += 4)
      if (k + c.offset_m(i) < p.k && column + c.offset_n(j) < p.columns_padded)
        store4_global(to + i64(c.offset_m(i)) * p.columns_padded + c.offset_n(j), c.sum[i][j], c.sum[i][j + 1],
                      c.sum[i][j + 2], c.sum[i][j + 3]);
}

// Table of the shifts of the block's columns, for a loader.
template <class Tile, bool kBordered, class Params>
__device__ __forceinline__ const int4* tabulate_columns(const Params& p) {
  __shared__ __align__(16) int4 table[Tile::kN];
  const int first_column = p.k_tiles.quotient(blockIdx.x) * Tile::kN;
  for (int n = threadIdx.x; n < Tile::kN; n += Tile::kThreads) table[n] = wgrad_column(first_column + n, p, kBordered);
  __syncthreads();
  return table;
}

template <class Tile, bool kVector, bool kBordered>
__device__ __forceinline__ void implicit_gemm_wgrad(const WgradParams& p) {
  const int4* table = tabulate_columns<Tile, kBordered>(p);
  const int first = blockIdx.z * p.pixels_per_slice, end = min(first + p.pixels_per_slice, p.pixels);
  const int first_k = (blockIdx.x - p.k_tiles.quotient(blockIdx.x) * p.k_tiles.divisor) * Tile::kM;
  WgradLoader<Tile, kVector, kBordered> loader(p, table, first_k, first, end);
  wgrad_slice<Tile>(p, loader, end - first);
}

}  // namespace polyconv
