// The kernels of a scheme, and where to find them. Schemes are compiled in families: one file each, once per
// instruction set, so that a build uses several cores.
#pragma once

#include <cstddef>

#include "algorithms.h"
#include "convolution.h"

namespace polyconv {

struct SchemeKernels {
  // Floats of the transformed weights; their layout is the kernels' own.
  std::size_t (*weights_size)(const Convolution&);
  void (*transform_weights)(const Convolution&, float* transformed, const Runtime&);
  void (*run)(const Convolution&, const Schedule&, const float* transformed, const Runtime&);
  // Of a sum over so many input channels, times the taps that count as such: how many terms are added in sequence, at
  // most, before their sum is added to the sums before it. The error model asks.
  int (*longest_sum)(int terms);
};

// Each gives null for schemes of another family.
const SchemeKernels* FindSquareScheme(InstructionSet set, const SchemeShape& shape);
const SchemeKernels* FindLongScheme(InstructionSet set, const SchemeShape& shape);
const SchemeKernels* FindLineScheme(InstructionSet set, const SchemeShape& shape);

const SchemeKernels* FindScheme(InstructionSet set, const SchemeShape& shape);

}  // namespace polyconv
