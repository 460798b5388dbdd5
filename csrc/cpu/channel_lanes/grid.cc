#include "channel_lanes/grid.h"

#include <algorithm>
#include <numeric>

namespace polyconv {
namespace {

// Output channels of a register tile, which are not cut among threads.
constexpr int kFewChannels = 64;

}  // namespace

PanelGrid::PanelGrid(const Convolution& conv, const TileShape& tile, int wanted_units, int threads)
    : conv_(conv), tile_(tile) {
  const int common = std::gcd(conv.stride_h, conv.dilation_h);
  row_dilation_ = conv.dilation_h / common;
  row_stride_ = conv.stride_h / common;
  row_phases_ = std::min(row_dilation_, conv.out_height);
  column_dilation_ = tile.column_phases ? conv.dilation_w : 1;
  column_phases_ = std::min(column_dilation_, conv.out_width);
  tile_rows_ = CeilDiv(CeilDiv(conv.out_height, row_dilation_), tile.rows);
  tile_columns_ = CeilDiv(CeilDiv(conv.out_width, column_dilation_), tile.columns);
  // Whole rows of tiles if they fit, otherwise parts of equal size.
  const int columns = std::max(1, wanted_units / column_phases_);
  panels_w_ = CeilDiv(tile_columns_, columns);
  panel_columns_ = CeilDiv(tile_columns_, panels_w_);
  panels_w_ = CeilDiv(tile_columns_, panel_columns_);
  const int rows = std::max(1, wanted_units / (panel_columns_ * column_phases_));
  panels_h_ = CeilDiv(tile_rows_, rows);
  // Few panels are cut further, so that threads have equally many, or equally many chunks of whole images. With more
  // output channels it is better to cut these: each chunk reads all weights.
  const int others = conv.batch * row_phases_ * panels_w_;
  const bool is_cut = conv.out_channels <= kFewChannels && others * panels_h_ < kManyChunks * threads;
  if (is_cut && (panels_h_ > 1 || others < threads)) {
    panels_h_ = std::min(RoundUp(panels_h_, threads / std::gcd(others, threads)), tile_rows_);
  }
  panel_rows_ = CeilDiv(tile_rows_, panels_h_);
  panels_ = others * panels_h_;
  const int fitting = std::clamp(wanted_units / PanelUnits(), 1, std::max(panels_, 1));
  const int chunks = CeilDiv(panels_, fitting);
  panels_per_chunk_ = panels_h_ * panels_w_ > 1 ? 1 : CeilDiv(panels_, is_cut ? RoundUp(chunks, threads) : chunks);
}

}  // namespace polyconv
