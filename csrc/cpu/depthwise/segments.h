// Depthwise correlations with many taps by Cook-Toom: see depthwise/segments-inl.h.
#pragma once

#include <cstddef>

#include "common/convolution.h"
#include "depthwise/depthwise.h"

namespace polyconv {

// Whether the kernels take a correlation: of unit stride, without dilation, from one channel to one. The processors that
// have no more than SSE4 are not worth the machine code.
inline bool TakesSegments(InstructionSet set, const DepthwiseCorrelation& conv) {
  const auto takes = [](const DepthwiseAxis& axis) {
    return axis.stride == 1 && axis.dilation == 1 && axis.phases.size() == 1 && axis.phases[0].taps > 0;
  };
  return set != InstructionSet::kSse4 && conv.depth.target == 0 && conv.reads == 1 && conv.writes == 1 &&
         conv.border == Border::kZeros && takes(conv.height) && takes(conv.width) &&
         (conv.x_channel == 1 || conv.x_column == 1) && (conv.y_channel == 1 || conv.y_column == 1);
}

// `transformed`: weights of TransformSegments; null: transforms them itself.
void RunSegments(InstructionSet set, const DepthwiseCorrelation& conv, const float* transformed,
                 const Runtime& runtime);

// Size of the transformed weights [floats], which are written to `target` unless that is null. They depend on groups,
// taps and weights only.
std::size_t TransformSegments(InstructionSet set, const DepthwiseCorrelation& conv, float* target,
                              const Runtime& runtime);

}  // namespace polyconv
