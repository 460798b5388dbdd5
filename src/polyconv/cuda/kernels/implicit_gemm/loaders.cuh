// Parameters of implicit_gemm/fprop_dgrad.cuh, the work of a block, and the loaders of its operands.
#pragma once

#include "common/elements.cuh"
#include "implicit_gemm/tile.cuh"

namespace polyconv {

template <class Element>
struct ImplicitGemmParamsOf {
  const Element* source;
  const Element* packed;
  const int4* table;    // per row {dy, dx, element offset as i64}; only RowLoader reads it
  const Element* bias;  // null: none
  Element* written;
  i64 source_batch, source_channel;  // element strides
  i64 source_channel_bytes;
  i64 next_tap_bytes;  // from behind the last channel under one tap to the first under the next
  i64 written_batch, written_channel;
  i64 packed_step_bytes;  // rows of one step
  int source_row, source_column;
  int written_row, written_column;
  int source_height, source_width;
  int batch, channels;          // images; source channels of one group
  int outputs, outputs_padded;  // written channels of one group; row length of `packed`
  FastDivisor channel_tiles;
  int packed_rows;     // rows of one group in `packed`
  int written_vector;  // 0: scalar stores, 1: four pixels at a time, 2: four channels at a time
  int phases_w;
  int tap_step_h, tap_step_w;
  // Only for borders other than zeros:
  int border;
  int image_top, image_left, image_height, image_width;  // part of `written` that the border folds into
  int pad_top, pad_bottom, pad_left, pad_right;
  FastDivisor stride_h, stride_w;
  int first_row[kMaxPhases * kMaxPhases];  // of each phase, in `packed` and `table`
  AxisPhase phase_h[kMaxPhases], phase_w[kMaxPhases];
};
struct ImplicitGemmParams : ImplicitGemmParamsOf<float> {};

template <class Tile>
using ImplicitGemmParamsFor = ImplicitGemmParamsOf<typename Tile::Element>;

// Image and coordinates of a flattened pixel of the block's phase.
struct Pixel {
  int image, i, j;

  __device__ __forceinline__ Pixel(u32 index, const AxisPhase& h, const AxisPhase& w) {
    const u32 line = w.count.quotient(index);
    const u32 n = h.count.quotient(line);
    image = n;
    i = line - n * h.count.divisor;
    j = index - line * w.count.divisor;
  }
};

// Work of a block.
template <class Tile>
struct ImplicitGemmBlock {
  const u32 phase;
  const AxisPhase &h, &w;
  u32 first_pixel, pixels;
  int group, first_output;
  int first_row, rows;

  __device__ __forceinline__ explicit ImplicitGemmBlock(const ImplicitGemmParamsFor<Tile>& p)
      : phase(fresh_block_z()), h(p.phase_h[phase / p.phases_w]), w(p.phase_w[phase % p.phases_w]) {
    const u32 x = fresh_block_x(), tile = p.channel_tiles.quotient(x);
    first_pixel = tile * Tile::kM;
    first_output = (x - tile * p.channel_tiles.divisor) * Tile::kN;
    pixels = p.batch * h.count.divisor * w.count.divisor;
    group = fresh_block_y();
    first_row = p.first_row[phase];
    rows = (h.taps * w.taps * p.channels + Tile::kDepth - 1) / Tile::kDepth * Tile::kDepth;
  }
};

// ---- Loaders: a tile of pixels x depth from global to shared memory ----------------------------------------------
// A loader keeps this thread's position in the gather. load(more) reads the current rows into registers (zeros if not
// `more`), store() writes them to a buffer from this thread's place() on, advance() moves to the next rows.

// Base of loaders with whole pixels per thread: each thread holds kRows rows of kPixels pixels.
template <class Tile>
struct PixelRows {
  static constexpr int kPixels = Tile::kM > Tile::kThreads ? Tile::kM / Tile::kThreads : 1;
  static constexpr int kSplit = Tile::kThreads > Tile::kM ? Tile::kThreads / Tile::kM : 1;  // threads per pixel
  static constexpr int kRows = Tile::kDepth / kSplit;
  using Element = typename Tile::Element;

  Element value[kPixels][kRows];

