// The weight gradient, in plain numbers and pointers: what is asked for, and which kernels there are.
#pragma once

#include <cstdint>
#include <vector>

#include "common/algorithms.h"
#include "common/convolution.h"

namespace polyconv {

// dw[k, c, r, s] = sum over n, i, j of dy[n, k, i, j] x[n, c, i sh + r dh - top, j sw + s dw - left], and
// db[k] = sum over n, i, j of dy[n, k, i, j].
struct WeightGradient {
  Convolution conv;  // the forward pass: `y` is dy and only read, the strides of `w` are those of dw
  float* dw;
  float* db;  // dense; may be null
};

struct GradientKernels {
  void (*run)(const WeightGradient&, const Runtime&);
  // How the sums are cut, from the inside out: products (direct) or tiles that are added in sequence, then such sums,
  // and so on. Depends on the sizes only.
  std::vector<std::int64_t> (*blocks)(const Convolution&);
};

// Each gives null for schemes of another family.
const GradientKernels* FindSquareGradient(InstructionSet set, const SchemeShape& shape);
const GradientKernels* FindLongGradient(InstructionSet set, const SchemeShape& shape);

const GradientKernels* FindGradient(InstructionSet set, const SchemeShape& shape);

}  // namespace polyconv
