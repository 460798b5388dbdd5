// Forward pass of 1x1 convolutions on channels_last tensors.
#include "pointwise/pointwise.h"

#include <cstdint>

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pointwise/pointwise.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "pointwise/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindPointwiseHere() {
  return &kPointwiseKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {

bool IsPointwise(const ConvolutionShape& conv) {
  const auto inside = [](int outputs, int stride, int size) { return (outputs - 1) * std::int64_t{stride} < size; };
  return conv.in_channels > 0 && conv.taps_h == 1 && conv.taps_w == 1 && conv.top == 0 && conv.left == 0 &&
         inside(conv.out_height, conv.stride_h, conv.in_height) &&
         inside(conv.out_width, conv.stride_w, conv.in_width) && conv.x_channel == 1 && conv.y_channel == 1;
}

const SchemeKernels* FindPointwise(InstructionSet set) {
  POLYCONV_CALL_TARGET(set, FindPointwiseHere);
}

}  // namespace polyconv
#endif
