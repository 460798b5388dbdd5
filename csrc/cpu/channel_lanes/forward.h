// The forward kernels that hold channels in the lanes, and where to find them.
#pragma once

#include "common/scheme_kernels.h"

namespace polyconv {

// Null for a scheme that they are not compiled for.
const SchemeKernels* FindChannelScheme(InstructionSet set, const SchemeShape& shape);

}  // namespace polyconv
