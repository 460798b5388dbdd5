// Convolution by its definition, all three passes, for float and double. The fallback for problems that no other kernel
// takes, and the most accurate kernel: every sum is in double.
#pragma once

#include <cstddef>

#include "common/convolution.h"

namespace polyconv {

// Sizes and strides of a convolution with all its groups.
struct PlainShape : ConvolutionShape {
  int groups;
  std::ptrdiff_t bias_step;
};

template <class T>
struct PlainKernels {
  // y = activation(w * x + bias + residual). The bias may be null.
  void (*forward)(const PlainShape&, const T* x, const T* w, const T* bias, const Epilogue<T>&, T* y, const Runtime&);
  void (*input_gradient)(const PlainShape&, const T* dy, const T* w, T* dx, const Runtime&);
  // Also computes the bias gradient, unless `db` is null.
  void (*weight_gradient)(const PlainShape&, const T* x, const T* dy, T* dw, T* db, const Runtime&);
};

template <class T>
const PlainKernels<T>& FindPlainKernels(InstructionSet set);

extern template const PlainKernels<float>& FindPlainKernels<float>(InstructionSet set);
extern template const PlainKernels<double>& FindPlainKernels<double>(InstructionSet set);

}  // namespace polyconv
