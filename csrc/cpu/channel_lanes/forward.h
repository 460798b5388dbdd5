// Forward kernels with channels in the lanes.
#pragma once

#include "common/scheme_kernels.h"

namespace polyconv {

// Null if the scheme is not compiled for this engine.
const SchemeKernels* FindChannelScheme(InstructionSet set, const SchemeShape& shape);

}  // namespace polyconv
