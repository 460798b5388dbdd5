// The kernels of a scheme, and where to find them. Schemes are compiled in families: one file each, once per
// instruction set, so that a build uses several cores.
#pragma once

#include <cstddef>

#include "convolution.h"

namespace polyconv {

struct SchemeKernels {
  // Floats of the transformed weights; their layout is the kernels' own.
  std::size_t (*weights_size)(const Convolution&);
  void (*transform_weights)(const Convolution&, float* transformed, const Runtime&);
  void (*run)(const Convolution&, const Schedule&, const float* transformed, const Runtime&);
};

// Each gives null for algorithms of another family.
const SchemeKernels* FindSquareScheme(InstructionSet set, Algorithm algorithm);
const SchemeKernels* FindLongScheme(InstructionSet set, Algorithm algorithm);
const SchemeKernels* FindLineScheme(InstructionSet set, Algorithm algorithm);

const SchemeKernels* FindScheme(InstructionSet set, Algorithm algorithm);

}  // namespace polyconv
