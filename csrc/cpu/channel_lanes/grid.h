// Cut of a convolution's output if the lanes are channels: integer arithmetic only.
//
//   phase   with dilation d and stride s, the output rows a, a + d', a + 2d', ... with d' = d / gcd(d, s) read rows of
//           one lattice of the input, d apart: output row i of the phase reads the lattice's rows i s' ... + taps - 1,
//           s' = s / gcd(d, s). Other rows are not packed
//   tile    outputs that are computed together: those of an algorithm, or a single one
//   panel   a rectangle of tiles of one image and row phase, with all column phases: its pixels are packed once
//   chunk   work item of a thread: a panel, or several small ones
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/convolution.h"
#include "common/integers.h"

namespace polyconv {

// Chunks per thread from which on work is not cut further to be equal for all threads.
inline constexpr int kManyChunks = 4;

// Outputs per tile, and the taps that its inputs span.
struct TileShape {
  int rows, columns;
  int taps_h, taps_w;
  bool column_phases;  // tiles take every d-th column; otherwise neighbours, which is as good without transforms
};

struct Panel {
  int image, phase;
  int first_row, rows;        // tiles
  int first_column, columns;  // tiles of each column phase
};

class PanelGrid {
 public:
  // Of about `wanted_units` tiles per chunk. If there are few, the threads get equally many.
  PanelGrid(const Convolution& conv, const TileShape& tile, int wanted_units, int threads = 1);

  int panels() const { return panels_; }
  int panels_per_chunk() const { return panels_per_chunk_; }
  int chunks() const { return CeilDiv(panels_, panels_per_chunk_); }
  int column_phases() const { return column_phases_; }
  int column_dilation() const { return column_dilation_; }
  int row_stride() const { return row_stride_; }
  int panel_columns() const { return panel_columns_; }

  Panel PanelAt(int index) const {
    Panel panel{};
    panel.first_column = index % panels_w_ * panel_columns_;
    const int band = index / panels_w_ % panels_h_;
    panel.first_row = FirstRow(band);
    panel.phase = index / (panels_w_ * panels_h_) % row_phases_;
    panel.image = index / (panels_w_ * panels_h_ * row_phases_);
    panel.rows = FirstRow(band + 1) - panel.first_row;
    panel.columns = std::min(panel_columns_, tile_columns_ - panel.first_column);
    return panel;
  }

  // Calls fn(panel, number in the chunk) for the panels of a chunk.
  template <class Fn>
  void ForPanels(int chunk, const Fn& fn) const {
    const int first = chunk * panels_per_chunk_, last = std::min(first + panels_per_chunk_, panels_);
    for (int i = first; i < last; i++) fn(PanelAt(i), i - first);
  }

  // Tiles of a full panel, and of all panels of a full chunk.
  int PanelUnits() const { return panel_rows_ * panel_columns_ * column_phases_; }
  int ChunkUnits() const { return PanelUnits() * panels_per_chunk_; }
  int Units(const Panel& panel) const { return panel.rows * panel.columns * column_phases_; }

  // Pixels of a panel: rows of the lattice, and all columns.
  int OutputRows(const Panel& panel) const { return panel.rows * tile_.rows; }
  int InputRows(const Panel& panel) const { return (OutputRows(panel) - 1) * row_stride_ + tile_.taps_h; }
  int MostOutputRows() const { return panel_rows_ * tile_.rows; }
  int MostInputRows() const { return (MostOutputRows() - 1) * row_stride_ + tile_.taps_h; }
  int OutputColumns() const { return OutputColumns(panel_columns_); }
  int InputColumns() const { return InputColumns(panel_columns_); }
  // Of `tiles` neighbouring tiles of each column phase.
  int OutputColumns(int tiles) const { return tiles * tile_.columns * column_dilation_; }
  int InputColumns(int tiles) const {
    return (OutputColumns(tiles) - 1) * conv_.stride_w + (tile_.taps_w - 1) * conv_.dilation_w + 1;
  }

  // Positions of these pixels in the images. Those outside belong to the border, or to tiles beyond the image.
  int OutputRow(const Panel& panel, int row) const {
    return panel.phase + row_dilation_ * (panel.first_row * tile_.rows + row);
  }
  int InputRow(const Panel& panel, int row) const {
    const int lattice = panel.first_row * tile_.rows * row_stride_ + row;
    return panel.phase * conv_.stride_h - conv_.top + conv_.dilation_h * lattice;
  }
  int FirstOutputColumn(const Panel& panel) const { return OutputColumns(panel.first_column); }
  int FirstInputColumn(const Panel& panel) const { return FirstOutputColumn(panel) * conv_.stride_w - conv_.left; }

  // Whether any tap reads this row: a stride may skip rows.
  bool IsRead(int input_row) const { return input_row % row_stride_ < tile_.taps_h; }

 private:
  // Of a band of panels: tiles.
  int FirstRow(int band) const { return static_cast<int>(std::int64_t{tile_rows_} * band / panels_h_); }

  const Convolution& conv_;
  const TileShape tile_;
  int row_dilation_, row_stride_, row_phases_;
  int column_dilation_, column_phases_;
  int tile_rows_, tile_columns_;
  int panel_rows_, panel_columns_;
  int panels_h_, panels_w_, panels_, panels_per_chunk_;
};

}  // namespace polyconv
