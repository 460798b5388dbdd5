// The forward kernels that hold tiles in the lanes, and where to find them. Schemes are compiled in families: one file
// each, once per instruction set, so that a build uses several cores.
#pragma once

#include "common/scheme_kernels.h"

namespace polyconv {

// Each gives null for schemes of another family.
const SchemeKernels* FindSquareScheme(InstructionSet set, const SchemeShape& shape);
const SchemeKernels* FindLongScheme(InstructionSet set, const SchemeShape& shape);
const SchemeKernels* FindLineScheme(InstructionSet set, const SchemeShape& shape);

const SchemeKernels* FindScheme(InstructionSet set, const SchemeShape& shape);

}  // namespace polyconv
