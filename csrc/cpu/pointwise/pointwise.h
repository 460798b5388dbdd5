// Forward pass on channels_last tensors, as a matrix product.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "common/elements.h"
#include "common/scheme_kernels.h"

namespace polyconv {

// Whether the kernels take a correlation: at most 1024 taps, contiguous output channels, contiguous or few input
// channels.
bool IsPointwise(const ConvolutionShape& conv);

// Whether the kernels read rows of the input from copies with borders: the channels of one tap are too few.
bool CopiesInput(const ConvolutionShape& conv);

const SchemeKernels* FindPointwise(InstructionSet set);

// Kernels that take all groups of a forward pass together, if vectors of output channels cover several groups; null if
// they do not. `group`: one of them. The weights are those of a convolution with out_channels of all groups.
const SchemeKernels* FindGroups(InstructionSet set, const ConvolutionShape& group, int groups);

// Input of a 1x1 layer: tensors whose channels follow one another, normalised and clamped from below. Blocks of it are
// computed when they are multiplied, and stay in L2.
struct JoinedInput {
  struct Part {
    const float* x;  // channels are contiguous
    int channels;
    std::ptrdiff_t batch, row, column;  // strides
  };
  std::span<const Part> parts;
  const float *scale, *shift;  // one per channel
  float least;
};

// Runs a convolution without borders, of one tap and one group, on such an input instead of conv.x.
using RunJoined = void (*)(const Convolution& conv, const JoinedInput& input, const float* packed, const Runtime&);

RunJoined FindJoined(InstructionSet set);

// Pixels in half precision of a block whose channels are planes: in each channel the same runs, one per image.
struct PlaneRuns {
  struct Run {
    std::ptrdiff_t from;  // element of the first channel
    int count;
  };
  Element type;
  void* data;
  const void* end;         // of the tensor
  std::ptrdiff_t channel;  // elements between channels
  std::vector<Run> runs;
};

// 1x1 convolutions in half precision, of packed weights in float32.
struct HalfKernels {
  // Of channels_last tensors: `conv` has their addresses and no residual. No operand is tiny.
  void (*run)(const Convolution& conv, Element type, const float* packed, const Runtime&);

  // Of planes, in float32: in `conv`, outputs are pixels, and columns of x and y are rows of the weight and of the
  // output. `pack` widens pixels to what the kernels take as packed weights, times 2^exponent if all are tiny, and returns
  // the exponent.
  int (*pack)(const Convolution& conv, const PlaneRuns& x, float* packed);
  // `round` adds bias and activation to the sums in conv.y, where a vector fits behind each row, and rounds them.
  void (*round)(const Convolution& conv, const PlaneRuns& y);
};

const HalfKernels* FindHalf(InstructionSet set);

}  // namespace polyconv
