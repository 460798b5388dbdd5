// The kernels of a scheme for a forward pass or an input gradient, whatever the lanes of their vectors hold.
#pragma once

#include <cstddef>

#include "common/algorithms.h"
#include "common/convolution.h"

namespace polyconv {

struct SchemeKernels {
  // Floats of the transformed weights; their layout is the kernels' own.
  std::size_t (*weights_size)(const Convolution&);
  void (*transform_weights)(const Convolution&, float* transformed, const Runtime&);
  // Whether `run` may be handed no transformed weights, and is quicker so than with those of one call.
  bool (*takes_plain_weights)(const Convolution&);
  void (*run)(const Convolution&, const Schedule&, const float* transformed, const Runtime&);
  // Of a sum over so many input channels, times the taps that count as such: how many terms are added in sequence, at
  // most, before their sum is added to the sums before it. The error model asks.
  int (*longest_sum)(int terms);
};

}  // namespace polyconv
