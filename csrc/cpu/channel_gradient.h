// The weight gradient, in plain numbers and pointers: what is asked for, and which kernels there are.
#pragma once

#include <cstdint>
#include <vector>

#include "convolution.h"

namespace polyconv {

// dw[k, c, r, s] = sum over n, i, j of dy[n, k, i, j] x[n, c, i sh + r dh - top, j sw + s dw - left], and
// db[k] = sum over n, i, j of dy[n, k, i, j].
struct WeightGradient {
  Convolution conv;  // the forward pass: `y` is dy and only read, the strides of `w` are those of dw
  float* dw;
  float* db;  // dense; may be null
};

// The values are those that Python sends. Every algorithm is right for every problem of unit stride; direct summation
// for all.
enum class GradientAlgorithm : int {
  kDirect = 0,
  kF45xF45Nested,  // up to 5 x 9 taps
  kF45xF45,        // 5 x 5
  kF43xF43,        // 3 x 3
  kF63xF63,        // 3 x 3, fewer products, larger tiles
  kF23xF23,        // 3 x 3, smallest error
  kF11xF45Nested,  // 1 x 9
  kF11xF45,        // 1 x 5
  kF45xF11,        // 5 x 1
  kF43xF45,        // 3 x 5
  kF43xF45Nested,  // 3 x 9
  kF11xF63,        // 1 x 3
  kF63xF11,        // 3 x 1
  kCount
};

struct GradientKernels {
  void (*run)(const WeightGradient&, const Runtime&);
  // How the sums are cut, from the inside out: products (direct) or tiles that are added in sequence, then such sums,
  // and so on. Depends on the sizes only.
  std::vector<std::int64_t> (*blocks)(const Convolution&);
};

// Each gives null for algorithms of another family.
const GradientKernels* FindSquareGradient(InstructionSet set, GradientAlgorithm algorithm);
const GradientKernels* FindLongGradient(InstructionSet set, GradientAlgorithm algorithm);

const GradientKernels* FindGradient(InstructionSet set, GradientAlgorithm algorithm);

}  // namespace polyconv