  static __device__ __forceinline__ int first_row() { return threadIdx.x / Tile::kM * kRows; }
  static __device__ __forceinline__ int place() { return first_row() * Tile::kPitchM + threadIdx.x % Tile::kM; }

  // Flattened pixel number q of this thread.
  static __device__ __forceinline__ u32 pixel(const ImplicitGemmBlock<Tile>& block, int q) {
    return block.first_pixel + threadIdx.x % Tile::kM + q * Tile::kThreads;
  }

  __device__ __forceinline__ void store(Element* to) const {
#pragma unroll
    for (int q = 0; q < kPixels; q++)
#pragma unroll
      for (int r = 0; r < kRows; r++) to[r * Tile::kPitchM + q * Tile::kThreads] = value[q][r];
  }
};

// Tap-major rows, with channels a multiple of the depth: all rows of a step share one tap and one bounds check.
// kVector: the channel stride is 1 and everything is aligned, so one load takes four channels.
template <class Tile, bool kVector>
struct TapMajorLoader : PixelRows<Tile> {
  using PixelRows<Tile>::kPixels, PixelRows<Tile>::kRows, PixelRows<Tile>::value;
  using Element = typename Tile::Element;
  static_assert(!kVector || kRows % 4 == 0, "vector loads take four channels");

  const ImplicitGemmParamsFor<Tile>& p;
  const ImplicitGemmBlock<Tile>& block;
  const Element* at[kPixels];  // may point outside while not `inside`: then it is not read
  int y[kPixels], x[kPixels];  // source coordinates under the current tap
  bool inside[kPixels];
  int channels_left, taps_left;  // until the next tap; until the next row of taps

  __device__ __forceinline__ TapMajorLoader(const ImplicitGemmParamsFor<Tile>& p, const ImplicitGemmBlock<Tile>& block)
      : p(p), block(block), channels_left(p.channels), taps_left(block.w.taps) {
    const int first_channel = block.group * p.channels + this->first_row();
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      const u32 index = this->pixel(block, q);
      const Pixel pixel(index, block.h, block.w);
      y[q] = block.h.read_first + pixel.i * block.h.read_step;
      x[q] = block.w.read_first + pixel.j * block.w.read_step;
      at[q] = p.source + pixel.image * p.source_batch + first_channel * p.source_channel + i64(y[q]) * p.source_row +
              i64(x[q]) * p.source_column;
      if (index >= block.pixels) y[q] = -(1 << 30);  // past the end: outside under every tap
    }
    look();
  }

  __device__ __forceinline__ void look() {
#pragma unroll
    for (int q = 0; q < kPixels; q++) inside[q] = u32(y[q]) < u32(p.source_height) && u32(x[q]) < u32(p.source_width);
  }

  // Leaves `at` behind the rows read: one chain of 64-bit additions which, unlike multiples of the stride, cost the
  // FP32 pipe nothing. Behind the last tap it may read other pixels of the image, which are not used.
  __device__ __forceinline__ void load(bool) {
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      if constexpr (kVector) {
#pragma unroll
        for (int r = 0; r < kRows; r += 4, at[q] += 4) {
          const Quad<Element> v = inside[q] ? load4(at[q]) : Quad<Element>{};
          value[q][r] = v.x, value[q][r + 1] = v.y, value[q][r + 2] = v.z, value[q][r + 3] = v.w;
        }
      } else {
#pragma unroll
        for (int r = 0; r < kRows; r++, at[q] = opaque(add_bytes(at[q], p.source_channel_bytes)))
          value[q][r] = inside[q] ? load_read_only(at[q]) : Element{};
      }
    }
  }

  __device__ __forceinline__ void advance() {
    constexpr int kOthers = Tile::kDepth - kRows;  // rows that other threads hold
    if constexpr (kOthers > 0) move(kOthers * p.source_channel_bytes);
    channels_left -= Tile::kDepth;
    if (channels_left == 0) {
      channels_left = p.channels;
      move(p.next_tap_bytes);
#pragma unroll
      for (int q = 0; q < kPixels; q++) x[q] += p.tap_step_w;
      if (--taps_left == 0) {
        taps_left = block.w.taps;
        const int back = taps_left * p.tap_step_w;
        move(i64(sizeof(Element)) * (i64(p.tap_step_h) * p.source_row - i64(back) * p.source_column));
#pragma unroll
        for (int q = 0; q < kPixels; q++) x[q] -= back, y[q] += p.tap_step_h;
      }
      look();
    }
  }

  __device__ __forceinline__ void move(i64 bytes) {
#pragma unroll
    for (int q = 0; q < kPixels; q++) at[q] = add_bytes(at[q], bytes);
  }
};

