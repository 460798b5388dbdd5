// The forward kernels that hold channels in the lanes, and where to find them.
#pragma once

#include "schemes.h"

namespace polyconv {

// The values are those that Python sends. All are right for every correlation: what is strided or has more than 3 x 3
// taps is summed directly.
enum class ChannelAlgorithm : int { kDirect = 0, kF43xF43, kF63xF63, kF23xF23, kCount };

// Null for a number that is none of them.
const SchemeKernels* FindChannelScheme(InstructionSet set, int algorithm);

}  // namespace polyconv
