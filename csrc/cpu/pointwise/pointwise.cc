// Forward pass on channels_last tensors, as a matrix product.
#include "pointwise/pointwise.h"

#include <cstdint>

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pointwise/pointwise.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "pointwise/groups-inl.h"
#include "pointwise/planes-inl.h"
#include "pointwise/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

const SchemeKernels* FindPointwiseHere() {
  return &kPointwiseKernels;
}

// As many terms as are summed at a time without groups, so that the bound of errors is the same.
const SchemeKernels* FindGroupsHere(const ConvolutionShape& group) {
  const int channels = group.in_channels, terms = channels * group.taps_h * group.taps_w;
  return kLanes % channels == 0 && terms <= kMostTerms ? &kGroupsKernels : nullptr;
}

RunJoined FindJoinedHere() {
  return &RunJoinedPointwise;
}

const HalfKernels* FindHalfHere() {
  return &kHalfKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {

bool CopiesInput(const ConvolutionShape& conv) {
  constexpr int kFewChannels = 16;
  return conv.in_channels < kFewChannels && conv.taps_w > 1 && conv.dilation_h == 1 && conv.dilation_w == 1 &&
         conv.stride_h <= conv.taps_h && conv.stride_w <= conv.taps_w;
}

bool IsPointwise(const ConvolutionShape& conv) {
  constexpr int kMostTaps = 1024;  // a pixel has an address per tap
  return conv.in_channels > 0 && conv.taps_h * std::int64_t{conv.taps_w} <= kMostTaps && conv.y_channel == 1 &&
         (conv.x_channel == 1 || conv.in_channels == 1 || CopiesInput(conv));
}

const SchemeKernels* FindPointwise(InstructionSet set) {
  POLYCONV_CALL_TARGET(set, FindPointwiseHere);
}

const SchemeKernels* FindGroups(InstructionSet set, const ConvolutionShape& group, int groups) {
  const bool few = group.in_channels > 1 && group.in_channels <= 8 && group.out_channels == group.in_channels;
  if (groups == 1 || !few || group.x_channel != 1 || group.y_channel != 1) return nullptr;
  const auto find = [&] { POLYCONV_CALL_TARGET(set, FindGroupsHere, group); };
  return find();
}

RunJoined FindJoined(InstructionSet set) {
  POLYCONV_CALL_TARGET(set, FindJoinedHere);
}

const HalfKernels* FindHalf(InstructionSet set) {
  POLYCONV_CALL_TARGET(set, FindHalfHere);
}

}  // namespace polyconv
#endif
