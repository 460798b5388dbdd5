// Conversion between float32 and half precision. Widening is exact, rounding is to nearest, ties to even.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/convolution.h"

namespace polyconv {

enum class HalfType { kFloat16, kBfloat16 };

// Runs of contiguous elements, in float32 without gaps.
struct HalfRuns {
  std::size_t runs = 1, length = 0;
  std::ptrdiff_t step = 0;  // between runs in half precision
};

void Widen(InstructionSet set, HalfType type, const HalfRuns& runs, const std::uint16_t* source, float* target);
void Round(InstructionSet set, HalfType type, const HalfRuns& runs, const float* source, std::uint16_t* target);

}  // namespace polyconv
