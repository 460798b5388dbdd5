// What the depthwise strip kernels share: which strip a thread owns, and how it reads its rows.
#pragma once

#include "common.cuh"

namespace polyconv {

// A strip is one column of positions of one plane, at most `rows_per_strip` rows of it.
struct StripParams {
  const float* source;
  const float* w;
  const float* bias;  // null: none
  float* written;
  i64 source_batch, source_channel, written_batch, written_channel;
  i64 w_channel, w_first, w_row, w_column;  // tap (r, s) of a channel at w_first + r * w_row + s * w_column
  int source_row, written_row;              // columns are neighbours in memory
  int source_height, source_width;
  int written_height, written_width;
  int first_row, first_column;  // source coordinates that position (0, 0) begins to read at
  int cell_row, cell_column;    // depthwise_scatter: where its cell (0, 0) begins
  int rows, rows_per_strip;     // positions along a column
  u32 strips;                   // of all planes
  FastDivisor columns;          // positions along a row
  FastDivisor row_strips, channels;
  FastDivisor multiplier;  // written channels per source channel
};

// Steps of so many loads that a thread may have under way: enough to hide the latency of memory, few enough registers.
__device__ constexpr int strip_steps(int loads) {
  return loads >= 9 ? 1 : loads >= 5 ? 2 : loads >= 2 ? 4 : 8;
}

struct Strip {
  int image, channel, first_row, rows, column;

  __device__ __forceinline__ Strip(const StripParams& p, u32 number) {
    const u32 above = p.columns.quotient(number), plane = p.row_strips.quotient(above);
    column = number - above * p.columns.divisor;
    first_row = (above - plane * p.row_strips.divisor) * p.rows_per_strip;
    rows = min(p.rows_per_strip, p.rows - first_row);
    image = p.channels.quotient(plane);
    channel = plane - image * p.channels.divisor;
  }
};

template <int kTapsH, int kTapsW>
__device__ __forceinline__ void load_taps(float (&taps)[kTapsH][kTapsW], const StripParams& p, int channel) {
  const float* from = p.w + channel * p.w_channel + p.w_first;
#pragma unroll
  for (int r = 0; r < kTapsH; r++)
#pragma unroll
    for (int s = 0; s < kTapsW; s++) taps[r][s] = from[r * p.w_row + s * p.w_column];
}

// `kColumns` neighbouring elements of one source row after the other; zeros outside the image.
template <int kColumns>
struct SourceColumn {
  const float* from;
  i64 next_row;
  int row, last_row;  // rows from `last_row` on are not read
  int column, width;

  __device__ __forceinline__ SourceColumn(const float* plane, int row_stride, int height, int width, int row,
                                          int column, int rows)
      : from(plane + i64(row) * row_stride + column),
        next_row(row_stride),
        row(row),
        last_row(max(min(height, row + rows), 0)),
        column(column),
        width(width) {}

  __device__ __forceinline__ SourceColumn(const StripParams& p, const Strip& strip, int row, int column, int rows)
      : SourceColumn(
            p.source + strip.image * p.source_batch + i64(p.multiplier.quotient(strip.channel)) * p.source_channel,
            p.source_row, p.source_height, p.source_width, row, column, rows) {}

  __device__ __forceinline__ void next(float (&x)[kColumns]) {
    // A row outside the image is one without columns: one comparison per element serves both axes.
    const u32 inside = u32(row) < u32(last_row) ? width : 0;
#pragma unroll
    for (int s = 0; s < kColumns; s++) x[s] = u32(column + s) < inside ? from[s] : 0.f;
    from += next_row;
    row++;
  }
};

}  // namespace polyconv
