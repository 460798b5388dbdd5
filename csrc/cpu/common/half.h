// Conversion between float32 and half precision. Widening is exact, rounding is to nearest, ties to even.
#pragma once

#include <cstddef>

#include "common/convolution.h"
#include "common/elements.h"

namespace polyconv {

// Runs of contiguous elements, in float32 without gaps.
struct HalfRuns {
  std::size_t runs = 1, length = 0;
  std::ptrdiff_t step = 0;  // between runs in half precision
};

void Widen(InstructionSet set, Element type, const HalfRuns& runs, const void* source, float* target);
void Round(InstructionSet set, Element type, const HalfRuns& runs, const float* source, void* target);

}  // namespace polyconv
