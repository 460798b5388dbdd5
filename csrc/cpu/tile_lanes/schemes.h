// Forward kernels with tiles in the lanes. Schemes are compiled in several files, so that a build uses several cores.
#pragma once

#include "common/scheme_kernels.h"

namespace polyconv {

// These return null for a scheme of another file.
const SchemeKernels* FindSquareScheme(InstructionSet set, const SchemeShape& shape);
const SchemeKernels* FindLongScheme(InstructionSet set, const SchemeShape& shape);
const SchemeKernels* FindLineScheme(InstructionSet set, const SchemeShape& shape);

const SchemeKernels* FindScheme(InstructionSet set, const SchemeShape& shape);

}  // namespace polyconv