// A 1x1 kernel over dense images: the gathered matrix is the source itself, so one load takes four pixels.
template <class Tile>
struct PointwiseLoader {
  static constexpr int kQuads = Tile::kM / 4;
  static constexpr int kStep = Tile::kThreads / kQuads;  // rows that the block loads at once
  static_assert(Tile::kThreads % kQuads == 0 && Tile::kDepth % kStep == 0, "a row of quads must divide the block");
  static constexpr int kRows = Tile::kDepth / kStep;
  using Element = typename Tile::Element;

  const ImplicitGemmParamsFor<Tile>& p;
  const Element* at;
  bool inside;
  int rows_left;
  Quad<Element> value[kRows];

  __device__ __forceinline__ PointwiseLoader(const ImplicitGemmParamsFor<Tile>& p, const ImplicitGemmBlock<Tile>& block)
      : p(p) {
    const u32 index = block.first_pixel + threadIdx.x % kQuads * 4;
    const Pixel pixel(index, block.h, block.w);
    const int row = threadIdx.x / kQuads;
    inside = index < block.pixels;
    rows_left = p.channels - row;
    at = p.source + pixel.image * p.source_batch + (block.group * p.channels + row) * p.source_channel +
         i64(pixel.i) * p.source_row + pixel.j;
  }

  __device__ __forceinline__ void load(bool more) {
#pragma unroll
    for (int r = 0; r < kRows; r++)
      value[r] = more && inside && r * kStep < rows_left ? load4(at + r * kStep * p.source_channel) : Quad<Element>{};
  }

  __device__ __forceinline__ void advance() {
    at += Tile::kDepth * p.source_channel;
    rows_left -= Tile::kDepth;
  }

  static __device__ __forceinline__ int place() {
    return threadIdx.x / kQuads * Tile::kPitchM + threadIdx.x % kQuads * 4;
  }

  __device__ __forceinline__ void store(Element* to) const {
#pragma unroll
    for (int r = 0; r < kRows; r++) store4(to + r * kStep * Tile::kPitchM, value[r]);
  }
};

enum class Gather { kZeros, kBordered, kFolded };

// Row by row, each with its tap from the table: any number of channels without padding, and every border.
// kZeros: outside reads zero. kBordered: outside reads the folded coordinate (fprop with padding_mode).
// kFolded: dgrad of such a border. A pixel collects from each of its images in the padding, selected by `fold`. All
// taps and the divisibility by the stride are checked one by one, and a block skips folds that none of its pixels has.
template <class Tile, Gather kGather>
struct RowLoader : PixelRows<Tile> {
  using PixelRows<Tile>::kPixels, PixelRows<Tile>::kRows, PixelRows<Tile>::value;
  using Element = typename Tile::Element;

  const ImplicitGemmParamsFor<Tile>& p;
  const ImplicitGemmBlock<Tile>& block;
  const Element* image[kPixels];
  const int4* row;
  int y[kPixels], x[kPixels];
  bool inside[kPixels];

