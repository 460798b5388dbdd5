// Kernels of one scheme for a forward pass or an input gradient, of any engine.
#pragma once

#include <cstddef>

#include "common/algorithms.h"
#include "common/convolution.h"

namespace polyconv {

struct SchemeKernels {
  // Size of the transformed weights [floats]. Their layout is private to the kernels.
  std::size_t (*weights_size)(const Convolution&);
  void (*transform_weights)(const Convolution&, float* transformed, const Runtime&);
  // Whether `run` takes null for `transformed` and is then faster than transforming the weights for one call.
  bool (*takes_plain_weights)(const Convolution&);
  void (*run)(const Convolution&, const Schedule&, const float* transformed, const Runtime&);
  // Most terms that are added sequentially before their sum is added to an earlier one, in a sum over `terms` (input
  // channels times the taps that count as channels). For the error model.
  int (*longest_sum)(int terms);
};

}  // namespace polyconv
