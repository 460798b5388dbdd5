// Packs the weights for implicit_gemm: packed[group][row][n], rows (tap, channel) of each phase in turn. Every phase is
// padded with zero rows to a multiple of the depth, every row with zeros to whole tiles. w may have any strides:
// channels_last weights and the transposed roles of dgrad (n = input channel) are only other numbers.
//
// Optionally writes the table that RowLoader reads: per row {dy, dx, element offset}; dy = kPaddingRow for padding.
//
// Grid: x = group * n tiles + n tile, y = tile of 8 channels, z = phase. Block: 32 n x 8 channels, looping over the
// taps: taps that are neighbours in memory are read by one block, so L1 serves all but the first.
#pragma once

#include "common/elements.cuh"
#include "implicit_gemm/tile.cuh"

namespace polyconv {

template <class Element>
struct PackParamsOf {
  const Element* w;
  Element* packed;
  int4* table;  // null: not needed
  i64 w_group, w_output, w_channel, w_row, w_column;
  i64 table_channel;  // element offset per channel, row and column of the gathered tensor
  int table_row, table_column;
  int channels, outputs, outputs_padded, output_tiles, packed_rows;
  int phases_w;
  int tap_step_h, tap_step_w;
  int first_row[kMaxPhases * kMaxPhases];
  AxisPhase phase_h[kMaxPhases], phase_w[kMaxPhases];
};
struct PackParams : PackParamsOf<float> {};
struct HalfPackParams : PackParamsOf<Half> {};
struct BFloat16PackParams : PackParamsOf<BFloat16> {};

// kTileDepth: depth of the tiles that read the rows.
template <int kTileDepth, class Element>
__device__ __forceinline__ void implicit_gemm_pack_weights(const PackParamsOf<Element>& p) {
  const AxisPhase& h = p.phase_h[blockIdx.z / p.phases_w];
  const AxisPhase& w = p.phase_w[blockIdx.z % p.phases_w];
  const int group = blockIdx.x / p.output_tiles;
  const int n = blockIdx.x % p.output_tiles * 32 + threadIdx.x % 32;
  const int c = blockIdx.y * 8 + threadIdx.x / 32;
  const int first_row = p.first_row[blockIdx.z];
  const bool tabulates = p.table && group == 0 && n == 0;
  Element* to = p.packed + (i64(group) * p.packed_rows + first_row) * p.outputs_padded + n;

  if (c < p.channels) {
    const Element* from = p.w + group * p.w_group + n * p.w_output + c * p.w_channel;
    int row = c;
    for (int i = 0; i < h.taps; i++)
      for (int j = 0; j < w.taps; j++, row += p.channels) {
        if (n < p.outputs_padded)
          to[i64(row) * p.outputs_padded] =
              n < p.outputs
                  ? from[(h.tap_first + i * h.tap_stride) * p.w_row + (w.tap_first + j * w.tap_stride) * p.w_column]
                  : Element{};
        if (tabulates) {
          const int dy = i * p.tap_step_h, dx = j * p.tap_step_w;
          const i64 offset = c * p.table_channel + i64(dy) * p.table_row + i64(dx) * p.table_column;
          p.table[first_row + row] = make_int4(dy, dx, int(offset), int(offset >> 32));
        }
      }
  }
  // Rows that pad the phase to a multiple of the depth.
  const int rows = h.taps * w.taps * p.channels;
  const int end = (rows + kTileDepth - 1) / kTileDepth * kTileDepth;
  for (int row = rows + threadIdx.x / 32; blockIdx.y == 0 && row < end; row += 8) {
    if (n < p.outputs_padded) to[i64(row) * p.outputs_padded] = Element{};
    if (tabulates) p.table[first_row + row] = make_int4(kPaddingRow, 0, 0, 0);
  }
}

}  // namespace polyconv
