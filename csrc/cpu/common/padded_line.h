// Copies of padded image rows in which kernels see neither borders nor strides.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/border.h"
#include "common/convolution.h"

namespace polyconv {

// Layout of a padded row, sorted by residue modulo the stride, so that a tap reads contiguously: the columns 0, stride,
// 2 stride, ... from position p of the padded row are at OffsetOf(p), OffsetOf(p) + 1, ...
struct LineLayout {
  int stride;  // of the convolution
  int before;  // columns of border before the image; negative: cropped
  int width;   // of the image
  int pitch;   // elements per residue

  // `reach`: columns of the padded row that are read.
  LineLayout(int stride_w, int left, int in_width, int reach)
      : stride(stride_w), before(left), width(in_width), pitch((reach + stride_w - 1) / stride_w) {}

  std::size_t size() const { return static_cast<std::size_t>(stride) * pitch; }
  std::ptrdiff_t OffsetOf(int position) const {
    return static_cast<std::ptrdiff_t>(position % stride) * pitch + position / stride;
  }
  // Image column of element i of a residue.
  int ColumnOf(int residue, int i) const { return i * stride + residue - before; }
  // First element of a residue whose column is at least `column`.
  int PlaceOf(int residue, int column) const {
    const int distance = column + before - residue;
    return std::clamp(distance <= 0 ? 0 : (distance + stride - 1) / stride, 0, pitch);
  }
};

// Fills a line from an image row with `step` floats between pixels. A null row is a row of zeros.
template <class From, class To>
inline void FillLine(const LineLayout& layout, Border border, const From* row, std::ptrdiff_t step, To* line) {
  if (row == nullptr) {
    std::fill_n(line, layout.size(), To{0});
    return;
  }
  for (int residue = 0; residue < layout.stride; residue++, line += layout.pitch) {
    const int first = layout.PlaceOf(residue, 0), last = layout.PlaceOf(residue, layout.width);
    const auto outside = [&](int i) {
      const int column = SourceIndex(border, layout.ColumnOf(residue, i), layout.width);
      return column < 0 ? To{0} : static_cast<To>(row[column * step]);
    };
    for (int i = 0; i < first; i++) line[i] = outside(i);
    const std::ptrdiff_t pixel_step = layout.stride * step;
    const From* pixels = row + layout.ColumnOf(residue, 0) * step;
    if (pixel_step == 1) {
      for (int i = first; i < last; i++) line[i] = static_cast<To>(pixels[i]);
    } else {
      for (int i = first; i < last; i++) line[i] = static_cast<To>(pixels[i * pixel_step]);
    }
    for (int i = last; i < layout.pitch; i++) line[i] = outside(i);
  }
}

// Adjoint of FillLine: adds every element of the line to the pixel that it copies. `sums` has one element per pixel.
template <class Sum>
inline void FoldLine(const LineLayout& layout, Border border, const Sum* line, Sum* sums) {
  std::fill_n(sums, layout.width, Sum{0});
  for (int residue = 0; residue < layout.stride; residue++, line += layout.pitch) {
    for (int i = 0; i < layout.pitch; i++) {
      const int column = SourceIndex(border, layout.ColumnOf(residue, i), layout.width);
      if (column >= 0) sums[column] += line[i];
    }
  }
}

}  // namespace polyconv