  __device__ __forceinline__ RowLoader(const ImplicitGemmParamsFor<Tile>& p, const ImplicitGemmBlock<Tile>& block)
      : p(p), block(block) {
    rewind();
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      const u32 index = this->pixel(block, q);
      const Pixel pixel(index, block.h, block.w);
      inside[q] = index < block.pixels;
      y[q] = block.h.read_first + pixel.i * block.h.read_step;
      x[q] = block.w.read_first + pixel.j * block.w.read_step;
      image[q] = p.source + pixel.image * p.source_batch + block.group * p.channels * p.source_channel;
      if constexpr (kGather == Gather::kZeros) image[q] += i64(y[q]) * p.source_row + i64(x[q]) * p.source_column;
    }
  }

  __device__ __forceinline__ void rewind() { row = p.table + block.first_row + this->first_row(); }

  // kFolded: moves every pixel to its image. False if no pixel of the block has one.
  __device__ __forceinline__ bool aim(int fold_h, int fold_w) {
    bool any = false;
    rewind();
#pragma unroll
    for (int q = 0; q < kPixels; q++) {
      const u32 index = this->pixel(block, q);
      const Pixel pixel(index, block.h, block.w);
      const Border border = Border(p.border);
      inside[q] = index < block.pixels;
      const int i = pixel.i - p.image_top, j = pixel.j - p.image_left;
      inside[q] &= u32(i) < u32(p.image_height) && u32(j) < u32(p.image_width);
      inside[q] &= unfold(i, fold_h, p.image_height, p.pad_top, p.pad_bottom, border, y[q]);
      inside[q] &= unfold(j, fold_w, p.image_width, p.pad_left, p.pad_right, border, x[q]);
      y[q] += p.pad_top;
      x[q] += p.pad_left;
      any |= inside[q];
    }
    return __syncthreads_or(any);
  }

  __device__ __forceinline__ void load(bool more) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int4 entry = more ? row[r] : make_int4(kPaddingRow, 0, 0, 0);
      const i64 offset = i64(u32(entry.z)) | i64(entry.w) << 32;
#pragma unroll
      for (int q = 0; q < kPixels; q++) {
        int v = y[q] + entry.x, u = x[q] + entry.y;
        bool valid = inside[q] && entry.x != kPaddingRow;
        const Element* at = image[q] + offset;
        if constexpr (kGather == Gather::kBordered) {
          v = fold_into(v, p.source_height, Border(p.border));
          u = fold_into(u, p.source_width, Border(p.border));
        }
        if constexpr (kGather == Gather::kFolded) {
          const int quotient_v = p.stride_h.quotient(v), quotient_u = p.stride_w.quotient(u);
          valid = valid && v >= 0 && u >= 0 && quotient_v * int(p.stride_h.divisor) == v &&
                  quotient_u * int(p.stride_w.divisor) == u;
          v = quotient_v, u = quotient_u;
        }
        if constexpr (kGather != Gather::kZeros) at += i64(v) * p.source_row + i64(u) * p.source_column;
        valid = valid && u32(v) < u32(p.source_height) && u32(u) < u32(p.source_width);
        value[q][r] = valid ? *at : Element{};
      }
    }
  }

  __device__ __forceinline__ void advance() { row += Tile::kDepth; }
};

// Packed weights: rows are dense, padded to whole tiles, and followed by one more step of workspace, so no checks.
template <class Tile>
struct PackedLoader {
  static constexpr int kQuads = Tile::kDepth * Tile::kN / 4;
  static constexpr int kEach = (kQuads + Tile::kThreads - 1) / Tile::kThreads;
  static constexpr int kStep = Tile::kThreads / (Tile::kN / 4);  // rows that the block loads at once
  using Element = typename Tile::Element;

  const ImplicitGemmParamsFor<Tile>& p;
  const Element* at[kEach];
  Quad<Element> value[kEach];

  __device__ __forceinline__ PackedLoader(const ImplicitGemmParamsFor<Tile>& p, const ImplicitGemmBlock<Tile>& block)
      : p(p) {
    const Element* group = p.packed + (i64(block.group) * p.packed_rows + block.first_row) * p.outputs_padded;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int quad = threadIdx.x + e * Tile::kThreads;
      at[e] = group + (quad / (Tile::kN / 4)) * i64(p.outputs_padded) + block.first_output + quad % (Tile::kN / 4) * 4;
    }
  }

  static __device__ __forceinline__ bool mine(int e) {
    return kQuads % Tile::kThreads == 0 || threadIdx.x + e * Tile::kThreads < kQuads;
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (mine(e)) value[e] = load4(at[e]);
  }

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int e = 0; e < kEach; e++) at[e] = add_bytes(at[e], p.packed_step_bytes);
  }

  static __device__ __forceinline__ int place() {
    return threadIdx.x / (Tile::kN / 4) * Tile::kPitchN + threadIdx.x % (Tile::kN / 4) * 4;
  }

  __device__ __forceinline__ void store(Element* to) const {
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (mine(e)) store4(to + e * kStep * Tile::kPitchN, value[e]);
  }
};

}  // namespace polyconv
