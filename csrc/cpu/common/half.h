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

// Channels of neighbouring pixels. In half precision each channel is contiguous, in float32 each pixel is, without gaps.
struct HalfPlanes {
  std::size_t channels = 0, pixels = 0;
  std::ptrdiff_t step = 0;  // between channels in half precision
};

void WidenPlanes(InstructionSet set, Element type, const HalfPlanes& planes, const void* source, float* target);
void RoundPlanes(InstructionSet set, Element type, const HalfPlanes& planes, const float* source, void* target);

}  // namespace polyconv
