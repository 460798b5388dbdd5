#include "depthwise/segments.h"

#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "depthwise/segments.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include "common/simd-inl.h"
#if HWY_TARGET != HWY_SSE4  // see TakesSegments
#include "depthwise/segments-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SSE4
void RunSegments(const DepthwiseCorrelation&, const float*, const Runtime&) {}
std::size_t TransformSegments(const DepthwiseCorrelation&, float*, const Runtime&) {
  return 0;
}
#else
void RunSegments(const DepthwiseCorrelation& conv, const float* transformed, const Runtime& runtime) {
  DepthwiseSegments(conv).Run(transformed, runtime);
}

std::size_t TransformSegments(const DepthwiseCorrelation& conv, float* target, const Runtime& runtime) {
  const DepthwiseSegments segments(conv);
  if (target != nullptr) segments.TransformWeights(target, runtime);
  return segments.weights_size();
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyconv {

void RunSegments(InstructionSet set, const DepthwiseCorrelation& conv, const float* transformed,
                 const Runtime& runtime) {
  POLYCONV_CALL_TARGET(set, RunSegments, conv, transformed, runtime);
}

std::size_t TransformSegments(InstructionSet set, const DepthwiseCorrelation& conv, float* target,
                              const Runtime& runtime) {
  POLYCONV_CALL_TARGET(set, TransformSegments, conv, target, runtime);
}

}  // namespace polyconv
#endif
