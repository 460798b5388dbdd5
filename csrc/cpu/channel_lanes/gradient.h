// Weight gradient: problem description, and its kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "common/algorithms.h"
#include "common/convolution.h"
#include "common/elements.h"

namespace polyconv {

// dw[k, c, r, s] = sum over n, i, j of dy[n, k, i, j] x[n, c, i sh + r dh - top, j sw + s dw - left]
// db[k] = sum over n, i, j of dy[n, k, i, j]
struct WeightGradient {
  Convolution conv;  // the forward pass: `y` is dy and only read, the strides of `w` are those of dw
  float* dw;
  float* db;  // dense; may be null
  // In half precision x and dy point to such elements, of contiguous channels, with zeros around the images.
  Element x_element = Element::kFloat, dy_element = Element::kFloat;
};

struct GradientKernels {
  void (*run)(const WeightGradient&, const Runtime&);
  // Lengths of the nested sums, from the inside out: products (direct) or tiles that are added sequentially, then such
  // sums, and so on. Depends on the sizes only.
  std::vector<std::int64_t> (*blocks)(const Convolution&);
};

// These return null for a scheme of another file.
const GradientKernels* FindSquareGradient(InstructionSet set, const SchemeShape& shape);
const GradientKernels* FindLongGradient(InstructionSet set, const SchemeShape& shape);

const GradientKernels* FindGradient(InstructionSet set, const SchemeShape& shape);

}  // namespace polyconv
