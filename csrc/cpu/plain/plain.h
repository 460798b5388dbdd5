// Convolution by its definition, in all three passes, for float and double: the fall-back for whatever no other kernel
// takes, and the most accurate one, because every sum is taken in double.
#pragma once

#include <cstddef>

#include "common/convolution.h"

namespace polyconv {

// A convolution with all its groups, without its data. Strides in memory are in elements, of any sign and size.
struct PlainShape {
  int batch, groups, in_channels, out_channels;  // channels of one group
  int in_height, in_width, out_height, out_width;
  int taps_h, taps_w;
  int top, left;  // negative where the image is cropped
  int stride_h, stride_w;
  int dilation_h, dilation_w;
  Border border;

  std::ptrdiff_t x_batch, x_channel, x_row, x_column;
  std::ptrdiff_t y_batch, y_channel, y_row, y_column;
  std::ptrdiff_t w_out, w_in, w_row, w_column;
  std::ptrdiff_t bias_step;
};

template <class T>
struct PlainKernels {
  // y = activation(w * x + bias + residual); the bias may be null
  void (*forward)(const PlainShape&, const T* x, const T* w, const T* bias, const Epilogue<T>&, T* y, const Runtime&);
  void (*input_gradient)(const PlainShape&, const T* dy, const T* w, T* dx, const Runtime&);
  // also the bias gradient, unless it is null
  void (*weight_gradient)(const PlainShape&, const T* x, const T* dy, T* dw, T* db, const Runtime&);
};

template <class T>
const PlainKernels<T>& FindPlainKernels(InstructionSet set);

extern template const PlainKernels<float>& FindPlainKernels<float>(InstructionSet set);
extern template const PlainKernels<double>& FindPlainKernels<double>(InstructionSet set);

}  // namespace polyconv
