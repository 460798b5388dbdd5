// Forward pass on channels_last tensors, as a matrix product.
#pragma once

#include "common/scheme_kernels.h"

namespace polyconv {

// Whether the kernels take a correlation: at most 1024 taps, contiguous output channels, contiguous or few input
// channels.
bool IsPointwise(const ConvolutionShape& conv);

// Whether the kernels read rows of the input from copies with borders: the channels of one tap are too few.
bool CopiesInput(const ConvolutionShape& conv);

const SchemeKernels* FindPointwise(InstructionSet set);

}  // namespace polyconv
