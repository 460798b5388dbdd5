// Forward pass of 1x1 convolutions on channels_last tensors, as a matrix product.
#pragma once

#include "common/scheme_kernels.h"

namespace polyconv {

// Whether the kernels take a correlation: one tap, inside of the image, and contiguous channels.
bool IsPointwise(const ConvolutionShape& conv);

const SchemeKernels* FindPointwise(InstructionSet set);

}  // namespace polyconv
