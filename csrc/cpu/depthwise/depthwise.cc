#include "depthwise/depthwise.h"

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "depthwise/depthwise.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "depthwise/pixels-inl.h"
#include "depthwise/planes-inl.h"
#include "depthwise/rows-inl.h"
#include "depthwise/tiles-inl.h"
#include "depthwise/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

void Correlate(const DepthwiseCorrelation& conv, const Runtime& runtime) {
  if (conv.depth.target > 0) return DepthwiseRows(conv).Run(runtime);
  if (DepthwiseTiles::Takes(conv)) return DepthwiseTiles(conv).Run(runtime);
  if (DepthwisePixels::Takes(conv)) return DepthwisePixels(conv).Run(runtime);
  if (DepthwisePlanes::Takes(conv)) return DepthwisePlanes(conv).Run(runtime);
  DepthwiseRows(conv).Run(runtime);
}

void WeightGradient(const DepthwiseWeightGradient& gradient, const Runtime& runtime) {
  if (DepthwisePixelWeights::Takes(gradient)) return DepthwisePixelWeights(gradient).Run(runtime);
  DepthwiseWeights(gradient).Run(runtime);
}

std::int64_t LongestSum(const DepthwiseWeightGradient& gradient) {
  return std::max(DepthwisePixelWeights::LongestSum(gradient), DepthwiseWeights::LongestSum(gradient));
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {

void RunDepthwise(InstructionSet set, const DepthwiseCorrelation& conv, const Runtime& runtime) {
  POLYCONV_CALL_TARGET(set, Correlate, conv, runtime);
}

void RunDepthwise(InstructionSet set, const DepthwiseWeightGradient& gradient, const Runtime& runtime) {
  POLYCONV_CALL_TARGET(set, WeightGradient, gradient, runtime);
}

std::int64_t LongestDepthwiseSum(InstructionSet set, const DepthwiseWeightGradient& gradient) {
  POLYCONV_CALL_TARGET(set, LongestSum, gradient);
}

}  // namespace polyconv
#endif
