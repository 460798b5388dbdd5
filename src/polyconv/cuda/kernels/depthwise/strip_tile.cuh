// Shared by the depthwise strip kernels: the strip of a thread, and how it reads its rows.
#pragma once

#include "common/elements.cuh"

namespace polyconv {

// Axis that is contiguous in memory and runs along the lanes of a warp.
enum class Lanes { kColumns, kChannels };

// A strip is a few columns of positions of one plane, at most `rows_per_strip` rows.
template <class Element>
struct StripParamsOf {
  const Element* source;
  const Element* w;
  const Element* bias;  // null: none
  Element* written;
  i64 source_batch, source_channel, written_batch, written_channel;
  i64 w_channel, w_first, w_row, w_column;  // tap (r, s) of a channel at w_first + r * w_row + s * w_column
  int source_row, source_column, written_row, written_column;
  int source_height, source_width;
  int written_height, written_width;
  int first_row, first_column;  // first source coordinates that position (0, 0) reads
  int cell_row, cell_column;    // depthwise_strip_scatter: first position of its cell (0, 0)
  int rows, columns;            // positions of a plane
  int rows_per_strip;
  u32 strips;                             // strips of all planes
  FastDivisor column_strips, row_strips;  // strips per row of strips, rows of strips
  FastDivisor channels, multiplier;       // written channels; written channels per source channel
};

struct StripParams : StripParamsOf<float> {};
struct HalfStripParams : StripParamsOf<Half> {};
struct BFloat16StripParams : StripParamsOf<BFloat16> {};

// Steps in flight per thread, if each has `loads` loads: enough to hide memory latency, within the registers.
__device__ constexpr int strip_steps(int loads) {
  return loads >= 9 ? 1 : loads >= 5 ? 2 : loads >= 2 ? 4 : 8;
}

// kColumns: neighbouring positions per strip.
template <Lanes kLanes, int kColumns>
struct Strip {
  int image, channel, first_row, rows, column;

  // Neighbouring numbers are neighbours in memory.
  template <class Params>
  __device__ __forceinline__ Strip(const Params& p, u32 number) {
    u32 place = number;
    if constexpr (kLanes == Lanes::kChannels) {
      place = p.channels.quotient(number);
      channel = number - place * p.channels.divisor;
    }
    const u32 above = p.column_strips.quotient(place), plane = p.row_strips.quotient(above);
    column = (place - above * p.column_strips.divisor) * kColumns;
    first_row = (above - plane * p.row_strips.divisor) * p.rows_per_strip;
    rows = min(p.rows_per_strip, p.rows - first_row);
    if constexpr (kLanes == Lanes::kColumns) {
      image = p.channels.quotient(plane);
      channel = plane - image * p.channels.divisor;
    } else {
      image = plane;
    }
  }
};

template <int kTapsH, int kTapsW, class Element>
__device__ __forceinline__ void load_taps(float (&taps)[kTapsH][kTapsW], const StripParamsOf<Element>& p, int channel) {
  const Element* from = p.w + channel * p.w_channel + p.w_first;
#pragma unroll
  for (int r = 0; r < kTapsH; r++)
#pragma unroll
    for (int s = 0; s < kTapsW; s++) taps[r][s] = widened(from[r * p.w_row + s * p.w_column]);
}

// Reads kColumns neighbouring elements of one source row after the other; zeros outside the image.
template <Lanes kLanes, int kColumns, class Element = float>
struct SourceRows {
  const Element* from;
  i64 next_row, next_column;
  int row, last_row;  // rows from `last_row` on are not read
  int column, width;

  __device__ __forceinline__ SourceRows(const Element* plane, int row_stride, int column_stride, int height, int width,
                                        int row, int column, int rows)
      : from(plane + i64(row) * row_stride + i64(column) * (kLanes == Lanes::kColumns ? 1 : column_stride)),
        next_row(row_stride),
        next_column(kLanes == Lanes::kColumns ? 1 : column_stride),
        row(row),
        last_row(max(min(height, row + rows), 0)),
        column(column),
        width(width) {}

  template <int kPositions>
  __device__ __forceinline__ SourceRows(const StripParamsOf<Element>& p, const Strip<kLanes, kPositions>& strip,
                                        int row, int column, int rows)
      : SourceRows(
            p.source + strip.image * p.source_batch + i64(p.multiplier.quotient(strip.channel)) * p.source_channel,
            p.source_row, p.source_column, p.source_height, p.source_width, row, column, rows) {}

  __device__ __forceinline__ void next(float (&x)[kColumns]) {
    // A row outside the image has no columns inside: one comparison per element serves both axes.
    const u32 inside = u32(row) < u32(last_row) ? width : 0;
#pragma unroll
    for (int s = 0; s < kColumns; s++) x[s] = u32(column + s) < inside ? widened(from[s * next_column]) : 0.f;
    from += next_row;
    row++;
  }
};

}  // namespace polyconv
